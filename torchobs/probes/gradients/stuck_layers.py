"""Report layers that learn nothing, from the gradient norms and the optimizer's hyperparameters.

The distance that a step moves a weight, relative to its size, is for SGD the learning rate times the gradient; for an optimizer
with an ``eps`` (Adam, RMSprop, Adafactor) the learning rate, less where the gradient is below ``eps``. One with neither uses
signs or curvature, and is not judged. A weight's usual size is assumed to be one over the root of its inputs, which all
initialisations have (LeCun 1998; Glorot & Bengio 2010; He et al. 2015) up to a small factor, so that no weight is read.
"""

from __future__ import annotations

from collections import deque
from math import inf, isfinite, sqrt
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.detect.stuck_layers import LASTING_SAMPLES, LASTING_STEPS, LayerSample, StuckLayerDetector, StuckLayers, leading
from torchobs.probes.core.sampling_interval import MAX_INTERVAL

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.gradients.layers import Layers
    from torchobs.probes.gradients.measurement import Measurement

_QUIET_S = 60.0
_RELAXED_S = 10.0
"""Between two measurements without any doubt. One takes 12 µs a layer: 0.25 % of the time for 200 of them every second"""
_ZEROS_S = 0.001
"""Time for zero gradients in one round of the sampler, which come every 100 ms"""
_APART, _LOOKS = LASTING_STEPS // 4, 9
"""Steps that are judged after other first gradients are zero than before: so many, so far apart. A fast training does thousands
of steps in the three seconds that three measurements take, and a short one ends before"""
_PRESENT, _ABSENT = 4, 5
"""Measured steps with, and then without, the gradient of a parameter that has lost it"""
_NAMED = 8
_MATRIX = 2
"""Least dimensions of a weight: gates, biases and scales have fewer"""
_MOST_PLANS = 64
_REASONS = {
    "dead_units": "only zeros come into {at}",
    "vanishing": "the gradient has all but vanished in {at}",
    "cut_off": "no gradient at all comes to {at} (saturated or dead units behind it, or a part that is cut off from the loss)",
    "no_gradient": "its optimizer gets no gradient for {at} (a detached loss, a model that was replaced, or zero_grad() "
    "after backward())",
}


def _leading_zeros(norms: Sequence[float]) -> int:
    return next((index for index, norm in enumerate(norms) if norm), 0)


class MissingGradients:
    """First parameters of an optimizer that had a gradient and now have none, as after ``detach()`` or in ``no_grad()``.

    Others may be used in some steps only (an expert, a second input), and not every step is measured: a parameter counts that
    had a gradient in the first ``_PRESENT`` measured steps and in every one until it lost it, and has had none in ``_ABSENT``
    since. One used in a random half of the steps looks like that in one run of 500.
    """

    __slots__ = ("_absences", "_had", "_noted")

    def __init__(self) -> None:
        self._had: dict[int, set[int]] = {}
        self._noted: dict[int, int] = {}
        self._absences: dict[int, int] = {}

    def note(self, measurement: Measurement) -> int:
        """See a step's measurement; return how many such parameters there are, certain or not."""
        optimizer = measurement.optimizer() if measurement.optimizer is not None else None
        if optimizer is None or not measurement.keys:
            return 0
        key = id(optimizer)
        if self._noted.get(key, 0) < _PRESENT:
            self._noted[key] = self._noted.get(key, 0) + 1
            keys = set(measurement.keys)
            self._had[key] = self._had.get(key, keys) & keys
            return 0
        missing = self.of(measurement, optimizer)
        if missing:
            self._absences[key] = self._absences.get(key, 0) + 1
        elif self._absences.pop(key, 0):
            self._had[key] = set()  # they come and go
        return len(missing)

    def of(self, measurement: Measurement, optimizer: Any) -> list[Any]:
        """Return them, in the optimizer's order."""
        if self._noted.get(id(optimizer), 0) < _PRESENT:
            return []
        found, had, first = [], self._had[id(optimizer)], measurement.keys[:1]
        for parameter in (each for group in list(optimizer.param_groups) for each in group["params"]):
            if [id(parameter)] == first:
                break
            if id(parameter) in had and parameter.requires_grad:
                found.append(parameter)
        return found

    def certain(self, optimizer: Any) -> bool:
        """Return True if they have had none for long enough."""
        return self._absences.get(id(optimizer), 0) >= _ABSENT


