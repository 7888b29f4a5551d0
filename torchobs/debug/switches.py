"""``enable``, ``disable`` and ``status``: switches of a session, each a probe and an interval in steps."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from operator import lt
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, ClassVar

from torchobs import catalog
from torchobs.debug import operations
from torchobs.debug.findings import found, logger, record_series, told
from torchobs.debug.gradients import check_gradients, scale_in_use
from torchobs.debug.operations import entered
from torchobs.debug.placement import devices
from torchobs.debug.profiles import Recorder
from torchobs.debug.steps import Collector, activations, monitor_step
from torchobs.debug.stopping import Validation, early_stopping, finish
from torchobs.detect.speed import BEGINS
from torchobs.flight.metrics.totals import Word
from torchobs.probes.core.torch_profiler import ProfilerBusyError
from torchobs.runtime.session import current, init
from torchobs.support.arguments import is_whole
from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.support.result import Result
from torchobs.taps import taps
from torchobs.tensors.batches import walk
from torchobs.tensors.references import living

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

MOST_TRACES = 8
"""Trace files that one ``enable`` writes"""
LEAST_STEPS = 5
"""Steps between two looks before the wait for data is judged"""
GROWING_LOOKS = 8
LEAST_GROWTH = 64 << 20
"""Memory that rose at each of so many looks, by so many bytes in all, is reported"""
RATE_JUMP = 10.0
"""Factor by which a learning rate exceeds all that it is to reach, or falls between two looks, from which it is reported"""
_ROUNDING = 1e-6
"""of a factor: a decay to a tenth is an ordinary one"""


class SwitchProbe:
    """A switch that is on. Its class has some of these methods, all called in the thread that the session records.

    ``install()`` begins, ``remove()`` puts everything back. ``begin_step()``: a step begins at which it is to look.
    ``begin_forward(model, inputs)``, ``end_forward(model, output)``: the model is called, and has returned.
    ``take_loss(loss)``: a backward pass begins from this loss, on its device, without the loss scale.
    ``before_step(model, optimizer)``, ``after_step()``: look; the model is ``None`` while it is unknown.
    """

    last = ""
    """What it saw last, in words"""

    def __init__(self, name: str, every: int, trace_dir: str) -> None:
        self.every, self.looks, self.trace_dir = every, 0, trace_dir
        """Steps between two looks, 0 if it looks at no step; how often it has looked"""
        self.breaker = CircuitBreaker(f"debug.{name}")

    def is_due(self, step: int) -> bool:
        """Return whether it looks at this step."""
        return self.every > 0 and not step % self.every

    def run(self, method: str, *args: Any) -> None:
        """Call one of the methods, where its class has it; an exception turns the switch off, and goes no further."""
        if (function := getattr(self, method, None)) is not None:
            call(self.breaker, function, *args)


class AnomalyMode(SwitchProbe):
    """Torch's anomaly mode."""

    def install(self) -> None:
        self._undo = ExitStack()
        self._undo.enter_context(entered("raise", lambda _: None))
        self.last = "torch raises at NaN in a backward function"

    def remove(self) -> None:
        self._undo.close()


