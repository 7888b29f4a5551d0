"""Capabilities of the terminal: width, colours, Unicode."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from typing import TextIO

from torchobs.config import settings

NARROWEST, WIDEST, UNKNOWN = 40, 200, 120
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}

STATE_COLOURS = {
    "alive": "green", "finished": "green", "hung": "red", "failed": "red", "lost": "red", "unresponsive": "yellow",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TerminalStyle:
    """Style of output on a terminal. ``width`` in columns."""

    width: int
    colour: bool = False
    unicode: bool = True

    def __call__(self, colour: str, text: str) -> str:
        """Return the text in that colour or style, if colours are on. The text must be clean."""
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self.colour and colour and text else text


def style_for(out: TextIO) -> TerminalStyle:
    """Return the style for ``out``. Colours need a terminal that is not dumb, and no NO_COLOR (no-color.org)."""
    environ, terminal = settings.environment(), out.isatty()
    width = size_of(out).columns
    colour = terminal and not environ.get("NO_COLOR") and environ.get("TERM") not in {"dumb", None, ""}
    encoding = (getattr(out, "encoding", None) or "ascii").lower().replace("-", "")
    return TerminalStyle(max(NARROWEST, min(WIDEST, width)), colour, encoding.startswith("utf"))


def size_of(out: TextIO) -> os.terminal_size:
    """Return the present size of the terminal; else that in COLUMNS and LINES, or 120 columns."""
    if out.isatty():
        with contextlib.suppress(OSError, ValueError):
            found = os.get_terminal_size(out.fileno())
            if found.columns and found.lines:
                return found
    return shutil.get_terminal_size((UNKNOWN, 24))


def tolerant(out: TextIO) -> TextIO:
    """Make ``out`` replace unencodable characters by question marks, and return it."""
    reconfigure = getattr(out, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return out
