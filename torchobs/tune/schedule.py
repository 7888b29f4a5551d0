"""The learning rate over a training: a function of the step, or lowered when a metric does not improve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the scheduler of a pipeline does, by its name and the steps over which the rate first rises."""

    name: str
    warmup_steps: int

    @property
    def ends(self) -> bool:
        """True if the rate depends on the number of steps in all."""
        return self.name in {"cosine", "linear"}

    def scheduler(self, optimizer: Optimizer, total_steps: Callable[[], int | None]) -> LRScheduler:
        """Return torch's scheduler of an optimizer."""
        if self.name != "plateau":
            return LambdaLR(optimizer, lambda step: self.factor(total_steps(), step))
        for group in optimizer.param_groups:
            group["lr"] *= self._warmup(0)
        return ReduceLROnPlateau(optimizer)

    def factor(self, total_steps: int | None, step: int) -> float:
        """Return the factor of the learning rate at a step, from 0."""
        if step < self.warmup_steps or step == 0 or not self.ends:
            return self._warmup(step)
        if total_steps is None:
            raise ValueError(f"scheduler {self.name!r} ends at a step: pass total_steps to tune.pipeline(), or use fit()")
        progress = min(1.0, (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps))
        return (1 + math.cos(math.pi * progress)) / 2 if self.name == "cosine" else 1 - progress

    def warm_up(self, optimizer: Optimizer, step: int) -> None:
        """Raise the rates after a step as a ``LambdaLR`` would: relative to what they are, which a plateau may have lowered."""
        if step <= self.warmup_steps:
            for group in optimizer.param_groups:
                group["lr"] *= self._warmup(step) / self._warmup(step - 1)

    def _warmup(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.warmup_steps + 1))
