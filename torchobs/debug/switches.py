"""``enable``, ``disable`` and ``status``: switches of a session, each a probe and an interval in steps."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any

from torchobs.debug.findings import logger
from torchobs.debug.gradients import scale_in_use
from torchobs.probes.core.hook_removal import remove_hooks, remove_later
from torchobs.runtime.session import current, init
from torchobs.support.arguments import is_whole
from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.support.living_objects import living
from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torchobs.debug.switch_probes import SwitchProbe

_lock = RLock()
_NAME = "debug"
"""Of the listener in the session's hook lists"""
SWITCHES = {
    "autograd_anomaly": "always", "autograd_profiler": "profile", "tensorboard_traces": "profile", "memory_usage": "memory",
    "gradient_norms": "gradients", "forward_pass": "gradients", "backward_pass": "gradients", "device_placement": "gradients",
    "mixed_precision": "gradients", "data_loading": "performance", "validation": "step", "early_stopping": "performance",
    "lr_scheduling": "performance",
}  # fmt: skip
"""Names, each with what its interval goes by"""
_IN_FORWARD = ("forward_pass", "mixed_precision", "validation")
"""Switches that look at forward passes"""
_INTERVALS = {"always": 0, "step": 1, "gradients": 100, "memory": 50, "performance": 10, "profile": 1000}
_BASIC = ("gradient_norms", "lr_scheduling")
_INTERMEDIATE = (*_BASIC, "memory_usage", "data_loading", "validation", "early_stopping")
PRESETS: dict[str, tuple[str, ...]] = {
    "none": (),
    "anomaly_detection": ("autograd_anomaly", "forward_pass", "backward_pass"),
    "gradient_checking": ("gradient_norms", "backward_pass"),
    "memory_profiling": ("memory_usage",),
    "performance_profiling": ("autograd_profiler", "data_loading", "memory_usage"),
    "full": tuple(SWITCHES),
    "basic": _BASIC,
    "intermediate": _INTERMEDIATE,
    "advanced": (*_INTERMEDIATE, "forward_pass", "backward_pass", "device_placement", "mixed_precision"),
    "expert": tuple(SWITCHES),
    "extreme": tuple(SWITCHES),
}
"""Modes, then levels"""


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


class _Running:
    """A switch that is on."""

    def __init__(self, name: str, probe: SwitchProbe) -> None:
        self.probe, self.looks = probe, 0
        self.breaker = CircuitBreaker(f"debug.{name}")

    def is_due(self, step: int) -> bool:
        """Return whether it looks at this step."""
        return self.probe.every > 0 and not step % self.probe.every


