"""The share of the forward pass in the time before a backward pass, by the stamps of some steps.

Where a forward pass begins is known of steps with a *forward stamp* alone: when the first module was called
(``probes.forward_stamps``). What lies before it is ``other``, what lies behind it ``forward``; a fetch in between is
``data``. The mean of the last stamps divides the time of all plain steps; until there are ``LEAST_STAMPS`` the time from a
fetch to the backward pass is ``forward``, and without a fetch it is ``between``. The means are words of the fold's state, so
that rank and reader divide every step alike. Of a single step that is shown by itself all of it is ``between``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.flight.step_record import StepRecord

Gap = tuple[float, float, float]
"""As of ``StepRecord.gap_s``"""
LEAST_STAMPS = 20
MEMORY = 512
"""Stamps that the means remember: about a minute of them"""
FORWARD, OTHER, BETWEEN = 1, 4, 8
"""Indexes of a record's phases"""


class ForwardShare:
    """Means of the stamped steps, in s: time before the fetch, its forward part; time behind it, its forward part."""

    __slots__ = ("_means", "_stamps")

    def __init__(self, words: Sequence[float]) -> None:
        self._stamps, *self._means = words

    def words(self) -> tuple[float, ...]:
        """Return the state: the number of stamps and the means."""
        return self._stamps, *self._means

    def learn(self, record: StepRecord) -> None:
        """Add the stamp of a plain step, if it has one."""
        if record.gap_s is None or record.gap_s[2] <= 0.0:
            return
        before_s, after_s, called_s = record.gap_s
        late_s = max(0.0, called_s - before_s - record.phase_s[0])
        if late_s > after_s:
            return  # of another step
        self._stamps += 1.0
        weight = 1.0 / min(self._stamps, MEMORY)
        for index, length in enumerate((before_s, max(0.0, before_s - called_s), after_s, after_s - late_s)):
            self._means[index] += (length - self._means[index]) * weight

    def divide(self, phase_s: Sequence[float], gap_s: Gap | None) -> tuple[float, float, float]:
        """Return the seconds of a step in forward, other and between, for sums and means of many (see ``StepRecord``)."""
        forward_s, other_s, between_s = phase_s[FORWARD], phase_s[OTHER], phase_s[BETWEEN]
        if gap_s is None or self._stamps < LEAST_STAMPS:
            return forward_s, other_s, between_s
        before_s, after_s, _ = gap_s
        mean_before, forward_before, mean_after, forward_after = self._means
        forward_s = after_s * forward_after / mean_after if mean_after > 0.0 else after_s
        forward_s += before_s * forward_before / mean_before if mean_before > 0.0 else 0.0
        return forward_s, other_s + after_s - forward_s, 0.0


def undivided(phase_s: tuple[float, ...], gap_s: Gap | None) -> tuple[float, ...]:
    """Return the phases of a single step: time that only means over many steps can divide is ``between``."""
    if gap_s is None:
        return phase_s
    before_s, after_s, _ = gap_s
    phases = list(phase_s)
    phases[FORWARD], phases[OTHER], phases[BETWEEN] = 0.0, max(0.0, phases[OTHER] - before_s), before_s + after_s
    return tuple(phases)


NO_SHARE = ForwardShare((0.0,) * 5)
"""Before any stamp"""
