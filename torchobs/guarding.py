"""The one place where an exception of ours is caught: the observer never breaks the observed.

The first exception inside a probe blows its fuse: every guarded function of that probe does nothing from then on, the error
is counted and shown (``torchobs.probe.errors``, ``torchobs.probe.disabled``, an event) and logged once, by the sampler thread.
The pattern is trio's instruments: the first exception removes the instrument, and the program goes on.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class Trip(NamedTuple):
    """What blew a fuse: the exception's class and where it was raised. No values, no source text."""

    probe: str
    exception: str
    location: str


class Fuse:
    """One probe's fuse. ``trips`` is filled by any thread and emptied by the sampler."""

    __slots__ = ("blown", "errors", "probe", "trips")

    def __init__(self, probe: str) -> None:
        self.probe = probe
        self.blown = False
        """Whether guarded functions do nothing"""
        self.errors = 0
        self.trips: list[Trip] = []

    def trip(self, error: BaseException) -> None:
        """Switch the probe off."""
        self.blown = True
        self.errors += 1
        frames = traceback.extract_tb(error.__traceback__)
        location = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"
        self.trips.append(Trip(self.probe, type(error).__name__, location))

    def guard(self, function: Callable[..., R]) -> Callable[..., R | None]:
        """Return ``function`` for use in a hook: it never raises, and returns ``None`` once the fuse has blown."""

        def guarded(*args: Any) -> Any:
            if self.blown:
                return None
            try:
                return function(*args)
            except Exception as error:  # noqa: BLE001  # this is the guard
                self.trip(error)
                return None

        return guarded


def call(fuse: Fuse, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
    """Call ``function`` unless the fuse has blown; what it raises blows the fuse and goes no further."""
    if fuse.blown:
        return None
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  # this is the guard
        fuse.trip(error)
        return None
