"""Layers that learn nothing, since their gradients are missing, zero, or too small to move a weight.

*Too small*: the distance that a step moves a weight, relative to its size, is for SGD the learning rate times the gradient;
for an optimizer with an ``eps`` (Adam, RMSprop, Adafactor) the learning rate, less where the gradient is below ``eps``. One
with neither uses signs or curvature, and is not judged. A weight's usual size is assumed to be one over the root of its
inputs, as initialisations have it (LeCun 1998; Glorot & Bengio 2010; He et al. 2015) up to a small factor: no weight is read.

*All missing*: the loss is cut off from the model (``detach``, ``item``, ``no_grad``, a new tensor of its value), ``backward``
is not called or comes before ``zero_grad``, or the optimizer has the parameters of a model that was copied or replaced since.
Healthy, and not reported: an optimizer that changes its parameters without gradients; one with frozen parameters; a dummy for a
scheduler, with a parameter that belongs to no module; players that train in turn, since an optimizer that has had gradients is
reported only while no other one has any.

*A part that never had one* is information, no warning: it may be unused on purpose (a pooler, a head, a backbone under
``no_grad``). Its version, or its state, shows that it was not stepped in between, as a seldom chosen expert would be.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from math import inf, isfinite, sqrt
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.detect.learning import LASTING_SAMPLES, LASTING_STEPS, LayerSample, StuckLayerDetector, StuckLayers, leading
from torchobs.probes.context import MAX_INTERVAL
from torchobs.probes.step_recorder import parameters_of
from torchobs.tensors.names import layer_of
from torchobs.tensors.references import ObjectIndex, TensorReference

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torchobs.probes.context import ProbeContext
    from torchobs.probes.gradient_norms import Measurement
    from torchobs.probes.layers import Layers

_QUIET_S = 60.0
_USUAL_S, _RELAXED_S = 1.0, 10.0
"""Time between two judged steps, and without any doubt. One takes 12 µs a layer: 0.25 % of a second for 200 layers"""
_APART, _LOOKS = LASTING_STEPS // 4, 9
"""Steps that are judged after other first gradients are zero than before: so many, so far apart. A fast training does thousands
of steps in the three seconds that three measurements take, and a short one ends before"""
_PRESENT, _ABSENT = 4, 5
"""Measured steps with, and then without, the gradient of a parameter that has lost it"""
_NAMED = 8
_MATRIX = 2
"""Least dimensions of a weight: gates, biases and scales have fewer"""
_MOST_PLANS = 64


class _Presence:
    """Which of an optimizer's parameters have always had a gradient, by id, and for how many measured steps one is missing."""

    __slots__ = ("absences", "had", "steps")

    def __init__(self) -> None:
        self.had, self.steps, self.absences = set[int](), 0, 0


class MissingGradients:
    """First parameters of an optimizer that had a gradient and now have none, as after ``detach()`` or in ``no_grad()``.

    Others may be used in some steps only (an expert, a second input), and not every step is measured: a parameter counts that
    had a gradient in the first ``_PRESENT`` measured steps and in every one until it lost it, and has had none in ``_ABSENT``
    since. One used in a random half of the steps looks like that in one run of 500.
    """

    def __init__(self) -> None:
        self._optimizers = ObjectIndex(_MOST_OPTIMIZERS, lambda _: _Presence())

    def count_missing(self, measurement: Measurement) -> int:
        """Add a step's measurement; return the number of parameters without a gradient, certain or not."""
        optimizer = measurement.optimizer() if measurement.optimizer is not None else None
        if optimizer is None or not measurement.keys:
            return 0
        presence = self._optimizers.of(optimizer)
        if presence is None:
            return 0
        if presence.steps < _PRESENT:
            presence.had = presence.had.intersection(measurement.keys) if presence.steps else set(measurement.keys)
            presence.steps += 1
            return 0
        missing = self.find_missing(measurement, optimizer)
        if missing:
            presence.absences += 1
        elif presence.absences:
            presence.had, presence.absences = set(), 0  # they come and go
        return len(missing)

    def find_missing(self, measurement: Measurement, optimizer: Any) -> list[Any]:
        """Return the parameters that miss their gradient, in the optimizer's order."""
        presence = self._optimizers.of(optimizer)
        if presence is None or presence.steps < _PRESENT:
            return []
        missing, first = [], measurement.keys[:1]
        for parameter in parameters_of(optimizer):
            if [id(parameter)] == first:
                break
            if id(parameter) in presence.had and parameter.requires_grad:
                missing.append(parameter)
        return missing

    def certain(self, optimizer: Any) -> bool:
        """Return whether an optimizer's parameters have had none for long enough."""
        presence = self._optimizers.of(optimizer)
        return presence is not None and presence.absences >= _ABSENT


