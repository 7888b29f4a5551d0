"""Has the training thread left the loop that it trained in? Then a rank without a step has not hung: it does something else.

A notebook between two cells, a server that trained first, a sleep, an upload. Where the optimizer is stepped, the stack has
the loops of the training in it; those that ran around ``init()`` already (an event loop, a sweep) are not its own. Once none
of them is on the stack any more, the training is over, or between two stages. But who waits for other ranks, in a last barrier
or the last collective of a checkpoint, is at the training's work wherever that stands, and may hang there.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchobs.detect.code_loops import loop_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

_HOOKS_FILE = "torch/optim/optimizer.py"
"""It calls the hooks in a loop"""

_COLLECTIVES_FILE = "torch/distributed/distributed_c10d.py"

_DEEPEST = 128
"""Frames of a stack that are looked at: a trainer's loops are fifty or so from the optimizer's step; recursion has no end."""

Places = tuple[tuple["CodeType", int], ...]
"""Code and the offset of the instruction at work, of each frame of a stack, the innermost first"""


class TrainingLoop:
    """``note`` is for the training thread, ``left`` for the sampler."""

    __slots__ = ("_before", "_known", "_loops", "_places")

    def __init__(self) -> None:
        self._before = _places(sys._getframe())
        self._places: Places = ()
        self._known: Places = ()
        self._loops: list[tuple[CodeType, tuple[int, int]]] = []

    def note(self) -> None:
        """A step is being made: 7 µs for twenty frames, to be called now and then."""
        self._places = _places(sys._getframe())

    @property
    def is_known(self) -> bool:
        """Whether a loop of the training has been found, at the last call of :meth:`left`."""
        return bool(self._loops)

    def left(self, thread: int) -> bool:
        """Return True if no loop of the training runs in that thread, and no collective operation.

        Where no loop has been found nothing is known: False.
        """
        places = self._places
        if places != self._known:
            before = set(_loops(self._before))
            self._known, self._loops = places, [loop for loop in _loops(places) if loop not in before]
        return bool(self._loops) and not self._is_running(sys._current_frames().get(thread))

    def _is_running(self, frame: FrameType | None) -> bool:
        while frame is not None:
            at, line = frame.f_code, frame.f_lineno or 0
            if any(code is at and first <= line <= last for code, (first, last) in self._loops):
                return True
            if at.co_filename.endswith(_COLLECTIVES_FILE):
                return True
            frame = frame.f_back
        return False


def _places(frame: FrameType | None) -> Places:
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _loops(places: Places) -> Iterator[tuple[CodeType, tuple[int, int]]]:
    for code, offset in places:
        lines = None if code.co_filename.endswith(_HOOKS_FILE) else loop_lines(code, offset)
        if lines is not None:
            yield code, lines