class _Watch:
    """Hooks of the optimizer's step and of the model, as long as any switch is on."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._session: Any = None
        self._context: Any = None
        self._handles: list[Any] = []
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
            running = self._running.get(name)
            every = intervals[SWITCHES[name]]
            if running is not None:
                running.probe.every = every
            else:
                running = self._running[name] = _Running(name, _make(name, every, trace_dir))
                call(running.breaker, running.probe.install)
        self._stop_for_threads()
        for running in self._running.values():
            if running.is_due(self.steps):
                call(running.breaker, running.probe.begin_step)

    def remove(self, names: Any) -> None:
        """Switch off; with the last one the hooks go."""
        for name in names:
            running = self._running.pop(name, None)
            if running is not None:
                _guarded(f"the switch {name} is not put back", running.probe.remove)  # also of one that has failed
        if not self._running and self._session is not None:
            handles, self._handles = self._handles, []
            _guarded("hooks stay", remove_hooks, handles)
            _guarded("hooks stay", remove_later)
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

    def _install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        session = current()
        if self._session is None and session is not None and session.context is not None:
            self._session, self._context = session, session.context
            session.context.hooks.takes_loss.register(session.context.breaker(_NAME), self._take_loss)
            session.context.hooks.ends.register(CircuitBreaker(_NAME), disable)
            handles = self._handles = []
            handles += [
                register_optimizer_step_pre_hook(self._hook(self._before, handles)),
                register_optimizer_step_post_hook(self._hook(self._after, handles)),
            ]

    def _hook(self, function: Callable[[Any], None], handles: list[Any]) -> Callable[[Any, Any, Any], None]:
        """Return a hook that does nothing while compiling, nor once it is removed, which may be later than it was asked for."""
        breaker = CircuitBreaker(_NAME)

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            import torch

            del args, kwargs
            if handles is self._handles and not torch.compiler.is_compiling():
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
        for running in list(self._running.values()) if len(self._threads) > 1 else ():
            call(running.breaker, running.probe.stop_for_threads)

    def _take_loss(self, tensors: Any, gradients: Any, accumulates: bool) -> None:  # noqa: FBT001  # a listener
        import torch

        loss = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
        if accumulates and gradients is None and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            loss, scale = loss.detach().reshape(()), scale_in_use(None)
            loss = loss if scale is None else loss / scale.to(loss.device, non_blocking=True)
            for running in list(self._running.values()):
                call(running.breaker, running.probe.take_loss, loss)

    def _before(self, optimizer: Any) -> None:
        if self.model is None and optimizer not in self._counts:
            _guarded("the model is unknown", lambda: self._take_model(model_of(optimizer)))
        for running in list(self._running.values()):
            if running.is_due(self.steps):
                running.looks += 1
                call(running.breaker, running.probe.before_step, self.model, optimizer)

    def _after(self, optimizer: Any) -> None:
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        due, self.steps = self.steps, max(self.steps, self._counts[optimizer])
        for name, running in list(self._running.items()):
            if running.is_due(due):
                call(running.breaker, running.probe.after_step)
            if self.steps > due and running.is_due(self.steps):
                call(running.breaker, running.probe.begin_step)
            _log(f"the switch {name} is off", running.breaker)

    def _take_model(self, model: Any) -> None:
        if model is not None and model is not self.model:
            self._release_model()
            self._model = weakref.ref(model)
            if _is_scripted(model):
                logger.warning(
                    "enable: the model is a ScriptModule, which takes no hooks: what looks at forward passes sees none (%s)",
                    ", ".join(_IN_FORWARD),
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
        for running in self._due_in_forward():
            call(running.breaker, running.probe.begin_forward, model, [*args, *kwargs.values()])

    def _end_forward(self, model: Any, _: Any, output: Any) -> None:
        for running in self._due_in_forward():
            call(running.breaker, running.probe.end_forward, model, output)

    def _due_in_forward(self) -> list[_Running]:
        import torch

        if torch.compiler.is_compiling() or get_ident() != self._context.training.thread:
            return []
        return [x for x in self._running.values() if x.is_due(self.steps)]

    def status(self) -> SwitchStatus:
        """Return what :func:`status` does."""
        rows = []
        for name, interval in SWITCHES.items():
            running = self._running.get(name)
            if running is None:
                rows.append(Switch(name, on=False, every=_INTERVALS[interval]))
                continue
            error = "failed, see the log" if running.breaker.is_open else None
            rows.append(Switch(name, True, running.probe.every, running.looks, running.probe.last, error))  # noqa: FBT003  # a row of a table
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


def _is_scripted(model: Any) -> bool:
    import torch

    return isinstance(model, torch.jit.ScriptModule)


_watch = _Watch()
"""The switches of this process"""


def _make(name: str, every: int, trace_dir: str) -> SwitchProbe:
    """Return a new probe for a switch."""
    from torchobs.debug import switch_probes

    if name == "tensorboard_traces":
        return switch_probes.StepProfile(every, trace_dir)
    probes: dict[str, type[SwitchProbe]] = {
        "autograd_anomaly": switch_probes.AnomalyMode,
        "autograd_profiler": switch_probes.StepProfile,
        "memory_usage": switch_probes.Memory,
        "gradient_norms": switch_probes.GradientNorms,
        "forward_pass": switch_probes.ForwardPass,
        "backward_pass": switch_probes.BackwardPass,
        "device_placement": switch_probes.Placement,
        "mixed_precision": switch_probes.Precision,
        "data_loading": switch_probes.DataWait,
        "validation": switch_probes.Validations,
        "early_stopping": switch_probes.Stopping,
        "lr_scheduling": switch_probes.Rates,
    }
    return probes[name](every)


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
    whole = [x for x in modules if wanted <= (call(CircuitBreaker("debug.model"), _ids_of_parameters, x) or set())]
    inner = {id(child) for x in whole for child in x.modules() if child is not x}
    return next((x for x in whole if id(x) not in inner), None)


def _ids_of_parameters(module: Any) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}
