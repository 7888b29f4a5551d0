"""What each switch of ``debug.enable`` does in a step. All run in the training thread, within a circuit breaker."""

from __future__ import annotations

import math
import weakref
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torchobs.debug import anomaly_mode, resources
from torchobs.debug.findings import found, record_series
from torchobs.support.living_objects import living

if TYPE_CHECKING:
    from collections.abc import Callable

    Guard = Callable[[Callable[..., Any]], Callable[..., Any]]

GROWING_LOOKS = 8
LEAST_GROWTH = 64 << 20
"""Memory that rose at each of so many looks, by so many bytes in all, is told"""
RATE_JUMP = 10.0
"""Factor by which a learning rate exceeds all that it is known to reach, or falls between two looks, from which it is told"""
_ROUNDING = 1e-6
"""of a factor: a decay to a tenth is an ordinary one"""


class Check:
    """Base of all: nothing to do. ``last`` is what it saw last, in words."""

    last = ""
    every = 1
    """Steps between two looks"""

    def install(self, guard: Guard) -> None:
        """Place what is needed; functions that training calls are guarded."""

    def take_model(self, model: Any) -> None:
        """Begin with a model. Called again for the same one."""

    def begin_step(self) -> None:
        """Called when a step begins at which it is to look."""

    def before_step(self, model: Any, optimizer: Any) -> None:
        """Look, before the optimizer of such a step; the model may be unknown."""

    def after_step(self, model: Any, optimizer: Any) -> None:
        """Look after it."""

    def remove(self) -> None:
        """Put everything back."""


class Anomaly(Check):
    """Torch's anomaly mode."""

    def install(self, guard: Guard) -> None:
        self._undo = ExitStack()
        self._undo.enter_context(anomaly_mode.entered("raise", lambda _: None))
        self.last = "torch raises at NaN in a backward function"

    def remove(self) -> None:
        self._undo.close()


class Memory(Check):
    """Memory of process and devices, and whether it only rises."""

    def __init__(self) -> None:
        self._host: deque[int] = deque(maxlen=GROWING_LOOKS)
        self._device: deque[int] = deque(maxlen=GROWING_LOOKS)

    def after_step(self, model: Any, optimizer: Any) -> None:
        reading = resources.read()
        self.last = f"{reading.host / 2**20:.0f} MiB on the host"
        record_series({"debug.memory.host": reading.host})
        for name, value, seen in (("host", reading.host, self._host), ("device", reading.device, self._device)):
            if value is None:
                continue
            seen.append(value)
            if name == "device":
                self.last += f", {value / 2**20:.0f} MiB on devices"
                record_series({"debug.memory.device": value})
            rises = all(one < other for one, other in zip(seen, list(seen)[1:], strict=False))
            if len(seen) == GROWING_LOOKS and rises and seen[-1] - seen[0] >= LEAST_GROWTH:
                text = f"{name} memory rose by {(seen[-1] - seen[0]) / 2**20:.0f} MiB in {GROWING_LOOKS} looks, each time"
                found("memory_growth", text, function="enable", name=name)


class GradientNorms(Check):
    """``check_gradients`` of the model, or the total norm where the model is unknown."""

    def before_step(self, model: Any, optimizer: Any) -> None:
        import torch

        from torchobs.debug.gradients import check_gradients
        from torchobs.debug.optimizer_norms import norm_of

        if model is not None:
            norm = check_gradients(model).total_norm
        else:
            parameters = [x for group in optimizer.param_groups for x in group["params"]]
            on_device = norm_of(torch, parameters, getattr(optimizer, "grad_scale", None))
            norm = math.nan if on_device is None else float(on_device)
            if not math.isfinite(norm) and on_device is not None:
                found("nonfinite_gradient", f"the gradient norm is {norm}", function="enable", name="gradients")
        self.last = f"norm {norm:.4g}"
        record_series({"debug.gradient_norm": norm})