class _Part(NamedTuple):
    """One parameter: its layer, the factor from its gradient's norm to the root mean square, and from that to its move."""

    layer: str
    weight: bool
    share: float
    inputs: float
    has_units: bool
    """Whether it is a matrix, so that units may be saturated or cut off"""
    group: int | None
    """``None`` if the optimizer does not have, or no longer has, the parameter"""


class _UpdateScale(NamedTuple):
    """Factor from gradient to step: ``rate``; with ``eps`` the step is ``rate`` times g / (g + eps)."""

    rate: float
    eps: float | None


class StuckLayersWatch:
    """Judges measured steps in the sampler thread. A part of ``publish.GradientPublisher``."""

    def __init__(self, context: ProbeContext, layers: Layers) -> None:
        self._context, self._layers = context, layers
        self._plans: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Part]] = {}
        self._reported_s = self._hurried = self._hurried_s = -inf
        """When layers were last reported; since which step first gradients were zero or missing when measurements were last
        made more often, and when that was"""
        self._due: deque[tuple[int, Sequence[Measurement]]] = deque(maxlen=_LOOKS)
        """Steps to judge because of them, oldest first"""
        self.begin()

    def begin(self) -> None:
        """Begin with a model, the first or another."""
        self._judge, self._due_s = StuckLayerDetector(), -inf
        self._reported: frozenset[str] = frozenset()
        self._missing, self._judged = MissingGradients(), -1
        self._zeros, self._begun, self._looks, self._looked, self._whole = -1, 0, 0, -_APART, -inf
        """First gradients that are zero or missing; since which step there are so many, looks since then, and the step of the
        last one; the last step in which there were none"""
        self._due.clear()
        self._plans.clear()
        self._unmoved = self._without = 0
        """Layers that learn nothing by their gradients, and those of an optimizer that gets none"""
        self._show()

    def note(self, measurements: Sequence[Measurement], step: int) -> None:
        """See the measurements of every step, which in a fast run are too many to be judged each: 0.3 µs."""
        zeros = sum(self._missing.note(measurement) + _leading_zeros(measurement.norms) for measurement in measurements)
        if not zeros:
            self._whole = step
        if zeros != self._zeros:
            self._zeros, self._begun, self._looks = zeros, step, 0
        if self._looks < _LOOKS and step - self._looked >= _APART:
            self._looks, self._looked = self._looks + 1, step
            self._due.append((step, measurements))

    def wanted_interval(self) -> int:
        """Return the longest interval between measurements for now: short while first gradients have just become zero.

        A fast training is measured every 50th or 100th step. That is hurried once a minute at most, for they may come and go.
        """
        if self._zeros <= 0 or self._looks >= _LOOKS:
            return MAX_INTERVAL
        if self._begun != self._hurried and monotonic() - self._hurried_s >= _QUIET_S:
            self._hurried, self._hurried_s = self._begun, monotonic()
        return _APART if self._begun == self._hurried else MAX_INTERVAL

    def check_zeros(self, *, now: bool = False) -> None:
        """Judge the steps in which other gradients are zero than before, one in any case; ``now``: all that wait."""
        until_s = inf if now else monotonic() + _ZEROS_S
        while self._waits():
            step, measurements = self._due.popleft()
            self._context.yield_gil()
            self._check(measurements, step)
            self._due_s = -inf
            if monotonic() >= until_s:
                return

    def _waits(self) -> bool:
        """Return True if there are such steps, and their layers are known."""
        return bool(self._due) and all(self._layers.find(measurement) is not None for measurement in self._due[0][1])

    def check(self, measurements: Sequence[Measurement], step: int, *, now: bool = False) -> None:
        """Judge a measured step with known layers, if due or ``now``; set the gauge and report new findings.

        Not before earlier ones that wait, which would be no samples any more: on a busy machine a round may end without them.
        """
        if now or (monotonic() >= self._due_s and not self._waits()):
            self._context.yield_gil()
            self._check(measurements, step)
            calm = self._judge.samples >= LASTING_SAMPLES and not self._judge.doubts
            self._due_s = monotonic() + _RELAXED_S * calm

    def _check(self, measurements: Sequence[Measurement], step: int) -> None:
        if step <= self._judged:
            return  # one step is one sample
        self._judged = step
        seen: dict[str, LayerSample] = {}
        unsure: set[str] = set()
        for measurement in measurements:
            optimizer = measurement.optimizer() if measurement.optimizer is not None else None
            if optimizer is None or not all(map(isfinite, measurement.norms)):
                return
            groups = list(optimizer.param_groups)  # the training thread may change them meanwhile
            plan = self._plan(measurement, groups)
            missing = [layer for each in self._missing.of(measurement, optimizer) if (layer := self._layers.known(each))]
            if missing and not self._missing.certain(optimizer):
                unsure.update(missing)
            seen.update(_layer_samples(plan, measurement.weighted(), _update_scales(optimizer, groups), missing))
        found = self._judge.judge(step, seen, self._whole)
        found = self._without_frozen(found._replace(cut=tuple(name for name in found.cut if name not in unsure)))
        self._unmoved = len(found.all)
        self._show()
        if set(found.all) - self._reported and monotonic() - self._reported_s >= _QUIET_S:
            self._report(found, step)

    def _without_frozen(self, found: StuckLayers) -> StuckLayers:
        """Return the findings without layers cut off on purpose: frozen after ``zero_grad(set_to_none=False)``."""
        if not found.cut:
            return found
        return found._replace(cut=tuple(name for name in found.cut if self._layers.trains(name)))

    def _plan(self, measurement: Measurement, param_groups: Sequence[dict[str, Any]]) -> list[_Part]:
        keys = tuple(measurement.keys), tuple(len(group["params"]) for group in param_groups)
        if keys not in self._plans:
            groups = {id(each): index for index, group in enumerate(param_groups) for each in group["params"]}
            found = zip(keys[0], self._layers.find(measurement) or (), strict=False)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[keys] = [_part(layer, key, groups.get(key), self._layers) for key, layer in found]
        return self._plans[keys]

    def _report(self, stuck: StuckLayers, step: int) -> None:
        self._reported, self._reported_s = frozenset(stuck.all), monotonic()
        total, reasons = max(self._layers.count(), len(stuck.all)), []
        for cause, layers, at in stuck.by_cause():
            self._write(cause, layers, total, at, step)
            reasons.append(_REASONS[cause].format(at=at))
        self._context.warn_limited("unmoved layers", f"{len(stuck.all)} of {total} layers learn nothing: {'; '.join(reasons)}")

    def report_missing(self, cause: str, layers: Sequence[str], step: int, parameters: Collection[int] = ()) -> None:
        """Report layers of an optimizer to whose ``parameters`` no gradient comes; no layers: some have come after all."""
        total, at = max(self._layers.count(parameters), len(layers)), layers[-1] if layers else ""
        self._write(cause, layers, total, at, step)
        if cause == "no_gradient":
            self._without = len(layers)
            self._show()
            if layers:
                what = f"{len(layers)} of {total} layers learn nothing: {_REASONS[cause].format(at=at)}"
                self._context.warn_limited("layers without a gradient", what)

    def _write(self, cause: str, layers: Sequence[str], total: int, at: str, step: int) -> None:
        attributes = {
            "layers": list(layers[:_NAMED]), "layers_affected": len(layers), "layers_total": total, "cause": cause, "at": at,
        }  # fmt: skip
        self._context.writer.event(catalog.EVENT_UNMOVED_LAYERS.name, attributes, step)

    def _show(self) -> None:
        self._context.set_gauge(catalog.GRAD_UNMOVED_LAYERS, float(self._unmoved + self._without))


