"""Functions for a person who debugs a training: what is wrong with this tensor, these gradients, this step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.support.import_hooks import attach

if TYPE_CHECKING:
    from torchobs.debug.compilation import compile  # noqa: A004  # torch's own name for it
    from torchobs.debug.diffusion import analyze_diffusion, diffusion_monitor
    from torchobs.debug.findings import clear, logging_bridge, summary, training_summary
    from torchobs.debug.flops import count_flops
    from torchobs.debug.gradients import acheck_gradients, acheck_tensor, check_gradients, nan_guard
    from torchobs.debug.loading import dataloader
    from torchobs.debug.memory import memory_tracking, memory_usage, profile_memory
    from torchobs.debug.nan_origin import trace_nan
    from torchobs.debug.operations import DebugInfo, context, operation, performance
    from torchobs.debug.placement import devices
    from torchobs.debug.profiles import profile, profiling_context
    from torchobs.debug.rank_agreement import ddp
    from torchobs.debug.reports import plots, report
    from torchobs.debug.steps import backward_pass, forward_pass, inference, monitor_step, optimization_step, training_step
    from torchobs.debug.stopping import early_stopping, validation
    from torchobs.debug.switches import disable, enable, status
    from torchobs.debug.tensors import analyze_parameters, analyze_tensor

_HOMES: dict[str, str] = {
    "compile": "compilation",
    "count_flops": "flops",
    "dataloader": "loading",
    "ddp": "rank_agreement",
    "devices": "placement",
    "trace_nan": "nan_origin",
    **dict.fromkeys(("DebugInfo", "context", "operation", "performance"), "operations"),
    **dict.fromkeys(("acheck_gradients", "acheck_tensor", "check_gradients", "nan_guard"), "gradients"),
    **dict.fromkeys(("analyze_diffusion", "diffusion_monitor"), "diffusion"),
    **dict.fromkeys(("analyze_parameters", "analyze_tensor"), "tensors"),
    **dict.fromkeys(("backward_pass", "forward_pass", "inference", "monitor_step"), "steps"),
    **dict.fromkeys(("optimization_step", "training_step"), "steps"),
    **dict.fromkeys(("clear", "logging_bridge", "summary", "training_summary"), "findings"),
    **dict.fromkeys(("disable", "enable", "status"), "switches"),
    **dict.fromkeys(("early_stopping", "validation"), "stopping"),
    **dict.fromkeys(("memory_tracking", "memory_usage", "profile_memory"), "memory"),
    **dict.fromkeys(("plots", "report"), "reports"),
    **dict.fromkeys(("profile", "profiling_context"), "profiles"),
}
"""Public name to the module that defines it"""

__all__ = [
    "DebugInfo",
    "acheck_gradients",
    "acheck_tensor",
    "analyze_diffusion",
    "analyze_parameters",
    "analyze_tensor",
    "backward_pass",
    "check_gradients",
    "clear",
    "compile",
    "context",
    "count_flops",
    "dataloader",
    "ddp",
    "devices",
    "diffusion_monitor",
    "disable",
    "early_stopping",
    "enable",
    "forward_pass",
    "inference",
    "logging_bridge",
    "memory_tracking",
    "memory_usage",
    "monitor_step",
    "nan_guard",
    "operation",
    "optimization_step",
    "performance",
    "plots",
    "profile",
    "profile_memory",
    "profiling_context",
    "report",
    "status",
    "summary",
    "trace_nan",
    "training_step",
    "training_summary",
    "validation",
]

__getattr__, __dir__ = attach(__name__, _HOMES, globals())
