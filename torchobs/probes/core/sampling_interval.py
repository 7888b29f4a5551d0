"""Choose how often to measure, so that the cost stays within a share of the training time."""

from __future__ import annotations

from math import ceil
from time import monotonic_ns

MAX_INTERVAL = 1000
_SMOOTHING = 0.25


class SamplingInterval:
    """Every step if that is cheap enough, else every n-th. For the training thread; :meth:`spend_later` for any."""

    __slots__ = (
        "_cost_ns", "_later_ns", "_share", "_since_ns", "_since_step", "_spent_ns", "due_at", "fixed", "interval", "step",
    )  # fmt: skip

    def __init__(self, share: float, fixed: int | None = None) -> None:
        self._share, self.fixed = max(share, 1e-6), fixed
        self._cost_ns = 0.0
        self._spent_ns = self._later_ns = self._since_ns = self._since_step = 0
        self.interval = fixed or 1
        self.due_at, self.step = 0, -1
        """The next step to measure and the last one measured, both as the number of steps before it"""

    def is_due(self, step: int) -> bool:
        """Return True if this step is measured; the answer is the same throughout a step."""
        if step >= self.due_at:
            self._set_interval(step)
            self.step, self.due_at = step, step + self.interval
        return step == self.step

    def would_be_due(self, step: int) -> bool:
        """Return what :meth:`is_due` would return, without a change of state."""
        return step >= self.due_at or step == self.step

    def rest(self, steps: int) -> None:
        """Be due again only after so many steps: this one, which is due, needed no measurement."""
        if self.fixed is None:
            self.due_at = max(self.due_at, self.step + steps)

    def spend(self, ns: int) -> None:
        """Add time that measuring took in the step that is due."""
        self._spent_ns += ns

    def spend_later(self, ns: int) -> None:
        """Set the device time that measuring took, which is known afterwards."""
        self._later_ns = max(self._later_ns, ns)

    def _set_interval(self, step: int) -> None:
        """Choose the interval from the cost of the last measurements and the duration of the steps since."""
        now_ns = monotonic_ns()
        spent_ns, self._spent_ns = self._spent_ns + self._later_ns, 0
        self._later_ns = 0
        if spent_ns:
            self._cost_ns += (spent_ns - self._cost_ns) * (_SMOOTHING if self._cost_ns else 1.0)
        done = step - self._since_step
        if self.fixed is None and done and self._cost_ns:
            length_ns = (now_ns - self._since_ns) / done
            wanted = min(MAX_INTERVAL, max(1, ceil(self._cost_ns / (self._share * length_ns))))
            # at most doubled at a time: one slow measurement says little
            self.interval = min(wanted, 2 * self.interval)
        self._since_ns, self._since_step = now_ns, step
