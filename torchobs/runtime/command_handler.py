"""What the exporter's side may ask of a rank while it runs: its level, which probes are off, stacks, a profile."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchobs.config.settings import PROBES
from torchobs.flight.files.control import LEVELS, ControlReader
from torchobs.runtime.diagnostics import Diagnostics
from torchobs.support.error_guard import call

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext
    from torchobs.runtime.probe_manager import ProbeManager

OFF = LEVELS.index("off")
_STEP = "step"


class Commands:
    """Obeys the control file of this incarnation. Begins with what the settings say."""

    def __init__(self, context: ProbeContext, switches: ProbeManager, directory: str) -> None:
        self._context, self._switches = context, switches
        self._reader = ControlReader(directory, context.writer.header.incarnation)
        self._probes_off = context.settings.disable_probes
        self._witness = Diagnostics(context)
        self._records_steps = True
        self._set_level(LEVELS.index(context.settings.level))
        self._say_whether_steps()

    def sample(self) -> None:
        """Look, and obey. Ten times a second."""
        command, context = self._reader.poll(), self._context
        self._witness.sample()
        self._say_whether_steps()
        if command is None:
            return
        if command.probes_off is not None:
            self._probes_off = frozenset(name for bit, name in enumerate(PROBES) if command.probes_off >> bit & 1)
        level, was = context.level if command.level is None else command.level, context.level
        self._set_level(level)
        if level != was:
            for probe, changed in list(context.on_level):
                call(context.breaker(probe), changed, level)
        self._witness.obey(command)
        self._say_whether_steps()

    def _say_whether_steps(self) -> None:
        """A rank whose steps nobody counts has not hung, and is not behind others; nor is its count theirs afterwards."""
        records = self._switches.records(_STEP)
        if records != self._records_steps:
            self._records_steps = records
            self._context.writer.steps_since(time.monotonic_ns() if records else None)

    def _set_level(self, level: int) -> None:
        self._context.level = level
        self._switches.switch_off(PROBES if level == OFF else self._probes_off)
        self._context.writer.level(level)

    def close(self) -> None:
        """Let go of the directory, the timer and the signal. Idempotent."""
        self._witness.close()
        self._reader.close()
