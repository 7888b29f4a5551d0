"""Total norms pending on devices: written as late values of their steps when all parts have arrived."""

from __future__ import annotations

from math import hypot, inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Part = tuple[Callable[[], float | None], float]


class PendingNorms:
    """Pending parts by step: a function that returns the norm (``None`` until it has arrived), and the clipping threshold.

    The training thread adds, the sampler thread takes.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[Part]] = {}

    def add(self, step: int, ask: Callable[[], float | None], limit: float = inf, *, anew: bool = False) -> None:
        """Add a part of that step's norm. ``anew``: replace earlier parts (a closure's last evaluation counts)."""
        parts = self._steps.setdefault(step, [])
        if anew:
            parts.clear()
        parts.append((ask, limit))

    def take(self, last: int) -> Iterator[tuple[int, float, bool]]:
        """Yield step, norm and whether it was clipped, for steps up to ``last``, in order."""
        for step in sorted(self._steps):
            if step > last:
                return
            norms = [(ask(), limit) for ask, limit in self._steps[step]]
            known = [(norm, limit) for norm, limit in norms if norm is not None]
            if len(known) < len(norms):
                return
            del self._steps[step]
            yield step, hypot(*(norm for norm, _ in known)), any(limit < norm < inf for norm, limit in known)
