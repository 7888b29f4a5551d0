"""Report layers that learn nothing, from the gradient norms and the optimizer's hyperparameters.

The distance that a step moves a weight, relative to its size, is for SGD the learning rate times the gradient; for an optimizer
with an ``eps`` (Adam, RMSprop, Adafactor) the learning rate, less where the gradient is below ``eps``. One with neither uses
signs or curvature, and is not judged. A weight's usual size is assumed to be one over the root of its inputs, which all
initialisations have (LeCun 1998; Glorot & Bengio 2010; He et al. 2015) up to a small factor, so that no weight is read.
"""

from __future__ import annotations

from math import inf, isfinite, sqrt
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.detect.stuck_layers import LASTING_SAMPLES, LayerSample, StuckLayerDetector, StuckLayers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.gradients.layers import Layers
    from torchobs.probes.gradients.measurement import Measurement

_QUIET_S = 60.0
_RELAXED_S = 10.0
"""Between two measurements without any doubt. One takes 12 µs a layer: 0.25 % of the time for 200 of them every second"""
_NAMED = 8
_MATRIX = 2
"""Least dimensions of a weight: gates, biases and scales have fewer"""
_MOST_PLANS = 64


class _Part(NamedTuple):
    """One parameter: its layer, the factor from its gradient's norm to the root mean square, and from that to its move."""

    layer: str
    weight: bool
    share: float
    inputs: float
    group: int | None
    """``None`` if the optimizer does not have, or no longer has, the parameter"""


class _UpdateScale(NamedTuple):
    """Factor from gradient to step: ``rate``; with ``eps`` the step is ``rate`` times g / (g + eps)."""

    rate: float
    eps: float | None


class StuckLayersWatch:
    """Judges measured steps in the sampler thread. A part of ``publish.GradientPublisher``."""

    def __init__(self, context: ProbeContext, layers: Layers) -> None:
        self._context, self._layers, self._judge = context, layers, StuckLayerDetector()
        self._plans: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Part]] = {}
        self._reported: frozenset[str] = frozenset()
        self._reported_s = self._due_s = -inf
        context.set_gauge(catalog.GRAD_UNMOVED_LAYERS, 0.0)

    def begin(self) -> None:
        """Reset for another model."""
        self._judge, self._reported, self._due_s = StuckLayerDetector(), frozenset(), -inf
        self._plans.clear()

    def check(self, measurements: Sequence[Measurement], step: int, *, now: bool = False) -> None:
        """Judge a measured step with known layers, if due or ``now``; set the gauge and report new findings."""
        if now or monotonic() >= self._due_s:
            self._context.yield_gil()
            self._check(measurements, step)
            calm = self._judge.samples >= LASTING_SAMPLES and not self._judge.doubts
            self._due_s = monotonic() + _RELAXED_S * calm

    def _check(self, measurements: Sequence[Measurement], step: int) -> None:
        seen: dict[str, LayerSample] = {}
        for measurement in measurements:
            optimizer = measurement.optimizer() if measurement.optimizer is not None else None
            if optimizer is None or not all(map(isfinite, measurement.norms)):
                return
            groups = list(optimizer.param_groups)  # the training thread may change them meanwhile
            seen.update(
                _layer_samples(self._plan(measurement, groups), measurement.weighted(), _update_scales(optimizer, groups))
            )
        found = self._judge.judge(step, seen)
        self._context.set_gauge(catalog.GRAD_UNMOVED_LAYERS, len(found.all))
        if set(found.all) - self._reported and monotonic() - self._reported_s >= _QUIET_S:
            self._report(found, step, len(seen))

    def _plan(self, measurement: Measurement, param_groups: Sequence[dict[str, Any]]) -> list[_Part]:
        keys = tuple(measurement.keys), tuple(len(group["params"]) for group in param_groups)
        if keys not in self._plans:
            groups = {id(each): index for index, group in enumerate(param_groups) for each in group["params"]}
            found = zip(keys[0], self._layers.find(measurement) or (), strict=False)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[keys] = [_part(layer, key, groups.get(key), self._layers) for key, layer in found]
        return self._plans[keys]

    def _report(self, found: StuckLayers, step: int, layers: int) -> None:
        self._reported, self._reported_s = frozenset(found.all), monotonic()
        cause, at = ("dead_units", found.unfed[0]) if found.unfed else ("vanishing", found.lost[-1])
        attributes = {
            "layers": list(found.all[:_NAMED]), "layers_affected": len(found.all), "layers_measured": layers, "cause": cause,
            "at": at,
        }  # fmt: skip
        self._context.writer.event(catalog.EVENT_UNMOVED_LAYERS.name, attributes, step)
        why = f"only zeros come into {at}" if found.unfed else f"the gradient has all but vanished in {at}"
        self._context.warn_limited("unmoved layers", f"{len(found.all)} of {layers} layers learn nothing: {why}")


def _part(layer: Any, key: int, group: int | None, layers: Layers) -> _Part:
    parameter = layer.parameters[key]() if key in layer.parameters else None
    if parameter is None or not parameter.numel():
        return _Part(layer.name, weight=False, share=0.0, inputs=0.0, group=group)
    elements, matrix = parameter.numel(), parameter.dim() >= _MATRIX
    weight = matrix or (layers.names.get(parameter) or "").endswith("weight")  # a normalisation's scale counts as one
    inputs = elements / parameter.shape[0] if matrix else 0.0
    return _Part(layer.name, weight, 1.0 / sqrt(elements), sqrt(inputs), group)


def _layer_samples(
    plan: Sequence[_Part], norms: Sequence[float], scales: Sequence[_UpdateScale | None]
) -> dict[str, LayerSample]:
    """Return a sample of each layer, in the model's order. ``scales`` by group (see ``_update_scale``)."""
    moves: dict[str, float | None] = {}
    weights: dict[str, float] = {}
    others: dict[str, float] = {}
    for part, norm in zip(plan, norms, strict=False):
        side = weights if part.weight else others
        side[part.layer] = max(side.get(part.layer, 0.0), norm)
        moves.setdefault(part.layer, None)
        reach = None if part.group is None else scales[part.group]
        if part.inputs and reach is not None:
            rate, eps = reach
            mean = norm * part.share
            moved = rate * part.inputs * (mean / (mean + eps) if eps is not None and mean else mean)
            moves[part.layer] = max(moves[part.layer] or 0.0, moved)
    return {
        layer: LayerSample(
            move, weights.get(layer) == 0.0 < others.get(layer, 0.0), not (weights.get(layer) or others.get(layer))
        )
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
