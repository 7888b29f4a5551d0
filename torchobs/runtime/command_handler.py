"""Apply commands that the exporter writes to the control file: the level, disabled probes, stacks, profiles."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchobs.config.settings import PROBES
from torchobs.flight.control import LEVELS, ControlReader
from torchobs.runtime.profiler import Profiles
from torchobs.runtime.stacks import StallWatch, Watchdog, write_stacks
from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from torchobs.probes.context import ProbeContext
    from torchobs.runtime.probe_manager import ProbeManager

OFF = LEVELS.index("off")
_STEP = "step"


class CommandHandler:
    """Polls this incarnation's control file and applies it. Starts from the settings. For the sampler thread."""

    def __init__(self, context: ProbeContext, probe_manager: ProbeManager, directory: str) -> None:
        self._context, self._probe_manager = context, probe_manager
        self._reader = ControlReader(directory, context.writer.header.incarnation)
        self._probes_off = context.settings.disable_probes
        self._profiles = Profiles(context)
        self._watchdog = Watchdog(context.writer) if context.settings.watchdog else None
        self._stall_watch = StallWatch(context) if context.settings.watchdog else None
        self._records_steps = True
        self._set_level(LEVELS.index(context.settings.level))
        self._publish_step_recording()

    def sample(self) -> None:
        """Advance profiles, reset the watchdogs, and apply a new command. Called ten times a second."""
        command, context = self._reader.poll(), self._context
        self._profiles.sample()
        if self._stall_watch is not None and self._records_steps:
            call(context.breaker("watchdog"), self._stall_watch.sample)
        if self._watchdog is not None:
            call(context.breaker("watchdog"), self._watchdog.sample)
        self._publish_step_recording()
        if command is None:
            return
        context.writer.command(command.seq)
        if command.probes_off is not None:
            self._probes_off = frozenset(name for bit, name in enumerate(PROBES) if command.probes_off >> bit & 1)
        previous = context.hooks.level.value
        level = previous if command.level is None else command.level
        self._set_level(level)
        if level != previous:
            for level_changed in list(context.hooks.level.listeners):
                level_changed(level)
        if command.stacks:
            self._write_stacks(command.stacks_seq)
        if command.profile_steps:
            self._profiles.request(command.profile_steps, command.profile_seq)
        self._publish_step_recording()

    def _publish_step_recording(self) -> None:
        """Publish since when steps are recorded: without the step probe a rank is neither hung nor behind others."""
        records = self._probe_manager.records(_STEP)
        if records != self._records_steps:
            self._records_steps = records
            self._context.writer.steps_since(time.monotonic_ns() if records else None)

    def _set_level(self, level: int) -> None:
        self._context.hooks.level.value = level
        self._probe_manager.switch_off(PROBES if level == OFF else self._probes_off)
        self._context.writer.level(level)

    def _write_stacks(self, number: int) -> None:
        breaker = CircuitBreaker("stacks")
        call(breaker, write_stacks, self._context, number)
        if breaker.failures:
            reason = f"{breaker.failures[0].exception} at {breaker.failures[0].location}"
            self._context.warn_limited("stacks", f"stacks could not be written: {reason}", rank_only=True)

    def close(self) -> None:
        """Release the directory, the timer and the signal. Idempotent, from any thread."""
        call(CircuitBreaker("profile"), self._profiles.close)
        if self._watchdog is not None:
            call(CircuitBreaker("watchdog"), self._watchdog.close)
        self._reader.close()
