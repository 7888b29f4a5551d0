"""Name the layer in which a gradient has grown first on its way back, compared with the steps measured before.

Squared norms of layers add up to that of the whole, so that only a layer with a part of the excess shows how far it has grown.
From where a gradient blows up it is carried on to all layers before: these grow by about the same factor, and the last of
them in the model's order is the one where it began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from statistics import median
from typing import NamedTuple

LEAST_BEFORE = 3
"""Least earlier measurements: a median of fewer is a single step's."""
LEAST_PART = 0.1
"""Least part of the excess"""
LEAST_FACTOR = 2.0
"""Least growth: a loss may leap without any gradient's doing so."""
LEAST_SHARED = 0.01
"""Least part of the excess of the layer where it began: one with a norm near zero grows by any factor by chance."""
SHARED = 2 / 3
"""Part of the largest growth, on the log scale, that layers have in common: of a thirtyfold one these are at least ten times
what they were, while norms of single steps vary by less than three."""


class BlownLayer(NamedTuple):
    """The layer, its gradient's norm in that step, and the median of the steps before."""

    layer: str
    norm: float
    usual: float


def blown_layer(norms: Mapping[str, float], before: Sequence[Mapping[str, float]]) -> BlownLayer | None:
    """Return the layer in which the growth began; ``None`` if no layer has doubled, or too little is known.

    ``norms``: the norm of each layer's gradient, in the model's order; ``before``: the same of measured steps before.

    Of the layers with a tenth of the excess one has grown by the largest factor; the last of those that grew with it is
    returned.
    """
    known = [BlownLayer(name, norm, usual) for name, norm in norms.items() if (usual := _usual(name, before)) is not None]
    grown = [one for one in known if isfinite(one.norm) and one.norm > LEAST_FACTOR * one.usual]
    excess = sum(map(_excess, grown))
    factor = max((_factor(one) for one in grown if _excess(one) >= LEAST_PART * excess), default=inf)
    shared = [one for one in grown if _factor(one) >= factor**SHARED and _excess(one) >= LEAST_SHARED * excess]
    return shared[-1] if shared else None


def _factor(one: BlownLayer) -> float:
    return one.norm / one.usual if one.usual else inf


def _excess(one: BlownLayer) -> float:
    return one.norm * one.norm - one.usual * one.usual


def _usual(name: str, before: Sequence[Mapping[str, float]]) -> float | None:
    seen = [norm for norms in before if isfinite(norm := norms.get(name, inf))]
    return median(seen) if len(seen) >= LEAST_BEFORE else None
