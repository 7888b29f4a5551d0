"""In which order things are timed that are compared within rounds."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def orders(count: int) -> Iterator[list[int]]:
    """Yield each round's order of that many things: one by chance, then its reverse, and so on; the same ones in every call.

    A step's place in its round has an effect of its own, 1 % or so. Randomised blocks (Fisher, The Design of Experiments, 1935)
    have it meet all alike, and so each of two things comes before the other equally often.
    """
    chance = Random(0)  # noqa: S311  # an order is no secret
    while True:
        order = chance.sample(range(count), count)
        yield order
        yield order[::-1]