def _part(layer: Any, key: int, group: int | None, layers: Layers) -> _Part:
    parameter = layer.parameters[key]() if key in layer.parameters else None
    if parameter is None or not parameter.numel():
        return _Part(layer.name, weight=False, share=0.0, inputs=0.0, has_units=False, group=group)
    elements, matrix = parameter.numel(), parameter.dim() >= _MATRIX
    named = (layers.names.get(parameter) or "").endswith("weight")
    weight = matrix or named  # a normalisation's scale counts as one
    inputs = elements / parameter.shape[0] if matrix else 0.0
    has_units = matrix and inputs > 1 and (named or parameter.shape[0] > 1)
    return _Part(layer.name, weight, 1.0 / sqrt(elements), sqrt(inputs), has_units, group)


def _layer_samples(
    plan: Sequence[_Part], norms: Sequence[float], scales: Sequence[_UpdateScale | None], missing: Sequence[str] = ()
) -> dict[str, LayerSample]:
    """Return a sample of each layer, in the model's order. ``scales`` by group (see ``_update_scale``).

    A gradient of zero means nothing where there is no matrix: a temperature that has come to its clamp, a gate, a scale.

    ``missing``: first layers that have lost their gradient; the same to a weight as one of zero.
    """
    moves: dict[str, float | None] = dict.fromkeys(missing)
    weights: dict[str, float] = {}
    others: dict[str, float] = {}
    layers = set(missing)
    for part, norm in zip(plan, norms, strict=False):
        side = weights if part.weight else others
        side[part.layer] = max(side.get(part.layer, 0.0), norm)
        moves.setdefault(part.layer, None)
        if part.has_units:
            layers.add(part.layer)
        reach = None if part.group is None else scales[part.group]
        if part.inputs and reach is not None:
            rate, eps = reach
            mean = norm * part.share
            moved = rate * part.inputs * (mean / (mean + eps) if eps is not None and mean else mean)
            moves[part.layer] = max(moves[part.layer] or 0.0, moved)
    zeros = {layer: not (weights.get(layer) or others.get(layer)) for layer in moves}
    zeros = {layer: zero for layer, zero in zeros.items() if layer in layers or not zero}
    first = set(list(zeros)[: leading(list(zeros.values()))])
    return {
        layer: LayerSample(move, weights.get(layer) == 0.0 < others.get(layer, 0.0), zeros.get(layer, False), layer in first)
        for layer, move in moves.items()
    }


def _update_scales(optimizer: Any, param_groups: Sequence[dict[str, Any]]) -> list[_UpdateScale | None]:
    """Return each group's learning rate and ``eps``; ``None`` if unknown, or if the gradient's size does not matter."""
    plain = any(kind.__name__ == "SGD" for kind in type(optimizer).__mro__)
    return [_update_scale(group, plain=plain) for group in param_groups]


def _update_scale(group: dict[str, Any], *, plain: bool) -> _UpdateScale | None:
    rate: Any = group.get("lr")
    eps: Any = group.get("eps")
    eps = eps[-1] if isinstance(eps, tuple) else eps  # Adafactor has one for the update and one for the weights' size
    if getattr(rate, "is_cpu", False):
        rate = float(rate)  # reading one on a device would wait
    if not isinstance(rate, (int, float)) or not (plain or isinstance(eps, (int, float))):
        return None
    return _UpdateScale(float(rate), None if plain else float(eps))
