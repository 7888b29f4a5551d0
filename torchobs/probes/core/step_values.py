"""What was seen of one step, but for its times; and of which step, where that shows only later."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchobs.flight.format.step_record import StepFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

GONE = -1


class StepValues:
    """What was seen of one step, but for its times."""

    __slots__ = (
        "evaluated", "flags", "learning_rate", "loss_left_out", "loss_sum", "losses", "norm_base", "norm_scale",
        "norm_squared", "part_of", "samples", "step", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.flags = self.losses = self.tokens = self.samples = 0
        self.step = 0
        """The first step that was written of them, 0 before, ``GONE`` if none ever is"""
        self.part_of: StepValues | None = None
        """Those that have taken these in"""
        self.evaluated = self.loss_left_out = False
        """Whether a closure has evaluated its loss, and whether another backward of the step has the loss that counts"""
        self.loss_sum = self.norm_squared = self.norm_base = self.learning_rate = 0.0
        self.norm_scale = 1.0

    def leave_loss_out(self) -> None:
        """Forget the loss, and what a device delivers of it: another backward of the same step has the one that counts."""
        self.loss_left_out, self.loss_sum, self.losses = True, 0.0, 0
        self.flags &= ~StepFlag.LOSS

    def leave_norm_out(self) -> None:
        """Forget the norm."""
        self.norm_squared = 0.0
        self.flags &= ~StepFlag.GRAD_NORM

    def merge(self, earlier: StepValues) -> None:
        """Take in what an earlier optimizer of the same step left."""
        earlier.part_of = self
        self.flags |= earlier.flags
        self.losses += earlier.losses
        self.tokens += earlier.tokens
        self.samples += earlier.samples
        self.loss_sum += earlier.loss_sum
        self.norm_squared += earlier.norm_squared
        if earlier.flags & StepFlag.LEARNING_RATE:
            self.learning_rate = earlier.learning_rate


class Ended(NamedTuple):
    """An end, provisional until it is written."""

    now_ns: int
    spent_ns: Sequence[int]
    values: StepValues
    backward: bool
    """Whether a backward was a part of it"""
    along: bool = False
    """Only such optimizers have stepped as step along now and then"""
    perturbed: bool = False
    """The parameters were changed by hand behind it"""


def resolve_step(pending_step: StepValues | int) -> int:
    """Return the number of the step that :meth:`Cycle.pending_step` spoke of, 0 while it is not known."""
    while isinstance(pending_step, StepValues) and pending_step.part_of is not None:
        pending_step = pending_step.part_of
    return pending_step.step if isinstance(pending_step, StepValues) else pending_step


def is_left_out(pending_step: StepValues | int) -> bool:
    """Return True if the losses of these values are not the step's."""
    return isinstance(pending_step, StepValues) and pending_step.loss_left_out
