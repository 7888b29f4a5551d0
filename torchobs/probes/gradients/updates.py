"""Measure weight norms and relative weight updates at level advanced, one layer at a time.

The weights of one layer are copied before a step and compared before the next one; nothing changes them in between, so no hook
is needed after the step. At most eight million elements are copied; of larger layers a part, whose relative update is about
the layer's. The ratio is the usual one for diagnosis (about 1e-3 is usual for Adam-like optimizers; Karpathy, "A Recipe for
Training Neural Networks").
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from math import hypot, isfinite
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.probes.core.sampling_interval import SamplingInterval
from torchobs.probes.gradients.devices import Devices
from torchobs.probes.gradients.measurement import Measurement, measure
from torchobs.probes.gradients.norms import flat
from torchobs.support.tensor_reference import TensorReference

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.gradients.layers import Layers, TrackedLayer

ADVANCED = 2
MOST_ELEMENTS = 8_000_000
_BUDGETS = 3
"""Share of the time that this may take, as a multiple of the overhead budget, which is that of level basic"""
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
        """See :class:`~torchobs.probes.core.context.Probe`."""
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
            known = copied.optimizer()
            if known is not None and known is not optimizer:
                return
            self._copied = None
            if known is not None:
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
        import torch  # torch is optional until training begins

        ours = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
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
        before = measure(torch, keys, copies, None, frozenset(), self._devices) if copies else None
        if before is not None:
            self._copied = _Copied(layer, weakref.ref(optimizer), parameters, copies, before)

    def _compare(self, copied: _Copied) -> None:
        import torch  # torch is optional until training begins

        alive = [ref() for ref in copied.parameters]
        if any(parameter is None for parameter in alive):
            return
        with torch.no_grad():
            views = _views(alive)
            if [view.shape for view in views] != [copy.shape for copy in copied.copies]:
                return
            for copy, view in zip(copied.copies, views, strict=True):
                copy.sub_(view)
        change = measure(torch, copied.before.keys, copied.copies, None, frozenset(), self._devices)
        if change is not None:
            self._compared.append((copied.layer, copied.before, change))


def _views(parameters: list[Any]) -> list[Any]:
    """Return flat views of local weights, at most ``MOST_ELEMENTS`` in all."""
    room, found = MOST_ELEMENTS, []
    for parameter in parameters:
        data = parameter.detach()
        data = data.to_local() if hasattr(data, "to_local") else data
        # quantised ones (integers) have no norm
        elements = flat(data) if data.is_floating_point() or data.is_complex() else None
        if elements is not None and elements.numel() and room:
            found.append(elements.narrow(0, 0, min(room, elements.numel())))
            room -= found[-1].numel()
    return found
