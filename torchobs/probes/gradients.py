"""Measure the L2 norms of the gradients, in total and by layer, as the optimizer gets them: unscaled, before clipping by norm.

**When**: without a closure in the pre hook (SGD with momentum, nesterov and foreach changes ``p.grad`` in its step; a fused
optimizer with a loss scaler unscales in its step), with one when the outermost backward inside the step returns.
**How often**: every step if that is cheap enough, else every n-th, so that the norms' own time stays within half of the
overhead budget; the interval in use is a metric. Norms that ``clip_grad_norm_`` computes anyway are taken from there.
**Then** the sampler thread updates the series by layer from the last measured step.
"""

from __future__ import annotations

import weakref
from collections import deque
from math import isnan, nan
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from torchobs import catalog
from torchobs.detect.spikes import blown_layer
from torchobs.flight.step_record import StepFlag
from torchobs.probes.clipping import ClipWatch
from torchobs.probes.context import SamplingInterval
from torchobs.probes.gradient_norms import PendingNorms, measure, scaled
from torchobs.probes.layers import WIDER, GrownLayers, Layers, UpdateWatch
from torchobs.probes.lints import Lints, Measured
from torchobs.probes.replicas import Replicas, ReplicaWeights
from torchobs.probes.stuck_layers import NoGradients, StuckLayersWatch
from torchobs.support.process_group import rank_and_size
from torchobs.support.rate_limit import RateLimiter
from torchobs.tensors.device_reads import Devices

if TYPE_CHECKING:
    from torchobs.detect.spikes import BlownLayer
    from torchobs.probes.amp import LossScaling
    from torchobs.probes.context import ProbeContext
    from torchobs.probes.gradient_norms import Clipping, Measurement


ADVANCED = 2
_SHOW_S, _EVENT_S = 1.0, 60.0
_MOST_KEPT = 256
_LAYERS_NAMED = 8
_SUSPECTED = 16
_PAST, _COMPARED = 64, 16
"""Measured steps kept, for the anomalies that the fold finds among them, and those that one is compared with"""
_MOST_NUMBERS = 1 << 15
"""Most norms kept: 1 MiB as Python's floats"""
_RECOUNT_EVERY = 64
_NOTED_STEPS = 8
"""Steps to skip after a step in which clipping has computed the norm, and nothing is left to measure"""


