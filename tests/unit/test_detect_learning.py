"""Layers that learn nothing, as opposed to those that wake up, are not used, or are slow; functions compiled without end."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from torchobs.detect import learning
from torchobs.detect.disagreement import LEAST_STEPS, differing
from torchobs.detect.learning import LASTING_SAMPLES, LASTING_STEPS, LayerSample, Recompiles, StuckLayerDetector, StuckLayers

if TYPE_CHECKING:
    from collections.abc import Callable


def moving(part: float) -> LayerSample:
    """A layer with weights that move by that part."""
    return LayerSample(part, unfed=False, zero=False)


USUAL, LOST = moving(1e-3), moving(0.9e-9)
UNFED = LayerSample(0.0, unfed=True, zero=False)
ZERO = LayerSample(0.0, unfed=False, zero=True)
NOTHING = StuckLayers((), (), ())


def judged(layers: Callable[[int], dict[str, LayerSample]], looks: int = 6, every: int = 50) -> StuckLayers:
    """What is said at the last of so many looks, so many steps apart."""
    judge = StuckLayerDetector()
    return [judge.judge(look * every, layers(look)) for look in range(1, looks + 1)][-1]


def test_what_is_lost_or_unfed_is_told_with_the_layers_before_it() -> None:
    """In the model's order, without zeros behind the last of them; of an optimizer that goes by signs no size is judged."""
    stuck = judged(lambda _: {"a": ZERO, "b": LOST, "c": ZERO, "d": UNFED, "e": USUAL, "f": ZERO})
    assert stuck == StuckLayers(("b",), ("d",), ("a", "c"))
    unknown = LayerSample(None, unfed=False, zero=False)
    stuck = judged(lambda _: {"a": unknown, "b": LayerSample(None, unfed=True, zero=False), "c": unknown})
    assert stuck == StuckLayers((), ("b",), ())


@pytest.mark.parametrize("sample", [LOST, UNFED])
def test_it_has_to_last(sample: LayerSample) -> None:
    """Three looks and a hundred steps, without one between them in which the layer moves."""
    for looks, every, names in ((LASTING_SAMPLES - 1, 1000, ()), (20, LASTING_STEPS // 20, ()), (LASTING_SAMPLES, 50, ("a",))):
        assert judged(lambda _: {"a": sample, "b": USUAL}, looks, every).all == names
    assert judged(lambda look: {"a": USUAL if look == 4 else sample, "b": USUAL}) == NOTHING


def test_layers_that_are_slow_together_or_wake_up_are_left_in_peace() -> None:
    """At a rate of nearly nothing all keep pace; one may wake up behind a gate; one that only varies far below is lost."""
    for parts in ((1.1e-15, 1e-9), (1e-7, 10.0), (0.0, 0.0)):
        layers = dict(zip("ab", map(moving, parts), strict=True))
        assert judged(lambda _, layers=layers: layers) == NOTHING  # type: ignore[misc]
    assert judged(lambda look: {"a": moving(1e-14 * 11.0**look), "b": moving(1.0)}) == NOTHING
    assert judged(lambda look: {"a": moving(1e-18 * 30.0 ** (look % 3)), "b": USUAL}).lost == ("a",)


CUT = LayerSample(0.0, unfed=False, zero=True, leading=True)


def test_first_layers_without_any_gradient_are_cut_off() -> None:
    """From some step on; not an input that was never used, a part behind others, what wakes up in time, or has hardly begun."""
    assert judged(lambda _: {"a": CUT, "b": CUT, "c": USUAL}).cut == ("a", "b")
    assert judged(lambda look: {"a": CUT if look > 2 else USUAL, "b": USUAL}).cut == ("a",)
    assert judged(lambda _: {"a": CUT, "b": CUT, "c": UNFED, "d": USUAL}) == StuckLayers((), ("c",), ("a", "b"))
    assert judged(lambda _: {"a": CUT, "b": USUAL}) == NOTHING
    assert judged(lambda look: {"a": USUAL, "b": ZERO if look > 2 else USUAL}) == NOTHING
    assert judged(lambda look: dict.fromkeys("ab", USUAL if look in {3, 5} else CUT) | {"c": USUAL}) == NOTHING
    assert judged(lambda look: dict.fromkeys("ab", CUT if look > 4 else USUAL) | {"c": USUAL}) == NOTHING


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_gradients_that_are_zero_by_chance_are_no_finding(share: float) -> None:
    """Experts that no token comes to: 10 layers in 75,000 measured steps; every 25th is judged."""
    chance, judge = random.Random(7), StuckLayerDetector()
    names, whole = [f"expert{number}" for number in range(10)], 0
    for step in range(75_000):
        zeros = [chance.random() < share for _ in names]
        first = learning.leading(zeros)
        whole = whole if first else step
        if step % 25 == 0:
            layers = {
                name: LayerSample(0.0 if zero else 1e-3, unfed=False, zero=zero, leading=index < first)
                for index, (name, zero) in enumerate(zip(names, zeros, strict=True))
            }
            assert judge.judge(step, layers, whole) == NOTHING


def test_three_recompilations_are_usual_and_the_fourth_is_told_once_a_minute() -> None:
    """A dynamic size, evaluation and a second dtype are usual; those of one step are no storm unless torch gives up."""
    recompiles = Recompiles()
    counts = [recompiles.note("forward", float(now), now) for now in range(0, 130, 2)]
    assert counts[:4] == [0, 0, 0, 4]
    assert [count for count in counts if count] == [4, 34, 64]
    recompiles = Recompiles()
    assert not any(recompiles.note("single_param_adam", float(now), now // 5) for now in range(6))
    assert recompiles.note("single_param_adam", 6.0, 1) == learning.WITHIN_ONE


def norms(ranks: int, steps: int = 40, **odd: float) -> dict[str, dict[int, float]]:
    """The same norms on so many ranks but for rounding; those of the named ones (`r3`) are so many times that."""
    chance = random.Random(1)
    usual = {step: chance.lognormvariate(0.0, 1.0) for step in range(1, steps + 1)}
    return {
        str(rank): {step: norm * odd.get(f"r{rank}", 1.0) * (1 + chance.gauss(0, 1e-6)) for step, norm in usual.items()}
        for rank in range(ranks)
    }


def test_the_rank_that_differs_is_named() -> None:
    """By a fiftieth or more; all where no majority agrees; not by rounding, too few steps, or a norm that is not finite."""
    for ranks in (3, 8, 64):
        assert differing(norms(ranks, r1=1.02)) == ("1",)
        assert differing(norms(ranks, r2=1e-3)) == ("2",)
    assert differing(norms(2, r1=2.0)) == ("0", "1")
    assert differing(norms(4, r2=2.0, r3=2.0)) == ("0", "1", "2", "3")
    assert differing(norms(8, 20_000)) == differing(norms(8, r1=1.005)) == ()
    assert differing(norms(1)) == differing({}) == ()
    assert differing(norms(4, LEAST_STEPS - 1, r1=2.0)) == ()
    once = norms(4)
    once["1"][40] *= 2.0
    assert differing(once) == ()
    once["1"] = dict.fromkeys(once["1"], float("nan"))
    assert differing(once) == ()
