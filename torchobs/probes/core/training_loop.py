"""Detect that the training thread has left its training loop, so that a rank without steps is idle and not hung.

Examples are a notebook between two cells, a server that trained first, a sleep, an upload. When the optimizer steps, the loops
of the training are on the stack; loops that already ran around ``init()`` (an event loop, a sweep) do not count. Once none of
them is on the stack any more, the training is over, or between two stages. But a thread that waits for other ranks, in a final
barrier or the last collective of a checkpoint, is still part of the training, and may hang there.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchobs.detect.hangs import loop_lines
from torchobs.probes.core.thread_frames import ThreadFrames

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

_HOOKS_FILE = "torch/optim/optimizer.py"
"""Calls the hooks in a loop, which is not the training's"""

_COLLECTIVES_FILE = "torch/distributed/distributed_c10d.py"

_DEEPEST = 128
"""Frames of a stack that are examined: a trainer's loops are about fifty from the optimizer's step; recursion is unbounded."""

Places = tuple[tuple["CodeType", int], ...]
"""Code and current instruction offset of each frame of a stack, innermost first"""


class TrainingLoop:
    """Loops of the training. ``note`` is for the training thread, ``left`` for the sampler thread."""

    __slots__ = ("_before", "_known", "_loops", "_places")

    def __init__(self) -> None:
        self._before = _places(sys._getframe())
        self._places: Places = ()
        self._known: Places = ()
        self._loops: list[tuple[CodeType, tuple[int, int]]] = []

    def note(self) -> None:
        """Record the stack of an optimizer step: 7 µs for twenty frames, so not for every step."""
        self._places = _places(sys._getframe())

    @property
    def is_known(self) -> bool:
        """Whether the last call of :meth:`left` has found a loop of the training."""
        return bool(self._loops)

    def left(self, thread: int) -> bool:
        """Return True if that thread runs no loop of the training and no collective; False if no loop is known."""
        places = self._places
        if places != self._known:
            before = set(_loops(self._before))
            self._known, self._loops = places, [loop for loop in _loops(places) if loop not in before]
        if not self._loops:
            return False
        with ThreadFrames() as frames:
            return not self._is_running(frames.get(thread))

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
