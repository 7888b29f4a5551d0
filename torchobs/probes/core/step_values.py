"""Values of one step other than its times, and the step's number, which may be known only later."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchobs.flight.format.step_record import StepFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

GONE = -1


class StepValues:
    """Values of one step other than its times."""

    __slots__ = (
        "evaluated", "flags", "learning_rate", "loss_left_out", "loss_sum", "losses", "norm_base", "norm_scale",
        "norm_squared", "part_of", "samples", "step", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.flags = self.losses = self.tokens = self.samples = 0
        self.step = 0
        """Number of the step that they were written as; 0 until then, ``GONE`` if they never are"""
        self.part_of: StepValues | None = None
        """The values that these were merged into"""
        self.evaluated = self.loss_left_out = False
        """Whether a closure has evaluated its loss, and whether the loss of another backward counts instead"""
        self.loss_sum = self.norm_squared = self.norm_base = self.learning_rate = 0.0
        self.norm_scale = 1.0

    def leave_loss_out(self) -> None:
        """Drop the loss, also one that a device has yet to deliver: that of another backward of the step counts."""
        self.loss_left_out, self.loss_sum, self.losses = True, 0.0, 0
        self.flags &= ~StepFlag.LOSS

    def leave_norm_out(self) -> None:
        """Drop the norm."""
        self.norm_squared = 0.0
        self.flags &= ~StepFlag.GRAD_NORM

    def merge(self, earlier: StepValues) -> None:
        """Add the values of an earlier part of the same step."""
        earlier.part_of = self
        self.flags |= earlier.flags
        self.losses += earlier.losses
        self.tokens += earlier.tokens
        self.samples += earlier.samples
        self.loss_sum += earlier.loss_sum
        self.norm_squared += earlier.norm_squared
        if earlier.flags & StepFlag.LEARNING_RATE:
            self.learning_rate = earlier.learning_rate


class StepEnd(NamedTuple):
    """End of a step, provisional until it is written."""

    now_ns: int
    spent_ns: Sequence[int]
    values: StepValues
    backward: bool
    """Whether it includes a backward"""
    occasional: bool = False
    """Whether only occasional optimizers have stepped"""
    perturbed: bool = False
    """Whether the parameters were changed manually after it"""


class OpenPart(NamedTuple):
    """A step in progress that is set aside: the lengths of its trace and arguments, its values."""

    traced: int
    arguments: int
    values: StepValues


def resolve_step(pending_step: StepValues | int) -> int:
    """Return the step number for a result of ``StepRecorder.pending_step``, 0 while it is not known."""
    while isinstance(pending_step, StepValues) and pending_step.part_of is not None:
        pending_step = pending_step.part_of
    return pending_step.step if isinstance(pending_step, StepValues) else pending_step


def is_left_out(pending_step: StepValues | int) -> bool:
    """Return True if the losses of these values are not the step's."""
    return isinstance(pending_step, StepValues) and pending_step.loss_left_out
