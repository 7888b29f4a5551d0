"""Look at the frames of other threads without a crash of the interpreter.

Python 3.11 makes the object of a frame when it is asked for, by ``sys._current_frames()`` or ``f_back``, and may collect
garbage as it makes it. A finalizer lets other threads run then, whose frames are gone when it goes on: it hangs with a lock of
the interpreter's held (python/cpython#106883), or reads freed memory (#99110). Before, frames were objects already; since 3.12
garbage is collected between two instructions of Python's alone (#97922).
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_COLLECTS_MEANWHILE = sys.version_info[:2] == (3, 11)


class ThreadFrames:
    """Gives the innermost frame of each thread, by identifier. Nothing is collected for as long, some microseconds.

    It is no generator: the frame of one that is suspended has no ``f_back``, and it would be this thread's innermost.
    """

    __slots__ = ("_held_back",)

    def __enter__(self) -> dict[int, FrameType]:
        """Return the frames."""
        self._held_back = _COLLECTS_MEANWHILE and gc.isenabled()
        if self._held_back:
            gc.disable()
        return sys._current_frames()

    def __exit__(self, *_: object) -> None:
        """Let garbage be collected again, if it was."""
        if self._held_back:
            gc.enable()