class StepProfile(SwitchProbe):
    """A profile of one step. One recording serves both switches, since torch allows one profiler."""

    _on: ClassVar[list[StepProfile]] = []
    _recorder: ClassVar[Recorder | None] = None
    _just_ended: ClassVar[bool] = False
    """Whether this optimizer step ended a recording: it runs in a ``record_function`` whose end another must not see"""
    _several_train: ClassVar[bool] = False
    _written = 0

    def install(self) -> None:
        self._on.append(self)

    def begin_step(self) -> None:
        """Start to record, unless a profiler runs. With an interval of 1 it is every second step."""
        if self._several_train or StepProfile._recorder is not None or (StepProfile._just_ended and self.every == 1):
            return
        directories = [x.trace_dir for x in self._on if isinstance(x, StepTrace) and x._written < MOST_TRACES]
        options = dict.fromkeys(("record_shapes", "with_stack", "profile_memory", "with_flops"), False)
        # in all threads, so that a profiler of the script's that begins in another one can end it
        recorder = Recorder("step", options, tensorboard=directories[0] if directories else None, all_threads=True)
        try:
            recorder.prepare()
        except ProfilerBusyError as problem:
            self.last = f"no profile: {problem}"
            return
        recorder.record()
        StepProfile._recorder = recorder

    def before_step(self, model: Any, optimizer: Any) -> None:
        """Begin another step."""
        StepProfile._just_ended = False

    def after_step(self) -> None:
        """End it."""
        recorder = StepProfile._recorder
        if recorder is None:
            return
        StepProfile._recorder, StepProfile._just_ended = None, True
        recorder.finish(1)
        result = recorder.result
        text = f"{result.time:.3g} s, top operator {result.top_operator}" if result.time else "; ".join(result.anomalies)
        for each in self._on:
            each.last = text
            if result.tensorboard is not None and isinstance(each, StepTrace):
                each._written += 1
                each.last = f"{text}, trace in {result.tensorboard}"

    @classmethod
    def stop_for_threads(cls) -> None:
        """Profile no more: optimizers step in several threads, one of which is the session's."""
        StepProfile._several_train = bool(cls._on)
        for each in cls._on:
            each.last = "no profile: steps come from several threads, beside which torch's profiler crashes"
        cls._cancel()

    def remove(self) -> None:
        self._on.remove(self)
        if not self._on:
            self._cancel()
            StepProfile._several_train = False

    @staticmethod
    def _cancel() -> None:
        recorder, StepProfile._recorder = StepProfile._recorder, None
        if recorder is not None:
            recorder.cancel()


class StepTrace(StepProfile):
    """The same, written for TensorBoard."""


class Memory(SwitchProbe):
    """Memory of process and devices, and whether it only rises."""

    def install(self) -> None:
        self._looks: dict[str, deque[int]] = {name: deque(maxlen=GROWING_LOOKS) for name in ("host", "device")}

    def after_step(self) -> None:
        reading = operations.read()
        sizes = {"host": reading.host} | ({} if reading.device is None else {"device": reading.device})
        record_series({f"debug.memory.{name}": size for name, size in sizes.items()})
        self.last = ", ".join(f"{size / 2**20:.0f} MiB on the {name}" for name, size in sizes.items())
        for name, size in sizes.items():
            looks = self._looks[name]
            looks.append(size)
            growth, rises = looks[-1] - looks[0], all(map(lt, looks, list(looks)[1:]))
            if len(looks) == GROWING_LOOKS and rises and growth >= LEAST_GROWTH:
                text = f"{name} memory rose by {growth / 2**20:.0f} MiB in {GROWING_LOOKS} looks, each time"
                found("memory_growth", text, function="enable", name=name)


class GradientNorms(SwitchProbe):
    """``check_gradients``."""

    def before_step(self, model: Any, optimizer: Any) -> None:
        if model is not None:
            norm = check_gradients(model).total_norm
            self.last = f"norm {norm:.4g}"
            record_series({"debug.gradient_norm": norm})


