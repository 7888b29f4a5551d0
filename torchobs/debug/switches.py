"""``enable``, ``disable`` and ``status``: a switch is a probe of the session and an interval in steps."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from torchobs import catalog
from torchobs.debug import findings, operations
from torchobs.debug.findings import TrainingSummary, logger, record_finding, record_findings, record_series
from torchobs.debug.gradients import before_steps, scale_in_use
from torchobs.debug.placement import check_devices
from torchobs.debug.profiles import Profile, Recorder
from torchobs.debug.steps import StepCheck, monitor_step
from torchobs.debug.stopping import early_stopping
from torchobs.debug.tensors import require
from torchobs.flight.totals import Word
from torchobs.runtime.profiler import ProfilerBusyError
from torchobs.runtime.session import current, init
from torchobs.support.arguments import is_whole
from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.support.result import Checked, Problem, Result
from torchobs.support.text import plural, size
from torchobs.tensors.losses import has_parameters_of
from torchobs.tensors.names import roots
from torchobs.tensors.references import living

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torchobs.debug.operations import Anomaly
    from torchobs.debug.operator_watch import Birth
    from torchobs.probes.context import ProbeContext
    from torchobs.tensors.statistics import ActivationStats

MOST_TRACES = 8
"""Trace files that one ``enable`` writes"""


@dataclass
class Look:
    """A step's update that begins, as a switch looks at it."""

    model: Any
    """``None`` while unknown"""
    optimizer: Any
    loss: Any
    """Loss of the last backward pass, without the loss scale; ``None`` before one"""
    context: ProbeContext

    @cached_property
    def check(self) -> StepCheck | None:
        """Loss and gradients, counted as a step that was checked; ``None`` while the model is unknown."""
        return None if self.model is None else monitor_step(self.model, self.loss, self.context.recorder.step)


class Options(NamedTuple):
    """Arguments of ``enable`` for single switches."""

    trace_dir: str
    anomaly: str


class SwitchProbe:
    """A switch that is on: a function that describes a :class:`Look`; an empty text means again at the next step.

    A switch that does more than look has a class of its own. An exception turns the switch off.
    """

    last = ""
    """The latest description"""

    def __init__(self, name: str, every: int, options: Options, context: ProbeContext, describe: Callable[[Look], str]) -> None:
        """``every``: steps between two looks; 0 if it looks at no step."""
        self.every, self.options, self.context, self._describe = every, options, context, describe
        self.on, self.failed = True, False
        self.looks, self.looked_at, self.due = 0, -1, context.recorder.step
        self.breaker = context.breakers[f"debug.{name}"] = CircuitBreaker(f"debug.{name}")

    def install(self) -> None:
        """Begin."""

    def remove(self) -> None:
        """Put everything back."""

    def take_loss(self, loss: Any) -> None:
        """Receive the loss of a backward pass that begins."""

    def before_step(self, step: int, look: Look) -> None:
        """Look if it is due, at each optimizer of a step."""
        if self.every and (step >= self.due or step == self.looked_at) and (text := self._describe(look)):
            self.record_look(step, text)

    def record_look(self, step: int, text: str) -> None:
        """Record the description of this step."""
        self.looks += step != self.looked_at
        self.last, self.looked_at, self.due = text, step, step + self.every

    def stop_for_threads(self) -> None:
        """React to an optimizer that steps in another thread."""

    def stop(self) -> None:
        """Put everything back, also after an error."""
        self.failed, self.on = self.breaker.is_open, False
        self.breaker.is_open = False
        call(self.breaker, self.remove)

    def row(self, name: str) -> Switch:
        """Return its state for :func:`status`."""
        failed = self.failed or (self.on and self.breaker.is_open)
        error = "failed, see the log" if failed else None
        return Switch(name, self.on and error is None, self.every, self.looks, self.last, error)


