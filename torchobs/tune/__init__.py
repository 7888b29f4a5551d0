"""Functions that make a training faster or smaller, and say what they did and what it gained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.support.import_hooks import attach

if TYPE_CHECKING:
    from torchobs.tune.comparison import Benchmark, benchmark
    from torchobs.tune.difference import NumericalDifferenceError
    from torchobs.tune.environment import clear_cache, device, devices, memory_fraction, memory_stats, seed
    from torchobs.tune.plan import Plan, optimize
    from torchobs.tune.training import FitResult, Pipeline, pipeline

_HOMES: dict[str, str] = {
    "Benchmark": "comparison",
    "benchmark": "comparison",
    "NumericalDifferenceError": "difference",
    **dict.fromkeys(("clear_cache", "device", "devices", "memory_fraction", "memory_stats", "seed"), "environment"),
    **dict.fromkeys(("FitResult", "Pipeline", "pipeline"), "training"),
    **dict.fromkeys(("Plan", "optimize"), "plan"),
}
"""Public name to the module that defines it"""

__all__ = [
    "Benchmark",
    "FitResult",
    "NumericalDifferenceError",
    "Pipeline",
    "Plan",
    "benchmark",
    "clear_cache",
    "device",
    "devices",
    "memory_fraction",
    "memory_stats",
    "optimize",
    "pipeline",
    "seed",
]

__getattr__, __dir__ = attach(__name__, _HOMES, globals())
