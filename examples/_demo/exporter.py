"""The exporter that serves the demo's flight files: started before the job, so that the page's address is known first."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import final

from examples._demo.processes import Program

OWN_VARIABLES = "TORCHOBS_EXPORTER_"


@final
class Exporter(Program):
    """Runs `torchobs exporter` for the length of a `with` block.

    Args:
        home: A private directory for its log.
        flight_dir: The directory of the flight files, which must exist.
    """

    def __init__(self, home: Path, flight_dir: Path) -> None:
        self._targets = home / "exporter.json"
        argv = [
            *(sys.executable, "-m", "torchobs", "exporter"),
            *("--mode", "node"),  # on loopback, on the next free port if 10960 is taken
            *("--flight-dir", str(flight_dir)),
            *("--web.file-sd", str(self._targets)),  # where it says which port that is
            *("--grace", "24h"),  # the ranks stay on the page for as long as a person reads it
            *("--drain-timeout", "0s"),
        ]
        # Another exporter of this machine may be configured by its variables.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}
        super().__init__(argv, home / "exporter.log", environment, home)

    @property
    def address(self) -> str:
        """Where it listens, `host:port`; empty before it does."""
        try:
            groups = json.loads(self._targets.read_text("utf-8"))
        except FileNotFoundError:
            return ""
        return str(groups[0]["targets"][0]) if groups else ""