class _Part(NamedTuple):
    """One parameter: its layer, the factor from its gradient's norm to the root mean square, and from that to its move."""

    layer: str
    weight: bool
    share: float
    inputs: float
    has_units: bool
    """Whether it is a matrix, so that units may be saturated or cut off"""
    group: int | None
    """``None`` if the optimizer does not have the parameter, or not now"""


class _UpdateScale(NamedTuple):
    """Factor from gradient to step: ``rate``; with ``eps`` the step is ``rate`` times g / (g + eps)."""

    rate: float
    eps: float | None


class StuckLayersWatch:
    """Judges measured steps in the sampler thread, and reports. A part of the gradient probe."""

    def __init__(self, context: ProbeContext, layers: Layers) -> None:
        self._context, self._layers = context, layers
        self._plans: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Part]] = {}
        self._reported_s = self._hurried = self._hurried_s = -inf
        """When layers were last reported; since which step first gradients were zero or missing when measurements were last
        made more often, and when that was"""
        self._due: deque[tuple[int, Sequence[Measurement]]] = deque(maxlen=_LOOKS)
        """Steps to judge as soon as their layers are known, oldest first"""
        self.begin()

    def begin(self) -> None:
        """Begin with a model, the first or another."""
        self._judge, self._due_s, self._judged = StuckLayerDetector(), -inf, -1
        self._reported: frozenset[str] = frozenset()
        self._missing = MissingGradients()
        self._zeros, self._begun, self._looks, self._last_look, self._whole = -1, 0, 0, -_APART, -inf
        """First gradients that are zero or missing; since which step there are so many, looks since then, and the step of the
        last one; the last step in which there were none"""
        self._due.clear()
        self._plans.clear()
        self._unmoved = self._without = 0
        """Layers that learn nothing by their gradients, and layers of an optimizer that gets none"""
        self._show()

    def add_measurements(self, measurements: Sequence[Measurement], step: int) -> None:
        """Add the measurements of every step, in 0.3 µs; a fast run has too many to judge each."""
        zeros = sum(
            self._missing.count_missing(measurement) + next((i for i, norm in enumerate(measurement.norms) if norm), 0)
            for measurement in measurements
        )
        if not zeros:
            self._whole = step
        if zeros != self._zeros:
            self._zeros, self._begun, self._looks = zeros, step, 0
        is_look = self._looks < _LOOKS and step - self._last_look >= _APART
        if is_look:
            self._looks, self._last_look = self._looks + 1, step
        if is_look or monotonic() >= self._due_s:
            is_calm = self._judge.samples >= LASTING_SAMPLES and not self._judge.doubts and not is_look
            self._due_s = monotonic() + (_RELAXED_S if is_calm else _USUAL_S)
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

    def judge(self, last: tuple[int, Sequence[Measurement]] | None = None) -> None:
        """Judge the next step that waits, or, as the rank ends, all up to its ``last``; report new findings."""
        if last is not None:
            self._due.append(last)
        while self._due and all(self._layers.find(measurement) is not None for measurement in self._due[0][1]):
            step, measurements = self._due.popleft()
            self._context.yield_gil()
            if step > self._judged:  # one step is one sample
                self._judged = step
                self._judge_step(measurements, step)
            if last is None:
                return

    def _judge_step(self, measurements: Sequence[Measurement], step: int) -> None:
        samples: dict[str, LayerSample] = {}
        unsure: set[str] = set()
        for measurement in measurements:
            optimizer = measurement.optimizer() if measurement.optimizer is not None else None
            if optimizer is None or not all(map(isfinite, measurement.norms)):
                return
            groups = list(optimizer.param_groups)  # the training thread may change them meanwhile
            absent = self._missing.find_missing(measurement, optimizer)
            missing = [layer for parameter in absent if (layer := self._layers.name_of(parameter))]
            if missing and not self._missing.certain(optimizer):
                unsure.update(missing)
            plain = any(kind.__name__ == "SGD" for kind in type(optimizer).__mro__)
            scales = [_update_scale(group, plain=plain) for group in groups]
            samples.update(_layer_samples(self._plan(measurement, groups), measurement.weighted(), scales, missing))
        stuck = self._judge.judge(step, samples, self._whole)
        # without those that are cut off on purpose: frozen after ``zero_grad(set_to_none=False)``
        cut = tuple(name for name in stuck.cut if name not in unsure and self._layers.trains(name))
        stuck = stuck._replace(cut=cut)
        self._unmoved = len(stuck.all)
        self._show()
        if set(stuck.all) - self._reported and monotonic() - self._reported_s >= _QUIET_S:
            self._report(stuck, step)

    def _plan(self, measurement: Measurement, param_groups: Sequence[dict[str, Any]]) -> list[_Part]:
        keys = tuple(measurement.keys), tuple(len(group["params"]) for group in param_groups)
        if keys not in self._plans:
            groups = {id(parameter): index for index, group in enumerate(param_groups) for parameter in group["params"]}
            layers = zip(keys[0], self._layers.find(measurement) or (), strict=False)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[keys] = [_part(layer, key, groups.get(key), self._layers) for key, layer in layers]
        return self._plans[keys]

    def _report(self, stuck: StuckLayers, step: int) -> None:
        self._reported, self._reported_s = frozenset(stuck.all), monotonic()
        total = self._layers.count(stuck.all)
        for cause, layers, at in stuck.by_cause():
            self._context.report(f"unmoved_layers_{cause}", step, **_values(cause, layers, total, at))

    def report_missing(self, cause: str, layers: Sequence[str], step: int, parameters: Collection[int] = ()) -> None:
        """Report layers of optimizers with ``parameters`` that get no gradient; no layers: some have come after all."""
        total, at = max(self._layers.count(layers, parameters), len(layers)), layers[-1] if layers else ""
        if cause == "no_gradient":
            self._without = len(layers)
            self._show()
        if layers and cause == "no_gradient":
            self._context.report("unmoved_layers_no_gradient", step, **_values(cause, layers, total, at))
        else:
            self._context.writer.event(catalog.EVENT_UNMOVED_LAYERS.name, _values(cause, layers, total, at), step)

    def _show(self) -> None:
        self._context.set_gauge(catalog.GRAD_UNMOVED_LAYERS, float(self._unmoved + self._without))


