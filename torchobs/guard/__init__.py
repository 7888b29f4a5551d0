"""Functions that keep a training and its files safe: contracts, outputs, model files, recovery, resources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.support.lazy import attach

if TYPE_CHECKING:
    from torchobs.guard.contracts import Contract, ContractError, PendingCheck, validate_inputs
    from torchobs.guard.model_files import FileScan, UnsafeFileError, WrongFileError, load, scan_file, verify
    from torchobs.guard.models import LayerReport, ModelReport, check_model
    from torchobs.guard.outputs import (
        Drift,
        InferenceResult,
        NonFiniteOutputError,
        OutputReport,
        check_outputs,
        safe_inference,
        sanitize_outputs,
    )
    from torchobs.guard.record import Category, LossSpikeError, NonFiniteLossError, Severity
    from torchobs.guard.recovery import BadBatch, Recovery, RecoveryPolicy, StepOutcome
    from torchobs.guard.resource_usage import ResourceGuard, ResourceReport, Usage, resources
    from torchobs.guard.tensor_values import Violation

_HOMES: dict[str, str] = {
    **dict.fromkeys(("Contract", "ContractError", "PendingCheck", "validate_inputs"), "contracts"),
    **dict.fromkeys(("LossSpikeError", "NonFiniteLossError"), "record"),
    **dict.fromkeys(("InferenceResult", "safe_inference"), "outputs"),
    **dict.fromkeys(("FileScan", "UnsafeFileError", "load", "scan_file"), "model_files"),
    **dict.fromkeys(("LayerReport", "ModelReport", "check_model"), "models"),
    **dict.fromkeys(("Drift", "NonFiniteOutputError", "OutputReport", "check_outputs", "sanitize_outputs"), "outputs"),
    **dict.fromkeys(("WrongFileError", "verify"), "model_files"),
    **dict.fromkeys(("BadBatch", "Recovery", "RecoveryPolicy", "StepOutcome"), "recovery"),
    **dict.fromkeys(("ResourceGuard", "ResourceReport", "Usage", "resources"), "resource_usage"),
    **dict.fromkeys(("Category", "Severity"), "record"),
    "Violation": "tensor_values",
}
"""Public name to the module that defines it"""

__all__ = [
    "BadBatch",
    "Category",
    "Contract",
    "ContractError",
    "Drift",
    "FileScan",
    "InferenceResult",
    "LayerReport",
    "LossSpikeError",
    "ModelReport",
    "NonFiniteLossError",
    "NonFiniteOutputError",
    "OutputReport",
    "PendingCheck",
    "Recovery",
    "RecoveryPolicy",
    "ResourceGuard",
    "ResourceReport",
    "Severity",
    "StepOutcome",
    "UnsafeFileError",
    "Usage",
    "Violation",
    "WrongFileError",
    "check_model",
    "check_outputs",
    "load",
    "resources",
    "safe_inference",
    "sanitize_outputs",
    "scan_file",
    "validate_inputs",
    "verify",
]

__getattr__, __dir__ = attach(__name__, _HOMES, globals())
