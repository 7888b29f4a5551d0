"""Functions for a person who debugs a training: what is wrong with this tensor, these gradients, this step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.support.import_hooks import attach

if TYPE_CHECKING:
    from torchobs.debug.compilation import explain_compile
    from torchobs.debug.diffusion import diffusion_monitor, inspect_diffusion
    from torchobs.debug.findings import clear, logging_bridge, summary, training_summary
    from torchobs.debug.flops import count_flops
    from torchobs.debug.gradients import acheck_gradients, ainspect_tensor, check_gradients, nan_guard
    from torchobs.debug.loading import check_dataloader
    from torchobs.debug.memory_use import memory, memory_by_module, memory_growth
    from torchobs.debug.nan_origin import trace_nan
    from torchobs.debug.operations import DebugInfo, context, operation
    from torchobs.debug.placement import check_devices
    from torchobs.debug.profiles import profile
    from torchobs.debug.rank_agreement import compare_ranks
    from torchobs.debug.reports import plots, report, system
    from torchobs.debug.steps import backward_pass, forward_pass, inference, monitor_step, optimization_step, training_step
    from torchobs.debug.stopping import early_stopping, validation
    from torchobs.debug.switches import disable, enable, status
    from torchobs.debug.tensors import inspect_parameters, inspect_tensor

_HOMES: dict[str, str] = {
    "explain_compile": "compilation",
    "count_flops": "flops",
    "check_dataloader": "loading",
    "compare_ranks": "rank_agreement",
    "check_devices": "placement",
    "trace_nan": "nan_origin",
    **dict.fromkeys(("DebugInfo", "context", "operation"), "operations"),
    **dict.fromkeys(("acheck_gradients", "ainspect_tensor", "check_gradients", "nan_guard"), "gradients"),
    **dict.fromkeys(("diffusion_monitor", "inspect_diffusion"), "diffusion"),
    **dict.fromkeys(("inspect_parameters", "inspect_tensor"), "tensors"),
    **dict.fromkeys(("backward_pass", "forward_pass", "inference", "monitor_step"), "steps"),
    **dict.fromkeys(("optimization_step", "training_step"), "steps"),
    **dict.fromkeys(("clear", "logging_bridge", "summary", "training_summary"), "findings"),
    **dict.fromkeys(("disable", "enable", "status"), "switches"),
    **dict.fromkeys(("early_stopping", "validation"), "stopping"),
    **dict.fromkeys(("memory", "memory_by_module", "memory_growth"), "memory_use"),
    **dict.fromkeys(("plots", "report", "system"), "reports"),
    "profile": "profiles",
}
"""Public name to the module that defines it"""

__all__ = [
    "DebugInfo",
    "acheck_gradients",
    "ainspect_tensor",
    "backward_pass",
    "check_dataloader",
    "check_devices",
    "check_gradients",
    "clear",
    "compare_ranks",
    "context",
    "count_flops",
    "diffusion_monitor",
    "disable",
    "early_stopping",
    "enable",
    "explain_compile",
    "forward_pass",
    "inference",
    "inspect_diffusion",
    "inspect_parameters",
    "inspect_tensor",
    "logging_bridge",
    "memory",
    "memory_by_module",
    "memory_growth",
    "monitor_step",
    "nan_guard",
    "operation",
    "optimization_step",
    "plots",
    "profile",
    "report",
    "status",
    "summary",
    "system",
    "trace_nan",
    "training_step",
    "training_summary",
    "validation",
]

__getattr__, __dir__ = attach(__name__, _HOMES, globals())