def _values(cause: str, layers: Sequence[str], total: int, at: str) -> dict[str, object]:
    return {"layers": list(layers[:_NAMED]), "layers_affected": len(layers), "layers_total": total, "cause": cause, "at": at}


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


def _update_scale(group: dict[str, Any], *, plain: bool) -> _UpdateScale | None:
    """Return a group's learning rate and ``eps``; ``None`` if unknown, or if the gradient's size does not matter."""
    rate: Any = group.get("lr")
    eps: Any = group.get("eps")
    eps = eps[-1] if isinstance(eps, tuple) else eps  # Adafactor has one for the update and one for the weights' size
    if getattr(rate, "is_cpu", False):
        rate = float(rate)  # reading one on a device would wait
    if not isinstance(rate, (int, float)) or not (plain or isinstance(eps, (int, float))):
        return None
    return _UpdateScale(float(rate), None if plain else float(eps))


APART = LASTING_STEPS // LASTING_SAMPLES
"""Least steps without a gradient before the verdict on an optimizer that never had one; else ``LASTING_STEPS``"""
_EVERY = 8
"""Steps between two looks at optimizers that have some gradients"""
_MOST_OPTIMIZERS = 16
_CHOSEN, _COMPARED = 3, 16
"""Most parameters of an optimizer that must stay as they are, and most of their elements that are compared"""


