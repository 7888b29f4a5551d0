"""Keeps the runs that have ended, by a process of its own: reading a whole run would hold up scrapes, and may need memory."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from typing import TYPE_CHECKING

from torchobs.config import settings
from torchobs.document import kept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.exporter.config import ExporterConfig
    from torchobs.ranks.snapshot import Snapshot

_LONGEST_S = 120.0
_LAST_WAIT_S = 30.0
_NICENESS = 10
# torchobs is imported from where this process has it: with -I neither PYTHONPATH nor the working directory count
_PROGRAM = """\
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
os.nice(int(sys.argv[2]))
from torchobs.cli.__main__ import main
sys.exit(main(sys.argv[3:]))"""
_log = logging.getLogger(__name__)


class Keeper:
    """Keeps each run once all its ranks have ended; again if some came and ended since."""

    def __init__(self, config: ExporterConfig) -> None:
        chosen, _ = settings.resolve({})
        # an exporter that a person started beside trainings is not the one that they rely on
        self.is_wanted = bool(chosen.keep_runs and kept.directory() and (config.mode == "node" or chosen.keep_dir))
        self._directory = ("--dir", config.flight_dir) if config.flight_dir else ()
        self._done: set[tuple[str, ...]] = set()
        self._work: asyncio.Task[None] | None = None

    def look(self, snapshot: Snapshot) -> None:
        """Begin to keep what has ended, unless that is under way."""
        if not self.is_wanted or (self._work is not None and not self._work.done()):
            return
        ranks: dict[str, list[str]] = {}
        for rank in snapshot.ranks:
            ranks.setdefault(rank.run_id, []).append("" if rank.up else rank.incarnation)
        ended = {(run_id, *sorted(members)) for run_id, members in ranks.items() if "" not in members} - self._done
        if ended:
            self._done |= ended
            runs = [run_id for run_id, *_ in ended]
            self._work = asyncio.get_running_loop().create_task(asyncio.to_thread(_keep, runs, self._directory))

    async def finish(self, snapshot: Snapshot) -> None:
        """Keep what has ended by now, and wait for it, but not for ever."""
        for _ in range(2):  # what was under way, and what has ended since
            self.look(snapshot)
            if self._work is not None:
                await asyncio.wait({self._work}, timeout=_LAST_WAIT_S)


def _keep(runs: list[str], directory: Sequence[str]) -> None:
    for run_id in runs:
        command = ["keep", "--automatic", *directory, "--", run_id]
        argv = [sys.executable, "-I", "-c", _PROGRAM, json.dumps(sys.path), str(_NICENESS), *command]
        try:
            ended = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=_LONGEST_S)
        except (OSError, subprocess.SubprocessError) as problem:
            _log.warning("run %s is not kept: %s", run_id, problem)
        else:
            if ended.returncode:
                _log.warning("run %s is not kept: %s", run_id, ended.stderr.strip()[-500:])
