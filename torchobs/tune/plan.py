"""``optimize``: a plan of techniques that make a model faster or smaller, applied and undone as a whole."""

from __future__ import annotations

import inspect
from contextlib import ContextDecorator
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn

from torchobs import api, catalog
from torchobs.support.arguments import is_number
from torchobs.support.result import Checked, Problem
from torchobs.tune.choices import LEVELS, MODES, Decision, Request, amp_dtype, choose
from torchobs.tune.difference import Difference, NumericalDifferenceError, compare, outputs, tolerance_of
from torchobs.tune.environment import device as chosen_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchobs.tune.techniques import Technique

F = TypeVar("F", bound="Callable[..., Any]")


class _State:
    """The mutable part of a plan: whether it is applied, and what failed."""

    def __init__(self) -> None:
        self.applied = False
        self.failures: dict[str, str] = {}

    def record_failure(self, technique: str, reason: str) -> None:
        self.failures[technique] = reason
        api.count(catalog.TUNE_PLANS, 1, action="compile_failed")
        api.event(catalog.EVENT_TUNE_PLAN.name, action="compile_failed", reason=reason)


@dataclass(frozen=True, repr=False)
class Plan(Checked, ContextDecorator):
    """The techniques that :func:`optimize` chose for a model. Printed, it shows each with its reason.

    It is applied within a ``with`` block, and while a function that it decorates runs.
    """

    mode: str
    level: str
    device: str
    dtype: str
    """type in which the forward pass computes"""
    decisions: tuple[Decision, ...]
    _model: nn.Module
    _choices: dict[Decision, Technique | None]
    _example: Any = None
    _state: _State = field(default_factory=_State)

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the techniques in use, without a compilation that failed."""
        failed = self._state.failures
        return tuple(decision.technique for decision in self.decisions if decision.used and decision.technique not in failed)

    @property
    def applied(self) -> bool:
        """Return whether :meth:`apply` was called, and :meth:`undo` not yet."""
        return self._state.applied

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Failures after it was applied: a compilation, so that the model runs eagerly."""
        return tuple(Problem("failed", technique, why) for technique, why in self._state.failures.items())

    def apply(self) -> Plan:
        """Change the model and torch's flags as planned. A second call does nothing."""
        if not self._state.applied:
            self._switch(on=True)
            self._record("applied")
        return self

    def undo(self) -> Plan:
        """Put model and flags back as before :meth:`apply`; trained values stay. A second call does nothing.

        Raises:
            RuntimeError: another plan was applied since to the same modules, and has to be undone first.
        """
        if self._state.applied:
            self._switch(on=False)
            self._record("undone")
        return self

    def check(self, batch: Any = None, tolerance: float | None = None) -> Difference:
        """Measure how far the plan's outputs are from those of float32 eager execution, in evaluation mode.

        Args:
            batch: the model's input: a tensor, a tuple of arguments, or a mapping of keyword arguments; by default the example
                given to :func:`optimize`.
            tolerance: largest relative difference; by default 8 roundings of the type computed in, at least 1e-4.

        Raises:
            NumericalDifferenceError: the difference is larger, or outputs are not finite; the plan is then undone.
            ValueError: there is no batch, the output has no floating tensor, or the model is on the device meta.
        """
        difference = self.inspect(batch, tolerance)
        if not difference:
            self.undo()
            self._record("refused", difference=difference.relative)
            raise NumericalDifferenceError(difference)
        return difference

    def inspect(self, batch: Any = None, tolerance: float | None = None) -> Difference:
        """Measure as :meth:`check` does, but refuse nothing; afterwards the plan is applied or not, as before."""
        batch = self._example if batch is None else batch
        if batch is None:
            raise ValueError("there is nothing to compute: pass a batch here, or example= to tune.optimize()")
        was_applied = self._state.applied
        try:
            self._switch(on=False)
            reference, gradients = outputs(self._model, batch)
            self._switch(on=True)
            got, _ = outputs(self._model, batch, gradients=gradients)
        finally:
            self._switch(on=was_applied)
        return compare(got, reference, tolerance_of(self.compute_dtype) if tolerance is None else tolerance)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Coarsest type in which products are computed; TF32 rounds like float16."""
        if "quantization" in self.used:
            return torch.bfloat16  # 8-bit integers round to 1 of 127, about the same
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.float16 if dtype == torch.float32 and "tf32" in self.used else dtype

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return the GradScaler that training needs: enabled for float16 only, since bfloat16 has float32's range."""
        return torch.amp.GradScaler(self.device.partition(":")[0], enabled=self.dtype == "float16" and "autocast" in self.used)

    def optimizer_options(self, optimizer: type[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return keyword arguments for an optimizer of that class: ``fused=True`` if plan and class have it.

        Raises:
            TypeError: it is no class.
        """
        if not isinstance(optimizer, type):
            raise TypeError(f"a class is needed, such as torch.optim.AdamW, not {type(optimizer).__name__}")
        fused = "fused_optimizer" in self.used and "fused" in inspect.signature(optimizer).parameters
        return {"fused": True} if fused else {}

    def loader_options(self, num_workers: int) -> dict[str, Any]:
        """Return keyword arguments for a ``DataLoader`` with that many workers."""
        if "loader" not in self.used:
            return {"num_workers": num_workers}
        options = {"num_workers": num_workers, "pin_memory": self.device.startswith("cuda")}
        return {**options, "persistent_workers": True} if num_workers else options

    def __enter__(self) -> Plan:  # noqa: PYI034  # typing.Self needs Python 3.11
        return self.apply()

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        failures, state = self._state.failures, "applied" if self.applied else "not applied"
        lines = [f"Plan: mode {self.mode}, level {self.level}, on {self.device} in {self.dtype} ({state})"]
        for decision in self.decisions:
            failure = failures.get(decision.technique)
            reason = decision.reason if failure is None else f"failed, runs eagerly: {failure}"
            lines.append(f"  {'+' if decision.technique in self.used else '-'} {decision.technique:<16}{reason}")
        return "\n".join(lines)

    __repr__ = __str__

    def _switch(self, *, on: bool) -> None:
        if on == self._state.applied:
            return
        techniques = [technique for technique in self._choices.values() if technique is not None]
        for technique in techniques if on else reversed(techniques):
            technique.apply() if on else technique.undo()
        self._state.applied = on

    def _record(self, action: str, **more: float) -> None:
        api.count(catalog.TUNE_PLANS, 1, action=action)
        about = {"action": action, "mode": self.mode, "level": self.level, "techniques": ", ".join(self.used)}
        api.event(catalog.EVENT_TUNE_PLAN.name, **about, **more)


@overload
def optimize(model: nn.Module, **options: Any) -> Plan: ...
@overload
def optimize(model: F, **options: Any) -> F: ...
@overload
def optimize(**options: Any) -> Callable[[F], F]: ...
def optimize(  # type: ignore[misc]  # noqa: PLR0913  # the keywords are those below; one for each thing that can be asked for
    model: Any = ...,
    *,
    mode: str = "amp",
    level: str = "basic",
    example: Any = None,
    amp: str | torch.dtype = "auto",
    checkpointing: tuple[type[nn.Module], ...] | type[nn.Module] = (),
    activation_budget: int | None = None,
    quantize: str | None = None,
) -> Any:
    """Plan how to make a model's training faster or smaller on its device. Nothing changes until ``apply()``.

    Given a function, return one that computes as planned, on ``tune.device()``; its attribute ``plan`` is the applied plan.
    Without a model or a function it is a decorator: ``@tune.optimize(amp="bf16")``.

    Args:
        model: the model, already on its device, before DDP or FSDP wraps it; or a function.
        mode: ``none``, ``amp`` (mixed precision), ``compile``, ``memory_efficient`` (mixed precision and recomputed
            activations), ``full``, or ``inference`` (forward passes without gradients).
        level: ``off``, ``basic``, ``advanced`` (memory layout, TF32) or ``extreme`` (search for the fastest kernels, too).
        example: a batch for ``Plan.check``: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        amp: type for autocast: ``bf16``, ``fp16``, ``off``, a dtype, or ``auto``: a type with instructions on the device.
        checkpointing: class or classes of modules that recompute their activations; by default repeated blocks.
        activation_budget: bytes that activations may need for the backward pass of ``example``. A forward pass measures each
            block's activations; the largest blocks are recomputed, no more of them than needed.
        quantize: for mode ``inference``: ``dynamic`` (linear layers in 8-bit integers by torch.ao, on a CPU).

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module`` or function, or ``checkpointing`` no class of modules.
        ValueError: a name is unknown, the budget is not above 0, or the model's parameters are on several devices.
    """
    check_name("mode", mode, MODES)
    check_name("level", level, LEVELS)
    amp_dtype(amp, torch.device("cpu"))
    if quantize is not None:
        check_name("quantize", quantize, ("dynamic",))
    if activation_budget is not None and not (is_number(activation_budget) and activation_budget > 0):
        raise ValueError(f"activation_budget is a number of bytes above 0, not {activation_budget!r}")
    classes: tuple[Any, ...] = tuple(checkpointing) if isinstance(checkpointing, (tuple, list)) else (checkpointing,)
    if not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in classes):
        raise TypeError(f"checkpointing is a class of modules, or several of them, not {checkpointing!r}")
    asked: dict[str, Any] = {"mode": mode, "level": level, "amp": amp, "checkpointing": classes, "quantize": quantize}
    asked |= {"activation_budget": activation_budget, "example": example}
    if isinstance(model, nn.Module):
        return _plan(model, model_device(model), asked)
    if model is ...:
        return partial(_decorate, asked)
    return _decorate(asked, model)


def _plan(model: nn.Module, device: torch.device, asked: dict[str, Any]) -> Plan:
    state = _State()
    choices = choose(Request(model=model, device=device, on_failure=state.record_failure, **asked))
    about = asked["mode"], asked["level"], str(device), _dtype(model, choices)
    return Plan(*about, tuple(choices), model, choices, asked["example"], state)


class _Function(nn.Module):
    """A function as a module, since a plan changes modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _decorate(asked: dict[str, Any], function: Any) -> Any:
    """Return a function that computes as planned."""
    if not callable(function) or isinstance(function, (type, nn.Module)):
        raise TypeError(f"tune.optimize() takes a torch.nn.Module, or decorates a function, not {type(function).__name__}")
    module = _Function(function)

    @wraps(function)
    def optimized(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    optimized.plan = _plan(module, chosen_device(), asked).apply()  # type: ignore[attr-defined]
    return optimized


def check_name(what: str, name: object, allowed: Iterable[str]) -> None:
    """Raise ValueError for an unknown name, with the allowed ones."""
    if not isinstance(name, str) or name not in allowed:
        value = repr(name) if isinstance(name, str) else f"of type {type(name).__name__}"
        raise ValueError(f"unknown {what} {value}: use one of {', '.join(allowed)}")


def model_device(model: nn.Module) -> torch.device:
    """Return the device of all parameters and buffers; the CPU if there are none."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise ValueError(f"the model is on several devices ({', '.join(sorted(map(str, devices)))}): move it to one first")
    return next(iter(devices), torch.device("cpu"))


def _dtype(model: nn.Module, decisions: Iterable[Decision]) -> str:
    autocast = next(decision for decision in decisions if decision.technique == "autocast")
    if autocast.used:
        return autocast.reason.partition(":")[0]
    return str(next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32))[6:]
