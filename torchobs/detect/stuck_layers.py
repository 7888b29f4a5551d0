"""Detect layers that learn nothing.

:mod:`torchobs.detect.vanishing` compares the gradient with its own past, which such a layer does not have: here it is compared
with what can move a weight, and with its peers. There are three findings:

*Lost*: a step so small that adding it leaves a float32 weight unchanged (half a unit in the last place: 2^-24 of the weight),
in a layer that is a million times slower than the fastest. Gradients of healthy layers are within a factor of 100 of
each other (Glorot & Bengio 2010, section 4.2; Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture",
section 3); an embedding of rare tokens and a gate that begins at zero differ somewhat more. Both conditions are needed:
with a rate near zero nothing moves, and Adam moves weights with small gradients as fast as any, down to its eps.

*Unfed*: the gradients of a layer's weights are exactly zero, and that of its bias is not. Then its input is all zeros: the
units before it are dead (Lu et al. 2019, "Dying ReLU and Initialization").

*Cut off*: the gradients of the first layers of an optimizer, in its order, are exactly zero, and that of a later layer is not.
Units between them are saturated (tanh at 30 has a slope of exactly 0 in float32), or the layers are cut off from the loss.
A single layer counts if it had a gradient before: the first of several inputs may be unused.

A gradient of exactly zero elsewhere means nothing: an unused part, a loss term with the weight 0, parameters included for DDP.
It belongs to the finding in a layer before a lost or unfed one, which blocks the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

RESOLUTION = 2.0**-24
FAR = 1e-6
LEAST_CUT = 2
"""Least number of layers cut off, of those that never had a gradient."""
LASTING_SAMPLES, LASTING_STEPS = 3, 100
"""Least measurements in a row and steps between the first and the last of them: weights behind a matrix or gate that begins at
zero (LoRA's, ReZero's, a zero-initialised residual branch) have no gradient, or hardly any, in the first steps."""
WAKING, WITHIN = 10.0, FAR / 1000
"""A layer recovers if its step relative to the fastest has grown by this factor since it was first lost, to near the limit.
Far below the limit, values that pass through twenty layers vary by more than that from batch to batch."""


class LayerSample(NamedTuple):
    """One layer in a measured step."""

    move: float | None
    """How far the step moves its weights, relative to their usual size; ``None`` if unknown"""
    unfed: bool
    zero: bool
    """Whether all its gradients are exactly zero"""
    leading: bool = False
    """Whether also those of all layers before it are, and that of a later one is not (:func:`leading`)"""


class StuckLayers(NamedTuple):
    """The layers that have learned nothing for a while, in the model's order."""

    lost: tuple[str, ...]
    unfed: tuple[str, ...]
    before: tuple[str, ...]
    """Layers with zero gradients before the last of those"""
    cut: tuple[str, ...] = ()
    """First layers with zero gradients, where none of those is behind them"""

    @property
    def all(self) -> tuple[str, ...]:
        """All of them, in the order ``before``, ``cut``, ``lost``, ``unfed``."""
        return (*self.before, *self.cut, *self.lost, *self.unfed)

    def by_cause(self) -> Iterator[tuple[str, tuple[str, ...], str]]:
        """Yield each cause that there is, its layers, and the one that it is seen at. What blocks the gradient comes first."""
        if self.unfed:
            yield "dead_units", self.unfed, self.unfed[0]
        if self.lost:
            yield "vanishing", self.lost, self.lost[-1]
        blocked = (*self.before, *self.cut)
        if blocked:
            yield "cut_off", blocked, blocked[-1]


class _Low(NamedTuple):
    step: int
    samples: int
    part: float


class StuckLayerDetector:
    """Judges consecutive measurements of all layers."""

    def __init__(self) -> None:
        self._low: dict[str, _Low] = {}
        self._fed: set[str] = set()
        """Layers that had a gradient"""
        self.samples = 0
        self.doubts = False
        """Whether the last measurement has a lost or unfed layer, or layers cut off, lasting or not"""

    def judge(self, step: int, layers: Mapping[str, LayerSample], whole: float = -inf) -> StuckLayers:
        """Process the layers of a measured step, in the model's order; return those that learn nothing.

        ``whole``: the last measured step, judged or not, in which no first layer had a gradient of zero. A gradient that is
        zero by chance in all steps that are judged (an expert that few tokens come to) is not in those between.
        """
        fastest = max((seen.move for seen in layers.values() if seen.move is not None), default=0.0)
        self._low = {name: low for name, seen in layers.items() if (low := self._next(name, seen, step, fastest)) is not None}
        self.samples += 1
        self.doubts = any(not layers[name].zero or layers[name].leading for name in self._low)
        self._fed.update(name for name, seen in layers.items() if not seen.zero)
        lasting = [
            name for name, low in self._low.items() if low.samples >= LASTING_SAMPLES and step - low.step >= LASTING_STEPS
        ]
        unfed = tuple(name for name in lasting if layers[name].unfed)
        lost = tuple(name for name in lasting if not (layers[name].unfed or layers[name].zero))
        order = list(layers)
        last = max((order.index(name) for name in (*lost, *unfed)), default=0)
        before = tuple(name for name in lasting if layers[name].zero and order.index(name) < last)
        cut = tuple(name for name in lasting if layers[name].leading and name not in before and step - whole >= LASTING_STEPS)
        return StuckLayers(lost, unfed, before, cut if len(cut) >= LEAST_CUT or self._fed.intersection(cut) else ())

    def _next(self, name: str, seen: LayerSample, step: int, fastest: float) -> _Low | None:
        """Return the state of a layer that is low in this measurement; ``None`` if it is not."""
        part = seen.move / fastest if seen.move and fastest else 0.0
        lost = seen.move is not None and 0.0 < seen.move < RESOLUTION and part < FAR
        if not (lost or seen.unfed or seen.zero):
            return None
        low = self._low.get(name)
        if low is None or (low.part and part > max(WAKING * low.part, WITHIN)):
            return _Low(step, 1, part)
        return _Low(low.step, low.samples + 1, low.part or part)


def leading(zeros: Sequence[bool]) -> int:
    """Return how many first layers of an optimizer have a zero gradient; 0 if all have. ``zeros``: in its order."""
    return zeros.index(False) if False in zeros else 0
