"""Publish gradient norms by layer: a series for each of the most important layers, and one, ``other``, for the rest.

A layer is a module's path: a weight and its bias are one, for people think in modules, and it halves the series. The norms of
all layers come with the total (it is made of them), so all are measured at once; the sampler thread updates the series once a
second from the numbers that the training thread has recorded.

The largest layers are chosen; a quarter of the series is reserved for those most recently anomalous: not finite, or far above
their own past.
"""

from __future__ import annotations

from math import hypot, isfinite, nan
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.writer.series_table import LAYERS
from torchobs.probes.gradients.parameter_names import ParameterNames, layer_of
from torchobs.support.tensor_reference import TensorReference

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torchobs.flight.writer.series_table import Cell, Table
    from torchobs.probes.gradients.measurement import Measurement

OTHER = "other"
WIDER = 4
"""Factor of the number of layers with a series at level advanced and above"""
LEAP, SEEN = 8.0, 20
"""A layer is anomalous at 8 times its usual norm, after at least 20 values"""
_SMOOTHING = 0.1
_MOST_PLANS = 4096


class TrackedLayer:
    """One module with parameters of its own."""

    __slots__ = ("anomalous", "name", "parameters", "seen", "size", "usual")

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = 0
        """Number of elements of its parameters"""
        self.anomalous = 0
        """The step in which it was anomalous last, 0: never"""
        self.usual = 0.0
        self.seen = 0
        self.parameters: dict[int, Any] = {}
        """Weak references by id"""

    def judge(self, norm: float, step: int) -> None:
        """Compare a norm with the layer's own past."""
        if not isfinite(norm) or (self.seen >= SEEN and norm > LEAP * self.usual):
            self.anomalous = step
        if isfinite(norm):
            self.seen += 1
            bounded = min(norm, LEAP * self.usual) if self.seen > 1 and self.usual else norm
            self.usual += (bounded - self.usual) * max(_SMOOTHING, 1.0 / self.seen)

    def begin_model(self) -> bool:
        """Drop its baseline and deleted parameters; return True if any parameters are left."""
        self.usual, self.seen, self.anomalous = 0.0, 0, 0
        alive = {key: parameter for key, known in self.parameters.items() if (parameter := known()) is not None}
        self.parameters = {key: self.parameters[key] for key in alive}
        self.size = sum(parameter.numel() for parameter in alive.values())
        return bool(alive)


