"""Publish gradient norms by layer, and weight updates at level advanced.

A layer is a module's path: a weight and its bias are one, since people think in modules, and this halves the series. The norms
of all layers come with the total (it is made of them), so all are measured at once; the sampler thread updates the series once
a second from the numbers that the training thread has recorded.

The largest layers have series of their own; one more series has the norm of all others together. An event names a layer in
which a gradient was not finite or blew up, whatever its size.

The weights of one layer are copied before a step and compared before the next one; nothing changes them in between, so no hook
is needed after the step. At most eight million elements are copied; of larger layers a part, which has about the
layer's relative update. The ratio is the usual one for diagnosis (about 1e-3 is usual for Adam-like optimizers; Karpathy, "A
Recipe for Training Neural Networks").
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from dataclasses import dataclass, field
from math import hypot, isfinite, nan
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchobs import catalog
from torchobs.flight.value_blocks import LAYERS
from torchobs.probes.context import SamplingInterval
from torchobs.probes.gradient_norms import Measurement, flat, measure
from torchobs.probes.step_recorder import parameters_of
from torchobs.tensors.device_reads import Devices
from torchobs.tensors.names import ParameterNames, layer_of
from torchobs.tensors.references import ObjectIndex, TensorReference

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torchobs.detect.spikes import BlownLayer
    from torchobs.flight.value_blocks import Cell, Table
    from torchobs.probes.context import ProbeContext
    from torchobs.probes.gradient_norms import Measurement


OTHER = "other"
WIDER = 4
"""Factor of the number of layers with a series at level advanced and above"""
_MOST_PLANS = 4096
_MOST_OPTIMIZERS = 256
"""Optimizers alive at a time that get unnamed layers of their own"""


@dataclass(slots=True, eq=False)
class TrackedLayer:
    """One module with parameters of its own."""

    name: str
    size: int = 0
    """Number of elements of its parameters"""
    parameters: dict[int, Any] = field(default_factory=dict)
    """Weak references by id"""

    @property
    def has_matrix(self) -> bool:
        """Whether it is more than a normalisation's scale, or a bias."""
        living = (reference() for reference in self.parameters.values())
        return any(parameter is not None and parameter.dim() > 1 for parameter in living)

    def begin_model(self) -> bool:
        """Drop deleted parameters; return whether any are left."""
        alive = {key: parameter for key, reference in self.parameters.items() if (parameter := reference()) is not None}
        self.parameters = {key: self.parameters[key] for key in alive}
        self.size = sum(parameter.numel() for parameter in alive.values())
        return bool(alive)


