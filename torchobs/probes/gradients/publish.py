"""Publish gradient measurements from the sampler thread: series by layer, counters, events."""

from __future__ import annotations

from collections import deque
from math import isnan, nan
from time import monotonic
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.blown_layer import blown_layer
from torchobs.probes.gradients.layers import WIDER, Layers
from torchobs.probes.gradients.stuck_layers import StuckLayersWatch
from torchobs.support.process_group import rank_and_size
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from torchobs.detect.blown_layer import BlownLayer
    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.core.sampling_interval import SamplingInterval
    from torchobs.probes.gradients.clipping import ClipWatch
    from torchobs.probes.gradients.measurement import Measurement

ADVANCED = 2
_SHOW_S, _EVENT_S = 1.0, 60.0
_MOST_KEPT = 256
_LAYERS_NAMED = 8
_SUSPECTED = 16
_PAST, _COMPARED = 64, 16
"""Measured steps kept, for the anomalies that the fold finds among them, and those that one is compared with"""
_MOST_NUMBERS = 1 << 15
"""Most norms kept: 1 MiB as Python's floats"""


class GradientPublisher:
    """Queues the measurements of steps and publishes them."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self.layers = Layers(context.writer.table, 0, context.yield_gil)
        self.stuck_layers, self._model = StuckLayersWatch(context, self.layers), context.recorder.models.changes
        self.suspects: frozenset[int] = frozenset()
        """Parameters with a non-finite gradient lately; their elements are counted on a device"""
        self._suspected = 0
        self._steps: dict[int, list[Measurement]] = {}
        self._latest: tuple[int, list[Measurement]] | None = None
        self._shown_s, self._events = 0.0, RateLimiter(_EVENT_S)
        context.count(catalog.GRAD_NONFINITE_ELEMENTS, 0)
        self._gauges: dict[str, float] = {}
        self._past: deque[tuple[int, list[Measurement]]] = deque(maxlen=_PAST)
        """The last measured steps, oldest first"""
        context.blown_layer[:] = [self.blown_layer]
        context.layer_norms[:] = [self.recent_norms]
        self.set_level(context.hooks.level.value)

    def set_level(self, level: int) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self.layers.room = self._context.settings.layers * (WIDER if level >= ADVANCED else 1)

    def add(self, step: int, made: Measurement, *, anew: bool) -> None:
        """Queue a measurement of a part of that step. In the training thread. ``anew``: replace that optimizer's last one."""
        steps = self._steps
        if len(steps) >= _MOST_KEPT and step not in steps:
            return
        parts = steps.setdefault(step, [])
        if anew and made.optimizer is not None:
            parts[:] = [part for part in parts if part.optimizer is None or part.optimizer() is not made.optimizer()]
        parts.append(made)

    def show(self, pace: SamplingInterval, clip: ClipWatch, *, now: bool = False) -> None:
        """Process measurements of ended steps; once a second, or ``now``, update the series from the last one."""
        self._set(catalog.GRAD_INTERVAL, float(pace.interval))
        self._begin_model()
        self._receive()
        pace.most = self.stuck_layers.wanted_interval()
        self.stuck_layers.check_zeros()
        time_s = monotonic()
        if self._latest is None or not (now or time_s - self._shown_s >= _SHOW_S):
            return
        self._shown_s = time_s
        step, parts = self._latest
        if not self.layers.show(parts, step, now=now):
            return
        self.stuck_layers.check_zeros(now=now)  # they are earlier, and may have waited for the layers' names
        self.stuck_layers.check(parts, step, now=now)
        self._latest = None
        self._set(catalog.GRAD_NORM_RANKS, float(self._ranks(parts)))
        for metric, limit in ((catalog.GRAD_CLIP_MAX_NORM, clip.limit), (catalog.GRAD_CLIP_MAX_VALUE, clip.value)):
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
            self.layers.begin_model()
            self.stuck_layers.begin()

    def _receive(self) -> None:
        last = self._context.recorder.step
        for step in sorted(self._steps):
            parts = self._steps[step]
            if step > last or not all(part.arrived() for part in parts):
                return
            del self._steps[step]
            self._latest = (step, parts)
            self._remember(step, parts)
            self.stuck_layers.note(parts, step)
            if any(part.faults for part in parts):
                self._report_faults(step, parts)
            elif self._suspected:
                self._suspected -= 1
                self.suspects = self.suspects if self._suspected else frozenset()

    def _remember(self, step: int, parts: list[Measurement]) -> None:
        numbers = sum(len(part.keys) for part in parts)
        while self._past and (len(self._past) + 1) * numbers > _MOST_NUMBERS:
            self._past.popleft()
        self._past.append((step, parts))

    def blown_layer(self, step: int) -> BlownLayer | None:
        """Return the layer whose gradient has grown most in that step; ``None`` if it was not measured lately, or none has."""
        self._receive()  # the step may have ended since :meth:`show`
        found = next((parts for at, parts in self._past if at == step), None)
        norms = self.layers.norms(found, now=True) if found is not None else None
        if norms is None:
            return None
        before = [self.layers.norms(parts) for at, parts in self._past if at < step]
        return blown_layer(norms, [one for one in before[-_COMPARED:] if one is not None])

    def recent_norms(self, most: int) -> list[tuple[int, dict[str, float]]]:
        """Return the norms of the last ``most`` measured steps by layer, of the layers that have series, oldest first."""
        self._receive()
        chosen = {layer.name for layer in self.layers.chosen}
        found = [(step, self.layers.norms(parts)) for step, parts in list(self._past)[-most:]]
        return [(step, {name: one for name, one in norms.items() if name in chosen}) for step, norms in found if norms]

    def _report_faults(self, step: int, parts: list[Measurement]) -> None:
        """Count non-finite elements and report their layers: at once, then at most once a minute."""
        faults = [fault for part in parts for fault in part.faults]
        elements = sum(fault.nans + fault.infinities for fault in faults)
        self._context.count(catalog.GRAD_NONFINITE_ELEMENTS, elements)
        self.suspects, self._suspected = frozenset(fault.key for fault in faults), _SUSPECTED
        layers = [layer.name for part in parts for layer in self.layers.note_faults(part, step)]
        if not self._events.take(monotonic()):
            return
        kinds = {"nan" if fault.nans or isnan(fault.norm) else "inf" for fault in faults}
        kinds |= {"inf" for fault in faults if fault.infinities and not isnan(fault.norm)}
        attributes = {
            "layers": layers[:_LAYERS_NAMED], "layers_affected": len(layers), "elements": elements, "kinds": sorted(kinds),
        }  # fmt: skip
        self._context.writer.event(catalog.EVENT_NONFINITE_GRADIENT.name, attributes, step)

    def _ranks(self, parts: list[Measurement]) -> int:
        """Return over how many ranks the squares of norms add up to the whole."""
        if any(part.whole for part in parts):
            return 1
        if self.layers.flattened:  # FSDP1: not known by parameter, so every rank is assumed to hold a shard
            group = rank_and_size()
            return 1 if group is None else group[1]
        return max(part.ranks for part in parts)

    def _set(self, metric: catalog.Metric, value: float) -> None:
        if value != self._gauges.get(metric.name) and self._context.set_gauge(metric, value):
            self._gauges[metric.name] = value
