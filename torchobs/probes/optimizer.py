"""Hyperparameters by parameter group, as the learning rate and others that a scheduler may change; the step resumed from.

The first group's rate is in the record of every step that its optimizer makes, read by the step hook; everything else is read
from ``param_groups`` by the sampler thread, at no cost to the training. A rate on a device (capturable optimizers) is copied
without waiting, once a second. Groups are numbered across optimizers, in the order of their first step; an optimizer that
continues with another's parameters takes its place, and a new model (``Models``) restarts the numbering, since former
optimizers may live on: a scheduler and its optimizer refer to each other.

An optimizer that holds others and calls their steps (torchtitan's ``OptimizersContainer``) has groups of its own that no
scheduler updates: the groups of the inner optimizers are used instead.

Adam, its relatives and RMSprop count their steps in the state that is saved with a checkpoint (``state[parameter]["step"]``),
fused ones of other libraries in their groups. It is read once, before the first step. A number given to
``torchobs.log(resumed_from=...)`` goes before. SGD counts nothing: then a scheduler that is stepped after every step says it
(:mod:`torchobs.probes.schedulers`), or the rank that saved the checkpoint (:mod:`torchobs.probes.restored`).
"""

from __future__ import annotations

import functools
import sys
from math import nan
from numbers import Real
from time import monotonic_ns
from typing import TYPE_CHECKING, Any
from weakref import ref

from torchobs import catalog
from torchobs.flight.step_record import RecordKind, StepFlag
from torchobs.probes.step_recorder import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from torchobs.catalog import Metric
    from torchobs.probes.context import ProbeContext


MAX_GROUPS = 8
MAX_DIFFERING = 4
"""Most groups with other hyperparameters recorded, if these differ from the first group's"""
LOOK_STEPS = 128
"""Steps after which new optimizers are searched for, unless another probe uses the hook more often"""
DEVICE_NS = 1_000_000_000


class _Container:
    """An optimizer that calls the steps of others in its own step, and those others."""

    __slots__ = ("_parts", "first", "outer")

    def __init__(self, outer: torch.optim.Optimizer) -> None:
        self.outer = ref(outer)
        self.first: ref[torch.optim.Optimizer] | None = None
        """The optimizer that updates the outer one's first parameter"""
        self._parts: dict[int, ref[torch.optim.Optimizer]] = {}

    def add(self, part: torch.optim.Optimizer) -> None:
        """Record that an optimizer steps within the outer one."""
        reference = self._parts.get(id(part))
        if reference is not None and reference() is part:
            return
        self._parts[id(part)] = ref(part)
        outer = self.outer()
        if outer is not None and next(iter(_parameters(outer)), 0) in _parameters(part):
            self.first = ref(part)

    def parts(self) -> list[torch.optim.Optimizer]:
        """Return the inner optimizers if together they update all parameters of the outer one (ZeRO's has a rank's share)."""
        outer, living = self.outer(), [part for reference in self._parts.values() if (part := reference()) is not None]
        updated = {parameter for part in living for parameter in _parameters(part)}
        return living if outer is not None and updated.issuperset(_parameters(outer)) else []


