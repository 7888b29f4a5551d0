"""Evenly spaced elements of a tensor that are not all of one column."""

from __future__ import annotations

from math import gcd
from typing import Any


def evenly_sampled(flat: Any, most: int) -> Any:
    """Return up to ``most`` elements of a vector: of all of its parts, and of all columns that it had as a matrix, alike.

    Every ``len / most``-th element alone is often of one column (or channel): where that is a multiple of their number. The
    stride here has no divisor in common with the number of elements, hence none with the period of a dimension, which divides
    it, so that all columns come as often. Where such a stride is a good deal larger, the vector is passed several times.
    """
    count = len(flat)
    stride = max(1, -(-count // most))
    while gcd(stride, count) > 1:
        stride += 1
    passes = min(stride, most // max(1, -(-count // stride))) or 1
    parts = [flat[index * stride // passes :: stride] for index in range(passes)]
    if passes == 1:
        return parts[0]
    import torch  # torch is optional until training begins

    return torch.cat(parts)