class Layers:
    """All measured layers, and the series of the chosen ones."""

    def __init__(self, table: Table, room: int, yield_gil: Callable[[], None], trained: Callable[[], list[Any]]) -> None:
        """``trained``: returns the parameters of all optimizers that have stepped."""
        self._table, self.room, self._trained = table, room, trained
        self.names = ParameterNames(yield_gil)
        self.chosen: list[TrackedLayer] = []
        self.flattened = False
        """Whether FSDP1 has sharded parameters"""
        self._layers: dict[str, TrackedLayer] = {}
        self._plans: dict[tuple[int, ...], list[TrackedLayer]] = {}
        self._series: set[str] = set()
        self._cells: dict[tuple[str, str], Cell] = {}
        self._optimizers = ObjectIndex(_MOST_OPTIMIZERS, lambda number: number)
        self._folded = table.cell(catalog.GRAD_LAYERS_FOLDED, {})
        self._zero = table.cell(catalog.GRAD_ZERO, {})

    def find(self, measurement: Measurement, *, now: bool = False) -> list[TrackedLayer] | None:
        """Return the layer of each gradient measured; ``None`` until the names have been collected."""
        keys = tuple(measurement.keys)
        plan = self._plans.get(keys)
        if plan is not None:
            return plan
        optimizer = measurement.optimizer() if measurement.optimizer is not None else None
        if optimizer is None:
            return None
        for group in optimizer.param_groups:
            self.names.take_group(group)
        parameters = list(parameters_of(optimizer))
        # all models at once, so that each has a title if there are several
        if not self.names.look_for((x for x in (*parameters, *self._trained()) if x.requires_grad), now=now):
            return None
        self.flattened = self.flattened or any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters)
        where = {id(parameter): self._place(parameter, name) for name, parameter in self._named(optimizer)}
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        plan = self._plans[keys] = [where.get(key) or self._layer("unknown") for key in keys]
        return plan

    def norms(self, measurements: Sequence[Measurement], *, now: bool = False) -> dict[str, float] | None:
        """Return one step's norm of each layer, in the model's order; ``None`` until the names have been collected.

        ``now``: something is wrong in that step, and names are worth a scan that would come later.
        """
        norms: dict[str, float] = {}
        for measurement in measurements:
            layers = self.find(measurement, now=now)
            if layers is None:
                return None
            for layer, norm in zip(layers, measurement.weighted(), strict=True):
                norms[layer.name] = hypot(norms.get(layer.name, 0.0), norm)
        return norms

    def show(self, measurements: Sequence[Measurement], *, now: bool = False) -> bool:
        """Publish one step's norms; return whether their layers were known."""
        norms = self.norms(measurements, now=now)
        if norms is None:
            return False
        self._choose()
        for layer in self.chosen:
            if layer.name in norms:
                self._show_norm(layer.name, norms.pop(layer.name))
        if norms:
            self._show_norm(OTHER, hypot(*norms.values()))
        values = [norm for measurement in measurements for norm in measurement.norms]
        if self._zero is not None and values:
            self._zero.set(values.count(0.0) / len(values))
        return True

    def name_of(self, parameter: Any) -> str | None:
        """Return the name of a parameter's layer, if it has been measured."""
        name = self.names.get(parameter)
        return layer_of(name) if name is not None and layer_of(name) in self._layers else None

    def trains(self, name: str) -> bool:
        """Return whether any parameter of a layer requires a gradient."""
        layer = self._layers.get(name)
        parameters = (parameter() for parameter in layer.parameters.values()) if layer else ()
        return any(parameter is not None and parameter.requires_grad for parameter in parameters)

    def count(self, stuck: Collection[str], more: Collection[int] = ()) -> int:
        """Return the number of the trained models' layers: those with a matrix, frozen and unused ones included, and the stuck.

        ``more``: ids of parameters.
        """
        trained = {key for layer in self._layers.values() for key in layer.parameters}.union(more)
        measured = sum(name in stuck or layer.has_matrix for name, layer in self._layers.items())
        return max(self.names.count_layers(trained, stuck), measured)

    def begin_model(self) -> None:
        """Drop the layers of deleted models."""
        self._plans.clear()
        self._layers = {name: layer for name, layer in self._layers.items() if layer.begin_model()}
        self._choose()

    def of_faults(self, measurement: Measurement) -> list[TrackedLayer]:
        """Return the layers with non-finite gradients, in the parameters' order."""
        layers = dict(zip(measurement.keys, self.find(measurement, now=True) or (), strict=False))
        return list(dict.fromkeys(layers[fault.key] for fault in measurement.faults if fault.key in layers))

    def set_layer(self, metric: catalog.Metric, name: str, value: float) -> None:
        """Set a value of one of the chosen layers."""
        cell = self._cells.get((metric.name, name)) or self._table.cell(metric, {"layer": name}, LAYERS)
        if cell is not None:
            self._cells[metric.name, name] = cell
            cell.set(value)

    def _named(self, optimizer: Any) -> Iterable[tuple[str, Any]]:
        number = self._optimizers.of(optimizer)
        prefix = f"optimizer{number}." if number else ""
        for index, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                name = self.names.get(parameter)
                yield (f"{prefix}group{index}.{place}" if name is None else layer_of(name)), parameter

    def _place(self, parameter: Any, name: str) -> TrackedLayer:
        layer = self._layer(name)
        reference = layer.parameters.get(id(parameter))
        if reference is None or reference() is not parameter:
            layer.parameters[id(parameter)] = TensorReference(parameter)
            layer.size += parameter.numel()
        return layer

    def _layer(self, name: str) -> TrackedLayer:
        name = f"{name} (layer)" if name == OTHER else name
        return self._layers.setdefault(name, TrackedLayer(name))

    def _choose(self) -> None:
        """Update the choice. A series is never removed, only set to NaN; at most twice as many are made as chosen."""
        wanted = sorted(self._layers.values(), key=lambda layer: layer.size, reverse=True)[: self.room]
        if len(self._series | {layer.name for layer in wanted}) > 2 * self.room:
            return
        for layer in self.chosen:
            if layer not in wanted:
                for metric in (catalog.GRAD_LAYER_NORM, catalog.PARAM_LAYER_NORM, catalog.UPDATE_LAYER_RATIO):
                    if (metric.name, layer.name) in self._cells:
                        self._cells[metric.name, layer.name].set(nan)
        self.chosen = wanted
        self._series |= {layer.name for layer in wanted}
        if self._folded is not None:
            self._folded.set(float(len(self._layers) - len(wanted)))

    def _show_norm(self, name: str, norm: float) -> None:
        if isfinite(norm):  # non-finite ones are counted, and the last finite one stays, as with the total
            self.set_layer(catalog.GRAD_LAYER_NORM, name, norm)


ADVANCED = 2
MOST_ELEMENTS = 8_000_000
_BUDGETS = 3
"""Most time that this may take, as a multiple of the overhead budget, which is for level basic"""
_NEVER = sys.maxsize


class _Copied(NamedTuple):
    layer: TrackedLayer
    optimizer: weakref.ref[Any]
    parameters: list[TensorReference]
    copies: list[Any]
    before: Measurement


