"""What every probe is given: where to record, services of the runtime, circuit breakers, lists of hooks."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol

from torchobs.probes.core.step_recorder import METER_EVERY
from torchobs.support.error_guard import CircuitBreaker
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from weakref import ref

    from torchobs.catalog import Event, Metric
    from torchobs.config.settings import Settings
    from torchobs.detect.spikes import BlownLayer
    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.probes.core.step_recorder import StepRecorder
    from torchobs.probes.core.training_state import TrainingState
    from torchobs.probes.core.user_scalars import Scalars
    from torchobs.probes.data.worker_states import LoaderWorker
    from torchobs.tensors.device_reads import DeviceValues

P = ParamSpec("P")

LONG_NS = 100_000_000
"""Spans from this length on are always written: there can be ten a second at most."""
_EVERY_NS, _BURST = 10_000_000_000, 10


class Probe(Protocol):
    """One signal. If ``install`` raises, this probe alone is disabled, and the reason is recorded.

    The sampler thread also calls, where a probe has them: ``sample()`` ten times a second, to process quickly what the training
    thread has recorded; ``observe()`` one second after its start, every ten seconds and when the rank ends, for what is slower;
    ``level_changed(level)`` when the debug level has changed (``hooks.DebugLevel``).
    """

    name: str

    def install(self, context: ProbeContext) -> None:
        """Put the hooks in place."""

    def remove(self) -> None:
        """Remove all hooks; listeners in hook lists are removed by the probe manager. Idempotent."""


class SpanWriter(Protocol):
    """``RunSpan.write``: records a child of the run's or the segment's span; times on CLOCK_MONOTONIC."""

    def __call__(self, name: str, started_ns: int, ended_ns: int, attributes: Mapping[str, object], *, failed: bool) -> None:
        """Record the span."""


class LimitedWarning(Protocol):
    """Logs a warning, at most one a minute for each cause; for the sampler thread."""

    def __call__(self, cause: str, message: str, *, own: bool = False) -> None:
        """Log it. ``own``: it concerns this rank alone, not all ranks of a node."""


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """Made by the session, passed to every probe. What probes need of each other: see ``probes``."""

    settings: Settings
    writer: FlightWriter
    recorder: StepRecorder
    device: DeviceValues
    """Asynchronous reads from devices"""
    training: TrainingState
    hooks: Hooks
    scalars: Scalars
    """Values given to ``torchobs.log``"""
    write_span: SpanWriter
    warn_limited: LimitedWarning
    yield_gil: Callable[[], None]
    """Called regularly by long work in the sampler thread"""
    at_backward: Callable[[Callable[[], object]], None]
    """``SafePoint.arm``: runs a task that cannot raise once in the training thread, when its next backward begins"""
    spent_ns: dict[str, int]
    """torchobs' own time in the training thread, by probe"""
    origins: dict[int, Any] = field(default_factory=dict)
    """``NonfiniteOrigin``: where values that were not finite were born, by step; the last ones"""
    blown_layer: list[Callable[[int], BlownLayer | None]] = field(default_factory=list)
    """Functions that name the layer whose gradient has grown most in a step, if it was measured lately; for the sampler
    thread. None, or the gradient probe's"""
    modules: list[Callable[[], list[Any]]] = field(default_factory=list)
    """Functions that return the outermost modules known, for the sampler thread. None, or the gradient probe's"""
    recent_collectives: list[Callable[[], dict[str, list[str]] | None]] = field(default_factory=list)
    """Functions that return the last collectives of a rank that stands still, as an event's attribute; for the sampler thread.
    None, or the collectives probe's"""
    loader_workers: list[Callable[[], list[LoaderWorker]]] = field(default_factory=list)
    """Functions that return the worker processes of the loaders in use, for the sampler thread. None, or the loader probe's"""
    explain_error: list[Callable[[BaseException], dict[str, Any] | None]] = field(default_factory=list)
    """Functions that return more attributes for the event of an exception. None, or the distributed probe's"""
    watched: list[ref[Any]] = field(default_factory=list)
    """Models given to ``torchobs.watch``"""
    breakers: dict[str, CircuitBreaker] = field(default_factory=dict)

    def breaker(self, probe: str) -> CircuitBreaker:
        """Return the circuit breaker of that probe."""
        return self.breakers.setdefault(probe, CircuitBreaker(probe))

    def event(self, event: Event, attributes: Mapping[str, object]) -> None:
        """Record an event, with the number of the last step that has ended."""
        self.writer.event(event.name, attributes, self.recorder.step)

    def set_gauge(self, metric: Metric, value: float | None, attributes: Mapping[str, str] | None = None) -> bool:
        """Set a gauge; return True if there is room for its series. ``None`` leaves it as it is; NaN makes it absent."""
        cell = self.writer.table.cell(metric, attributes or {}) if value is not None else None
        if cell is None or value is None:
            return False
        cell.set(float(value))
        return True

    def count(self, metric: Metric, amount: float, attributes: Mapping[str, str] | None = None) -> bool:
        """Add to a counter; return True if there is room for its series. 0 makes it exist before anything is counted."""
        cell = self.writer.table.cell(metric, attributes or {})
        if cell is None:
            return False
        if amount:
            cell.add(amount)
        return True

    def record_overhead(self, probe: str, ns: int) -> None:
        """Add our own time in a metered step, one in ``METER_EVERY``, times ``METER_EVERY``."""
        self.spent_ns[probe] = self.spent_ns.get(probe, 0) + ns * METER_EVERY


