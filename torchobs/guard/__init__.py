"""Functions that keep a training and its files safe: contracts, outputs, model files, recovery, resources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.support.import_hooks import attach

if TYPE_CHECKING:
    from torchobs.guard.contracts import Contract, ContractError, ContractReport, Violation, validate_inputs
    from torchobs.guard.model_files import FileScan, UnsafeFileError, WrongFileError, load, scan_file, verify
    from torchobs.guard.models import ModelReport, check_model
    from torchobs.guard.outputs import (
        InferenceResult,
        NonFiniteOutputError,
        OutputReport,
        OutputTensor,
        check_outputs,
        safe_inference,
        sanitize_outputs,
    )
    from torchobs.guard.records import Category, LossSpikeError, NonFiniteLossError, Severity, record
    from torchobs.guard.recovery import BadBatch, Recovery, RecoveryPolicy, StepOutcome
    from torchobs.guard.resource_usage import ResourceGuard, ResourceReport, Usage, resources

_HOMES: dict[str, str] = {
    **dict.fromkeys(("Contract", "ContractError", "ContractReport", "Violation", "validate_inputs"), "contracts"),
    **dict.fromkeys(("Category", "LossSpikeError", "NonFiniteLossError", "Severity", "record"), "records"),
    **dict.fromkeys(("InferenceResult", "NonFiniteOutputError", "OutputReport", "OutputTensor"), "outputs"),
    **dict.fromkeys(("check_outputs", "safe_inference", "sanitize_outputs"), "outputs"),
    **dict.fromkeys(("FileScan", "UnsafeFileError", "WrongFileError", "load", "scan_file", "verify"), "model_files"),
    **dict.fromkeys(("ModelReport", "check_model"), "models"),
    **dict.fromkeys(("BadBatch", "Recovery", "RecoveryPolicy", "StepOutcome"), "recovery"),
    **dict.fromkeys(("ResourceGuard", "ResourceReport", "Usage", "resources"), "resource_usage"),
}
"""Public name to the module that defines it"""

__all__ = [
    "BadBatch",
    "Category",
    "Contract",
    "ContractError",
    "ContractReport",
    "FileScan",
    "InferenceResult",
    "LossSpikeError",
    "ModelReport",
    "NonFiniteLossError",
    "NonFiniteOutputError",
    "OutputReport",
    "OutputTensor",
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
    "record",
    "resources",
    "safe_inference",
    "sanitize_outputs",
    "scan_file",
    "validate_inputs",
    "verify",
]

__getattr__, __dir__ = attach(__name__, _HOMES, globals())