class Rates(Check):
    """Learning rates of each optimizer's groups.

    A rise is a jump if it exceeds the highest rate so far, and those that optimizer and scheduler are to reach: a warm-up from
    near 0, or a restart, does not. A linear warm-up from one of its own increments grows by at most the number of steps, plus
    one. A fall is a jump from a rate within a tenth of the highest: a decay to 0 ends with large factors of tiny rates.
    """

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Any, list[_Rate]] = weakref.WeakKeyDictionary()

    def before_step(self, model: Any, optimizer: Any) -> None:
        groups = [group for group in optimizer.param_groups if "lr" in group]
        rates = [float(group["lr"]) for group in groups]
        seen = self._seen.setdefault(optimizer, [])
        if len(seen) != len(groups):
            seen[:] = [_Rate(rate, _peak(group, optimizer)) for group, rate in zip(groups, rates, strict=True)]
        for index, (rate, known) in enumerate(zip(rates, seen, strict=True)):
            if not math.isfinite(rate) or rate < 0:
                found("learning_rate", f"the learning rate is {rate}", function="enable", name=f"group {index}")
                continue
            if known.jumps_to(rate, max(RATE_JUMP, 1 + self.every)):
                text = f"the learning rate went from {known.last:.3g} to {rate:.3g}"
                found("learning_rate", text, function="enable", name=f"group {index}")
            known.last, known.highest = rate, max(known.highest, rate)
        self.last = "lr " + ", ".join(f"{rate:.3g}" for rate in rates)
        record_series({f"debug.learning_rate.{index}": rate for index, rate in enumerate(rates)})


class _Rate:
    """What is known of one group's learning rate."""

    def __init__(self, rate: float, peak: float) -> None:
        self.last, self.highest = rate, max(rate, peak)

    def jumps_to(self, rate: float, rise: float) -> bool:
        """Return True if the next rate, a look later, is neither a warm-up's nor a decay's."""
        if not (self.last > 0 and rate > 0):
            return False
        falls = rate * RATE_JUMP < self.last * (1 - _ROUNDING) and self.last * RATE_JUMP >= self.highest
        return falls or rate > self.highest * rise * (1 + _ROUNDING)


def _peak(group: dict[str, Any], optimizer: Any) -> float:
    """Return the highest rate that a group is to reach: the scheduler's, or else that which the optimizer was made with."""
    known = [group[name] for name in ("initial_lr", "max_lr") if name in group] or [optimizer.defaults.get("lr", 0.0)]
    return max(float(rate) for rate in known)


class ModelHooks(Check):
    """Hooks before and after the model's own forward call, not those of its parts."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._is_due = False

    def install(self, guard: Guard) -> None:
        self._guard = guard

    def take_model(self, model: Any) -> None:
        if not self._handles:
            before, after = self._guard(self.before_forward), self._guard(self.after_forward)
            self._handles = [
                model.register_forward_pre_hook(_quietly(before), with_kwargs=True),
                model.register_forward_hook(_quietly(after), with_kwargs=True),
            ]

    def begin_step(self) -> None:
        self._is_due = True

    def before_forward(self, model: Any, args: Any, kwargs: Any) -> None:
        """Look at what goes in."""

    def after_forward(self, model: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Look at what comes out."""

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def _quietly(function: Callable[..., Any]) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            function(*args)

    return hook


def model_of(optimizer: Any) -> Any:
    """Return the outermost module that has all of the optimizer's parameters; ``None`` without one. It takes some 100 ms."""
    import torch

    wanted = {id(x) for group in optimizer.param_groups for x in group["params"]}
    modules = [x for x in living(torch.nn.Module) if "_modules" in vars(x)]
    whole = [x for x in modules if wanted <= {id(parameter) for parameter in x.parameters()}]
    inner = {id(child) for x in whole for child in x.modules() if child is not x}
    return next((x for x in whole if id(x) not in inner), None)