def span_limiter() -> RateLimiter:
    """Return a limiter for one probe's short spans, in ns: frequent ones must not evict entries of the small event ring."""
    return RateLimiter(_EVERY_NS, _BURST)


class HookList(Generic[P]):
    """Listeners of one occurrence, called in the order of registration, each guarded by its probe's circuit breaker."""

    __slots__ = ("_by_probe", "_spent_ns", "listeners")

    def __init__(self, spent_ns: dict[str, int]) -> None:
        self._spent_ns = spent_ns
        self._by_probe: list[tuple[str, Callable[P, object]]] = []
        self.listeners: list[Callable[P, object]] = []
        """For the hot path, which iterates over it itself: always the same list"""

    def register(self, breaker: CircuitBreaker, listener: Callable[P, object], *, guarded: bool = False) -> None:
        """Add a listener of the breaker's probe. ``guarded``: it guards itself by that breaker, for want of a frame."""
        self._by_probe.append((breaker.probe, listener if guarded else breaker.guard(listener)))
        self._update()

    def unregister(self, probe: str) -> None:
        """Remove the listeners of that probe."""
        self._by_probe = [entry for entry in self._by_probe if entry[0] != probe]
        self._update()

    def _update(self) -> None:
        self.listeners[:] = [listener for _, listener in self._by_probe]

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call the listeners in the training thread; each one's time counts as its probe's overhead."""
        del kwargs
        now_ns = monotonic_ns()
        spent = self._spent_ns
        for probe, listener in self._by_probe:
            listener(*args)  # type: ignore[call-arg]  # without keywords, which no listener has
            then_ns, now_ns = now_ns, monotonic_ns()
            spent[probe] = spent.get(probe, 0) + now_ns - then_ns


class BeforeStep(HookList[[Any, bool]]):
    """Called before an outermost optimizer step, with the optimizer and whether it was given a closure.

    Most steps are of no interest to the listeners, which therefore say when they want to be called next: all set ``due_at``
    (0 for the next step) and the gradient probe, or without it the optimizer probe, ``last``. The step probe reads both.
    """

    __slots__ = ("due_at", "last")

    def __init__(self, spent_ns: dict[str, int]) -> None:
        super().__init__(spent_ns)
        self.due_at = sys.maxsize
        """Number of the ended step after which the listeners are called next"""
        self.last = -1
        """The same of the last call: they are called for all optimizers of a step, or for none"""

    def unregister(self, probe: str) -> None:
        """See :class:`HookList`. Those that stay are called before the next step, and set ``due_at`` then."""
        super().unregister(probe)
        self.due_at = 0 if self.listeners else sys.maxsize


class TakesLoss(HookList[[Any, Any, bool]]):
    """Called when a backward begins, with its tensors, the given gradients, and whether it accumulates its gradients."""

    __slots__ = ("_instead",)

    def __init__(self, spent_ns: dict[str, int]) -> None:
        super().__init__(spent_ns)
        self._instead: Callable[[Any, Any, bool], object] | None = None

    def divert(self, instead: Callable[[Any, Any, bool], object] | None) -> None:
        """Have this called instead of the listeners, until ``None`` is given: a captured CUDA graph computes no loss yet."""
        self._instead = instead
        self._update()

    def _update(self) -> None:
        registered = [listener for _, listener in self._by_probe]
        self.listeners[:] = registered if self._instead is None else [self._instead]


class DebugLevel(HookList[[int]]):
    """The debug level in force, and what to call in the sampler thread when it has changed. Set by the command handler."""

    __slots__ = ("value",)

    def __init__(self, spent_ns: dict[str, int]) -> None:
        super().__init__(spent_ns)
        self.value = 1
        """Index into ``flight.files.control.LEVELS``: 0 off, 1 basic, 2 advanced, 3 extreme"""


class Hooks:
    """All hook lists of a session; beside each: who calls it, when, and with what. All but ``level`` in the training thread."""

    __slots__ = (
        "after_closure_backward",
        "before_step",
        "ends",
        "ends_by_error",
        "iterated",
        "level",
        "loss_scaled",
        "nonfinite_arrived",
        "nonfinite_gradient",
        "nonfinite_loss",
        "steps_within",
        "takes_loss",
        "unscales",
        "watched",
    )  # fmt: skip

    def __init__(self, spent_ns: dict[str, int]) -> None:
        self.level = DebugLevel(spent_ns)
        self.before_step = BeforeStep(spent_ns)
        """Step probe"""
        self.after_closure_backward: HookList[[]] = HookList(spent_ns)
        """Step probe: the outermost backward inside an optimizer's closure has returned"""
        self.takes_loss = TakesLoss(spent_ns)
        """Step probe"""
        self.nonfinite_loss: HookList[[Any]] = HookList(spent_ns)
        """Loss probe: a backward pass begins from these tensors, whose loss is not finite"""
        self.nonfinite_gradient: HookList[[Any, frozenset[int]]] = HookList(spent_ns)
        """Gradient probe: this optimizer is about to step with gradients that are not finite; ids of their parameters before
        clipping, none if unknown"""
        self.nonfinite_arrived: HookList[[]] = HookList(spent_ns)
        """Loss probe: a loss that is not finite has arrived from a device; when the next backward begins"""
        self.ends_by_error: HookList[[BaseException | None]] = HookList(spent_ns)
        """Exit probe: this exception is about to end the program, or ``sys.exit(n)`` does (``None``)"""
        self.ends: HookList[[]] = HookList(spent_ns)
        """Session: it is about to end, with whatever is there still"""
        self.steps_within: HookList[[int, Any]] = HookList(spent_ns)
        """Step probe: within the step of the optimizer with this id, this other one begins to step"""
        self.loss_scaled: HookList[[object, object, Any]] = HookList(spent_ns)
        """AMP probe: a loss scaler has scaled, with the outputs, the scaled outputs and the scale, a tensor"""
        self.unscales: HookList[[Any, Any]] = HookList(spent_ns)
        """AMP probe: a loss scaler is about to divide this optimizer's gradients by this scale, a tensor"""
        self.iterated: HookList[[Any, Any]] = HookList(spent_ns)
        """Loader probe: this data loader has returned this iterator"""
        self.watched: HookList[[Any]] = HookList(spent_ns)
        """``torchobs.watch``: was given this module"""

    def unregister(self, probe: str) -> None:
        """Remove the listeners of that probe from every list."""
        for name in self.__slots__:
            hook: HookList[...] = getattr(self, name)
            hook.unregister(probe)
