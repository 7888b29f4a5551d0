"""Diagnostics of a rank, on request or when it is stuck: dispatches to stack dumps, the profiler and the watchdog."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.runtime.profiler import Profiles
from torchobs.runtime.stack_dump import write_stacks
from torchobs.runtime.watchdog import Watchdog
from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from torchobs.flight.files.control import Command
    from torchobs.probes.core.context import ProbeContext


class Diagnostics:
    """One per session; used by the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._profiles = Profiles(context)
        self._watchdog = Watchdog(context.writer) if context.settings.watchdog else None

    def apply(self, command: Command) -> None:
        """Carry out the command's requests; a failure of one does not affect the others."""
        if command.stacks:
            self._write_stacks("stacks", command)
        if command.profile_steps:
            self._profiles.request(command.profile_steps, command.profile_seq)

    def sample(self) -> None:
        """Advance profiles and reset the watchdog. Called ten times a second."""
        self._profiles.sample()
        if self._watchdog is not None:
            call(self._context.breaker("watchdog"), self._watchdog.sample)

    def close(self) -> None:
        """Stop. Called at the session's end, from any thread."""
        call(CircuitBreaker("profile"), self._profiles.close)
        if self._watchdog is not None:
            call(CircuitBreaker("watchdog"), self._watchdog.close)

    def _write_stacks(self, what: str, command: Command) -> None:
        breaker = CircuitBreaker(what)
        call(breaker, write_stacks, self._context, command.stacks_seq)
        if breaker.failures and self._context.warn_limited is not None:
            reason = f"{breaker.failures[0].exception} at {breaker.failures[0].location}"
            self._context.warn_limited(what, f"{what} could not be written: {reason}", own=True)