class GradientProbe:
    """Measures the gradients."""

    name = "gradients"

    def __init__(self, scaling: LossScaling, replicas: Replicas | None = None) -> None:
        self._scaling, self._replicas = scaling, replicas
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._pending = PendingNorms()
        self._misuse_reported = False

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context, self._devices = context, Devices(context.device.cuda)
        self._counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int, int]] = weakref.WeakKeyDictionary()
        fixed = context.settings.grad_interval
        self._pace = SamplingInterval(context.settings.overhead_budget / 2, fixed if isinstance(fixed, int) else None)
        self._layers = Layers(context.writer.table, 0, context.yield_gil, context.trained)
        self._stuck_layers, self._model = StuckLayersWatch(context, self._layers), context.recorder.models.changes
        self._paced = self._model
        """Number of changes of the model after which the training thread last began to measure each step"""
        self._suspects: frozenset[int] = frozenset()
        """Parameters with a non-finite gradient lately; their elements are counted on a device"""
        self._suspected = 0
        self._steps: dict[int, list[Measurement]] = {}
        self._latest: tuple[int, list[Measurement]] | None = None
        self._past: deque[tuple[int, list[Measurement]]] = deque(maxlen=_PAST)
        """The last measured steps, oldest first"""
        self._shown_s, self._events = 0.0, RateLimiter(_EVENT_S)
        self._gauges: dict[str, float] = {}
        self._sized: frozenset[int] = frozenset()
        """Ids of the parameters that were trained when the models' size was last published"""
        context.count(catalog.GRAD_NONFINITE_ELEMENTS, 0)
        context.blown_layer[:] = [self._blown_layer]
        self._updates, self._grown = UpdateWatch(context, self._layers), GrownLayers(context)
        self._clip = ClipWatch(context, self._scaling, self._pace, self._measure_clipped, self._devices)
        breaker, hooks, self._step_hook = context.breaker(self.name), context.hooks, context.hooks.before_step
        names = self._layers.names
        self._lints = Lints(context, breaker, names, self._clip)
        self._weights = ReplicaWeights(context, self._replicas or Replicas(), self._devices)
        self._no_gradients = NoGradients(context, self._stuck_layers)
        hooks.before_step.register(breaker, self._before_step)
        hooks.after_closure_backward.register(breaker, self._after_backward)
        hooks.watched.register(breaker, names.watch)
        names.built_modules.install(breaker)
        context.modules[:] = [names.outermost]
        self.level_changed(hooks.level.value)
        self._clip.install(breaker)
        hooks.unscales.register(breaker, self._clip.unscales)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._clip.remove()
        self._lints.remove()
        self._layers.names.built_modules.remove()

    def sample(self) -> None:
        """Write norms of ended steps once they have arrived from a device; publish measurements."""
        recorder = self._context.recorder
        for step, norm, clipped in self._pending.pop_arrived(recorder.step):
            recorder.late(step, StepFlag.GRAD_NORM | (StepFlag.CLIPPED if clipped else 0), 0.0, norm)
        self._publish()
        self._updates.show()
        self._grown.forget(monotonic())
        self._examine_loop()
        if self._clip.misused is not None and not self._misuse_reported:
            self._misuse_reported, (limit, scale) = True, self._clip.misused
            self._context.report("clipped_scaled", limit=limit, scale=scale)

    def observe(self) -> None:
        """Publish all arrived measurements, and search for missing names."""
        self._publish(now=True)
        self._updates.show()
        self._examine_loop(last=True)
        self._show_size()

    def _show_size(self) -> None:
        """Publish the models' number of parameters, once and whenever others are trained."""
        trained = frozenset(id(parameter) for parameter in self._context.trained() if parameter.requires_grad)
        if trained == self._sized or (size := self._layers.names.size(trained)) is None:
            return
        self._sized, between = trained, size.frozen_between
        for state, number in (("trainable", size.trainable), ("frozen", size.frozen)):
            self._context.set_gauge(catalog.MODEL_PARAMETERS, number, {"state": state})
        if between:
            named = {"layers": between[:_LAYERS_NAMED], "layers_affected": len(between)}
            self._context.event(catalog.EVENT_FROZEN_BETWEEN, named)

    def _examine_loop(self, *, last: bool = False) -> None:
        self._lints.sample()
        self._weights.sample()
        if self._lints.due:
            self._step_hook.due_at = 0
        self._no_gradients.sample(self._layers, last=last)

    def level_changed(self, level: int) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._layers.room = self._context.settings.layers * (WIDER if level >= ADVANCED else 1)
        self._updates.set_level(level)
        self._step_hook.due_at = 0

    def _publish(self, *, now: bool = False) -> None:
        """Process measurements of ended steps; once a second, or ``now``, update the series from the last one."""
        self._set(catalog.GRAD_INTERVAL, float(self._pace.interval))
        self._begin_model()
        self._receive()
        self._pace.most = self._stuck_layers.wanted_interval()
        self._stuck_layers.judge()
        time_s = monotonic()
        if self._latest is None or not (now or time_s - self._shown_s >= _SHOW_S):
            return
        self._shown_s = time_s
        step, parts = self._latest
        if not self._layers.show(parts, now=now):
            return
        if now:
            self._stuck_layers.judge((step, parts))
        self._latest = None
        self._set(catalog.GRAD_NORM_RANKS, float(self._ranks(parts)))
        for metric, limit in ((catalog.GRAD_CLIP_MAX_NORM, self._clip.limit), (catalog.GRAD_CLIP_MAX_VALUE, self._clip.value)):
            if limit is not None:
                self._set(metric, limit)
            elif self._gauges.pop(metric.name, None) is not None:
                self._context.set_gauge(metric, nan)  # it was known once, and another is in force

    def _begin_model(self) -> None:
        """Reset the layers if the model has changed; before the measurements of the new one are received."""
        changes = self._context.recorder.models.changes
        if self._model != changes:
            self._model = changes
            self._past.clear()
            self._layers.begin_model()
            self._stuck_layers.begin()

    def _receive(self) -> None:
        last = self._context.recorder.step
        for step in sorted(self._steps):
            parts = self._steps[step]
            if step > last or not all(part.arrived() for part in parts):
                return
            del self._steps[step]
            self._latest = (step, parts)
            self._remember(step, parts)
            self._stuck_layers.add_measurements(parts, step)
            if any(part.faults for part in parts):
                self._report_faults(step, parts)
            elif self._suspected:
                self._suspected -= 1
                self._suspects = self._suspects if self._suspected else frozenset()

    def _remember(self, step: int, parts: list[Measurement]) -> None:
        numbers = sum(len(part.keys) for part in parts)
        while self._past and (len(self._past) + 1) * numbers > _MOST_NUMBERS:
            self._past.popleft()
        self._past.append((step, parts))

    def _blown_layer(self, step: int) -> BlownLayer | None:
        """Return the layer with the most grown gradient in that step; ``None`` if none has grown, or none was measured."""
        self._receive()  # the step may have ended since the last round
        measurements = next((parts for at, parts in self._past if at == step), None)
        norms = self._layers.norms(measurements, now=True) if measurements is not None else None
        if norms is None:
            return None
        before = [self._layers.norms(parts) for at, parts in self._past if at < step]
        blown = blown_layer(norms, [usual for usual in before[-_COMPARED:] if usual is not None])
        if blown is not None:
            self._grown.publish(blown, monotonic())
        return blown

    def _report_faults(self, step: int, parts: list[Measurement]) -> None:
        """Count non-finite elements and report their layers: at once, then at most once a minute."""
        faults = [fault for part in parts for fault in part.faults]
        elements = sum(fault.elements for fault in faults)
        self._context.count(catalog.GRAD_NONFINITE_ELEMENTS, elements)
        self._suspects, self._suspected = frozenset(fault.key for fault in faults), _SUSPECTED
        layers = [layer.name for part in parts for layer in self._layers.of_faults(part)]
        if not self._events.take(monotonic()):
            return
        kinds = {"nan" if isnan(fault.norm) else "inf" for fault in faults}
        attributes = {
            "layers": layers[:_LAYERS_NAMED], "layers_affected": len(layers), "elements": elements, "kinds": sorted(kinds),
        }  # fmt: skip
        self._context.writer.event(catalog.EVENT_NONFINITE_GRADIENT.name, attributes, step)

    def _ranks(self, parts: list[Measurement]) -> int:
        """Return over how many ranks the squares of norms add up to the whole."""
        if any(part.whole for part in parts):
            return 1
        if self._layers.flattened:  # FSDP1: unknown by parameter, so every rank is assumed to hold a shard
            group = rank_and_size()
            return 1 if group is None else group[1]
        return max(part.ranks for part in parts)

    def _set(self, metric: catalog.Metric, value: float) -> None:
        if value != self._gauges.get(metric.name) and self._context.set_gauge(metric, value):
            self._gauges[metric.name] = value

    # -- in the training thread --------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:  # noqa: FBT001  # a listener
        self._weights.before_step()
        if closure:
            self._optimizer = weakref.ref(optimizer)
            self._clip.forget()
            return
        context, pace, begun_ns = self._context, self._pace, monotonic_ns()
        step, changes = context.recorder.plain.step, context.recorder.models.changes
        if changes != self._paced:
            self._paced = changes
            pace.begin(step)
        clipping = self._clip.pop_clipping(optimizer, self._grads_of)
        pace.spend_later(self._devices.take_ns())
        due = pace.is_due(step)
        if clipping is not None:
            self._use_clipping_norm(clipping, optimizer, due=due)
        elif due and self._clip.has_noted(step):
            pace.rest(_NOTED_STEPS)
        elif due:
            self._measure(optimizer, within=False)
        if due:
            self._lint(optimizer, step + 1, begun_ns, within=False)
        if self._lints.due:
            begun_ns = monotonic_ns()
            self._lints.before_any_step(optimizer, step + 1)
            pace.spend(monotonic_ns() - begun_ns)
        if self._updates.level:
            self._updates.before_step(optimizer, monotonic_ns() if due else begun_ns)
        hook = self._step_hook
        hook.due_at, hook.last = min(pace.due_at, self._updates.due_at, self._weights.due_at), pace.step

    def _after_backward(self) -> None:
        optimizer, begun_ns = self._optimizer() if self._optimizer is not None else None, monotonic_ns()
        self._pace.spend_later(self._devices.take_ns())
        if optimizer is not None and self._pace.is_due(self._context.recorder.step):
            self._measure(optimizer, within=True)
            self._lint(optimizer, self._context.recorder.step + 1, begun_ns, within=True)
        # last, since another probe may have changed it, and the next optimizer may have no closure
        self._step_hook.due_at = min(self._pace.due_at, self._updates.due_at, self._weights.due_at)

    def _lint(self, optimizer: torch.optim.Optimizer, step: int, begun_ns: int, *, within: bool) -> None:
        """Examine an optimizer that is about to take a measured step. ``within``: after a closure's backward pass."""
        sample = _last_with_gradient(optimizer)
        self._lints.before_step(Measured(step, optimizer, sample), within=within)
        self._no_gradients.before_step(optimizer, sample)
        self._pace.spend(monotonic_ns() - begun_ns)

    def _grads_of(self, optimizer: torch.optim.Optimizer, expected: int) -> int:
        """Return its number of gradients, counted now and then: parameters are seldom frozen or thawed."""
        count, against, age = self._counts.get(optimizer, (0, -1, 0))
        if age >= _RECOUNT_EVERY or expected not in {against, count}:
            count, against, age = len(_parameters_with_gradient(optimizer)), expected, 0
        self._counts[optimizer] = (count, against, age + 1)
        return count

    def _measure(self, optimizer: torch.optim.Optimizer, *, within: bool) -> None:
        parameters = _parameters_with_gradient(optimizer)
        gradients = [parameter.grad for parameter in parameters]
        scale = getattr(optimizer, "grad_scale", None)
        scale = scale if isinstance(scale, torch.Tensor) else None  # other libraries use the name for something else
        keys, suspects = list(map(id, parameters)), self._suspects
        measurement = measure(keys, gradients, scale, suspects, self._devices) if parameters else None
        if measurement is not None:
            self._record(measurement, within=within)
            self._keep(measurement, optimizer, within=within)
            if measurement.faults and not (within or measurement.arriving):
                self._context.hooks.nonfinite_gradient.notify(optimizer, frozenset())

    def _measure_clipped(self, gradients: list[Any]) -> Measurement | None:
        """Measure gradients that are about to be clipped, or may have an inexact norm."""
        return measure(list(map(id, gradients)), gradients, None, self._suspects, self._devices)

    def _use_clipping_norm(self, clipping: Clipping, optimizer: torch.optim.Optimizer, *, due: bool) -> None:
        """Use the norm that clipping has computed in this step."""
        scale = getattr(optimizer, "grad_scale", None)
        if clipping.scale is None and isinstance(scale, torch.Tensor):
            self._clip.mark_scaled(clipping, scale)  # a fused optimizer unscales in its step
        total, measured = clipping.total, clipping.measured
        if clipping.scale is not None:
            total = self._unscaled(clipping)
        if measured is not None:
            names = {id(parameter.grad): id(parameter) for parameter in _parameters_with_gradient(optimizer)}
            measured.keys = [names.get(key, 0) for key in measured.keys]
            measured.faults = [fault._replace(key=names.get(fault.key, 0)) for fault in measured.faults]
            if due or measured.faults:
                self._keep(measured, optimizer, within=False)
        if isinstance(total, float):
            scale = clipping.scale if isinstance(clipping.scale, float) else 1.0
            self._context.recorder.add_norm(total, scale, within_step=False)
            if total - total:  # NaN, which is true, unless it is finite
                faults = frozenset(fault.key for fault in measured.faults) if measured is not None else frozenset[int]()
                self._context.hooks.nonfinite_gradient.notify(optimizer, faults - {0})
        elif total is not None:
            self._expect(total, clipping.limit)
        elif measured is not None:
            self._record(measured, within=False)

    def _unscaled(self, clipping: Clipping) -> Any:
        """Return the unscaled total norm; store the scale with the single norms."""
        scale, total, measured = clipping.scale, clipping.total, clipping.measured
        if isinstance(scale, float):
            if measured is not None:
                measured.scale = scale
        elif measured is not None and scaled(measured, scale, self._devices) is None:
            clipping.measured = None
        with torch.no_grad():
            return total if total is None else total / scale

    def _expect(self, norm: torch.Tensor, limit: float) -> None:
        arriving: list[float] = []
        if self._context.device.take(norm, arriving.append):
            self._pending.add(self._context.recorder.step + 1, lambda: arriving[0] if arriving else None, limit)

    def _record(self, measurement: Measurement, *, within: bool) -> None:
        """Record the total, in a later record if a device has yet to deliver it."""
        recorder = self._context.recorder
        if measurement.arriving:
            self._pending.add(recorder.step + 1, lambda: measurement.total() if measurement.arrived() else None, anew=within)
        else:
            recorder.add_norm(measurement.total(), measurement.scale, within_step=within)

    def _keep(self, measurement: Measurement, optimizer: torch.optim.Optimizer, *, within: bool) -> None:
        """Queue a measurement for the sampler thread; after a closure's backward pass it replaces the one before."""
        measurement.optimizer, step = weakref.ref(optimizer), self._context.recorder.step + 1
        if len(self._steps) >= _MOST_KEPT and step not in self._steps:
            return
        parts = self._steps.setdefault(step, [])
        if within:
            parts[:] = [part for part in parts if part.optimizer is None or part.optimizer() is not optimizer]
        parts.append(measurement)


def _parameters_with_gradient(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _last_with_gradient(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    last = (p for group in reversed(optimizer.param_groups) for p in reversed(group["params"]) if p.grad is not None)
    return next(last, None)
