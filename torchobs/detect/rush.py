"""Will the memory be used up within minutes?

:mod:`torchobs.detect.growth` wants four minutes of points, and who is killed before is never told of. This looks at a point a
second for the same kind of trend, and follows it only five times as long as it was seen: half a minute foretells two and a
half. So the growth has to take a fifth of what is left while it is looked at, which fluctuations do not, and half of the limit
has to be in use: a training begins with a ramp (a dataset that is cached, arenas, compiled code), which for all we know ends.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from torchobs.detect.growth import Growth, MemoryPoint, grows

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST = 48
"""Points looked at, the last two thirds of which are judged: 32 s. The first verdict comes with ``growth.LEAST``: 24 s."""
LEAST_STEPS = 6
"""In what is judged: three in each half. A leak of a training of slow steps is a staircase."""
FORESIGHT = 5.0
STEADY = 0.85
"""A part of a ramp that slows down looks straighter than the whole: 0.7 and more for a logarithm that is a minute old."""
IN_USE = 0.5


def rushes(points: Sequence[MemoryPoint], left: float, total: float) -> Growth | None:
    """Return the trend of ``points`` (in order, a second apart) if it uses up the bytes ``left`` of ``total`` soon."""
    if len(points) < 2 or left > (1.0 - IN_USE) * total or points[-1].used - points[0].used <= left / FORESIGHT / 2:  # noqa: PLR2004
        return None  # which it nearly always is: what follows is a matter of squares
    growth = grows(points, LEAST_STEPS, STEADY)
    if growth is None or not growth.sustained:
        return None
    return growth if max(left, 0.0) <= FORESIGHT * growth.per_second * growth.seconds else None


class Rush:
    """The points of the last minute, of looks that may come more often."""

    __slots__ = ("_least", "_points", "growth")

    def __init__(self) -> None:
        self._points: deque[MemoryPoint] = deque(maxlen=MOST)
        self._least = inf
        self.growth: Growth | None = None
        """The trend that is to be feared; ``None`` if there is none"""

    def see(self, point: MemoryPoint, left: float, total: float) -> bool:
        """Take in a look; tell whether there is a new verdict, or none any more."""
        self._least = min(self._least, point.used)
        if self._points and point.seconds - self._points[-1].seconds < 1.0:
            return False
        self._points.append(point._replace(used=self._least))
        self._least, before = inf, self.growth
        self.growth = rushes(self._points, left, total)
        return (self.growth is None) != (before is None)

    def begin(self) -> None:
        """Forget it all: another model is trained, and begins with a ramp of its own."""
        self._points.clear()
        self._least, self.growth = inf, None
