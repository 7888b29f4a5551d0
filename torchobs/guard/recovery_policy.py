"""What a recovery may do about which error, how often; and what it has done."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from torchobs.support.arguments import are_exceptions, is_number, is_whole
from torchobs.support.result import Result


@dataclass(frozen=True)
class RecoveryPolicy:
    """What may be done about what, how often. A budget of 0 does nothing: the error is raised."""

    oom: int = 100
    """times that parts may be halved because they did not fit"""
    nonfinite: int = 10
    """batches that may be skipped because their loss or gradient is not finite"""
    spikes: int = 3
    """times that a snapshot may be restored because the loss jumped"""
    data: int = 10
    """batches that may be skipped because they cannot be read"""
    io: int = 5
    """repetitions in a row of an operation that failed for a moment"""
    data_errors: tuple[type[Exception], ...] = (ValueError, TypeError, KeyError, IndexError, EOFError, UnicodeError)
    """errors of a data loader that concern one batch. The ``OSError`` of a loader's worker has lost its number on the way: add
    ``OSError`` here to skip it, too"""
    snapshot_every: int = 100
    """steps between two snapshots in the host's memory; only taken if ``spikes`` is not 0"""
    least_excess: float = 0.5
    """distance above the usual loss that a spike has at least; see :func:`torchobs.detect.spikes.judge`"""
    backoff_s: float = 0.5
    """wait before the first repetition; doubled each time"""
    agree: bool = False
    """under DDP: one all-reduce of a number in each step, so that all ranks skip together; without it nothing is skipped"""

    def __post_init__(self) -> None:
        for name in ("oom", "nonfinite", "spikes", "data", "io", "snapshot_every"):
            value, least = getattr(self, name), 1 if name == "snapshot_every" else 0
            if not is_whole(value) or value < least:
                raise ValueError(f"{name} is {value!r}: a whole number; a budget is 0 or more, and snapshot_every at least 1")
        for name in ("backoff_s", "least_excess"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < inf:
                raise ValueError(f"{name} is {value!r}: a number, 0 or more")
        if not isinstance(self.agree, bool):
            raise ValueError(f"agree is {self.agree!r}: True or False")  # noqa: TRY004  # as of every other field
        if not are_exceptions(self.data_errors):
            raise ValueError(f"data_errors is {self.data_errors!r}: a tuple of exception classes, as (ValueError, KeyError)")


@dataclass(frozen=True)
class StepOutcome(Result):
    """What became of one step."""

    loss: float
    """mean over the batch"""
    stepped: bool
    """True if the optimizer stepped"""
    action: str
    """``none``, ``split``, ``skip`` or ``restore``"""
    parts: int = 1
    """backward passes of the step: its micro-batches, and the parts that they were split into"""
    reason: str = ""


@dataclass(frozen=True)
class BadBatch:
    """Evidence: a batch that was skipped."""

    step: int
    reason: str
    batch: Any
    """on the CPU; of a step of several micro-batches the one whose loss is not finite, or the list of all"""
