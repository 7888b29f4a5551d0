"""What was seen of one step, but for its times; and of which step, where that shows only later."""

from __future__ import annotations

from torchobs.flight.metrics.fold import StepFlag

GONE = -1


class StepValues:
    """What was seen of one step, but for its times."""

    __slots__ = (
        "flags", "learning_rate", "loss_base", "loss_sum", "losses", "norm_base", "norm_scale", "norm_squared", "part_of",
        "samples", "step", "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.flags = self.losses = self.tokens = self.samples = 0
        self.step = 0
        """The first step that was written of them, 0 before, ``GONE`` if none ever is"""
        self.part_of: StepValues | None = None
        """Those that have taken these in"""
        self.loss_sum = self.loss_base = self.norm_squared = self.norm_base = self.learning_rate = 0.0
        self.norm_scale = 1.0

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


def resolve_step(pending_step: StepValues | int) -> int:
    """Return the number of the step that :meth:`Cycle.pending_step` spoke of, 0 while it is not known."""
    while isinstance(pending_step, StepValues) and pending_step.part_of is not None:
        pending_step = pending_step.part_of
    return pending_step.step if isinstance(pending_step, StepValues) else pending_step