class OptimizerProbe:
    """Reads ``param_groups``."""

    name = "optimizer"

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context = context
        self._optimizers: list[ref[torch.optim.Optimizer]] = []
        self._first: Callable[[], object] = lambda: None
        self._changes = context.recorder.models.changes
        self._shown: dict[tuple[Metric, int], float] = {}
        self._arrived: dict[int, float] = {}
        self._device_due_ns = 0
        self._containers: dict[int, _Container] = {}
        breaker, self._step_hook = context.breaker(self.name), context.hooks.before_step
        context.hooks.steps_within.register(breaker, self._note_within)
        self._step_hook.register(breaker, self._take_rate)
        self._step_hook.due_at = 0

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context.recorder.plain.rated = 0

    def _take_rate(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:  # noqa: FBT001  # a listener
        del closure
        recorder, hook = self._context.recorder, self._step_hook
        if self._first() is not optimizer or recorder.models.changes != self._changes:
            self._order_optimizers(optimizer)
        rate = optimizer.param_groups[0].get("lr")
        number = number_of(rate)
        if number is not None and id(optimizer) == recorder.plain.rated and not recorder.values.flags & StepFlag.LEARNING_RATE:
            recorder.set_rate(number)
        self._take_from_device(rate, number)
        step = recorder.plain.step
        if hook.due_at <= step:  # the gradient probe, which is called first, has not set it
            hook.due_at, hook.last = step + LOOK_STEPS, step

    def _note_within(self, outer: int, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer steps within the step of the optimizer with this id."""
        container = self._containers.get(outer)
        if container is None or container.outer() is None:
            enclosing = next((living for living in self._living() if id(living) == outer), None)
            if enclosing is None or enclosing is optimizer:
                return  # a subclass's step calls its parent's
            self._containers = {key: entry for key, entry in self._containers.items() if entry.outer() is not None}
            container = self._containers[outer] = _Container(enclosing)
        if id(optimizer) != outer:
            container.add(optimizer)
        if outer == self._context.recorder.plain.rated and container.first is not None and container.first() is optimizer:
            rate = optimizer.param_groups[0].get("lr")
            number = number_of(rate)
            self._context.recorder.set_rate(number)
            self._take_from_device(rate, number)

    def _order_optimizers(self, optimizer: torch.optim.Optimizer) -> None:
        """Insert a new optimizer into the order, and update which is the first."""
        models, living = self._context.recorder.models, self._living()
        if models.changes != self._changes:
            self._changes, living = models.changes, []
        if not any(other is optimizer for other in living):
            living = _with(optimizer, living)[:MAX_GROUPS]
            self._optimizers = [ref(other) for other in living]
        self._first, self._context.recorder.plain.rated = ref(living[0]), id(living[0])

    def _take_from_device(self, rate: Any, number: float | None) -> None:
        """Copy the rates of all groups, if the first one is on a device and a copy is due."""
        if number is not None or rate is None or monotonic_ns() < self._device_due_ns:
            return
        self._device_due_ns = monotonic_ns() + DEVICE_NS
        arrived, step = self._arrived, self._context.recorder.step + 1
        arrived.clear()
        for index, group in enumerate(self._groups()):
            rate = group.get("lr")
            if number_of(rate) is None and hasattr(rate, "numel") and rate.numel() == 1:
                arrive = functools.partial(arrived.__setitem__, id(rate))
                self._context.device.take(rate, arrive if index else functools.partial(self._write_first, step))

    def _write_first(self, step: int, rate: float) -> None:
        """Write the first group's rate once it has arrived, for a step that may have ended."""
        append = self._context.writer.append
        append(step, monotonic_ns(), RecordKind.LATE, StepFlag.LEARNING_RATE, 0, 0.0, 0.0, 0.0, rate, (0.0,) * 9)

    def _living(self) -> list[torch.optim.Optimizer]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _groups(self) -> list[dict[str, Any]]:
        stepping = [part for optimizer in self._living() for part in self._parts_of(optimizer) or [optimizer]]
        return [group for optimizer in stepping for group in optimizer.param_groups][:MAX_GROUPS]

    def _parts_of(self, optimizer: object) -> list[torch.optim.Optimizer]:
        container = self._containers.get(id(optimizer))
        return container.parts() if container is not None and container.outer() is optimizer else []

    def sample(self) -> None:
        """Update the series that have changed."""
        groups = self._groups()
        series = {
            (catalog.LEARNING_RATE, index): rate
            for index, group in enumerate(groups)
            if index and (rate := self._rate(group.get("lr"))) is not None
        }
        for metric, values in _others(groups[:MAX_DIFFERING]).items():
            for index, value in enumerate(values):
                is_shown = (metric, index) in self._shown
                if value is not None and (is_shown or not index or value != values[0]):
                    series[metric, index] = value
        if series != self._shown:
            self._show(series)

    def _rate(self, rate: Any) -> float | None:
        number = number_of(rate)
        return self._arrived.get(id(rate)) if number is None else number

    def _show(self, values: Mapping[tuple[Metric, int], float]) -> None:
        gone = dict.fromkeys(self._shown.keys() - values.keys(), nan)  # its optimizer was deleted
        for (metric, index), value in {**values, **gone}.items():
            if self._shown.get((metric, index)) != value:
                self._context.set_gauge(metric, value, {"group": str(index)})
        self._shown = dict(values)


def _with(optimizer: torch.optim.Optimizer, others: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return all in order; the optimizer takes the place of the first one that it shares parameters with, and drops those."""
    parameters = set(_parameters(optimizer))
    left = [parameters.isdisjoint(_parameters(other)) for other in others]
    place = left.index(False) if False in left else len(others)  # all before it stay
    kept = [other for other, stays in zip(others, left, strict=True) if stays]
    return [*kept[:place], optimizer, *kept[place:]]


def _parameters(optimizer: torch.optim.Optimizer) -> list[int]:
    return list(map(id, parameters_of(optimizer)))


def _others(groups: list[dict[str, Any]]) -> dict[Metric, list[float | None]]:
    """Return each hyperparameter except the learning rate by group; ``None`` where the optimizer has none."""
    return {
        catalog.OPTIMIZER_WEIGHT_DECAY: [number_of(group.get("weight_decay")) for group in groups],
        catalog.OPTIMIZER_MOMENTUM: [number_of(group.get("momentum", _beta(group, 0))) for group in groups],
        catalog.OPTIMIZER_BETA2: [
            number_of(group.get("alpha") if "centered" in group else _beta(group, 1)) for group in groups
        ],
    }


def _beta(group: dict[str, Any], index: int) -> Any:
    betas = group.get("betas")
    return betas[index] if isinstance(betas, (tuple, list)) and len(betas) > index else None


def number_of(value: Any) -> float | None:
    """Return the value as a float; ``None`` if it is no number, or on a device, where reading would wait.

    Numbers are Python's and numpy's (YOLOv5's warm-up gives ``np.interp``'s), and tensors of one element on the CPU.
    """
    if isinstance(value, Real):
        return float(value)
    of_numpy = getattr(sys.modules.get("numpy"), "ndarray", None)
    if of_numpy is not None and isinstance(value, of_numpy):
        return float(value.item()) if value.size == 1 and value.dtype.kind in "fiu" else None
    device = getattr(getattr(value, "device", None), "type", None)
    return float(value.item()) if device == "cpu" and value.numel() == 1 else None


class ResumeProbe:
    """Reads the step of the optimizer that steps first."""

    name = "resume"

    def __init__(self) -> None:
        self._began = False
        self._fresh: Callable[[], Any] = lambda: None
        """The optimizer, if its state was empty: whether it keeps one shows after the first step"""

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context = context
        context.hooks.before_step.register(context.breaker(self.name), self._before_step)
        context.hooks.before_step.due_at = 0

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._fresh = lambda: None

    def _before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:  # noqa: FBT001  # a listener
        del closure
        if self._began:
            return
        self._began = True
        done, here = counted_steps(optimizer), self._context.recorder.step
        if done is None:
            self._fresh = self._fresh if getattr(optimizer, "state", None) or here else ref(optimizer)
        elif isinstance(done, Real):
            self._context.scalars.infer_resumed_from(float(done) - here)
        else:
            self._context.device.take(done, lambda value: self._context.scalars.infer_resumed_from(value - here))

    def sample(self) -> None:
        """Publish 0 once an optimizer that began without a state has one, or if nothing was loaded."""
        optimizer = self._fresh()
        if optimizer is not None and self._context.recorder.ended:
            self._fresh = lambda: None
            if optimizer.state or self._context.training.restored is False:
                self._context.scalars.infer_resumed_from(0.0)


def counted_steps(optimizer: Any) -> Any:
    """Return an optimizer's counter of its steps, a number or a one-element tensor; ``None`` without one."""
    state = getattr(optimizer, "state", {})  # that of another library may have none
    for counts in (*getattr(optimizer, "param_groups", ()), *list(state.values())[:1]):
        counted = counts.get("step") if hasattr(counts, "get") else None
        if isinstance(counted, Real) or getattr(counted, "numel", lambda: 0)() == 1:
            return counted
    return None