class _Optimizer:
    """The state of an optimizer without a gradient."""

    __slots__ = ("before", "done", "due", "had", "looks", "resumed", "since", "without")

    def __init__(self) -> None:
        self.done = self.had = False
        """Whether there is a verdict; whether it has had gradients"""
        self.resumed = 0
        """Step in which gradients came after the verdict"""
        self.looks = self.since = 0
        """Looks without a gradient in a row, and the step of the first"""
        self.before: list[tuple[int, Any]] = []
        """Versions and elements of some parameters at the first of these looks"""
        self.without: list[tuple[TensorReference, int]] | None = None
        """Parameters without a gradient at the first look that had some, with their versions"""
        self.due = 0
        """Step of the next look at them; -1 after the last one"""

    def look_again(self) -> None:
        """Drop the verdict, since gradients came after it. In the sampler thread."""
        self.done = False  # first: while it is set, the training thread notes a gradient
        self.resumed = 0


class _Missing(NamedTuple):
    """Parameters that get no gradient."""

    state: _Optimizer
    cause: str
    step: int
    parameters: list[TensorReference]


class _Open(NamedTuple):
    """Reported facts of an optimizer: layers, ids of their parameters, and since which step they get no gradient."""

    layers: list[str]
    parameters: set[int]
    step: int


