"""Messages of ``torchobs run`` on a terminal: the live page's address, and at the end the main findings of ``inspect``.

Only on a terminal, on rank 0, and to standard error: the script's streams and exit status are not affected.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchobs.support import error_guard

if TYPE_CHECKING:  # imported at the end: a training begins sooner without them
    from torchobs.diagnosis.rank_report import RankReport
    from torchobs.runtime.session import Session

_STDERR = 2
_MOST_FINDINGS = 3
_PATIENCE_S = 20.0
_LOOK_S = 0.1
_LEAST_NAMED = 0.01


class _Watched(NamedTuple):
    """The run that this process belongs to."""

    directory: str
    run_id: str
    pid: int


class Summary:
    """Prints the messages at start and end. Must be created before ``init()``, so that its exit handler runs last."""

    def __init__(self, *, quiet: bool) -> None:
        from torchobs.runtime.page_address import PageAddress

        PageAddress.said_elsewhere = True
        self._quiet = quiet
        self._watched: _Watched | None = None
        # exit handlers run last in, first out: this one after the session's and the script's
        atexit.register(error_guard.call, error_guard.CircuitBreaker("summary"), self.end)

    def begin(self, session: Session | None) -> None:
        """Print the live page's address as soon as it is known."""
        writer = session.writer if session is not None else None
        if session is None or writer is None or session.identity is None or session.identity.rank:
            return
        if self._quiet or not session.settings.summary or not os.isatty(_STDERR):
            return
        directory = str(Path(writer.path).parent)
        self._watched = _Watched(directory, session.identity.run_id, os.getpid())
        if session.settings.exporter:
            guarded = (error_guard.CircuitBreaker("summary"), self._say_address)
            threading.Thread(target=error_guard.call, args=guarded, name="torchobs-address", daemon=True).start()

    def end(self) -> None:
        """Print the summary of the run after everything else has ended."""
        watched, self._watched = self._watched, None
        if watched is None or watched.pid != os.getpid():  # a forked child
            return
        from torchobs.diagnosis.load import choose

        chosen = choose([Path(watched.directory)], watched.run_id)
        more = f"torchobs inspect {shlex.quote(watched.directory)} --run {shlex.quote(watched.run_id)}"
        _tell([*summary_lines(chosen.ranks, chosen.launchers), f"more: {more}"])

    def _say_address(self) -> None:
        from torchobs.runtime.page_address import announced

        until = time.monotonic() + _PATIENCE_S
        while self._watched is not None and time.monotonic() < until:
            if url := announced(self._watched.directory):
                _tell([f"this run is shown live on {url}"])
                return
            time.sleep(_LOOK_S)


def summary_lines(ranks: Sequence[RankReport], launchers: Sequence[RankReport]) -> list[str]:
    """Return a summary of the run in a few lines: health, how it ended, worst findings, where the time went."""
    from torchobs import catalog
    from torchobs.cli.table import shares
    from torchobs.diagnosis.diagnosis import diagnose_run
    from torchobs.diagnosis.health import INFO

    known = diagnose_run(ranks, launchers)
    ended, *rest = known.by_rank[known.principal]
    worst = [finding.text for finding in [*known.together, *rest] if finding.severity != INFO][:_MOST_FINDINGS]
    times = ranks[known.principal].by_attribute(catalog.GOODPUT_TIME)
    whole = sum(times.values())
    large = {name: seconds for name, seconds in times.items() if whole and seconds >= _LEAST_NAMED * whole}
    went = ", ".join(shares(large, sys.maxsize, whole)).replace("  ", ", ")
    return [known.verdict.text, ended.text, *worst, *([f"time since {ranks[known.principal].since}: {went}"] if went else [])]


def _tell(lines: Sequence[str]) -> None:
    """Write in one piece to descriptor 2: the script may have replaced or closed ``sys.stderr``.

    If it has closed the descriptor too, as a daemon does, another file of it may have the number: then nothing is written.
    """
    with contextlib.suppress(OSError):
        if not os.isatty(_STDERR):
            return
        os.write(_STDERR, "".join(f"torchobs: {line}\n" for line in lines).encode(errors="replace"))
