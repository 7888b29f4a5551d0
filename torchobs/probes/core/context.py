"""What probes share: the step in progress, fuses, the clock of our own cost, and values on their way from a device."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

from torchobs.probes.core.step_recorder import METER_EVERY
from torchobs.probes.core.training_loop import TrainingLoop
from torchobs.probes.core.user_scalars import Scalars
from torchobs.support.error_guard import CircuitBreaker

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.config.settings import Settings
    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.probes.core.device_scalars import DeviceValues
    from torchobs.probes.core.step_recorder import StepRecorder


class Probe(Protocol):
    """One signal. ``install`` may raise: then the probe is off, with a reason, and nothing else is."""

    name: str

    def install(self, context: ProbeContext) -> None:
        """Put the hooks in place."""

    def remove(self) -> None:
        """Remove every one of them. Idempotent."""


class Sampled(Protocol):
    """A probe that the sampler thread asks, too: ten times a second, so what it does is small."""

    def sample(self) -> None:
        """Look at a value that the training thread left."""


class Observed(Protocol):
    """A probe that the sampler thread asks a second after its start, every ten seconds, and at the rank's end."""

    def observe(self) -> None:
        """Look at something slow."""


class Levelled(Protocol):
    """A probe that does more, or less, as the debug level says. Called by the sampler thread when it changes."""

    def level_changed(self, level: int) -> None:
        """The level is one of ``flight.files.control.LEVELS`` by index: 0 off, 1 basic, 2 advanced, 3 extreme."""


class ManualSteps(Protocol):
    """Who looks for steps that no optimizer makes; told when an outermost backward begins, with its arguments, and ends."""

    begins: Callable[..., None]
    ends: Callable[..., None]
    optimizer_stepped: Callable[..., None]


@dataclass(slots=True)
class ProbeContext:
    """Composed by the session, handed to every probe."""

    settings: Settings
    writer: FlightWriter
    recorder: StepRecorder
    device: DeviceValues
    level: int = 1
    """The debug level in force, as an index into ``flight.files.control.LEVELS``"""
    span: Callable[..., None] | None = None
    """``RunSpan.write``: records a span beneath the run's, times on CLOCK_MONOTONIC"""
    warn_limited: Callable[..., None] | None = None
    """``Sampler.warn_limited``: logs a warning, at most one a minute for each cause; for the sampler thread.

    ``own=True``: it concerns this rank alone"""
    yield_gil: Callable[[], None] = lambda: None
    """``Sampler.yield_gil``: to be called now and then in what takes the sampler thread longer"""
    breakers: dict[str, CircuitBreaker] = field(default_factory=dict)
    spent_ns: dict[str, int] = field(default_factory=dict)
    """Our own time in the training thread, by probe"""
    on_level: list[tuple[str, Callable[[int], None]]] = field(default_factory=list)
    """By probe, called by the sampler thread when the level has changed"""
    epochs: int = 0
    """Passes over the training loader begun so far"""
    scalars: Scalars = field(init=False)
    """Given to ``torchobs.log``"""
    thread: int = field(default_factory=get_ident)
    """The training thread: the one that steps optimizers"""
    loop: TrainingLoop = field(default_factory=TrainingLoop)
    """The loops that it trains in"""
    idle: bool = False
    """Whether it has left them, and does something else"""
    evaluating_since_ns: int = 0
    """When the evaluation began that it has been in for a while; 0: it is in none"""
    backwards: int = 0
    """1 while a backward pass runs in the training thread"""
    in_closure: bool = False
    """Whether an optimizer is evaluating its closure"""
    reads_rate: bool = False
    """Whether the step hook shall read the learning rate"""
    steps_within: Callable[[int, Any], object] | None = None
    """Called with the id of the optimizer that is stepping and another one that begins to step within that"""
    norm_due: int = sys.maxsize
    """The step after which ``before_step`` is called next"""
    norm_step: int = -1
    """The step after which it was called last: all of a step's optimizers are told, or none"""
    before_step: list[tuple[str, Callable[[Any, bool], None]]] = field(default_factory=list)
    """By probe, called with the optimizer, and whether it was given a closure, before its outermost step"""
    after_closure_backward: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    """By probe, called when the outermost backward inside a closure has returned"""
    anomalous: deque[int] = field(default_factory=lambda: deque(maxlen=100))
    """Steps that the fold has found to be, for their spans"""
    iterated: list[tuple[str, Callable[[Any, Any], None]]] = field(default_factory=list)
    """By probe, called with a data loader and the iterator it was asked for, in the training thread"""
    at_backward: Callable[[Callable[[], object]], None] | None = None
    """Has something that cannot raise done once in the training thread, when its next backward begins (``safepoint``)"""
    manual_steps: ManualSteps | None = None
    """Told of the outermost backwards, while there may be steps by hand"""
    steps_by_hand: Callable[[], ManualSteps | None] | None = None
    """Called when a backward begins that may be the second one since a step; returns who is to be told of it"""
    returned: set[int] = field(default_factory=set)
    """Boundaries at which a backward pass ended that left its gradients to the caller, and none in parameters"""
    takes_loss: Callable[[Any, Any, bool], None] | None = None
    """Called with the tensors and the given gradients of the outermost backward, and whether it accumulates its gradients"""
    clipped_by_hand: Callable[[Any, int], object] | None = None
    """Called at the end of a step by hand (``byhand``) with what stands for its optimizer, and how many gradients that has"""
    watched: Callable[[Any], object] | None = None
    """Called with a module that was given to ``torchobs.watch``"""
    loss_scaled: Callable[[object, object, Any], object] | None = None
    """Called with the outputs, the scaled outputs and the scale when a loss scaler has scaled"""
    scalings: int = 0
    """Losses that loss scalers have scaled"""
    scaled: bool = False
    """Whether one was since gradients were last unscaled"""
    unscales: Callable[[Any, Any], object] | None = None
    """Called with an optimizer and the scale, a tensor, before a loss scaler divides its gradients by that"""
    loss_scale: Any = None
    """The scale, a tensor, that it has used last"""

    def __post_init__(self) -> None:
        self.scalars = Scalars(self.writer.table)

    def breaker(self, probe: str) -> CircuitBreaker:
        """Return the fuse of that probe."""
        return self.breakers.setdefault(probe, CircuitBreaker(probe))

    def record_overhead(self, probe: str, ns: int) -> None:
        """Count our own time in a metered step, which stands for ``METER_EVERY``."""
        self.spent_ns[probe] = self.spent_ns.get(probe, 0) + ns * METER_EVERY

    def notify(self, listeners: list[tuple[str, Callable[..., None]]], *args: Any) -> None:
        """Call the listeners, each on its probe's account."""
        now_ns = monotonic_ns()
        spent = self.spent_ns
        for probe, listener in listeners:
            listener(*args)
            then_ns, now_ns = now_ns, monotonic_ns()
            spent[probe] = spent.get(probe, 0) + now_ns - then_ns
