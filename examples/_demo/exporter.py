"""The exporter that serves the demo's flight files: started before the job, so that the page's address is known first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import final

from examples._demo import processes

OWN_VARIABLES = "TORCHOBS_EXPORTER_"


@final
class Exporter:
    """Runs `torchobs exporter` for the length of a `with` block.

    Args:
        home: A private directory for its log.
        flight_dir: The directory of the flight files, which must exist.
    """

    def __init__(self, home: Path, flight_dir: Path) -> None:
        self._home, self._flight_dir, self._targets = home, flight_dir, home / "exporter.json"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Exporter:
        argv = [
            *(sys.executable, "-m", "torchobs", "exporter"),
            *("--mode", "node"),  # on loopback, on the next free port if 10960 is taken
            *("--flight-dir", str(self._flight_dir)),
            *("--web.file-sd", str(self._targets)),  # where it says which port that is
            *("--grace", "24h"),  # the ranks stay on the page for as long as a person reads it
            *("--drain-timeout", "0s"),
        ]
        # Another exporter of this machine may be configured by its variables.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}
        self._process = processes.start(argv, self._home / "exporter.log", environment, self._home)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process:
            processes.end_tree(self._process)

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def address(self) -> str:
        """Where it listens, `host:port`; empty before it does."""
        try:
            groups = json.loads(self._targets.read_text("utf-8"))
        except FileNotFoundError:
            return ""
        return str(groups[0]["targets"][0]) if groups else ""

    @property
    def log(self) -> list[str]:
        """The lines that it has logged so far."""
        return processes.lines(self._home / "exporter.log")
