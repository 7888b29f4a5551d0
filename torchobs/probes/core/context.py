"""What every probe is given: where to record, services of the runtime, circuit breakers, overhead accounting."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torchobs.probes.core.step_recorder import METER_EVERY
from torchobs.support.error_guard import CircuitBreaker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from weakref import ref

    from torchobs.catalog import Event, Metric
    from torchobs.config.settings import Settings
    from torchobs.detect.spikes import BlownLayer
    from torchobs.flight.metrics.totals import Anomaly
    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.probes.core.device_scalars import DeviceValues
    from torchobs.probes.core.hooks import Hooks
    from torchobs.probes.core.step_recorder import StepRecorder
    from torchobs.probes.core.training_state import TrainingState
    from torchobs.probes.core.user_scalars import Scalars
    from torchobs.probes.data.worker_states import LoaderWorker


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
    layer_norms: list[Callable[[int], list[tuple[int, dict[str, float]]]]] = field(default_factory=list)
    """Functions that return the gradient norm of each layer in so many of the last measured steps; as ``blown_layer``"""
    after_anomaly: list[Callable[[Anomaly], object]] = field(default_factory=list)
    """Called for each anomaly, by the sampler thread, when its event has been written. None, or the activation probe's"""
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