class UpdateWatch:
    """Copies weights, compares them, updates the series."""

    def __init__(self, context: ProbeContext, layers: Layers) -> None:
        self._context, self._layers, self._devices = context, layers, Devices(context.device.cuda)
        self._pace = SamplingInterval(context.settings.overhead_budget * _BUDGETS)
        self._copied: _Copied | None = None
        self._turn = 0
        self._compared: deque[tuple[TrackedLayer, Measurement, Measurement]] = deque(maxlen=64)
        self.level = 0
        self.set_level(context.hooks.level.value)

    def set_level(self, level: int) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self.level = level if level >= ADVANCED else 0
        if not self.level:
            self._copied = None

    @property
    def due_at(self) -> int:
        """The step after which :meth:`before_step` has something to do."""
        following = self._context.recorder.step + 1
        if self._copied is not None:
            return following
        if not self.level or not self._layers.chosen:
            return _NEVER  # or until the gradients are measured, with layers chosen by then
        return max(following, self._pace.due_at)

    def before_step(self, optimizer: Any, begun_ns: int) -> None:
        """Compare the weights copied before this optimizer's last step; copy if due. In the training thread.

        ``begun_ns``: since when time is counted; in a step of 2 ms the call takes as long as a copy.

        Nothing may be recorded into a graph that is being captured: each replay would write to memory freed long ago. A
        copy made before it is useless afterwards: replays change the weights unobserved.
        """
        if self._devices.cuda.capturing():
            self._copied = None
            return
        copied = self._copied
        if copied is not None:
            before = copied.optimizer()
            if before is not None and before is not optimizer:
                return
            self._copied = None
            if before is not None:
                self._compare(copied)
        elif self._layers.chosen and self._pace.is_due(self._context.recorder.step):
            self._copy(optimizer)
        self._pace.spend(monotonic_ns() - begun_ns)

    def show(self) -> None:
        """Publish comparisons that have arrived. In the sampler thread."""
        for _ in range(len(self._compared)):
            layer, before, change = self._compared.popleft()
            if not (before.arrived() and change.arrived()):
                self._compared.append((layer, before, change))
                continue
            size, moved = hypot(*before.norms), hypot(*change.norms)
            if isfinite(size):
                self._layers.set_layer(catalog.PARAM_LAYER_NORM, layer.name, size)
            if isfinite(moved) and isfinite(size) and size:
                self._layers.set_layer(catalog.UPDATE_LAYER_RATIO, layer.name, moved / size)

    def _copy(self, optimizer: Any) -> None:
        ours = set(map(id, parameters_of(optimizer)))
        layers = self._layers.chosen
        for _ in range(len(layers)):
            layer = layers[self._turn % len(layers)]
            self._turn += 1
            parameters = [ref for key, ref in layer.parameters.items() if key in ours and ref() is not None]
            if parameters:
                break
        else:
            return
        with torch.no_grad():
            views = _views([ref() for ref in parameters])
            copies = [view.clone() for view in views]
        self._pace.spend_later(self._devices.take_ns())
        keys = list(range(len(copies)))
        before = measure(keys, copies, None, frozenset(), self._devices) if copies else None
        if before is not None:
            self._copied = _Copied(layer, weakref.ref(optimizer), parameters, copies, before)

    def _compare(self, copied: _Copied) -> None:
        alive = [ref() for ref in copied.parameters]
        if any(parameter is None for parameter in alive):
            return
        with torch.no_grad():
            views = _views(alive)
            if [view.shape for view in views] != [copy.shape for copy in copied.copies]:
                return
            for copy, view in zip(copied.copies, views, strict=True):
                copy.sub_(view)
        change = measure(copied.before.keys, copied.copies, None, frozenset(), self._devices)
        if change is not None:
            self._compared.append((copied.layer, copied.before, change))


def _views(parameters: list[Any]) -> list[Any]:
    """Return flat views of local weights, at most ``MOST_ELEMENTS`` in all."""
    room, views = MOST_ELEMENTS, []
    for parameter in parameters:
        data = parameter.detach()
        data = data.to_local() if hasattr(data, "to_local") else data
        # quantised ones (integers) have no norm
        elements = flat(data) if data.is_floating_point() or data.is_complex() else None
        if elements is not None and elements.numel() and room:
            views.append(elements.narrow(0, 0, min(room, elements.numel())))
            room -= views[-1].numel()
    return views


MOST_LAYERS = 8
"""Series in a whole run: from where a gradient blows up it is carried on, so that few layers are ever named."""
SHOWN_S = 600.0
"""As long as an alert looks back at anomalies"""
_MOST_GROWTH = 1e9
"""The growth of a layer that usually has a zero gradient"""


class GrownLayers:
    """For the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._until: dict[str, float] = {}
        self._named: set[str] = set()

    def publish(self, blown: BlownLayer, now: float) -> None:
        """Publish a layer with its latest growth."""
        if blown.layer not in self._named and len(self._named) >= MOST_LAYERS:
            return
        self._named.add(blown.layer)
        self._until[blown.layer] = now + SHOWN_S
        growth = min(blown.norm / blown.usual, _MOST_GROWTH) if blown.usual else _MOST_GROWTH
        self._context.set_gauge(catalog.GRAD_LAYER_GROWTH, growth, {"layer": blown.layer})

    def forget(self, now: float) -> None:
        """Take back values published ten minutes ago."""
        for layer in [layer for layer, until in self._until.items() if until <= now]:
            del self._until[layer]
            self._context.set_gauge(catalog.GRAD_LAYER_GROWTH, nan, {"layer": layer})
