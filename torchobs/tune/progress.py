"""A bar on a terminal for what takes long. Where stderr is no terminal, nothing is written: a log is no place for it."""

from __future__ import annotations

import sys
from time import perf_counter

_WIDTH = 24


class Progress:
    """Shows how much of some work is done, as a line of stderr that is written over and over.

    Args:
        wanted: True to show it whatever stderr is, False not to, None for a terminal alone.
    """

    def __init__(self, wanted: bool | None = None) -> None:  # noqa: FBT001  # handed on from a keyword
        self._on = sys.stderr.isatty() if wanted is None else wanted
        self._started = perf_counter()
        self._shown = 0

    def show(self, share: float, words: str) -> None:
        """Show the share that is done, from 0 to 1, and what is being done."""
        if not self._on:
            return
        filled = round(_WIDTH * min(1.0, max(0.0, share)))
        line = (
            f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {100 * share:3.0f} %  {perf_counter() - self._started:.0f} s  {words}"
        )
        sys.stderr.write(f"\r{line:<{self._shown}}")
        sys.stderr.flush()
        self._shown = len(line)

    def end(self) -> None:
        """Leave the line as it is and begin another."""
        if self._shown:
            sys.stderr.write("\n")
            self._shown = 0
