"""What the exporter's side may ask of a rank while it runs: its level, which probes are off, stacks, a profile."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchobs.evidence import Witness
from torchobs.flight.control import LEVELS, ControlReader
from torchobs.guarding import call
from torchobs.settings import PROBES

if TYPE_CHECKING:
    from torchobs.probes.host import Host
    from torchobs.switches import Switches

OFF = LEVELS.index("off")
_STEP = "step"


class Commands:
    """Obeys the control file of this incarnation. Begins with what the settings say."""

    def __init__(self, host: Host, switches: Switches, directory: str) -> None:
        self._host, self._switches = host, switches
        self._reader = ControlReader(directory, host.writer.header.incarnation)
        self._probes_off = host.settings.disable_probes
        self._witness = Witness(host)
        self._records_steps = True
        self._set_level(LEVELS.index(host.settings.level))
        self._say_whether_steps()

    def sample(self) -> None:
        """Look, and obey. Ten times a second."""
        command, host = self._reader.poll(), self._host
        self._witness.sample()
        self._say_whether_steps()
        if command is None:
            return
        if command.probes_off is not None:
            self._probes_off = frozenset(name for bit, name in enumerate(PROBES) if command.probes_off >> bit & 1)
        level, was = host.level if command.level is None else command.level, host.level
        self._set_level(level)
        if level != was:
            for probe, changed in list(host.on_level):
                call(host.fuse(probe), changed, level)
        self._witness.obey(command)
        self._say_whether_steps()

    def _say_whether_steps(self) -> None:
        """A rank whose steps nobody counts has not hung, and is not behind others; nor is its count theirs afterwards."""
        records = self._switches.records(_STEP)
        if records != self._records_steps:
            self._records_steps = records
            self._host.writer.steps_since(time.monotonic_ns() if records else None)

    def _set_level(self, level: int) -> None:
        self._host.level = level
        self._switches.switch_off(PROBES if level == OFF else self._probes_off)
        self._host.writer.level(level)

    def close(self) -> None:
        """Let go of the directory, the timer and the signal. Idempotent."""
        self._witness.close()
        self._reader.close()