class ForwardPass(SwitchProbe):
    """Inputs, outputs of all modules, and output: statistics and what is not finite. Of a compiled model no modules within."""

    _collector: Collector | None = None
    _inside: AbstractContextManager[None] | None = None

    def begin_forward(self, model: Any, inputs: list[Any]) -> None:
        if self._collector is None and model.training:
            self._collector = Collector()
            self._collector.add("inputs", "input", inputs)
            is_compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
            self._inside = activations(model, self._collector, wanted=not is_compiled)
            self._inside.__enter__()

    def end_forward(self, model: Any, output: Any) -> None:
        if self._inside is not None and self._collector is not None:
            self.remove()
            self._collector.add("outputs", "output", output)

    def before_step(self, model: Any, optimizer: Any) -> None:
        """Read what the step's forward pass left on the device."""
        self.remove()  # where the forward pass raised
        collector, self._collector = self._collector, None
        if collector is not None:
            rows = [row for group in collector.read().values() for row in group]
            odd = [row for row in rows if row.anomaly]
            told("enable", [("nonfinite_activation", row.name, row.anomaly) for row in odd])
            self.last = f"{len(rows)} tensors, {len(odd)} not finite"

    def remove(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(None, None, None)


class BackwardPass(SwitchProbe):
    """``monitor_step`` of the loss that the backward pass began from."""

    _loss: Any = None

    def take_loss(self, loss: Any) -> None:
        self._loss = loss

    def before_step(self, model: Any, optimizer: Any) -> None:
        loss, self._loss = self._loss, None
        if loss is not None and model is not None:
            check = monitor_step(model, loss)
            self.last = f"loss {check.loss:.4g}, norm {check.gradient_norm:.4g}"


class Placement(SwitchProbe):
    """``devices`` of model and optimizer."""

    def before_step(self, model: Any, optimizer: Any) -> None:
        if model is not None:
            check = devices(model, optimizer=optimizer)
            self.last = f"on {check.device}, {len(check.misplaced)} elsewhere"


class Precision(SwitchProbe):
    """What autocast computes in, the output's type, weights in float16, and the loss scale."""

    def end_forward(self, model: Any, output: Any) -> None:
        import torch

        kind = next((x.device.type for x in model.parameters()), "cpu")
        autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
        types = sorted({str(x.dtype) for _, x in walk(output, "output")})
        scale = scale_in_use(None)
        scaled = f", loss scale {float(scale):g}" if scale is not None else ""
        self.last = f"autocast {autocast}, output {', '.join(types)}{scaled}".replace("torch.", "")
        half = [name for name, x in model.named_parameters() if x.dtype is torch.float16 and x.requires_grad]
        if half:
            text = f"{len(half)} trained parameters are float16, where small updates are lost: keep float32 and use autocast"
            found("half_weights", text, function="enable", name=half[0])


class DataWait(SwitchProbe):
    """Share of the steps' time between two looks that the session counts as waiting for data."""

    _before: tuple[int, float, float] | None = None

    def after_step(self) -> None:
        session = current()
        if session is None or session.context is None:
            return
        totals = session.context.writer.table.core.totals
        phases = totals.floats[Word.PHASE_TIME : Word.PHASE_TIME + len(catalog.PHASES)].tolist()
        now = totals.ints[Word.STEPS], phases[catalog.PHASES.index("data")], sum(phases)
        before = self._before or now
        steps, waited, passed = (after - start for after, start in zip(now, before, strict=True))
        if self._before is not None and not passed:
            return  # the sampler has folded no step since
        self._before = now
        share = waited / passed if passed else 0.0
        self.last = f"{share:.0%} of the time of {steps} steps waiting for batches"
        record_series({"debug.data_wait_share": share})
        if share >= BEGINS and steps >= LEAST_STEPS:
            found("data_wait", f"training waits for data {share:.0%} of the time", function="enable", name="data_loading")


class Validations(SwitchProbe):
    """Forward passes in eval mode between two steps are a validation: samples and time, as ``validation`` records them."""

    _current: Validation | None = None

    def begin_forward(self, model: Any, inputs: list[Any]) -> None:
        if model.training:
            self.remove()
            return
        if self._current is None:
            self._current, self._begun = Validation("validation"), time.perf_counter()
            self._ended = self._begun  # in case the model raises
        first = next((x for _, x in walk(inputs, "input") if x.dim()), None)
        self._current.add(int(first.shape[0]) if first is not None else 1)

    def end_forward(self, model: Any, output: Any) -> None:
        self._ended = time.perf_counter()

    def before_step(self, model: Any, optimizer: Any) -> None:
        self.remove()

    def remove(self) -> None:
        """Record it."""
        validation, self._current = self._current, None
        if validation is not None:
            finish(validation, max(0.0, self._ended - self._begun), None)
            self.last = f"{validation.samples} samples in {validation.time or 0:.3g} s"


class Stopping(SwitchProbe):
    """The mean training loss between two looks, given to ``early_stopping``: reported, never acted on."""

    def install(self) -> None:
        self._stopper = early_stopping("training_loss", patience=10, mode="min")
        self._losses: list[Any] = []

    def take_loss(self, loss: Any) -> None:
        self._losses = [sum(self._losses[:1], loss), sum(self._losses[1:], 1)]

    def after_step(self) -> None:
        if self._losses:
            decision = self._stopper(self._losses[0] / self._losses[1])
            self._losses = []
            self.last = f"loss {decision.value:.4g}, best {decision.best or 0:.4g}, patience left {decision.patience_left}"


class Rates(SwitchProbe):
    """Learning rates of each optimizer's groups.

    A rise is a jump if it exceeds the highest rate so far, and those that optimizer and scheduler are to reach: a warm-up from
    near 0, or a restart, does not. A linear warm-up from one of its own increments grows by at most the number of steps, plus
    one. A fall is a jump from a rate within a tenth of the highest: a decay to 0 ends with large factors of tiny rates.
    """

    def install(self) -> None:
        self._rates: weakref.WeakKeyDictionary[Any, list[tuple[float, float]]] = weakref.WeakKeyDictionary()
        """Of each group the rate at the last look, and the highest"""

    def before_step(self, model: Any, optimizer: Any) -> None:
        groups = [group for group in optimizer.param_groups if "lr" in group]
        rates = [float(group["lr"]) for group in groups]
        before = self._rates.get(optimizer, [])
        if len(before) != len(groups):
            before = [(rate, _peak(group, optimizer)) for group, rate in zip(groups, rates, strict=True)]
        for index, (rate, (last, highest)) in enumerate(zip(rates, before, strict=True)):
            text = "" if math.isfinite(rate) and rate >= 0 else f"the learning rate is {rate}"
            if not text and _jumps(last, rate, highest, max(RATE_JUMP, 1 + self.every)):
                text = f"the learning rate went from {last:.3g} to {rate:.3g}"
            if text:
                found("learning_rate", text, function="enable", name=f"group {index}")
        self._rates[optimizer] = [
            (rate, max(rate, highest)) if math.isfinite(rate) else (last, highest)
            for rate, (last, highest) in zip(rates, before, strict=True)
        ]
        self.last = "lr " + ", ".join(f"{rate:.3g}" for rate in rates)
        record_series({f"debug.learning_rate.{index}": rate for index, rate in enumerate(rates)})


def _jumps(last: float, rate: float, highest: float, rise: float) -> bool:
    """Return whether the next rate, a look later, is neither a warm-up's nor a decay's."""
    if not (last > 0 and rate > 0):
        return False
    falls = rate * RATE_JUMP < last * (1 - _ROUNDING) and last * RATE_JUMP >= highest
    return falls or rate > highest * rise * (1 + _ROUNDING)


def _peak(group: dict[str, Any], optimizer: Any) -> float:
    """Return the highest rate that a group is to reach: the scheduler's, or else that which the optimizer was made with."""
    peaks = [group[name] for name in ("initial_lr", "max_lr") if name in group] or [optimizer.defaults.get("lr", 0.0)]
    return max(float(rate) for rate in (*peaks, group["lr"]))


SWITCHES: dict[str, tuple[type[SwitchProbe], str]] = {
    "autograd_anomaly": (AnomalyMode, "always"),
    "autograd_profiler": (StepProfile, "profile"),
    "tensorboard_traces": (StepTrace, "profile"),
    "memory_usage": (Memory, "memory"),
    "gradient_norms": (GradientNorms, "gradients"),
    "forward_pass": (ForwardPass, "gradients"),
    "backward_pass": (BackwardPass, "gradients"),
    "device_placement": (Placement, "gradients"),
    "mixed_precision": (Precision, "gradients"),
    "data_loading": (DataWait, "performance"),
    "validation": (Validations, "step"),
    "early_stopping": (Stopping, "performance"),
    "lr_scheduling": (Rates, "performance"),
}
"""Names, each with its probe and what its interval goes by"""
_INTERVALS = {"always": 0, "step": 1, "gradients": 100, "memory": 50, "performance": 10, "profile": 1000}
_BASIC = ("gradient_norms", "lr_scheduling")
_INTERMEDIATE = (*_BASIC, "memory_usage", "data_loading", "validation", "early_stopping")
PRESETS: dict[str, tuple[str, ...]] = {
    "none": (),
    "anomaly_detection": ("autograd_anomaly", "forward_pass", "backward_pass"),
    "gradient_checking": ("gradient_norms", "backward_pass"),
    "memory_profiling": ("memory_usage",),
    "performance_profiling": ("autograd_profiler", "data_loading", "memory_usage"),
    "basic": _BASIC,
    "intermediate": _INTERMEDIATE,
    "advanced": (*_INTERMEDIATE, "forward_pass", "backward_pass", "device_placement", "mixed_precision"),
} | dict.fromkeys(("full", "expert", "extreme"), tuple(SWITCHES))
"""Modes and levels"""
_NAME = "debug"
"""Of the listener in the session's hook lists"""
_lock = RLock()


@dataclass(frozen=True, slots=True)
class Switch(Result):
    """One switch."""

    name: str
    on: bool
    every: int
    """Steps between two looks; 0 if it is on all the time"""
    looks: int = 0
    """How often it has looked, since it was enabled"""
    last: str = ""
    """What it saw last"""
    error: str | None = None
    """Said of a switch that does nothing after an exception"""


@dataclass(frozen=True, slots=True)
class SwitchStatus(Result):
    """All switches of this process."""

    enabled: tuple[str, ...]
    steps: int
    """Optimizer steps since the first was enabled"""
    model: str | None
    """Class of the model that is looked at; searched for at the first step where it was not given"""
    switches: tuple[Switch, ...]


def enable(  # frequencies are settings
    switches: Any, *, model: Any = None, gradients_every: int = 100, memory_every: int = 50, performance_every: int = 10,
    profile_every: int = 1000, trace_dir: str | Path = "runs/torchobs",
) -> SwitchStatus:  # fmt: skip
    """Switch on debugging of the training that this process does, from its next step on, until :func:`disable`.

    Where no session runs, :func:`torchobs.init` is called. Where that records nothing (``TORCHOBS_ENABLED=0``, no directory),
    nothing is switched on, and a warning says so. Switches end with the session. An error inside a switch turns that switch
    off, and training goes on.

    Args:
        switches: names in a list, or the name of a mode (``anomaly_detection``, ``gradient_checking``, ``memory_profiling``,
            ``performance_profiling``, ``full``) or of a level (``basic``, ``intermediate``, ``advanced``, ``expert`` or
            ``extreme``). ``none`` switches off what is on; other names are added to it.
        model: the module that trains; without it, it is searched for at the first step by the optimizer's parameters. A
            ``ScriptModule`` takes no hooks: what looks at its forward passes sees none, and a warning says so.
        gradients_every: steps between two looks at gradients, passes, devices, precision.
        memory_every: at memory.
        performance_every: at data loading, learning rates, the loss for early stopping.
        profile_every: between two profiled steps.
        trace_dir: where ``tensorboard_traces`` writes.

    Raises:
        ValueError: a name is unknown, or a frequency below 1.
        TypeError: ``model`` is no module.
    """
    names, every = _names_of(switches), (gradients_every, memory_every, performance_every, profile_every)
    if not all(map(is_whole, every)) or min(every) < 1:
        given = ", ".join(map(repr, every))
        raise ValueError(f"a switch looks every step or less often: frequencies are whole numbers, 1 or more, not {given}")
    if model is not None:
        from torchobs.debug.tensors import require_module

        require_module(model, "enable")
    if names and current() is None:
        init()  # not under the lock, which a session's end takes
    with _lock:
        if switches == "none":
            _watch.remove(SWITCHES)
        intervals = _INTERVALS | dict(zip(("gradients", "memory", "performance", "profile"), every, strict=True))
        if names and current() is not None:
            _watch.add(names, model, intervals, str(trace_dir))
        elif names:
            logger.warning("enable: nothing is switched on, since no session records in this process")
    return status()


def disable(switches: Any = None) -> SwitchStatus:
    """Switch off those, or all, and put back exactly what was there before. The session goes on.

    Raises:
        ValueError: a name is unknown.
    """
    with _lock:
        _watch.remove(SWITCHES if switches is None else _names_of(switches))
    return status()


def status() -> SwitchStatus:
    """Return which switches are on, how often they looked, and what they saw last."""
    with _lock:
        return _watch.status()


class _Watch:
    """Hooks of the optimizer's step and of the model, as long as any switch is on."""

    def __init__(self) -> None:
        self._probes: dict[str, SwitchProbe] = {}
        self._session: Any = None
        self._context: Any = None
        self._unsubscribe: Callable[[], None] | None = None
        self._model_handles: list[Any] = []
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Steps by optimizer; the training's steps are those of the one that steps most"""
        self._threads = set[int]()
        """In which optimizers step"""
        self._model: Any = None
        self.steps = 0

    def add(self, names: tuple[str, ...], model: Any, intervals: dict[str, int], trace_dir: str) -> None:
        """Switch on; those that are on get the new interval."""
        if self._session is not current():
            self.remove(SWITCHES)
        self._install()
        if model is not None:
            _guarded("the model takes no hooks", self._take_model, model)
        for name in names:
            kind, interval = SWITCHES[name]
            if name in self._probes:
                self._probes[name].every = intervals[interval]
            else:
                probe = self._probes[name] = kind(name, intervals[interval], trace_dir)
                probe.run("install")
        self._stop_for_threads()
        for probe in self._due():
            probe.run("begin_step")

    def remove(self, names: Any) -> None:
        """Switch off; with the last one the hooks go."""
        for name in names:
            probe = self._probes.pop(name, None)
            if probe is not None:
                _guarded(f"the switch {name} is not put back", getattr(probe, "remove", int))  # also of one that has failed
        if not self._probes and self._session is not None:
            if self._unsubscribe is not None:
                _guarded("hooks stay", self._unsubscribe)
            self._unsubscribe = None
            for hooks in (self._context.hooks.takes_loss, self._context.hooks.ends):
                hooks.unregister(_NAME)
            self._session = self._context = None
            self._release_model()
            self._counts.clear()
            self._threads.clear()
            self.steps = 0

    @property
    def model(self) -> Any:
        """The model, if it is known and alive."""
        return self._model() if self._model is not None else None

    def _due(self) -> list[SwitchProbe]:
        return [probe for probe in self._probes.values() if probe.is_due(self.steps)]

    def _install(self) -> None:
        session = current()
        if self._session is None and session is not None and session.context is not None:
            self._session, self._context = session, session.context
            session.context.hooks.takes_loss.register(session.context.breaker(_NAME), self._take_loss)
            session.context.hooks.ends.register(CircuitBreaker(_NAME), disable)
            self._unsubscribe = taps.OPTIMIZER_STEP.subscribe(self._hook(self._before), self._hook(self._after))

    def _hook(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a hook that does nothing while compiling."""
        breaker = CircuitBreaker(_NAME)

        def hook(optimizer: Any) -> None:
            import torch

            if not torch.compiler.is_compiling():
                call(breaker, self._note_step, function, optimizer)
                _log("all switches are off", breaker)

        return hook

    def _note_step(self, function: Callable[[Any], None], optimizer: Any) -> None:
        if self._session is not current():
            disable()
            return
        if get_ident() not in self._threads:
            self._threads.add(get_ident())
            self._stop_for_threads()
        if get_ident() == self._context.training.thread:  # that which the session records
            function(optimizer)

    def _stop_for_threads(self) -> None:
        if len(self._threads) > 1:
            _guarded("a profile stays", StepProfile.stop_for_threads)

    def _take_loss(self, tensors: Any, gradients: Any, accumulates: bool) -> None:  # noqa: FBT001  # a listener
        import torch

        loss = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
        if accumulates and gradients is None and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            loss, scale = loss.detach().reshape(()), scale_in_use(None)
            loss = loss if scale is None else loss / scale.to(loss.device, non_blocking=True)
            for probe in list(self._probes.values()):
                probe.run("take_loss", loss)

    def _before(self, optimizer: Any) -> None:
        if self.model is None and optimizer not in self._counts:
            _guarded("the model is unknown", lambda: self._take_model(model_of(optimizer)))
        for probe in self._due():
            probe.looks += 1
            probe.run("before_step", self.model, optimizer)

    def _after(self, optimizer: Any) -> None:
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        due, self.steps = self.steps, max(self.steps, self._counts[optimizer])
        for name, probe in list(self._probes.items()):
            if probe.is_due(due):
                probe.run("after_step")
            if self.steps > due and probe.is_due(self.steps):
                probe.run("begin_step")
            _log(f"the switch {name} is off", probe.breaker)

    def _take_model(self, model: Any) -> None:
        import torch

        if model is None or model is self.model:
            return
        self._release_model()
        self._model = weakref.ref(model)
        if isinstance(model, torch.jit.ScriptModule):
            blind = "forward_pass, mixed_precision, validation"
            logger.warning(
                "enable: the model is a ScriptModule, which takes no hooks: what looks at forward passes sees none (%s)", blind
            )
            return
        handles = self._model_handles = []
        handles.append(model.register_forward_pre_hook(self._begin_forward, with_kwargs=True))
        handles.append(model.register_forward_hook(self._end_forward))

    def _release_model(self) -> None:
        self._model = None
        while self._model_handles:
            self._model_handles.pop().remove()

    def _begin_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        for probe in self._due_in_forward():
            probe.run("begin_forward", model, [*args, *kwargs.values()])

    def _end_forward(self, model: Any, _: Any, output: Any) -> None:
        for probe in self._due_in_forward():
            probe.run("end_forward", model, output)

    def _due_in_forward(self) -> list[SwitchProbe]:
        import torch

        return [] if torch.compiler.is_compiling() or get_ident() != self._context.training.thread else self._due()

    def status(self) -> SwitchStatus:
        """Return what :func:`status` does."""
        rows = []
        for name, (_, interval) in SWITCHES.items():
            probe = self._probes.get(name)
            if probe is None:
                rows.append(Switch(name, on=False, every=_INTERVALS[interval]))
            else:
                error = "failed, see the log" if probe.breaker.is_open else None
                rows.append(Switch(name, True, probe.every, probe.looks, probe.last, error))  # noqa: FBT003  # a row of a table
        model = type(self.model).__name__ if self.model is not None else None
        return SwitchStatus(tuple(row.name for row in rows if row.on), self.steps, model, tuple(rows))


def _guarded(consequence: str, function: Callable[..., object], *args: Any) -> None:
    """Call a function; its exception is logged with what follows from it, and goes no further."""
    breaker = CircuitBreaker(_NAME)
    call(breaker, function, *args)
    _log(consequence, breaker)


def _log(consequence: str, breaker: CircuitBreaker) -> None:
    """Log what has tripped the breaker, once."""
    while breaker.failures:
        failure = breaker.failures.pop()
        logger.warning("enable: %s after %s at %s", consequence, failure.exception, failure.location)


_watch = _Watch()
"""The switches of this process"""


def _names_of(wanted: object) -> tuple[str, ...]:
    """Return the switches that a preset's name, a switch's name or a sequence of both means.

    Raises:
        ValueError: a name is unknown.
    """
    words = (wanted,) if isinstance(wanted, str) else tuple(wanted) if isinstance(wanted, (list, tuple, set, frozenset)) else ()
    if not words and wanted not in ((), [], set(), frozenset()):
        raise TypeError(f"switches are names in a list, or the name of a mode or level, not {type(wanted).__name__}")
    chosen = set[str]()
    for word in words:
        if word not in SWITCHES and word not in PRESETS:
            names = ", ".join((*SWITCHES, *PRESETS))
            raise ValueError(f"{word!r} is no switch, mode or level: there are {names}")
        chosen.update(PRESETS.get(str(word), (str(word),)))
    return tuple(name for name in SWITCHES if name in chosen)


def model_of(optimizer: Any) -> Any:
    """Return the outermost module that has all of the optimizer's parameters; ``None`` without one. It takes some 100 ms."""
    import torch

    wanted = {id(x) for group in optimizer.param_groups for x in group["params"]}
    modules = [x for x in living(torch.nn.Module) if "_modules" in vars(x)]
    # each within a breaker of its own: a module of another model may refuse to list its parameters
    ids: Callable[[Any], set[int]] = lambda module: set(map(id, module.parameters()))  # noqa: E731
    whole = [x for x in modules if wanted <= (call(CircuitBreaker("debug.model"), ids, x) or set())]
    inner = {id(child) for x in whole for child in x.modules() if child is not x}
    return next((x for x in whole if id(x) not in inner), None)
