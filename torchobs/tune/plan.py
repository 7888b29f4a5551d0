"""A plan of what would make a model faster or smaller on its device: applied and undone as a whole, checked against float32."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from torchobs import api, catalog
from torchobs.support.arguments import is_number
from torchobs.support.result import Result
from torchobs.tune.choices import LEVELS, MODES, Choice, Decision, Request, choose
from torchobs.tune.difference import Difference, NumericalDifferenceError, compare, outputs, tolerance_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from torch import nn


class _State:
    """What changes about a plan: whether it is applied, and what failed."""

    def __init__(self) -> None:
        self.applied = False
        self.failures: dict[str, str] = {}

    def failed(self, technique: str, reason: str) -> None:
        self.failures[technique] = reason
        api.count(catalog.TUNE_PLANS, 1, action="compile_failed")
        api.event(catalog.EVENT_TUNE_PLAN.name, action="compile_failed", reason=reason)


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """What :func:`optimize` would do to a model. Printing it shows each technique with its reason."""

    mode: str
    level: str
    device: str
    dtype: str
    """type that the forward pass computes in"""
    decisions: tuple[Decision, ...]
    _model: nn.Module
    _choices: tuple[Choice, ...]
    _example: Any = None
    _state: _State = field(default_factory=_State)

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the techniques that are used, without a compilation that failed."""
        failed = self._state.failures
        return tuple(each.technique for each in self.decisions if each.used and each.technique not in failed)

    @property
    def applied(self) -> bool:
        """Return True between :meth:`apply` and :meth:`undo`."""
        return self._state.applied

    @property
    def compile_failure(self) -> str | None:
        """Why torch could not compile the model, which then runs eagerly; None if it could, or has not been called yet."""
        return self._state.failures.get("compile")

    def apply(self) -> Plan:
        """Change the model and torch's flags as planned. A second call does nothing."""
        if not self._state.applied:
            self._switch(on=True)
            self._tell("applied")
        return self

    def undo(self) -> Plan:
        """Leave model and flags as they were before :meth:`apply`; values that were trained since stay. May be called twice.

        Raises:
            RuntimeError: another plan that was applied since to the same modules is to be undone first.
        """
        if self._state.applied:
            self._switch(on=False)
            self._tell("undone")
        return self

    def check(self, batch: Any = None, tolerance: float | None = None) -> Difference:
        """Measure how far the plan's outputs are from those of float32 eager execution, in evaluation mode.

        Args:
            batch: the model's input: a tensor, a tuple of arguments, or a mapping of keyword arguments; by default the example
                given to :func:`optimize`.
            tolerance: largest relative difference; by default 8 roundings of the type computed in, at least 1e-4.

        Raises:
            NumericalDifferenceError: the difference is larger, or outputs are not finite; the plan is undone then.
            ValueError: there is no batch, the output has no floating tensor, or the model is on the device meta.
        """
        difference = self.measure(batch, tolerance)
        if not difference.accepted:
            self.undo()
            self._tell("refused", difference=difference.relative)
            raise NumericalDifferenceError(difference)
        return difference

    def measure(self, batch: Any = None, tolerance: float | None = None) -> Difference:
        """Measure as :meth:`check` does, and refuse nothing; afterwards the plan is applied or not as before."""
        batch = self._batch(batch)
        was_applied = self._state.applied
        try:
            self._switch(on=False)
            reference, gradients = outputs(self._model, batch)
            self._switch(on=True)
            got, _ = outputs(self._model, batch, gradients=gradients)
        finally:
            self._switch(on=was_applied)
        return compare(got, reference, tolerance_of(self.compute_dtype) if tolerance is None else tolerance)

    def _batch(self, batch: Any) -> Any:
        batch = self._example if batch is None else batch
        if batch is None:
            raise ValueError("there is nothing to compute: pass a batch here, or example= to tune.optimize()")
        return batch

    @property
    def compute_dtype(self) -> torch.dtype:
        """Coarsest type in which products are computed; TF32 rounds as float16 does."""
        if "quantization" in self.used:
            return torch.bfloat16  # 8-bit integers round to 1 of 127, about as it does
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.float16 if dtype == torch.float32 and "tf32" in self.used else dtype

    def grad_scaler(self) -> torch.amp.GradScaler:
        """Return the GradScaler that training needs: enabled for float16 only, since bfloat16 has float32's range."""
        return torch.amp.GradScaler(self.device.partition(":")[0], enabled=self.dtype == "float16" and "autocast" in self.used)

    def optimizer_options(self, optimizer: type[torch.optim.Optimizer]) -> dict[str, Any]:
        """Return keyword arguments for an optimizer of that class: ``fused=True`` where the plan and the class have it.

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()

    def __str__(self) -> str:
        failures = self._state.failures
        state = "applied" if self._state.applied else "not applied"
        lines = [f"Plan: mode {self.mode}, level {self.level}, on {self.device} in {self.dtype} ({state})"]
        for each in self.decisions:
            failure = failures.get(each.technique)
            reason = each.reason if failure is None else f"failed, runs eagerly: {failure}"
            lines.append(f"  {'+' if each.technique in self.used else '-'} {each.technique:<16}{reason}")
        return "\n".join(lines)

    __repr__ = __str__

    def _switch(self, *, on: bool) -> None:
        if on == self._state.applied:
            return
        techniques = [choice.technique for choice in self._choices if choice.technique is not None]
        for technique in techniques if on else reversed(techniques):
            technique.apply() if on else technique.undo()
        self._state.applied = on

    def _tell(self, action: str, **more: float) -> None:
        api.count(catalog.TUNE_PLANS, 1, action=action)
        about = {"action": action, "mode": self.mode, "level": self.level, "techniques": ", ".join(self.used)}
        api.event(catalog.EVENT_TUNE_PLAN.name, **about, **more)


def optimize(  # noqa: PLR0913  # one keyword for each thing that can be asked for
    model: nn.Module,
    *,
    mode: str = "amp",
    level: str = "basic",
    example: Any = None,
    amp_dtype: torch.dtype | None = None,
    checkpoint: tuple[type[nn.Module], ...] | type[nn.Module] = (),
    activation_budget: int | None = None,
    quantize: str | None = None,
) -> Plan:
    """Plan what makes a model's training faster or smaller on the device that it is on. Nothing changes until ``apply()``.

    Args:
        model: the model, already on its device, before DDP or FSDP wraps it.
        mode: ``none``, ``amp`` (mixed precision), ``compile``, ``memory_efficient`` (mixed precision and recomputed
            activations), ``full``, or ``inference`` (forward passes without gradients).
        level: ``none``, ``basic``, ``advanced`` (memory layout, TF32) or ``maximum`` (search for the fastest kernels, too).
        example: a batch for ``Plan.check``: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        amp_dtype: type for autocast; by default the one that the device has instructions for.
        checkpoint: class or classes of the modules whose activations are recomputed; by default repeated blocks.
        activation_budget: bytes that activations may need for the backward pass of ``example``. What each block keeps is
            measured by a forward pass, and no more blocks are recomputed than needed, the largest first.
        quantize: for mode ``inference``: ``dynamic`` (linear layers in 8-bit integers by torch.ao, on a CPU).

    Raises:
        TypeError: ``model`` is no ``torch.nn.Module``, ``amp_dtype`` no floating type, or ``checkpoint`` no class of modules.
        ValueError: a name is unknown, the budget is not above 0, or the model's parameters are on several devices.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"tune.optimize() takes a torch.nn.Module, not {type(model).__name__}")
    _one_of("mode", mode, MODES)
    _one_of("level", level, LEVELS)
    if amp_dtype not in {None, torch.bfloat16, torch.float16}:
        raise TypeError(f"amp_dtype is torch.bfloat16 or torch.float16, not {amp_dtype}")
    if quantize is not None:
        _one_of("quantize", quantize, ("dynamic",))
    if activation_budget is not None and not (is_number(activation_budget) and activation_budget > 0):
        raise ValueError(f"activation_budget is a number of bytes above 0, not {activation_budget!r}")
    classes: tuple[Any, ...] = tuple(checkpoint) if isinstance(checkpoint, (tuple, list)) else (checkpoint,)
    if not all(isinstance(each, type) and issubclass(each, torch.nn.Module) for each in classes):
        raise TypeError(f"checkpoint is a class of modules, or several of them, not {checkpoint!r}")
    state = _State()
    request = Request(
        model=model,
        mode=mode,
        level=level,
        device=model_device(model),
        dtype=amp_dtype,
        checkpoint=classes,
        activation_budget=activation_budget,
        quantize=quantize,
        example=example,
        failed=state.failed,
    )
    choices = choose(request)
    return Plan(
        mode=mode,
        level=level,
        device=str(request.device),
        dtype=_dtype(model, choices),
        decisions=tuple(choice.decision for choice in choices),
        _model=model,
        _choices=tuple(choices),
        _example=example,
        _state=state,
    )


@contextmanager
def optimized(model: nn.Module, **options: Any) -> Iterator[Plan]:
    """Apply a plan within a ``with`` block, or while a decorated function runs; takes what :func:`optimize` takes."""
    with optimize(model, **options) as plan:
        yield plan


def _one_of(what: str, name: object, known: Iterable[str]) -> None:
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown {what} {name!r}: use one of {', '.join(known)}")


def model_device(model: nn.Module) -> torch.device:
    """Return the device that all parameters and buffers are on; the CPU if there are none."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise ValueError(f"the model is on several devices ({', '.join(sorted(map(str, devices)))}): move it to one first")
    return next(iter(devices), torch.device("cpu"))


def _dtype(model: nn.Module, choices: list[Choice]) -> str:
    autocast = next(choice.decision for choice in choices if choice.decision.technique == "autocast")
    if autocast.used:
        return autocast.reason.partition(":")[0]
    return str(next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32))[6:]