def choose(layers: Iterable[TrackedLayer], room: int) -> list[TrackedLayer]:
    """Return the layers that get a series: at most a quarter of ``room`` for recent anomalies, the rest by size."""
    by_size = sorted(layers, key=lambda layer: layer.size, reverse=True)
    if len(by_size) <= room:
        return by_size
    anomalous = sorted((layer for layer in by_size if layer.anomalous), key=lambda layer: layer.anomalous, reverse=True)
    recent = anomalous[: room // 4]
    return recent + [layer for layer in by_size if layer not in recent][: room - len(recent)]


class Layers:
    """All measured layers, and the series of the chosen ones."""

    def __init__(self, table: Table, room: int, yield_gil: Callable[[], None]) -> None:
        self._table, self.room = table, room
        self.names = ParameterNames(yield_gil)
        self.chosen: list[TrackedLayer] = []
        self.flattened = False
        """Whether FSDP1 has sharded parameters"""
        self._layers: dict[str, TrackedLayer] = {}
        self._plans: dict[tuple[int, ...], list[TrackedLayer]] = {}
        self._made: set[str] = set()
        self._cells: dict[tuple[str, str], Cell] = {}
        self._optimizers: dict[int, int] = {}
        self._folded = table.cell(catalog.GRAD_LAYERS_FOLDED, {})
        self._zero = table.cell(catalog.GRAD_ZERO, {})

    def find(self, measurement: Measurement, *, now: bool = False) -> list[TrackedLayer] | None:
        """Return the layer of each gradient measured; ``None`` while names are still being looked for."""
        keys = tuple(measurement.keys)
        plan = self._plans.get(keys)
        if plan is not None:
            return plan
        optimizer = measurement.optimizer() if measurement.optimizer is not None else None
        if optimizer is None:
            return None
        for group in optimizer.param_groups:
            self.names.take_group(group)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not self.names.look_for((parameter for parameter in parameters if parameter.requires_grad), now=now):
            return None
        self.flattened = self.flattened or any(getattr(parameter, "_fsdp_flattened", False) for parameter in parameters)
        where = {id(parameter): self._place(parameter, name) for name, parameter in self._named(optimizer)}
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        plan = self._plans[keys] = [where.get(key) or self._layer("unknown") for key in keys]
        return plan

    def norms(self, measurements: Sequence[Measurement], *, now: bool = False) -> dict[str, float] | None:
        """Return one step's norm of each layer, in the model's order; ``None`` while names are still being looked for.

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

    def show(self, measurements: Sequence[Measurement], step: int, *, now: bool = False) -> bool:
        """Publish one step's norms; return True if their layers were known."""
        norms: dict[TrackedLayer, float] = {}
        zeros = count = 0
        for measurement in measurements:
            layers = self.find(measurement, now=now)
            if layers is None:
                return False
            values = measurement.weighted()
            for layer, norm in zip(layers, values, strict=True):
                norms[layer] = hypot(norms.get(layer, 0.0), norm)
            zeros += values.count(0.0)
            count += len(values)
        for layer, norm in norms.items():
            layer.judge(norm, step)
        self._choose()
        self._show_norms(norms)
        if self._zero is not None and count:
            self._zero.set(zeros / count)
        return True

    def known(self, parameter: Any) -> str | None:
        """Return the name of a parameter's layer, if it has been measured."""
        name = self.names.get(parameter)
        return layer_of(name) if name is not None and layer_of(name) in self._layers else None

    def trains(self, name: str) -> bool:
        """Return True if any parameter of a layer requires a gradient."""
        known = self._layers.get(name)
        found = (parameter() for parameter in known.parameters.values()) if known else ()
        return any(parameter is not None and parameter.requires_grad for parameter in found)

    def count(self, more: Collection[int] = ()) -> int:
        """Return how many layers the trained models have, frozen and unused ones included. ``more``: ids of parameters."""
        trained = {key for layer in self._layers.values() for key in layer.parameters}.union(more)
        return max(self.names.count_layers(trained), len(self._layers))

    def begin_model(self) -> None:
        """Drop the layers of deleted models, and the baselines of all others."""
        self._plans.clear()
        self._layers = {name: layer for name, layer in self._layers.items() if layer.begin_model()}
        self._choose()

    def note_faults(self, measurement: Measurement, step: int) -> list[TrackedLayer]:
        """Return the layers with non-finite gradients, in the parameters' order, and mark them as anomalous."""
        layers = dict(zip(measurement.keys, self.find(measurement, now=True) or (), strict=False))
        found = list(dict.fromkeys(layers[fault.key] for fault in measurement.faults if fault.key in layers))
        for layer in found:
            layer.anomalous = step
        return found

    def set_layer(self, metric: catalog.Metric, name: str, value: float) -> None:
        """Set a value of one of the chosen layers."""
        cell = self._cells.get((metric.name, name)) or self._table.cell(metric, {"layer": name}, LAYERS)
        if cell is not None:
            self._cells[metric.name, name] = cell
            cell.set(value)

    def _named(self, optimizer: Any) -> Iterable[tuple[str, Any]]:
        number = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        prefix = f"optimizer{number}." if number else ""
        for index, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                name = self.names.get(parameter)
                yield (f"{prefix}group{index}.{place}" if name is None else layer_of(name)), parameter

    def _place(self, parameter: Any, name: str) -> TrackedLayer:
        layer = self._layer(name)
        known = layer.parameters.get(id(parameter))
        if known is None or known() is not parameter:
            layer.parameters[id(parameter)] = TensorReference(parameter)
            layer.size += parameter.numel()
        return layer

    def _layer(self, name: str) -> TrackedLayer:
        name = f"{name} (layer)" if name == OTHER else name
        return self._layers.setdefault(name, TrackedLayer(name))

    def _choose(self) -> None:
        """Update the choice. A series is never removed, only set to NaN; at most twice as many are made as chosen."""
        wanted = choose(self._layers.values(), self.room)
        if len(self._made | {layer.name for layer in wanted}) > 2 * self.room:
            return
        for layer in self.chosen:
            if layer not in wanted:
                for metric in (catalog.GRAD_LAYER_NORM, catalog.PARAM_LAYER_NORM, catalog.UPDATE_LAYER_RATIO):
                    if (metric.name, layer.name) in self._cells:
                        self._cells[metric.name, layer.name].set(nan)
        self.chosen = wanted
        self._made |= {layer.name for layer in wanted}
        if self._folded is not None:
            self._folded.set(float(len(self._layers) - len(wanted)))

    def _show_norms(self, norms: dict[TrackedLayer, float]) -> None:
        for layer in self.chosen:
            if layer in norms:
                self._show_norm(layer.name, norms.pop(layer))
        if norms:
            self._show_norm(OTHER, hypot(*norms.values()))

    def _show_norm(self, name: str, norm: float) -> None:
        if isfinite(norm):  # non-finite ones are counted, and the last finite one stays, as with the total
            self.set_layer(catalog.GRAD_LAYER_NORM, name, norm)