class AnomalyMode(SwitchProbe):
    """``context(anomaly=...)`` all the time: torch's anomaly mode, or a check of each operator."""

    def install(self) -> None:
        raises = self.options.anomaly == "raise"
        self.last = "torch raises at NaN in a backward function" if raises else "no operator has made NaN or Inf"
        self._mode, self._thread = ExitStack(), get_ident()
        self._mode.enter_context(operations.anomaly_mode(self.options.anomaly, self._record_birth))

    def _record_birth(self, birth: Birth) -> None:
        self.last = f"{birth.text} at {birth.location}"
        if not operations.record_birth(birth):  # else an operation reports it
            record_finding("nonfinite_result", birth.text, function="enable", name=birth.location)

    def remove(self) -> None:
        if self.options.anomaly == "warn" and get_ident() != self._thread:
            logger.warning("enable: operators are still looked at in the thread that switched it on, which alone can end that")
            return
        self._mode.close()


class StepProfile(SwitchProbe):
    """A profile from one update to the next.

    Torch allows one profiler: this waits for the end of another. None begins in the update in which one has ended: it would
    record the end of a ``record_function`` without its beginning.
    """

    writes = False
    _ended_at: ClassVar[int] = -1
    several_train: ClassVar[bool] = False
    _recorder: Recorder | None = None

    def before_step(self, step: int, look: Look) -> None:
        recorder = self._recorder
        if recorder is not None and step > self.looked_at:
            self._recorder, StepProfile._ended_at = None, step
            recorder.finish(1)
            result = recorder.result
            self.last = "; ".join(map(str, result.problems)) or f"{result.time_s:.3g} s, top operator {result.top_operator}"
            self.last += f", trace in {result.tensorboard}" * bool(result.tensorboard)
        elif recorder is None and step >= self.due and step != self._ended_at and not self.several_train:
            directory = self.options.trace_dir if self.writes and self.looks < MOST_TRACES else None
            try:
                recorder = Recorder(Profile("step"), tensorboard=directory, light=True)
            except ProfilerBusyError as problem:
                self.last = self.last or f"no profile: {problem}"
                return
            recorder.start()
            self._recorder = recorder
            self.record_look(step, self.last)
        if self.several_train:  # also where another thread has stepped meanwhile
            self.stop_for_threads()

    def stop_for_threads(self) -> None:
        """Stop profiling for good: torch's profiler crashes beside an optimizer that steps in another thread."""
        StepProfile.several_train = True
        self.last = "no profile: steps come from several threads, beside which torch's profiler crashes"
        self.remove()

    def remove(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            StepProfile._ended_at = self.context.recorder.step
            recorder.stop()


class StepTrace(StepProfile):
    """The same, with a trace for TensorBoard."""

    writes = True


class ForwardPass(SwitchProbe):
    """Outputs of the layers, by the probe of activations at level extreme."""

    def install(self) -> None:
        self.last = "no look so far: layers are chosen beside the training, after its first steps"
        if "activations" in self.context.settings.disable_probes:
            self.last = "nothing: the setting disable_probes has activations, the probe behind this switch"
        self.context.hooks.layers.register(self.breaker, self._record_outputs)

    def _record_outputs(self, step: int, stats: dict[str, ActivationStats]) -> None:
        """Record a step's outputs, in the sampler thread."""
        shares = {name: row.nonfinite for name, row in stats.items() if row.nonfinite}
        shown = ", ".join(f"{name} {list(row.shape)} {row.mean_abs:.3g} ± {row.std:.3g}" for name, row in stats.items())
        logger.debug("forward pass of step %d: %s", step, shown)
        texts = [("nonfinite_activation", name, f"{share:.2%} of its output is not finite") for name, share in shares.items()]
        record_findings("enable", texts)
        self.record_look(step, f"{plural(len(stats), 'layer')}, {len(shares)} not finite")

    def before_step(self, step: int, look: Look) -> None:
        self.context.hooks.layers.want(self.every)

    def remove(self) -> None:
        self.context.hooks.layers.want(0)
        self.context.hooks.layers.unregister(self.breaker.probe)


def memory_usage(_: Look) -> str:
    """Describe the memory of process and devices."""
    reading = operations.read()
    on_devices = f", {size(reading.device)} on the devices" if reading.device is not None else ""
    return f"{size(reading.host)} on the host{on_devices}"


def gradient_norms(look: Look) -> str:
    """Run ``monitor_step``, and describe the gradient norm."""
    if look.check is None:
        return ""
    if look.check.gradient_norm is not None:
        record_series({"debug.gradient_norm": look.check.gradient_norm})
    return f"norm {_norm_text(look.check.gradient_norm)}"


def backward_pass(look: Look) -> str:
    """Run ``monitor_step`` once there is a loss, and describe both."""
    if look.loss is None or look.check is None:
        return ""
    text = f"loss {look.check.loss:.4g}, norm {_norm_text(look.check.gradient_norm)}"
    logger.debug("backward pass of step %d: %s", look.context.recorder.step, text)
    return text


def _norm_text(norm: float | None) -> str:
    return "of no gradient" if norm is None else f"{norm:.4g}"


def device_placement(look: Look) -> str:
    """Run ``check_devices`` on model and optimizer."""
    if look.model is None:
        return ""
    check = check_devices(look.model, optimizer=look.optimizer if has_parameters_of(look.optimizer, look.model) else None)
    return f"on {check.device}, {len(check.misplaced)} elsewhere"


def mixed_precision(look: Look) -> str:
    """Describe autocast and the loss scale; report float16 weights."""
    named = look.model.named_parameters() if look.model is not None else ()
    half = [name for name, x in named if x.dtype is torch.float16 and x.requires_grad]
    if half:
        text = f"{len(half)} trained parameters are float16, where small updates are lost: keep float32 and use autocast"
        record_finding("half_weights", text, function="enable", name=half[0])
    autocast = ", ".join(f"{dtype} on {device}" for device, dtype in look.context.training.autocast.items()) or "off"
    scale = scale_in_use(None)
    return f"autocast {autocast}" + (f", loss scale {float(scale):g}" if scale is not None else "")


def time_in(state: str) -> Callable[[Look], str]:
    """Return a switch that describes the session's time in that state of goodput."""

    def describe(look: Look) -> str:
        spent = look.context.writer.table.core.totals.floats[Word.GOODPUT :][: len(catalog.GOODPUT_STATES)].tolist()
        time_s = spent[catalog.GOODPUT_STATES.index(state)]
        share = time_s / (sum(spent) or 1.0)
        return f"{time_s:.3g} s, {share:.0%} of the time, in {state}"

    return describe


class Stopping(SwitchProbe):
    """Early stopping by the mean training loss between two looks: reported, never acted on."""

    def install(self) -> None:
        self._stopper, self._sum, self._count = early_stopping("training_loss", mode="min"), 0.0, 0

    def take_loss(self, loss: Any) -> None:
        self._sum, self._count = self._sum + loss, self._count + 1

    def before_step(self, step: int, look: Look) -> None:
        if step >= self.due and self._count:
            decision = self._stopper(self._sum / self._count)
            self._sum, self._count = 0.0, 0
            best = decision.best or 0
            self.record_look(step, f"loss {decision.value:.4g}, best {best:.4g}, patience left {decision.patience_left}")


def lr_scheduling(look: Look) -> str:
    """Describe the learning rates of an optimizer's groups."""
    rates = [float(group["lr"]) for group in look.optimizer.param_groups if "lr" in group]
    return "lr " + ", ".join(f"{rate:.3g}" for rate in rates)


SWITCHES: dict[str, tuple[Any, str]] = {
    "autograd_anomaly": (AnomalyMode, "always"),
    "autograd_profiler": (StepProfile, "profile"),
    "tensorboard_traces": (StepTrace, "profile"),
    "memory_usage": (memory_usage, "memory"),
    "gradient_norms": (gradient_norms, "gradients"),
    "forward_pass": (ForwardPass, "gradients"),
    "backward_pass": (backward_pass, "gradients"),
    "device_placement": (device_placement, "gradients"),
    "mixed_precision": (mixed_precision, "gradients"),
    "data_loading": (time_in("data"), "performance"),
    "validation": (time_in("evaluation"), "performance"),
    "early_stopping": (Stopping, "performance"),
    "lr_scheduling": (lr_scheduling, "performance"),
}
"""Function or class of each switch, and which interval it has"""
_BASIC = ("gradient_norms", "lr_scheduling")
_ADVANCED = (*_BASIC, "memory_usage", "data_loading", "validation", "early_stopping", "forward_pass", "backward_pass")
PRESETS: dict[str, tuple[str, ...]] = {
    "anomaly_detection": ("autograd_anomaly", "forward_pass", "backward_pass"),
    "gradient_checking": ("gradient_norms", "backward_pass"),
    "memory_profiling": ("memory_usage",),
    "performance_profiling": ("autograd_profiler", "data_loading", "memory_usage"),
    "off": (),
    "basic": _BASIC,
    "advanced": (*_ADVANCED, "device_placement", "mixed_precision"),
} | dict.fromkeys(("extreme", "full"), tuple(SWITCHES))
"""Modes and levels"""
_NAME = "debug"
"""Name of the listener in the session's hook lists"""
_lock = RLock()


@dataclass(frozen=True, slots=True)
class Switch(Result):
    """One switch."""

    name: str
    on: bool
    every: int
    """Steps between two looks; 0: on all the time"""
    looks: int
    """Number of looks since it was enabled"""
    last: str
    """Its latest description, also after its end"""
    error: str | None
    """Set if an exception has turned it off"""


@dataclass(frozen=True, slots=True)
class RunSummary(Checked):
    """Results of the switches, from the first that was enabled until the last was disabled."""

    enabled: tuple[str, ...]
    """Names of switches that are on"""
    steps: int
    model: str | None
    """Class of the model that is checked; if none was given, it is searched for at the first step"""
    switches: tuple[Switch, ...]
    """Switches that are on, or were"""
    training: TrainingSummary
    """Of the steps that were checked"""
    problems: tuple[Problem, ...]
    """The last hundred findings of all functions meanwhile, one for each kind and name"""


class Run(AbstractContextManager["Run"]):
    """The switches of this process, as :func:`enable` returns them; a hook of the optimizer's step while any is on.

    As a context manager it switches everything off at the end. Results are kept.
    """

    def __init__(self, context: ProbeContext | None) -> None:
        self._context = context
        self._probes: dict[str, SwitchProbe] = {}
        """Those that are on, or were"""
        self._problems: dict[tuple[str, str], Problem] = {}
        self._before, self._begun = findings.steps_so_far(), 0
        self._model: Any = None
        self._loss: Any = None
        self._searched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last: RunSummary | None = None
        if context is None:
            self._last = self.summary()
            return
        self._begun = context.recorder.step
        findings.collecting.append(self._problems)
        breaker = context.breakers[_NAME] = CircuitBreaker(_NAME)
        context.hooks.takes_loss.register(breaker, self._take_loss)
        context.hooks.ends.register(CircuitBreaker(_NAME), disable)
        self._unhook = before_steps(breaker.guard(self._before_step))

    def __exit__(self, *_: object) -> None:
        """Switch everything off."""
        disable()

    def __getattr__(self, name: str) -> Any:
        """Return a field of :meth:`summary`: ``run.ok``, ``run.problems``, ``run.enabled``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.summary(), name)

    @property
    def is_over(self) -> bool:
        """Whether all switches are off."""
        return self._last is not None

    def summary(self) -> RunSummary:
        """Return the results so far, or those when the last switch went off."""
        with _lock:
            if self._last is not None:
                return self._last
            rows = tuple(self._probes[name].row(name) for name in SWITCHES if name in self._probes)
            steps = self._context.recorder.step - self._begun if self._context is not None else 0
            model = self._model() if self._model is not None else None
            return RunSummary(
                tuple(row.name for row in rows if row.on), steps, None if model is None else type(model).__name__, rows,
                findings.training_since(self._before), tuple(self._problems.values()),
            )  # fmt: skip

    def add(self, names: tuple[str, ...], intervals: dict[str, int], options: Options, model: Any) -> None:
        """Switch on; switches that are on get the new interval. ``model``: the one to check."""
        if model is not None:
            self._model = weakref.ref(model)
        for name in names if self._context is not None else ():
            describe, interval = SWITCHES[name]
            before = self._probes.get(name)
            if before is not None and before.row(name).on:
                before.every = intervals[interval]
            elif self._context is not None:
                self.remove([name])  # one that has failed
                make = describe if isinstance(describe, type) else SwitchProbe
                probe = self._probes[name] = make(name, intervals[interval], options, self._context, describe)
                call(probe.breaker, probe.install)

    def remove(self, names: Iterable[str]) -> None:
        """Switch off."""
        for probe in [self._probes[name] for name in names if name in self._probes and self._probes[name].on]:
            probe.stop()

    def end_if_off(self) -> None:
        """Remove the hooks once all switches are off."""
        context = self._context
        if context is not None and not self.is_over and not any(probe.on for probe in self._probes.values()):
            self._last = self.summary()
            findings.collecting.remove(self._problems)
            self._unhook()
            context.hooks.takes_loss.unregister(_NAME)
            context.hooks.ends.unregister(_NAME)
            self._loss, StepProfile.several_train = None, False

    def _before_step(self, optimizer: Any) -> None:
        context = self._context
        if context is None:
            return
        if get_ident() != context.training.thread:
            for probe in self._active_probes():
                call(probe.breaker, probe.stop_for_threads)
            return
        model = self._model() if self._model is not None else None
        if model is None and optimizer not in self._searched:
            self._searched.add(optimizer)
            if (model := model_of(optimizer)) is not None:
                self._model = weakref.ref(model)
        step = context.recorder.step
        look = Look(model, optimizer, self._loss, context)
        for probe in sorted(self._active_probes(), key=lambda probe: probe.due):  # of two profilers the one that waits longer
            call(probe.breaker, probe.before_step, step, look)

    def _take_loss(self, tensors: Any, gradients: Any, accumulates: bool) -> None:  # noqa: FBT001  # a listener
        loss = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
        if accumulates and gradients is None and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            loss, scale = loss.detach().reshape(()), scale_in_use(None)
            self._loss = loss if scale is None else loss / scale.to(loss.device, non_blocking=True)
            for probe in self._active_probes():
                call(probe.breaker, probe.take_loss, self._loss)

    def _active_probes(self) -> list[SwitchProbe]:
        return [probe for probe in list(self._probes.values()) if probe.on]


_run = Run(None)


def enable(  # noqa: PLR0913  # each switch's own
    switches: Any = "full", *, model: Any = None, anomaly: Anomaly = "raise", gradients_every: int = 100,
    memory_every: int = 50, performance_every: int = 10, profile_every: int = 1000, trace_dir: str | Path = "runs/torchobs",
) -> Run:  # fmt: skip
    """Switch on debugging of this process's training, from the next step on, until :func:`disable`.

    As a context manager it ends with the block. Without a session, :func:`torchobs.init` is called; if that records nothing
    (``TORCHOBS_ENABLED=0``), nothing is switched on, and a warning says so. Switches end with the session. An error inside a
    switch turns that switch off.

    Args:
        switches: names in a list, or the name of a mode (``anomaly_detection``, ``gradient_checking``, ``memory_profiling``,
            ``performance_profiling``, ``full``) or of a level (``off``, ``basic``, ``advanced``, ``extreme``). ``off`` switches
            everything off; other names add to what is on.
        model: the module that trains; by default it is found at the first step by the optimizer's parameters.
        anomaly: what ``autograd_anomaly`` does: ``raise`` or ``warn``, as for :func:`torchobs.debug.context`.
        gradients_every: steps between two looks at gradients, passes, devices, precision.
        memory_every: at memory.
        performance_every: at data loading, learning rates, the loss for early stopping.
        profile_every: between two profiled steps.
        trace_dir: where ``tensorboard_traces`` writes.

    Raises:
        ValueError: a name is unknown, a frequency below 1, or ``anomaly`` neither of the two.
        TypeError: ``model`` is no module.
    """
    global _run  # noqa: PLW0603  # of the process
    names, every = _names_of(switches), (gradients_every, memory_every, performance_every, profile_every)
    if not all(map(is_whole, every)) or min(every) < 1:
        numbers = ", ".join(map(repr, every))
        raise ValueError(f"a switch looks every step or less often: frequencies are whole numbers, 1 or more, not {numbers}")
    if anomaly not in {"raise", "warn"}:
        raise ValueError(f"anomaly is 'raise' or 'warn', not {anomaly!r}: without it leave autograd_anomaly out")
    if model is not None:
        require(model, "nn.Module", "enable")
    if names and current() is None:
        init()  # not under the lock, which a session's end takes
    intervals = dict(zip(("gradients", "memory", "performance", "profile"), every, strict=True)) | {"always": 0}
    with _lock:
        if "off" in ([switches] if isinstance(switches, str) else switches):
            _run.remove(SWITCHES)
            _run.end_if_off()
        session = current()
        context = session.context if session is not None else None
        if names and context is None:
            logger.warning("enable: nothing is switched on, since no session records in this process")
        if names and _run.is_over:
            _run = Run(context)
        _run.add(names, intervals, Options(str(trace_dir), anomaly), model)
        return _run


def disable(switches: Any = None) -> RunSummary:
    """Switch these off, or all, and put back exactly what was there before. The session goes on.

    Raises:
        ValueError: a name is unknown.
    """
    with _lock:
        _run.remove(SWITCHES if switches is None else _names_of(switches))
        _run.end_if_off()
    return status()


def status() -> RunSummary:
    """Return which switches are on, how often they looked, and what they saw last; if none is on, the last ones."""
    return _run.summary()


def _names_of(wanted: object) -> tuple[str, ...]:
    """Return the switches of a preset's name, a switch's name or a sequence of both.

    Raises:
        ValueError: a name is unknown.
        TypeError: it is neither a name nor a sequence.
    """
    if not isinstance(wanted, (str, list, tuple, set, frozenset)):
        raise TypeError(f"switches are names in a list, or the name of a mode or level, not {type(wanted).__name__}")
    words = {wanted} if isinstance(wanted, str) else set(wanted)
    if unknown := words - SWITCHES.keys() - PRESETS.keys():
        names = ", ".join((*SWITCHES, *PRESETS))
        raise ValueError(f"{unknown.pop()!r} is no switch, mode or level: there are {names}")
    chosen = {name for word in words for name in PRESETS.get(word, (word,))}
    return tuple(name for name in SWITCHES if name in chosen)


def model_of(optimizer: Any) -> Any:
    """Return the outermost module that has all of the optimizer's parameters; ``None`` without one. It takes some 100 ms."""

    def ids(module: Any) -> set[int]:
        return set(map(id, module.parameters()))

    wanted = {id(x) for group in optimizer.param_groups for x in group["params"]}
    # each in its own breaker: a module of another model may refuse to list its parameters
    whole = (x for x in roots(living(torch.nn.Module)) if wanted <= (call(CircuitBreaker("debug.model"), ids, x) or set()))
    return next(whole, None)
