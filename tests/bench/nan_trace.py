"""What it costs to find where a NaN was born: a traced step, a watched backward pass, and torch's anomaly mode beside them.

``python -m tests.bench.nan_trace`` prints a table of medians. Nothing is paid by training that stays finite.
"""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchobs.probes.nonfinite.backward import BackwardWatch
from torchobs.probes.nonfinite.origin import GraphTracer
from torchobs.support.error_guard import CircuitBreaker

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 5


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Six layers of width 192, on 8 sequences of 64."""
    layer = nn.TransformerEncoderLayer(192, 6, 768, batch_first=True)
    return nn.TransformerEncoder(layer, 6), torch.randn(8, 64, 192)


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """Twelve layers of width 256, on 64 rows."""
    layers = [part for _ in range(12) for part in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(64, 256)


def step(model: nn.Module, x: torch.Tensor, before: Callable[[torch.Tensor], Any]) -> float:
    """Return the seconds of a forward and a backward pass, with ``before`` between them."""
    begun = perf_counter()
    loss = model(x).square().mean()
    before(loss)
    loss.backward()
    return perf_counter() - begun


def traced(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    """Trace a loss as if it were NaN."""
    return lambda loss: GraphTracer([loss * float("nan")], [], 1, [model]).forward()


def watched(model: nn.Module) -> Callable[[torch.Tensor], Any]:
    """Watch the backward pass."""

    def watch(loss: torch.Tensor) -> None:
        tracer = GraphTracer([loss], [], 1, [model])
        tracer.release()
        BackwardWatch(tracer.nodes, print, CircuitBreaker("nonfinite"))

    return watch


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    print(f"{'model':12} {'plain':>9} {'traced':>9} {'watched':>9} {'anomaly mode':>13}   (ms per step)")
    for build in (transformer, perceptron):
        model, x = build()
        ways: dict[str, list[float]] = {"plain": [], "traced": [], "watched": [], "anomaly": []}
        for _ in range(STEPS):  # by turns: the machine is not always as fast
            ways["plain"].append(step(model, x, lambda _: None))
            ways["traced"].append(step(model, x, traced(model)))
            ways["watched"].append(step(model, x, watched(model)))
            with torch.autograd.detect_anomaly(check_nan=True):
                ways["anomaly"].append(step(model, x, lambda _: None))
        figures = [1e3 * statistics.median(times) for times in ways.values()]
        print(f"{build.__name__:12} " + " ".join(f"{figure:9.1f}" for figure in figures))


if __name__ == "__main__":
    main()
