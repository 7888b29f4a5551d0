"""What probes share: the step in progress, fuses, the clock of our own cost, and values on their way from a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any, Protocol

from torchobs.guarding import Fuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.flight.writer import FlightWriter
    from torchobs.probes.cycle import Cycle
    from torchobs.probes.device import DeviceValues
    from torchobs.settings import Settings


class Probe(Protocol):
    """One signal. ``install`` may raise: then the probe is off, with a reason, and nothing else is."""

    name: str

    def install(self, host: Host) -> None:
        """Put the hooks in place."""

    def remove(self) -> None:
        """Remove every one of them. Idempotent."""


class Sampled(Protocol):
    """A probe that the sampler thread asks, too."""

    def sample(self) -> None:
        """Look at something slow, or at a value that the training thread left."""


@dataclass(slots=True)
class Host:
    """Composed by the session, handed to every probe."""

    settings: Settings
    writer: FlightWriter
    cycle: Cycle
    device: DeviceValues
    fuses: dict[str, Fuse] = field(default_factory=dict)
    spent_ns: dict[str, int] = field(default_factory=dict)
    """Our own time in the training thread, by probe"""
    thread: int = field(default_factory=get_ident)
    """The training thread: the one that steps optimizers"""
    backwards: int = 0
    """Depth of backward passes in the training thread"""
    in_closure: bool = False
    before_step: list[Callable[[Any, bool], None]] = field(default_factory=list)
    """Called with the optimizer, and whether it was given a closure, before its outermost step"""
    before_backward: list[Callable[[Any, Any], None]] = field(default_factory=list)
    """Called with the tensors and the gradients given to the outermost backward"""
    after_backward: list[Callable[[], None]] = field(default_factory=list)
    """Called when the outermost backward has returned"""

    loss_scaled: Callable[[object, object, Any], object] | None = None
    """Called with the outputs, the scaled outputs and the scale when a loss scaler has scaled"""

    def fuse(self, probe: str) -> Fuse:
        """Return the fuse of that probe."""
        return self.fuses.setdefault(probe, Fuse(probe))

    def spend(self, probe: str, ns: int) -> None:
        """Count our own time."""
        self.spent_ns[probe] = self.spent_ns.get(probe, 0) + ns
