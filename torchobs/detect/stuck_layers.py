"""Which layers learn nothing, from the first step on?

:mod:`torchobs.detect.vanishing` compares the gradient with its own past, which such a layer does not have: here it is compared
with what can move a weight, and with its peers. Two things are told:

*Lost*: a step so small that adding it leaves a float32 weight as it is (half a unit in the last place: 2^-24 of the weight), in
a layer that is a million times behind the fastest. Gradients of healthy layers are within two orders of magnitude of each other
(Glorot & Bengio 2010, section 4.2; Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture", section 3), an
embedding whose rows are seldom used and a gate that begins at zero some more. Both have to be so: at a learning rate of nearly
zero nothing moves, and Adam moves what has small gradients as fast as any, down to its eps.

*Unfed*: the gradients of a layer's weights are exactly zero, and that of its bias is not. Then all that comes into it is zero:
the units before it are dead (Lu et al. 2019, "Dying ReLU and Initialization").

A gradient of exactly zero alone means nothing: a part that is not used, a term of the loss with the weight 0, parameters that
DDP has to see. It belongs to the finding where it is in a layer before one of the two, which let nothing through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

RESOLUTION = 2.0**-24
FAR = 1e-6
LASTING_LOOKS, LASTING_STEPS = 3, 100
"""Looks in a row and the steps between the first and the last of them: the weights behind a matrix or gate that begins at zero
(LoRA's, ReZero's, a zero-initialised residual branch) have no gradient, or hardly any, in the first steps."""
WAKING, WITHIN = 10.0, FAR / 1000
"""A layer whose part of the fastest's step has grown so many times since it was called lost first, to within reach of the
limit, is waking up. Further below, what passes through twenty layers varies by more than that from batch to batch."""


class LayerSample(NamedTuple):
    """One layer in a measured step."""

    move: float | None
    """How far the step moves its weights, as a part of their usual size; ``None`` if that is not known"""
    unfed: bool
    zero: bool
    """Whether all its gradients are exactly zero"""


class StuckLayers(NamedTuple):
    """The layers that have learned nothing for a while, in the model's order."""

    lost: tuple[str, ...]
    unfed: tuple[str, ...]
    before: tuple[str, ...]
    """Layers without any gradient before the last of those"""

    @property
    def all(self) -> tuple[str, ...]:
        """Every one of them."""
        return (*self.before, *self.lost, *self.unfed)


class _Low(NamedTuple):
    step: int
    looks: int
    part: float


class StuckLayerDetector:
    """Judges look after look."""

    def __init__(self) -> None:
        self._low: dict[str, _Low] = {}
        self.looks = 0
        self.doubts = False
        """Whether the last look has seen a layer that is lost or unfed, if only for now"""

    def judge(self, step: int, layers: Mapping[str, LayerSample]) -> StuckLayers:
        """Take the layers of a measured step, in the model's order; return those that learn nothing."""
        fastest = max((seen.move for seen in layers.values() if seen.move is not None), default=0.0)
        self._low = {name: low for name, seen in layers.items() if (low := self._next(name, seen, step, fastest)) is not None}
        self.looks += 1
        self.doubts = any(not layers[name].zero for name in self._low)
        lasting = [name for name, low in self._low.items() if low.looks >= LASTING_LOOKS and step - low.step >= LASTING_STEPS]
        unfed = tuple(name for name in lasting if layers[name].unfed)
        lost = tuple(name for name in lasting if not (layers[name].unfed or layers[name].zero))
        order = list(layers)
        last = max((order.index(name) for name in (*lost, *unfed)), default=0)
        return StuckLayers(lost, unfed, tuple(name for name in lasting if layers[name].zero and order.index(name) < last))

    def _next(self, name: str, seen: LayerSample, step: int, fastest: float) -> _Low | None:
        """Return what is known of a layer that is low in this look; ``None`` if it is not."""
        part = seen.move / fastest if seen.move and fastest else 0.0
        lost = seen.move is not None and 0.0 < seen.move < RESOLUTION and part < FAR
        if not (lost or seen.unfed or seen.zero):
            return None
        low = self._low.get(name)
        if low is None or (low.part and part > max(WAKING * low.part, WITHIN)):
            return _Low(step, 1, part)
        return _Low(low.step, low.looks + 1, low.part or part)
