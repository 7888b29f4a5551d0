"""The context of every probe: where to record, services, circuit breakers, hook lists, the state of the training thread."""

from __future__ import annotations

import inspect
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from math import ceil
from threading import Lock, get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, Protocol

from torchobs.catalog import Event
from torchobs.catalog.findings import KINDS, Finding
from torchobs.detect.hangs import loop_lines
from torchobs.probes.hot_path import METER_EVERY, PlainSteps
from torchobs.probes.step_recorder import parameters_of
from torchobs.support.error_guard import CircuitBreaker
from torchobs.support.rate_limit import RateLimiter
from torchobs.taps.taps import ThreadFrames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, FrameType
    from weakref import ref

    from torchobs.catalog import Metric
    from torchobs.config.settings import Settings
    from torchobs.detect.spikes import BlownLayer
    from torchobs.flight.writer import FlightWriter
    from torchobs.probes.scalars import Scalars
    from torchobs.probes.step_recorder import StepRecorder
    from torchobs.tensors.device_reads import DeviceValues

P = ParamSpec("P")

LONG_NS = 100_000_000
"""Spans from this length on are always written: there can be ten a second at most."""
_EVERY_NS, _BURST = 10_000_000_000, 10


class Probe(Protocol):
    """One signal. If ``install`` raises, this probe alone is disabled, and the reason is recorded.

    The sampler thread also calls, where a probe has them: ``sample()`` ten times a second, to process the training thread's
    records quickly; ``observe()`` one second after its start, every ten seconds and when the rank ends, for slower work;
    ``level_changed(level)`` when the debug level has changed (``DebugLevel``).
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

    def __call__(self, cause: str, message: str, *, rank_only: bool = False) -> None:
        """Log it. ``rank_only``: it concerns this rank alone, not all ranks of a node."""


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """Made by the session, passed to every probe. Objects that probes share: see ``probes``."""

    settings: Settings
    writer: FlightWriter
    recorder: StepRecorder
    device: DeviceValues
    """Asynchronous reads from devices"""
    training: TrainingState
    hooks: Hooks
    scalars: Scalars
    """Values of ``torchobs.log``"""
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
    """Functions that name the layer with the gradient that has grown most in a step, if it was measured lately; for the sampler
    thread. None, or the gradient probe's"""
    modules: list[Callable[[], list[Any]]] = field(default_factory=list)
    """Functions that return the outermost modules known, for the sampler thread. None, or the gradient probe's"""
    watched: list[ref[Any]] = field(default_factory=list)
    """Models of ``torchobs.watch``"""
    breakers: dict[str, CircuitBreaker] = field(default_factory=dict)

    def breaker(self, probe: str) -> CircuitBreaker:
        """Return the circuit breaker of that probe."""
        return self.breakers.setdefault(probe, CircuitBreaker(probe))

    def trained(self) -> list[Any]:
        """Return the parameters of the optimizers that have stepped."""
        return list(parameters_of(*self.recorder.optimizers()))

    def models(self) -> list[Any]:
        """Return the living models of ``torchobs.watch``."""
        return [model for reference in list(self.watched) if (model := reference()) is not None]

    def outermost(self) -> list[Any]:
        """Return the models of ``torchobs.watch``, then the outermost modules that are known, in the order of their making."""
        return self.models() + [module for outermost in list(self.modules) for module in outermost()]

    def report(self, kind: str, step: int | None = None, **values: object) -> None:
        """Record the event of a kind of finding, with these values as attributes, and log its short words. In any thread.

        ``step``: the one that it is dated to, if that is not the last one that has ended.
        """
        row, step = KINDS[kind], self.recorder.step if step is None else step
        if isinstance(row.source, Event):
            has_kind = row.key and any(attribute.name == "kind" for attribute in row.source.attributes)
            selecting = {"kind": row.key} if has_kind else {}
            self.writer.event(row.source.name, {**selecting, **values}, step)
        self.warn_limited(kind, Finding(kind, "", step, values).short)

    def event(self, event: Event, attributes: Mapping[str, object]) -> None:
        """Record an event, with the number of the last step that has ended."""
        self.writer.event(event.name, attributes, self.recorder.step)

    def set_gauge(self, metric: Metric, value: float | None, attributes: Mapping[str, str] | None = None) -> bool:
        """Set a gauge; return whether there is room for its series. ``None`` leaves it as it is; NaN makes it absent."""
        cell = self.writer.table.cell(metric, attributes or {}) if value is not None else None
        if cell is None or value is None:
            return False
        cell.set(float(value))
        return True

    def count(self, metric: Metric, amount: float, attributes: Mapping[str, str] | None = None) -> bool:
        """Add to a counter; return whether there is room for its series. 0 makes it exist before anything is counted."""
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
        """Add a listener of the breaker's probe. ``guarded``: it guards itself by that breaker, which saves a frame."""
        self._by_probe.append((breaker.probe, listener if guarded else breaker.guard(listener)))
        self._update()

    def unregister(self, probe: str) -> None:
        """Remove the listeners of that probe."""
        self._by_probe = [entry for entry in self._by_probe if entry[0] != probe]
        self._update()

    def _update(self) -> None:
        self.listeners[:] = [listener for _, listener in self._by_probe]

    def ask(self, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        """Return the listeners' results, without ``None``; in any thread."""
        answers = [listener(*args, **kwargs) for listener in list(self.listeners)]
        return [answer for answer in answers if answer is not None]

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Call the listeners in the training thread; each one's time counts as its probe's overhead."""
        del kwargs
        then_ns = monotonic_ns()
        spent = self._spent_ns
        for probe, listener in self._by_probe:
            listener(*args)  # type: ignore[call-arg]  # without keywords, which no listener has
            now_ns = monotonic_ns()
            spent[probe] = spent.get(probe, 0) + now_ns - then_ns
            then_ns = now_ns


class BeforeStep(HookList[[Any, bool]]):
    """Called before an outermost optimizer step, with the optimizer and whether it has a closure.

    Most steps are of no interest to the listeners, which therefore say when they want to be called next: all set ``due_at``
    (0 for the next step) and the gradient probe, or without it the optimizer probe, ``last``. The step probe reads both.
    """

    __slots__ = ("_plain", "last")

    def __init__(self, spent_ns: dict[str, int], plain: PlainSteps | None = None) -> None:
        super().__init__(spent_ns)
        self._plain = plain or PlainSteps()
        self.last = -1
        """The same of the last call: they are called for all optimizers of a step, or for none"""

    @property
    def due_at(self) -> int:
        """Number of the ended step after which the listeners are called next."""
        return self._plain.due_at

    @due_at.setter
    def due_at(self, step: int) -> None:
        self._plain.due_at = step

    def unregister(self, probe: str) -> None:
        """See :class:`HookList`. Those that stay are called before the next step, and set ``due_at`` then."""
        super().unregister(probe)
        self.due_at = 0 if self.listeners else sys.maxsize


class DebugLevel(HookList[[int]]):
    """The debug level in force, and callbacks in the sampler thread for its changes. Set by the command handler."""

    __slots__ = ("value",)

    def __init__(self, spent_ns: dict[str, int]) -> None:
        super().__init__(spent_ns)
        self.value = 1
        """Index into ``flight.control.LEVELS``: 0 off, 1 basic, 2 advanced, 3 extreme"""


class LayerOutputs(HookList[[int, dict[str, Any]]]):
    """Called in the sampler thread with a step and the ``ActivationStats`` of its layers."""

    __slots__ = ("changed", "every")

    def __init__(self, spent_ns: dict[str, int]) -> None:
        super().__init__(spent_ns)
        self.every = 0
        """Steps between two looks, whatever the level; 0: at level extreme, as often as the overhead budget allows"""
        self.changed: Callable[[], object] = int
        """Called after a change of ``every``, in any thread"""

    def want(self, every: int) -> None:
        """Set how often the layers are measured."""
        if every != self.every:
            self.every = every
            self.changed()


class Hooks:
    """All hook lists of a session; beside each: its caller, when, and with which arguments, mostly in the training thread."""

    def __init__(self, spent_ns: dict[str, int], plain: PlainSteps | None = None) -> None:
        self.level = DebugLevel(spent_ns)
        self.layers = LayerOutputs(spent_ns)
        """Activation probe"""
        self.before_step = BeforeStep(spent_ns, plain)
        """Step probe"""
        self.after_closure_backward: HookList[[]] = HookList(spent_ns)
        """Step probe: the outermost backward inside an optimizer's closure has returned"""
        self.compiles_on_trial: HookList[[bool]] = HookList(spent_ns)
        """``debug.explain_compile``: whether compilations from now on are a trial beside the training"""
        self.takes_loss: HookList[[Any, Any, bool]] = HookList(spent_ns)
        """Step probe: a backward pass begins, with its tensors, their gradients, and whether it accumulates gradients"""
        self.nonfinite_loss: HookList[[Any]] = HookList(spent_ns)
        """Loss probe: a backward pass begins from these tensors, with a loss that is not finite"""
        self.nonfinite_gradient: HookList[[Any, frozenset[int]]] = HookList(spent_ns)
        """Gradient probe: this optimizer is about to step with gradients that are not finite; ids of their parameters before
        clipping, none if unknown"""
        self.nonfinite_arrived: HookList[[]] = HookList(spent_ns)
        """Loss probe: a loss that is not finite has arrived from a device; when the next backward begins"""
        self.ends_by_error: HookList[[BaseException | None]] = HookList(spent_ns)
        """Exit probe: this exception is about to end the program, or ``sys.exit(n)`` does (``None``)"""
        self.explain_error: HookList[[BaseException]] = HookList(spent_ns)
        """Exit probe, in any thread: collects more attributes of the event of this exception"""
        self.recent_collectives: HookList[[]] = HookList(spent_ns)
        """Sampler thread: collects the last collectives of a rank that stands still, as attributes of an event"""
        self.loader_workers: HookList[[]] = HookList(spent_ns)
        """Sampler thread: collects the worker processes of the loaders in use (lists of ``LoaderWorker``)"""
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
        """``torchobs.watch``: got this module"""

    def unregister(self, probe: str) -> None:
        """Remove the listeners of that probe from every list."""
        hooks: list[HookList[...]] = list(vars(self).values())
        for hook in hooks:
            hook.unregister(probe)


MAX_INTERVAL = 1000
_SMOOTHING = 0.25


class SamplingInterval:
    """Every step if that is cheap enough, else every n-th. For the training thread; :meth:`spend_later` for any."""

    def __init__(self, share: float, fixed: int | None = None) -> None:
        self._share, self.fixed = max(share, 1e-6), fixed
        self._cost_ns = 0.0
        self._spent_ns = self._later_ns = self._since_ns = self._since_step = 0
        self.interval = fixed or 1
        self.most = MAX_INTERVAL
        """Longest interval for the time being, whatever it costs; for few steps. Set in any thread"""
        self.due_at, self.step = 0, -1
        """The next step to measure and the last one measured, both as the number of steps before it"""

    def is_due(self, step: int) -> bool:
        """Return whether this step is measured; the answer is the same throughout a step."""
        if step >= self.due_at:
            self._set_interval(step)
            self.step, self.due_at = step, step + (self.interval if self.fixed else min(self.interval, self.most))
        return step == self.step

    def would_be_due(self, step: int) -> bool:
        """Return whether :meth:`is_due` would hold, without a change of state."""
        return step >= self.due_at or step == self.step

    def begin(self, step: int) -> None:
        """Measure this step, and the next ones as closely as those of a first model: another one begins."""
        self.interval, self.due_at = self.fixed or 1, step

    def rest(self, steps: int) -> None:
        """Be due again only after so many steps: this due step needed no measurement."""
        if self.fixed is None:
            self.due_at = max(self.due_at, self.step + min(steps, self.most))

    def spend(self, ns: int) -> None:
        """Add time that measuring took in the step that is due."""
        self._spent_ns += ns

    def spend_later(self, ns: int) -> None:
        """Set the device time of the measurement, which is known afterwards."""
        self._later_ns = max(self._later_ns, ns)

    def _set_interval(self, step: int) -> None:
        """Choose the interval from the cost of the last measurements and the duration of the steps since."""
        now_ns = monotonic_ns()
        spent_ns, self._spent_ns = self._spent_ns + self._later_ns, 0
        self._later_ns = 0
        if spent_ns:
            self._cost_ns += (spent_ns - self._cost_ns) * (_SMOOTHING if self._cost_ns else 1.0)
        done = step - self._since_step
        if self.fixed is None and done and self._cost_ns:
            length_ns = (now_ns - self._since_ns) / done
            wanted = min(MAX_INTERVAL, max(1, ceil(self._cost_ns / (self._share * length_ns))))
            # at most doubled at a time: one slow measurement says little
            self.interval = min(wanted, 2 * self.interval)
        self._since_ns, self._since_step = now_ns, step


LONGEST_S = 60.0
"""Age of a capture from which it counts as failed, and the sampler goes on"""
_PATIENCE_S, _REST_S = 0.2, 0.0005
"""Age of a round, usually some ms, from which no capture waits for it: the driver may not answer for long"""
_HOOKS_FILE = "torch/optim/optimizer.py"
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Frame that calls the hooks in a loop of its own, which is not the training's"""

_COLLECTIVES_FILE = "torch/distributed/distributed_c10d.py"

_DEEPEST = 128
"""Frames of a stack that are examined: a trainer's loops are about fifty from the optimizer's step; recursion is unbounded."""

Places = tuple[tuple["CodeType", int], ...]
"""Code and current instruction offset of each frame of a stack, innermost first"""


class Captures:
    """Captures of CUDA graphs in progress in any thread; threads of ours rest meanwhile.

    A garbage collection runs in the thread that makes the object that is one too many. In the sampler thread it could destroy
    a graph or an event of the user's that was part of a cycle. In a capture's default mode an unsafe CUDA call of any thread
    (the ``cudaFree`` of a graph's private pool) then ends the capture with an error. The statistics of ``cudaMallocAsync``'s
    allocator are CUDA calls, too (``cudaMemPoolGetAttribute``). So the threads that do rounds (the sampler's, the GPU probe's)
    do none while a capture is in progress, and a capture waits for the rounds in progress.
    """

    __slots__ = ("_begun_s", "_rounds")

    def __init__(self) -> None:
        self._begun_s: dict[int, float] = {}
        self._rounds: dict[str, float] = {}
        """Threads of ours with a round in progress, and since when"""

    def begin(self, graph: int) -> None:
        """Record that this graph, by id, is about to be captured, and wait for rounds in progress, but not for long."""
        now = self._begun_s[graph] = time.monotonic()
        while time.monotonic() - now < _PATIENCE_S and any(
            time.monotonic() - begun_s < _PATIENCE_S for begun_s in tuple(self._rounds.values())
        ):
            time.sleep(_REST_S)

    def end(self, graph: int) -> None:
        """Record that the capture has ended or did not begin."""
        self._begun_s.pop(graph, None)

    def begin_round(self, thread: str) -> bool:
        """Record that a thread of ours begins a round; return False if it has to rest. :meth:`end_round` follows either way.

        It is noted first and asked then: a capture that begins in between waits.
        """
        self._rounds[thread] = time.monotonic()
        return not self.in_progress()

    def end_round(self, thread: str) -> None:
        """Record that the thread's round has ended."""
        self._rounds.pop(thread, None)

    def in_progress(self) -> bool:
        """Return whether a graph is being captured."""
        begun_s = tuple(self._begun_s.values())  # another thread's capture may end meanwhile
        return bool(begun_s) and max(begun_s) > time.monotonic() - LONGEST_S


class TrainingLoop:
    """Loops of the training: a thread that has left them is idle, and not hung, if no step comes.

    Examples are a notebook between two cells, a server that trained first, a sleep, an upload. When the optimizer steps, the
    loops of the training are on the stack; loops that already ran around ``init()`` (an event loop, a sweep) do not count. Once
    none of them is on the stack, the training is over, or between two stages. But a thread that waits for other ranks,
    in a final barrier or the last collective of a checkpoint, is still part of the training, and may hang there.
    ``note`` is for the training thread, ``left`` for the sampler thread.
    """

    __slots__ = ("_before", "_judged", "_loops", "_places")

    def __init__(self) -> None:
        self._before = _places(sys._getframe())
        self._places: Places = ()
        self._judged: Places = ()
        self._loops: list[tuple[CodeType, tuple[int, int]]] = []

    def record_stack(self) -> None:
        """Record the stack of an optimizer step: 7 µs for twenty frames, so not for every step."""
        self._places = _places(sys._getframe())

    @property
    def is_known(self) -> bool:
        """Whether the last call of :meth:`left` has found a loop of the training."""
        return bool(self._loops)

    def left(self, thread: int) -> bool:
        """Return whether that thread runs no loop of the training and no collective; False if no loop is known."""
        places = self._places
        if places != self._judged:
            before = set(_loops(self._before))
            self._judged, self._loops = places, [loop for loop in _loops(places) if loop not in before]
        if not self._loops:
            return False
        with ThreadFrames() as frames:
            return not self._is_running(frames.get(thread))

    def _is_running(self, frame: FrameType | None) -> bool:
        while frame is not None:
            at, line = frame.f_code, frame.f_lineno or 0
            if any(code is at and first <= line <= last for code, (first, last) in self._loops):
                return True
            if at.co_filename.endswith(_COLLECTIVES_FILE):
                return True
            before, frame = frame, frame.f_back
            if frame is None and before.f_code.co_flags & _GENERATOR:
                return True  # it has yielded meanwhile: its caller is unknown
        return False


class EpochStart(NamedTuple):
    """Begin of an epoch, on CLOCK_MONOTONIC, and the last step that had ended by then."""

    number: int
    begun_ns: int
    step: int


class LeftPhase(NamedTuple):
    """A phase that an exception has left, on CLOCK_MONOTONIC: it holds until training goes on after ``left_ns``."""

    phase: int
    begun_ns: int
    left_ns: int


class OtherThreads:
    """The threads beside the training thread that run backward passes.

    A backward pass replaces gradients without the GIL, and who reads one of them meanwhile crashes the process. So gradients
    that may be of another thread's model are read in ``read`` alone.
    """

    __slots__ = ("_lock", "_threads")

    def __init__(self) -> None:
        self._lock, self._threads = Lock(), set[int]()

    def add_thread(self, thread: int) -> None:
        """Record that a backward pass is about to begin in that thread; reads in progress are finished before."""
        if thread not in self._threads:
            with self._lock:
                self._threads.add(thread)

    def read(self, read: Callable[[], object]) -> None:
        """Call a function that reads gradients, in the training thread, unless another living thread runs backward passes."""
        with self._lock:
            others = self._threads - {get_ident()}
            if others:
                with ThreadFrames() as frames:
                    others &= frames.keys()
            if not others:
                read()


class TrainingState:
    """State of the training thread. The step probe owns it: others only read it, except as marked here.

    ``thread`` is first set by the session, ``loop`` noted by ``torchobs.step`` as well, and ``idle`` and
    ``evaluating_since_ns`` belong to the phase probe, which finds them in the sampler thread. The epoch probe sets ``epoch``
    and adds to ``epochs``; the run's spans take them from there. The AMP probe sets ``autocast``, the exit probe ``left``.
    """

    __slots__ = (
        "_plain", "autocast", "captures", "epoch", "epochs", "evaluating_since_ns", "idle", "left", "loop", "others",
        "restored", "to_call_ns",
    )  # fmt: skip

    def __init__(self, plain: PlainSteps | None = None) -> None:
        self._plain = plain or PlainSteps()
        self.autocast: dict[str, str] = {}
        """The last data type of autocast in training, by type of device"""
        self.left: LeftPhase | None = None
        """The phase that was left by an exception which may end the training"""
        self.captures = Captures()
        """Captures of CUDA graphs, in whatever thread"""
        self.others = OtherThreads()
        """The threads that train beside it"""
        self.loop = TrainingLoop()
        """The loops of the training on that thread's stack"""
        self.idle = False
        """Whether the thread has left those loops"""
        self.evaluating_since_ns = 0
        """When a long evaluation in progress began; 0 if none is in progress"""
        self.to_call_ns = 0
        """From a fetch to the forward pass, by the last forward stamp, which sets it"""
        self.restored: bool | None = None
        """Whether a checkpoint or a module's state has been loaded, by the checkpoint probe; ``None`` if that is unknown"""
        self.epoch = 0
        """Number of the last epoch that has begun, from 1; 0 before the first"""
        self.epochs: deque[EpochStart] = deque(maxlen=1024)
        """Begun epochs that the run's spans do not have yet"""

    @property
    def thread(self) -> int:
        """The training thread: it steps the optimizers."""
        return self._plain.thread

    @property
    def backwards(self) -> bool:
        """Whether a backward pass runs in it."""
        return self._plain.backwards


def _places(frame: FrameType | None) -> Places:
    places: list[tuple[CodeType, int]] = []
    while frame is not None and len(places) < _DEEPEST:
        places.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(places)


def _loops(places: Places) -> Iterator[tuple[CodeType, tuple[int, int]]]:
    for code, offset in places:
        lines = None if code.co_filename.endswith(_HOOKS_FILE) else loop_lines(code, offset)
        if lines is not None:
            yield code, lines
