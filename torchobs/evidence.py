"""What a rank tells about itself on request, or when it is stuck: stacks and profiles. Composed here, done elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.guarding import Fuse, call
from torchobs.profiling import Profiles
from torchobs.stacks import write_stacks
from torchobs.watchdog import Watchdog

if TYPE_CHECKING:
    from torchobs.flight.control import Command
    from torchobs.probes.host import Host


class Witness:
    """One per session, for the sampler thread."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._profiles = Profiles(host)
        self._watchdog = Watchdog(host.writer) if host.settings.watchdog else None

    def obey(self, command: Command) -> None:
        """Do what is asked for; where that fails, only that does."""
        if command.stacks:
            self._try("stacks", command)
        if command.profile_steps:
            self._profiles.ask(command.profile_steps, command.profile_seq)

    def sample(self) -> None:
        """Ten times a second."""
        self._profiles.sample()
        if self._watchdog is not None:
            call(self._host.fuse("watchdog"), self._watchdog.sample)

    def close(self) -> None:
        """At the session's end, whatever thread that is in."""
        call(Fuse("profile"), self._profiles.close)
        if self._watchdog is not None:
            call(Fuse("watchdog"), self._watchdog.close)

    def _try(self, what: str, command: Command) -> None:
        fuse = Fuse(what)
        call(fuse, write_stacks, self._host, command.stacks_seq)
        if fuse.trips and self._host.say is not None:
            why = f"{fuse.trips[0].exception} at {fuse.trips[0].location}"
            self._host.say(what, f"{what} could not be written: {why}", own=True)
