"""Publish the layers whose gradients had grown most in recent explosions and spikes, so that an alert can name them."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

from torchobs import catalog

if TYPE_CHECKING:
    from torchobs.detect.blown_layer import BlownLayer
    from torchobs.probes.core.context import ProbeContext

MOST_LAYERS = 8
"""Series in a whole run: from where a gradient blows up it is carried on, so that few layers are ever named."""
SHOWN_S = 600.0
"""As long as an alert looks back at anomalies"""
_MOST_GROWTH = 1e9
"""Of a layer whose usual gradient is zero"""


class GrownLayers:
    """For the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._until: dict[str, float] = {}
        self._named: set[str] = set()

    def note(self, found: BlownLayer, now: float) -> None:
        """Publish a layer with its latest growth."""
        if found.layer not in self._named and len(self._named) >= MOST_LAYERS:
            return
        self._named.add(found.layer)
        self._until[found.layer] = now + SHOWN_S
        growth = min(found.norm / found.usual, _MOST_GROWTH) if found.usual else _MOST_GROWTH
        self._context.set_gauge(catalog.GRAD_LAYER_GROWTH, growth, {"layer": found.layer})

    def forget(self, now: float) -> None:
        """Take back what was published ten minutes ago."""
        for layer in [layer for layer, until in self._until.items() if until <= now]:
            del self._until[layer]
            self._context.set_gauge(catalog.GRAD_LAYER_GROWTH, nan, {"layer": layer})
