"""Report an optimizer whose gradients alone have faded: one of a GAN's two players, an actor beside a critic.

The norm that is judged for vanishing is that of all optimizers of a step, in which the others hide it.
"""

from __future__ import annotations

from math import hypot, isfinite
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.detect.vanishing import NormHistory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from weakref import ref

    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.gradients.layers import Layers
    from torchobs.probes.gradients.measurement import Measurement

_MOST = 8
"""Optimizers that are told apart. An optimizer for every parameter, as fused into the backward pass, has norms of its own that
are zero by chance."""
_NAMED = 8


class FadedOptimizers:
    """Judges each optimizer's norm by its own past, in the sampler thread. A part of ``publish.GradientPublisher``."""

    def __init__(self, context: ProbeContext, layers: Layers) -> None:
        self._context, self._layers = context, layers
        self._known: dict[int, tuple[ref[Any], NormHistory]] = {}
        self._told: set[int] = set()

    def begin(self) -> None:
        """Reset for another model."""
        self._known.clear()
        self._told.clear()

    def note(self, measurements: Sequence[Measurement], step: int) -> None:
        """See the measurements of a step."""
        parts: dict[int, list[Measurement]] = {}
        for measurement in measurements:
            optimizer = measurement.optimizer() if measurement.optimizer is not None else None
            if optimizer is None or not all(map(isfinite, measurement.norms)):
                return
            parts.setdefault(id(optimizer), []).append(measurement)
            known = self._known.get(id(optimizer))
            if known is None or known[0]() is not optimizer:
                self._known[id(optimizer)] = measurement.optimizer, NormHistory()  # type: ignore[assignment]  # checked
        if not 1 < len(self._known) <= _MOST:
            return
        usual = {key: self._known[key][1].usual for key in parts}
        norms = {key: hypot(*(part.total() for part in own)) for key, own in parts.items()}
        faded = [key for key, norm in norms.items() if self._known[key][1].add(norm)]
        sound = any(not history.low and history.is_known for _, history in self._known.values())
        for key in faded if sound else ():
            if key not in self._told:
                self._told.add(key)
                self._report(parts[key], norms[key], usual[key], step)

    def _report(self, own: Sequence[Measurement], norm: float, usual: float, step: int) -> None:
        optimizer = own[0].optimizer() if own[0].optimizer is not None else None
        layers = list(self._layers.norms(own, now=True) or ())
        attributes = {
            "optimizer": type(optimizer).__name__, "layers": layers[:_NAMED], "layers_affected": len(layers),
            "value": norm, "baseline": usual,
        }  # fmt: skip
        self._context.writer.event(catalog.EVENT_FADED_OPTIMIZER.name, attributes, step)
        what = f"the gradients of one optimizer ({type(optimizer).__name__} of {', '.join(layers[:2])}) have vanished"
        self._context.warn_limited("faded optimizer", f"{what}: {norm:.3g} in step {step}, usual is {usual:.3g}")