class NoGradients:
    """Optimizers without a gradient; the training thread looks, the sampler thread names and reports.

    Each event has the layers of all optimizers that get none, so that one is not hidden by another.
    """

    def __init__(self, context: ProbeContext, stuck_layers: StuckLayersWatch) -> None:
        import torch  # torch is optional until training begins

        self._context, self._torch, self._stuck_layers = context, torch, stuck_layers
        self._plain = {torch.Tensor, torch.nn.Parameter}
        self._optimizers = ObjectIndex(_MOST_OPTIMIZERS, lambda _: _Optimizer())
        self._others_train = False
        self._trained, self._last_look = 0, -_EVERY
        """Step in which any optimizer last had a gradient, and of the last look at one"""
        self._unreported: list[_Missing] = []
        self._unused = False
        """Whether unused parameters were reported"""
        self._open: dict[_Optimizer, _Open] = {}
        """Parameters reported to get no gradient, until some come after all"""

    # -- in the training thread --------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, sample: Any) -> None:
        """Examine an optimizer that is about to take a measured step. ``sample``: a parameter of it with a gradient."""
        step = self._context.recorder.step
        if sample is not None:
            self._trained = step
            if 0 < step - self._last_look < _EVERY:
                return
        self._last_look = step if step - self._last_look >= _EVERY else self._last_look
        state = self._optimizers.of(optimizer)
        if state is None:
            return
        if sample is not None:
            if state.done and not state.resumed:
                state.resumed = step + 1
            state.looks, state.had, self._others_train = 0, True, True
            if 0 <= state.due <= step:
                self._examine_parts(state, optimizer, step)
        elif not state.done:
            self._examine_all(state, optimizer, step)

    def _examine_parts(self, state: _Optimizer, optimizer: Any, step: int) -> None:
        without = [parameter for parameter in _filled(optimizer) if parameter.grad is None and parameter.requires_grad]
        if state.without is None:
            state.without = [(TensorReference(parameter), parameter._version) for parameter in without]
            state.due = step + LASTING_STEPS if without else -1
            return
        versions = {id(parameter): version for reference, version in state.without if (parameter := reference()) is not None}
        stepped = _possibly_stepped(optimizer)
        never = [tensor for tensor in without if id(tensor) not in stepped and versions.get(id(tensor)) == tensor._version]
        state.due, state.without = -1, []
        if never:
            self._unreported.append(_Missing(state, "unused", step + 1, list(map(TensorReference, never))))

    def _examine_all(self, state: _Optimizer, optimizer: Any, step: int) -> None:
        state.looks += 1
        if state.looks == 1:
            state.since, state.before = step, self._chosen(optimizer)
        if state.had and self._trained >= state.since:  # this one now and then, or others, in turn
            state.looks = 0
            return
        if state.looks <= LASTING_SAMPLES or step - state.since < (LASTING_STEPS if state.had else APART):
            return
        before, state.before, now = state.before, [], self._chosen(optimizer)
        if [version for version, _ in now] != [version for version, _ in before]:
            state.looks, state.done = 0, not state.had  # gradients in steps that were not measured, or it needs none
            return
        state.done = True
        trained = [TensorReference(parameter) for parameter in _filled(optimizer) if parameter.requires_grad]
        if not trained:
            return
        report = partial(self._add_missing, _Missing(state, "no_gradient", state.since + 1, trained))
        with self._torch.no_grad():
            pairs = [(old, new) for (_, old), (_, new) in zip(before, now, strict=True) if old is not None]
            differ = [(old != new).any().float() for old, new in pairs]
            if not differ:
                report(0.0)
            elif len({difference.device for difference in differ}) == 1:
                self._context.device.take(self._torch.stack(differ).sum(), report)

    def _add_missing(self, missing: _Missing, differ: float) -> None:
        if not differ:
            self._unreported.append(missing)

    def _chosen(self, optimizer: Any) -> list[tuple[int, Any]]:
        """Return versions of some parameters, and copies of some of their elements."""
        owned = _filled(optimizer)
        chosen = [owned[len(owned) * index // _CHOSEN] for index in range(_CHOSEN)] if owned else []
        with self._torch.no_grad():
            return [(parameter._version, self._elements(parameter)) for parameter in chosen]

    def _elements(self, parameter: Any) -> Any:
        plain = type(parameter) in self._plain and parameter.layout is self._torch.strided and not parameter.is_meta
        return parameter.detach().reshape(-1)[:_COMPARED].clone() if plain else None

    # -- in the sampler thread ---------------------------------------------------------------------------------------------

    def sample(self, layers: Layers, *, last: bool) -> None:
        """Name and report the stuck layers, or take the report back. ``last``: do not wait for names."""
        for state in [state for state in self._open if state.resumed]:
            del self._open[state]
            self._report(state.resumed)
            state.look_again()
        if not self._unreported:
            return
        state, cause, step, references = self._unreported[0]
        parameters = [parameter for reference in references if (parameter := reference()) is not None]
        if not layers.names.look_for(parameters, now=last):
            return
        self._unreported.pop(0)
        named = [name for parameter in parameters if (name := layers.names.get(parameter)) is not None]
        names = list(dict.fromkeys(map(layer_of, named)))
        ids = set(map(id, parameters))
        is_dummy = not names and (len(references) == 1 or (self._others_train and not state.had))
        if cause == "unused":
            if names and not self._unused:
                self._unused = True
                self._stuck_layers.report_missing(cause, names, step, ids)
        elif state.resumed:
            state.look_again()
        elif not is_dummy:
            names = names or [f"parameter{number}" for number in range(len(references))]  # all may be gone when a rank ends
            living = {other for _, other in self._optimizers.living()}
            self._open = {other: entry for other, entry in self._open.items() if other in living}
            self._open[state] = _Open(names, ids, step)
            self._report(step)

    def _report(self, step: int) -> None:
        """Report the layers of all optimizers without a gradient, since the last of their steps; without any since ``step``."""
        reports = self._open.values()
        layers = [name for report in reports for name in report.layers]
        parameters = {key for report in reports for key in report.parameters}
        since = max((report.step for report in reports), default=step)
        self._stuck_layers.report_missing("no_gradient", layers, since, parameters)


def _possibly_stepped(optimizer: Any) -> set[int]:
    """Return ids of parameters with a version that does not show whether they were stepped: a fused step raises none.

    By their state they were, or by the others' of their group if none has a state: such an optimizer keeps none.
    """
    stepped = set[int]()
    for group in optimizer.param_groups:
        if group.get("fused"):
            stateful = {id(parameter) for parameter in group["params"] if optimizer.state.get(parameter)}
            stepped |= stateful or set(map(id, group["params"]))
    return stepped


def _filled(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer that have elements: a rank may have none of a sharded one."""
    return [parameter for parameter in parameters_of(optimizer) if parameter.numel()]
