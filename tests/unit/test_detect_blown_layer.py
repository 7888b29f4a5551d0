"""The layer in which a gradient has blown up."""

from __future__ import annotations

import random
from math import inf, nan

from torchobs.detect.blown_layer import BlownLayer, blown_layer

BEFORE = [{"a": 1.0, "b": 0.1, "c": 3.0, "big": 10.0}] * 4


def test_the_layer_that_has_grown_most_is_named_and_not_the_largest() -> None:
    """All have grown behind it; one that grew by more in a hair's breadth of the whole is no cause."""
    found = blown_layer({"a": 90.0, "b": 80.0, "c": 60.0, "big": 100.0}, BEFORE)
    assert found == BlownLayer("b", 80.0, 0.1)
    assert blown_layer({"a": 90.0, "b": 12.0, "c": 3.0, "big": 100.0}, BEFORE) == BlownLayer("a", 90.0, 1.0)


def test_of_layers_that_have_grown_together_the_last_is_named() -> None:
    """From where a gradient blows up it is carried back to all layers before, of which one has grown most by chance."""
    before = [{"stem": 1.0, "first": 2.0, "second": 0.1, "third": 1.0, "head": 5.0}] * 4
    found = blown_layer({"stem": 1300.0, "first": 1700.0, "second": 400.0, "third": 1.5, "head": 9.0}, before)
    assert found == BlownLayer("second", 400.0, 0.1)


def test_nothing_is_named_without_growth_or_a_past() -> None:
    """A loss that leaps with the gradients of always, a first step, a layer that is new, values that are not finite."""
    assert blown_layer(BEFORE[0], BEFORE) is None
    assert blown_layer({"a": 90.0}, BEFORE[:2]) is None
    assert blown_layer({"new": 90.0, "a": 1.0}, BEFORE) is None
    assert blown_layer({"a": inf, "b": nan}, BEFORE) is None
    assert blown_layer({}, []) is None


def test_the_culprit_is_found_among_noise() -> None:
    """Of 48 layers whose norms vary by half, one that is 30 times its own: in each of 500 trials."""
    chance = random.Random(2)
    for _ in range(500):
        sizes = {f"layer{number}": chance.lognormvariate(0.0, 1.0) for number in range(48)}
        before = [{name: size * chance.lognormvariate(0.0, 0.2) for name, size in sizes.items()} for _ in range(8)]
        culprit = chance.choice(list(sizes))
        norms = {name: size * (30.0 if name == culprit else chance.lognormvariate(0.0, 0.2)) for name, size in sizes.items()}
        found = blown_layer(norms, before)
        if sizes[culprit] > 0.1:  # else the rest's noise is as much
            assert found is not None
            assert found.layer == culprit
