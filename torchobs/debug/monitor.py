"""``monitor_step``: check loss and gradients of a step in a training loop, and count what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any
from weakref import WeakKeyDictionary

from torchobs.debug.findings import found, history
from torchobs.debug.gradients import EXPLODING, VANISHING, GradientCheck, start_gradients
from torchobs.debug.tensors import require_module
from torchobs.detect.divergence import Divergence
from torchobs.detect.spikes import LossBaseline, NormBaseline
from torchobs.support.result import Result


@dataclass(frozen=True, slots=True)
class StepCheck(Result):
    """One step of a training loop."""

    step: int
    loss: float
    gradient_norm: float
    """L2 norm of all gradients, unscaled"""
    gradient_explosion: bool
    gradient_vanishing: bool
    loss_anomaly: bool
    """Not finite, far above the losses of this model before, or grown without end since its first"""
    anomaly_detected: bool
    anomalies: tuple[str, ...]
    gradients: GradientCheck


class _Steps:
    """What is known of one model so far."""

    __slots__ = ("baseline", "divergence", "norms", "number")

    def __init__(self) -> None:
        self.baseline, self.divergence = LossBaseline(), Divergence()
        self.norms, self.number = NormBaseline(), 0


_models: WeakKeyDictionary[Any, _Steps] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a step as a whole, by kind."""

    kinds: frozenset[str]
    anomalies: tuple[str, ...]

    def count(self, *, anomalous: bool) -> None:
        """Count the step in the history and in the flight file."""
        history.add_step(self.kinds, anomalous=anomalous or bool(self.kinds))


def monitor_step(
    model: Any, loss: Any, step: int | None = None, *, scaler: Any = None, exploding: float | None = None,
    vanishing: float = VANISHING,
) -> StepCheck:  # fmt: skip
    """Check loss and gradients of the step in progress, after one transfer from each device, and count it.

    Call it between ``backward()`` and ``zero_grad()``, before ``scaler.update()``. The loss is compared with those of the same
    model before, by :mod:`torchobs.detect.spikes`, from the 20th on, and by :mod:`torchobs.detect.divergence` with its first
    ones: one that has been a thousand times as large for 50 steps has diverged, however smoothly it grew.

    Args:
        model: the module.
        loss: a tensor with one element, or a number.
        step: its number; without one, calls for this model are counted.
        scaler: as for :func:`torchobs.debug.check_gradients`.
        exploding: gradient norm, in total or of one parameter, above which it explodes. Without one: 10; from the 20th step of
            this model on also far above its own norms (eight times, and 6 standard deviations on the log scale) or a thousand
            times those of its start, since the norm of a loss that is a sum is as large as the batch.
        vanishing: gradient norm, in total or of one weight, below which it vanishes.

    Raises:
        TypeError: ``model`` is no module, or ``loss`` not one number.
        ValueError: a threshold is not above 0.
    """
    require_module(model, "monitor_step")
    if loss is None:
        raise TypeError("monitor_step() takes a loss: a tensor with one element, or a number")
    exploding = explodes_above(model) if exploding is None else exploding
    numbers, build = start_gradients(model, loss, scaler, "monitor_step", exploding, vanishing)
    check = build(numbers.read())
    value = check.loss if check.loss is not None else float("nan")
    # a loss scaler skips a step whose gradients overflow: that is how it finds its scale
    is_skipped = check.loss_scale != 1.0 and not isfinite(check.total_norm)
    verdict = judge_step(model, value, check.total_norm, "monitor_step", exploding, vanishing, is_skipped=is_skipped)
    anomalies = tuple(dict.fromkeys([*(() if is_skipped and isfinite(value) else check.anomalies), *verdict.anomalies]))
    verdict.count(anomalous=bool(anomalies))
    return StepCheck(
        step=_models[model].number if step is None else step, loss=value, gradient_norm=check.total_norm,
        gradient_explosion="gradient_explosion" in verdict.kinds, gradient_vanishing="gradient_vanishing" in verdict.kinds,
        loss_anomaly="loss_anomaly" in verdict.kinds, anomaly_detected=bool(anomalies), anomalies=anomalies, gradients=check,
    )  # fmt: skip


def explodes_above(model: Any) -> float:
    """Return the gradient norm above which the model's next step explodes, by those of its steps before."""
    steps = _models.get(model)
    return EXPLODING if steps is None else max(EXPLODING, steps.norms.limit)


def judge_step(
    model: Any, loss: float, norm: float, function: str, exploding: float, vanishing: float, *, is_skipped: bool = False
) -> Verdict:
    """Judge a step by its loss and the total norm of its gradients; one that is not finite explodes, unless it is skipped."""
    steps = _models.setdefault(model, _Steps())
    steps.number += 1
    steps.norms.add(norm)
    told: dict[str, str] = {}
    if not isfinite(loss):
        told["loss_anomaly"] = f"the loss is {loss}"
    else:
        is_spike, has_diverged = steps.baseline.is_spike(loss), steps.divergence.add(loss)
        if has_diverged:
            told["loss_anomaly"] = (
                f"the loss {loss:.4g} stays far above the first ones, {steps.divergence.start:.4g} (diverged)"
            )
        elif is_spike:
            told["loss_anomaly"] = f"the loss {loss:.4g} is far above the usual {steps.baseline.mean:.4g}"
    if norm > exploding or (not isfinite(norm) and _has_gradients(model)):
        if isfinite(norm) or not is_skipped:
            is_above = f"the total gradient norm {norm:.3g} is above {exploding:.3g} (exploding)"
            told["gradient_explosion"] = is_above if isfinite(norm) else f"the total gradient norm is {norm}"
    elif norm < vanishing:
        told["gradient_vanishing"] = f"the total gradient norm {norm:.3g} is below {vanishing:.3g} (vanishing)"
    for kind, text in told.items():
        if isfinite(loss) or kind != "loss_anomaly":  # else the check of the gradients has told it
            found(kind, text, function=function, name=type(model).__name__)
    return Verdict(frozenset(told), tuple(told.values()))


def _has_gradients(model: Any) -> bool:
    return any(parameter.grad is not None and parameter.device.type != "meta" for parameter in model.parameters())
