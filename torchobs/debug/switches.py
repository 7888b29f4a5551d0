"""``enable``, ``disable`` and ``status``: debugging switched on and off while a program trains, in the step's own hooks."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from threading import RLock
from typing import TYPE_CHECKING, Any

from torchobs.debug.findings import logger
from torchobs.debug.presets import SWITCHES, Frequencies, names_of
from torchobs.probes.core.hook_removal import remove_hooks, remove_later
from torchobs.support.arguments import is_whole
from torchobs.support.error_guard import CircuitBreaker
from torchobs.support.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torchobs.debug.switch_checks import Check

_lock = RLock()


@dataclass(frozen=True, slots=True)
class Switch(Result):
    """One switch."""

    name: str
    on: bool
    every: int
    """Steps between two looks; 0 if it is on all the time"""
    looks: int
    """How often it has looked, since it was enabled"""
    last: str
    """What it saw last"""
    error: str | None
    """Class of the exception after which it does nothing"""


@dataclass(frozen=True, slots=True)
class SwitchStatus(Result):
    """All switches of this process."""

    enabled: tuple[str, ...]
    steps: int
    """Optimizer steps since the first was enabled"""
    model: str | None
    """Class of the model that is looked at; found at the first step where it was not given"""
    switches: tuple[Switch, ...]


def enable(  # frequencies are settings
    switches: Any, *, model: Any = None, gradients_every: int = 100, memory_every: int = 50, performance_every: int = 10,
    profile_every: int = 1000, trace_dir: str | Path = "runs/torchobs",
) -> SwitchStatus:  # fmt: skip
    """Switch on debugging of the training that this process does, from its next step on, until :func:`disable`.

    Nothing needs a session or an exporter; findings go where those of all functions go. An error inside a switch turns that
    switch off, and training goes on.

    Args:
        switches: names in a list, or the name of a mode (``anomaly_detection``, ``gradient_checking``, ``memory_profiling``,
            ``performance_profiling``, ``full``) or of a level (``basic``, ``intermediate``, ``advanced``, ``expert`` or
            ``extreme``). ``none`` switches off what is on; other names are added to it.
        model: the module that trains; without it, it is found at the first step by the optimizer's parameters.
        gradients_every: steps between two looks at gradients, passes, devices, precision.
        memory_every: at memory.
        performance_every: at data loading, learning rates, the loss for early stopping.
        profile_every: between two profiled steps.
        trace_dir: where ``tensorboard_traces`` writes.

    Raises:
        ValueError: a name is unknown, or a frequency below 1.
        TypeError: ``model`` is no module.
    """
    names, every = names_of(switches), (gradients_every, memory_every, performance_every, profile_every)
    if not all(map(is_whole, every)) or min(every) < 1:
        found = ", ".join(map(repr, every))
        raise ValueError(f"a switch looks every step or less often: frequencies are whole numbers, 1 or more, not {found}")
    frequencies = Frequencies(*every)
    if model is not None:
        from torchobs.debug.tensors import require_module

        require_module(model, "enable")
    with _lock:
        if switches == "none":
            _watch.remove(SWITCHES)
        _watch.add(names, model, frequencies, str(trace_dir))
    return status()


def disable(switches: Any = None) -> SwitchStatus:
    """Switch off those, or all, and put back exactly what was there before.

    Raises:
        ValueError: a name is unknown.
    """
    with _lock:
        _watch.remove(SWITCHES if switches is None else names_of(switches))
    return status()


def status() -> SwitchStatus:
    """Return which switches are on, how often they looked, and what they saw last."""
    with _lock:
        return _watch.status()


class _Running:
    """A switch that is on."""

    def __init__(self, name: str, check: Check, every: int) -> None:
        self.check, self.looks = check, 0
        self.look_every(every)
        self.breaker = CircuitBreaker(f"debug.{name}")
        self.before, self.after = self.breaker.guard(check.before_step), self.breaker.guard(check.after_step)
        self.begin = self.breaker.guard(check.begin_step)

    def look_every(self, steps: int) -> None:
        """Look once in so many steps."""
        self.every = self.check.every = steps


class Watch:
    """Hooks of the optimizer's step, as long as any switch is on; each switch is asked at its frequency."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._handles: list[Any] = []
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._model: Any = None
        self._sought: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose model was looked for: that takes long"""
        self.steps = 0

    def add(self, names: tuple[str, ...], model: Any, frequencies: Frequencies, trace_dir: str) -> None:
        """Switch on; those that are on get the new frequencies."""
        if model is not None:
            self._model = weakref.ref(model)
        for name in names:
            if name in self._running:
                self._running[name].look_every(frequencies.of(name))
                continue
            running = _Running(name, _make(name, trace_dir), frequencies.of(name))
            self._running[name] = running
            running.check.install(running.breaker.guard)
        self._install()
        for running in self._running.values():
            if self.model is not None:
                running.breaker.guard(running.check.take_model)(self.model)
            if running.every and not self.steps % running.every:
                running.begin()

    def remove(self, names: tuple[str, ...]) -> None:
        """Switch off; with the last one the hooks go."""
        for name in names:
            running = self._running.pop(name, None)
            if running is not None:
                running.check.remove()
        if not self._running:
            handles, self._handles = self._handles, []
            if handles:
                remove_hooks(handles)
                remove_later()
            self._counts.clear()
            self._sought.clear()
            self._model, self.steps = None, 0

    @property
    def model(self) -> Any:
        """The model, if it is known and alive."""
        return self._model() if self._model is not None else None

    def _install(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        if self._running and not self._handles:
            handles = self._handles = []
            handles += [
                register_optimizer_step_pre_hook(self._hook(self._before, handles)),
                register_optimizer_step_post_hook(self._hook(self._after, handles)),
            ]

    def _hook(self, function: Callable[[Any], None], handles: list[Any]) -> Callable[[Any, Any, Any], None]:
        """Return a hook that does nothing while compiling, nor once it is removed, which may be later than it was asked for."""

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            import torch

            del args, kwargs
            if handles is self._handles and not torch.compiler.is_compiling():
                function(optimizer)

        return hook

    def _before(self, optimizer: Any) -> None:
        self._find_model(optimizer)
        for running in list(self._running.values()):
            if running.every and not self.steps % running.every:
                running.looks += 1
                running.before(self.model, optimizer)

    def _after(self, optimizer: Any) -> None:
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        due, self.steps = self.steps, max(self.steps, self._counts[optimizer])  # of several, that which steps most
        for name, running in list(self._running.items()):
            if running.every and not due % running.every:
                running.after(self.model, optimizer)
            if self.steps > due and running.every and not self.steps % running.every:
                running.begin()
            for failure in running.breaker.failures[:]:
                running.breaker.failures.remove(failure)
                logger.warning("enable: the switch %s is off after %s at %s", name, failure.exception, failure.location)

    def _find_model(self, optimizer: Any) -> None:
        if self.model is None and optimizer not in self._sought:
            self._sought.add(optimizer)
            from torchobs.debug.switch_checks import model_of

            found = model_of(optimizer)
            if found is not None:
                self._model = weakref.ref(found)
                for running in self._running.values():
                    running.breaker.guard(running.check.take_model)(found)

    def status(self) -> SwitchStatus:
        """Return what :func:`status` does."""
        rows = []
        for name in SWITCHES:
            running = self._running.get(name)
            if running is None:
                rows.append(Switch(name, False, Frequencies().of(name), 0, "", None))  # noqa: FBT003  # a row of a table
                continue
            error = "failed, see the log" if running.breaker.is_open else None
            rows.append(Switch(name, True, running.every, running.looks, running.check.last, error))  # noqa: FBT003  # as above
        model = type(self.model).__name__ if self.model is not None else None
        return SwitchStatus(tuple(row.name for row in rows if row.on), self.steps, model, tuple(rows))


_watch = Watch()
"""The switches of this process"""


def _make(name: str, trace_dir: str) -> Check:
    """Return a new check for a switch."""
    from torchobs.debug import switch_checks, switch_passes, switch_profiles

    makers: dict[str, Callable[[], Check]] = {
        "autograd_anomaly": switch_checks.Anomaly, "memory_usage": switch_checks.Memory,
        "gradient_norms": switch_checks.GradientNorms, "lr_scheduling": switch_checks.Rates,
        "forward_pass": switch_passes.ForwardPass, "backward_pass": switch_passes.BackwardPass,
        "device_placement": switch_passes.Placement, "mixed_precision": switch_passes.Precision,
        "validation": switch_passes.Validations, "early_stopping": switch_passes.Stopping,
        "data_loading": switch_profiles.Loading,
        "autograd_profiler": lambda: switch_profiles.StepProfile(None),
        "tensorboard_traces": lambda: switch_profiles.StepProfile(trace_dir),
    }  # fmt: skip
    return makers[name]()
