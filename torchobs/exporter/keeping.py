"""Keeps the runs that have ended, by a process of its own: reading a whole run would hold up scrapes, and take memory."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from torchobs.config import settings
from torchobs.document import kept

if TYPE_CHECKING:
    from torchobs.exporter.config import ExporterConfig
    from torchobs.ranks.snapshot import Snapshot

_LONGEST_S, _LAST_WAIT_S = 120.0, 30.0
_log = logging.getLogger(__name__)


class Keeper:
    """Keeps each run once all its ranks have ended; again if some came and ended since."""

    def __init__(self, config: ExporterConfig) -> None:
        chosen, _ = settings.resolve({})
        # an exporter that a person started beside trainings is not the one that they rely on, unless it has a directory
        self._is_wanted = bool(chosen.keep_runs and kept.directory() and (config.mode == "node" or chosen.keep_dir))
        directory = ("--dir", config.flight_dir) if config.flight_dir else ()
        self._argv = (sys.executable, "-m", "torchobs", "keep", "--automatic", *directory, "--")
        self._done: set[str] = set()
        """incarnations"""
        self._work: asyncio.Task[None] | None = None

    def keep_ended(self, snapshot: Snapshot) -> None:
        """Begin to keep what has ended, unless that is under way."""
        if not self._is_wanted or (self._work is not None and not self._work.done()):
            return
        alive = {rank.run_id for rank in snapshot.ranks if rank.up}
        new = [rank for rank in snapshot.ranks if rank.run_id not in alive and rank.incarnation not in self._done]
        if new:
            self._done |= {rank.incarnation for rank in new}
            work = asyncio.to_thread(self._keep, sorted({rank.run_id for rank in new}))
            self._work = asyncio.get_running_loop().create_task(work)

    async def finish(self, snapshot: Snapshot) -> None:
        """Keep what has ended by now, and wait for it, but not for ever."""
        for _ in range(2):  # what was under way, and what has ended since
            self.keep_ended(snapshot)
            if self._work is not None:
                await asyncio.wait({self._work}, timeout=_LAST_WAIT_S)

    def _keep(self, runs: list[str]) -> None:
        # torchobs is imported from where this process has it; what the command complains of stands in our log
        environ = {**settings.environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for run_id in runs:
            try:
                subprocess.run(
                    [*self._argv, run_id], cwd="/", env=environ, timeout=_LONGEST_S, check=False,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                )  # fmt: skip
            except (OSError, subprocess.SubprocessError) as problem:
                _log.warning("run %s is not kept: %s", run_id, problem)
