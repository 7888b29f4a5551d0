"""State that probes share: the step recorder, circuit breakers, overhead accounting, asynchronous device reads."""

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
    """One signal. If ``install`` raises, this probe alone is disabled, and the reason is recorded."""

    name: str

    def install(self, context: ProbeContext) -> None:
        """Put the hooks in place."""

    def remove(self) -> None:
        """Remove all hooks. Idempotent."""


class Sampled(Protocol):
    """A probe that the sampler thread also calls ten times a second."""

    def sample(self) -> None:
        """Process what the training thread has recorded. Must be quick."""


class Observed(Protocol):
    """A probe that the sampler thread calls one second after its start, every ten seconds, and when the rank ends."""

    def observe(self) -> None:
        """Do what is too slow for :meth:`Sampled.sample`."""


class Levelled(Protocol):
    """A probe that does more or less depending on the debug level. Called by the sampler thread when the level changes."""

    def level_changed(self, level: int) -> None:
        """Adapt to ``level``, an index into ``flight.files.control.LEVELS``: 0 off, 1 basic, 2 advanced, 3 extreme."""


class ManualSteps(Protocol):
    """Detector of steps without an optimizer; called with the arguments of each outermost backward when it begins and ends."""

    begins: Callable[..., None]
    ends: Callable[..., None]
    optimizer_stepped: Callable[..., None]


@dataclass(slots=True)
class ProbeContext:
    """Made by the session, passed to every probe."""

    settings: Settings
    writer: FlightWriter
    recorder: StepRecorder
    device: DeviceValues
    level: int = 1
    """The debug level in force, as an index into ``flight.files.control.LEVELS``"""
    span: Callable[..., None] | None = None
    """``RunSpan.write``: records a child span of the run's span; times on CLOCK_MONOTONIC"""
    warn_limited: Callable[..., None] | None = None
    """``Sampler.warn_limited``: logs a warning, at most one a minute for each cause; for the sampler thread.

    ``own=True``: it concerns this rank alone"""
    yield_gil: Callable[[], None] = lambda: None
    """``Sampler.yield_gil``: called regularly by long work in the sampler thread"""
    breakers: dict[str, CircuitBreaker] = field(default_factory=dict)
    spent_ns: dict[str, int] = field(default_factory=dict)
    """torchobs' own time in the training thread, by probe"""
    on_level: list[tuple[str, Callable[[int], None]]] = field(default_factory=list)
    """Listeners by probe, called by the sampler thread when the level has changed"""
    epochs: int = 0
    """Passes over the training loader begun so far"""
    scalars: Scalars = field(init=False)
    """Values given to ``torchobs.log``"""
    thread: int = field(default_factory=get_ident)
    """The training thread: the one that steps optimizers"""
    loop: TrainingLoop = field(default_factory=TrainingLoop)
    """The loops of the training on that thread's stack"""
    idle: bool = False
    """Whether the training thread has left those loops"""
    evaluating_since_ns: int = 0
    """When a long evaluation in progress began; 0 if none is in progress"""
    backwards: int = 0
    """1 while a backward pass runs in the training thread"""
    in_closure: bool = False
    """Whether an optimizer is evaluating its closure"""
    reads_rate: bool = False
    """Whether the step hook reads the learning rate"""
    steps_within: Callable[[int, Any], object] | None = None
    """Called when an optimizer begins to step within another one's step, with the id of the outer one and the inner one"""
    norm_due: int = sys.maxsize
    """Number of the ended step after which ``before_step`` is called next"""
    norm_step: int = -1
    """The same of its last call: it is called for all optimizers of a step, or for none"""
    before_step: list[tuple[str, Callable[[Any, bool], None]]] = field(default_factory=list)
    """Listeners by probe, called before an outermost optimizer step with the optimizer and whether it was given a closure"""
    after_closure_backward: list[tuple[str, Callable[[], None]]] = field(default_factory=list)
    """Listeners by probe, called when the outermost backward inside a closure has returned"""
    anomalous: deque[int] = field(default_factory=lambda: deque(maxlen=100))
    """Anomalous steps that the fold has found, for their spans"""
    iterated: list[tuple[str, Callable[[Any, Any], None]]] = field(default_factory=list)
    """Listeners by probe, called in the training thread with a data loader and the iterator that it has returned"""
    at_backward: Callable[[Callable[[], object]], None] | None = None
    """``SafePoint.arm``: runs a task that cannot raise once in the training thread, when its next backward begins"""
    manual_steps: ManualSteps | None = None
    """Called around outermost backward passes while manual steps are possible"""
    find_manual_steps: Callable[[], ManualSteps | None] | None = None
    """Called when a possible second backward since a step begins; returns the detector that watches it, or ``None``"""
    returned: set[int] = field(default_factory=set)
    """Boundaries at which a backward pass ended that left its gradients to the caller, and none in parameters"""
    takes_loss: Callable[[Any, Any, bool], None] | None = None
    """Called with the tensors and the given gradients of the outermost backward, and whether it accumulates its gradients"""
    manual_step_ended: Callable[[Any, int], object] | None = None
    """Called at the end of a manual step with its ``OptimizerStandIn`` and the number of its gradients"""
    watched: Callable[[Any], object] | None = None
    """Called with a module that was given to ``torchobs.watch``"""
    loss_scaled: Callable[[object, object, Any], object] | None = None
    """Called with the outputs, the scaled outputs and the scale after a loss scaler has scaled"""
    scalings: int = 0
    """Number of losses that loss scalers have scaled"""
    scaled: bool = False
    """Whether a loss was scaled since gradients were last unscaled"""
    unscales: Callable[[Any, Any], object] | None = None
    """Called with an optimizer and the scale, a tensor, before a loss scaler divides the gradients by it"""
    loss_scale: Any = None
    """The scale that was last used, a tensor"""

    def __post_init__(self) -> None:
        self.scalars = Scalars(self.writer.table)

    def breaker(self, probe: str) -> CircuitBreaker:
        """Return the circuit breaker of that probe."""
        return self.breakers.setdefault(probe, CircuitBreaker(probe))

    def record_overhead(self, probe: str, ns: int) -> None:
        """Add our own time in a metered step, one in ``METER_EVERY``, times ``METER_EVERY``."""
        self.spent_ns[probe] = self.spent_ns.get(probe, 0) + ns * METER_EVERY

    def notify(self, listeners: list[tuple[str, Callable[..., None]]], *args: Any) -> None:
        """Call the listeners; each one's time counts as its probe's overhead."""
        now_ns = monotonic_ns()
        spent = self.spent_ns
        for probe, listener in listeners:
            listener(*args)
            then_ns, now_ns = now_ns, monotonic_ns()
            spent[probe] = spent.get(probe, 0) + now_ns - then_ns
