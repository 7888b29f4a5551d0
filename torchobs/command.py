"""What the exporter's side may ask of a rank while it runs: the level, so far. Polled by the sampler, ten times a second."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchobs.flight.control import LEVELS, ControlReader
from torchobs.flight.place import KUBERNETES_CONTROL, KUBERNETES_MOUNT
from torchobs.guarding import call
from torchobs.settings import PROBES

if TYPE_CHECKING:
    from torchobs.probes.host import Host

OFF = LEVELS.index("off")
PAUSABLE = frozenset(PROBES) - {"exits"}


class Commands:
    """Obeys the control file of this incarnation. Off means that the hooks return at once; they stay in place."""

    def __init__(self, host: Host, directory: str, level: str) -> None:
        self._host = host
        self._reader = ControlReader(directory, host.writer.header.incarnation)
        host.level = LEVELS.index(level)
        host.writer.level(host.level)

    def sample(self) -> None:
        """Look, and obey."""
        command, host = self._reader.poll(), self._host
        if command is None or command.level is None or command.level == host.level:
            return
        was, host.level = host.level, command.level
        if OFF in (was, host.level):
            for probe in PAUSABLE & host.fuses.keys():
                host.fuses[probe].paused(off=host.level == OFF)
            host.cycle.restart()
        for probe, changed in list(host.on_level):
            call(host.fuse(probe), changed, host.level)
        host.writer.level(host.level)

    def close(self) -> None:
        """Let go of the directory."""
        self._reader.close()


def control_directory(chosen: Path | None, flight_dir: str) -> str:
    """Return where the commands are: as set, the pod's volume beside its flight volume, else below the flight directory."""
    if chosen is not None:
        return str(chosen)
    return KUBERNETES_CONTROL if flight_dir == KUBERNETES_MOUNT else str(Path(flight_dir) / "control")
