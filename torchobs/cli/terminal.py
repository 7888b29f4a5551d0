"""Terminal control for ``torchobs top``: plain ANSI, single keys; restored however the program ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TextIO

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""Alternate screen, no cursor, no wrapping."""
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_KEYS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"k": "up", b"j": "down"}
_QUIT = (b"q", b"Q", b"\x04")
_ENDING = (signal.SIGTERM, signal.SIGHUP)
QUIT = "quit"


class Terminal:
    """A terminal under control in a ``with`` block. ``keys``: descriptor to read keys from, -1 for none."""

    def __init__(self, out: TextIO, keys: int) -> None:
        self._out, self._keys = out, keys
        self._before: list[object] | None = None
        self._handlers: dict[int, object] = {}
        self._wakeup = os.pipe()

    def __enter__(self) -> Terminal:  # noqa: PYI034  # typing.Self needs Python 3.11
        """Take control of the terminal."""
        for end in self._wakeup:
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _end) for number in _ENDING}
        self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, _ignore)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Restore the terminal."""
        self._give()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as returned by signal()
        for end in self._wakeup:
            os.close(end)

    def draw(self, lines: Sequence[str]) -> None:
        """Show exactly these lines, overwriting the previous ones without flicker."""
        self._out.write("\x1b[H" + "".join(f"{line}\x1b[0m\x1b[K\r\n" for line in lines[:-1]))
        self._out.write("".join(f"{line}\x1b[0m\x1b[K" for line in lines[-1:]) + "\x1b[J")
        self._out.flush()

    def wait(self, seconds: float) -> str:
        """Wait for a key, a resize or the timeout. Returns ``up``, ``down``, ``quit``, or an empty text."""
        readable, _, _ = select.select([end for end in (self._keys, self._wakeup[0]) if end >= 0], [], [], seconds)
        if self._wakeup[0] in readable:
            os.read(self._wakeup[0], 4096)
        if self._keys not in readable:
            return ""
        typed = os.read(self._keys, 64)
        if not typed or typed[:1] in _QUIT:
            return QUIT  # end of file: the connection is gone
        return _KEYS.get(typed, "")

    def _take(self) -> None:
        if self._keys >= 0:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        self._out.write(_ENTER)
        self._out.flush()

    def _give(self) -> None:
        self._out.write(_LEAVE)
        self._out.flush()
        if self._before is not None:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]  # as returned by tcgetattr()

    def _suspend(self, number: int, _: FrameType | None) -> None:
        """Handle Ctrl-Z: restore the terminal for the shell, and take it again when continued."""
        self._give()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.signal(number, self._suspend)
        self._take()


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _ignore(_: int, __: FrameType | None) -> None:
    """Do nothing: the wake-up descriptor reports the signal."""
