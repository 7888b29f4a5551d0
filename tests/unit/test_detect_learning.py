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
    """A layer whose weights move by that part."""
    return LayerSample(part, unfed=False, zero=False)


USUAL, LOST = moving(1e-3), moving(1e-12)
UNFED = LayerSample(0.0, unfed=True, zero=False)
ZERO = LayerSample(0.0, unfed=False, zero=True)
NOTHING = StuckLayers((), (), ())


def judged(layers: Callable[[int], dict[str, LayerSample]], looks: int = 6, every: int = 50) -> StuckLayers:
    """What is said at the last of so many looks, so many steps apart."""
    judge = StuckLayerDetector()
    return [judge.judge(look * every, layers(look)) for look in range(1, looks + 1)][-1]


def test_what_is_lost_or_unfed_is_told_with_the_layers_before_it() -> None:
    """In the model's order; a gradient of zero behind the last of them is another matter."""
    found = judged(lambda _: {"a": ZERO, "b": LOST, "c": ZERO, "d": UNFED, "e": USUAL, "f": ZERO})
    assert found == StuckLayers(("b",), ("d",), ("a", "c"))
    assert found.all == ("a", "c", "b", "d")


@pytest.mark.parametrize("seen", [LOST, UNFED])
def test_it_has_to_last(seen: LayerSample) -> None:
    """Three looks and a hundred steps, without one between them in which the layer moves."""
    for looks, every, names in ((LASTING_SAMPLES - 1, 1000, ()), (20, LASTING_STEPS // 20, ()), (LASTING_SAMPLES, 50, ("a",))):
        assert judged(lambda _: {"a": seen, "b": USUAL}, looks, every).all == names
    assert judged(lambda look: {"a": USUAL if look == 4 else seen, "b": USUAL}) == NOTHING


def test_all_layers_may_be_slow_together() -> None:
    """At a learning rate of nearly nothing no weight moves, and all keep pace; nor does a slow one matter that does move."""
    assert judged(lambda _: {"a": moving(1e-12), "b": moving(1e-9)}) == NOTHING
    assert judged(lambda _: {"a": moving(1e-7), "b": moving(10.0)}) == NOTHING
    assert judged(lambda _: {"a": moving(0.0), "b": moving(0.0)}) == NOTHING


def test_a_layer_that_wakes_up_is_left_in_peace() -> None:
    """Behind a gate that opens, eleven times as wide at each look; one that only varies far below is lost all the same."""
    assert judged(lambda look: {"a": moving(1e-14 * 11.0**look), "b": moving(1.0)}) == NOTHING
    assert judged(lambda look: {"a": moving(1e-18 * 30.0 ** (look % 3)), "b": USUAL}).lost == ("a",)


def test_an_optimizer_that_goes_by_signs_is_not_judged_by_size() -> None:
    """How far it moves is not known; that only zeros come into a layer is."""
    unknown = LayerSample(None, unfed=False, zero=False)
    found = judged(lambda _: {"a": unknown, "b": LayerSample(None, unfed=True, zero=False), "c": unknown})
    assert found == StuckLayers((), ("b",), ())


CUT = LayerSample(0.0, unfed=False, zero=True, leading=True)


def test_first_layers_without_any_gradient_are_cut_off() -> None:
    """Saturated from the first step on, or from some step on; with another cause behind them they are ``before`` it."""
    assert judged(lambda _: {"a": CUT, "b": CUT, "c": USUAL}).cut == ("a", "b")
    assert judged(lambda look: {"a": CUT if look > 2 else USUAL, "b": USUAL}).cut == ("a",)
    assert judged(lambda _: {"a": CUT, "b": CUT, "c": UNFED, "d": USUAL}) == StuckLayers((), ("c",), ("a", "b"))


def test_what_is_no_cut() -> None:
    """An input that was never used, a part behind others, what wakes up in time, and what has hardly begun."""
    assert judged(lambda _: {"a": CUT, "b": USUAL}) == NOTHING
    assert judged(lambda look: {"a": USUAL, "b": ZERO if look > 2 else USUAL}) == NOTHING
    assert judged(lambda look: dict.fromkeys("ab", USUAL if look in {3, 5} else CUT) | {"c": USUAL}) == NOTHING
    assert judged(lambda look: dict.fromkeys("ab", CUT if look > 4 else USUAL) | {"c": USUAL}) == NOTHING


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_gradients_that_are_zero_by_chance_are_no_finding(share: float) -> None:
    """Experts that no token comes to: 10 layers in 75,000 measured steps, of which every 25th is judged."""
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
    """The usual ones: a size that becomes dynamic, evaluation, a second dtype."""
    recompiles = Recompiles()
    told = [recompiles.note("forward", float(now), now) for now in range(0, 130, 2)]
    assert told[:4] == [0, 0, 0, 4]
    assert [count for count in told if count] == [4, 34, 64]


def test_those_of_one_step_are_no_storm_unless_torch_gives_up() -> None:
    """One for each kind of parameter, in an optimizer's first step: the remedy for a storm is none for it."""
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
    """By a fiftieth or by orders of magnitude; all are named where no majority agrees."""
    for ranks in (3, 8, 64):
        assert differing(norms(ranks, r1=1.02)) == ("1",)
        assert differing(norms(ranks, r2=1e-3)) == ("2",)
    assert differing(norms(2, r1=2.0)) == ("0", "1")
    assert differing(norms(4, r2=2.0, r3=2.0)) == ("0", "1", "2", "3")


def test_ranks_that_agree_are_not_named() -> None:
    """Rounding, a single rank, too few common steps, one step in which they differed, a norm that is not finite."""
    assert differing(norms(8, 20_000)) == ()
    assert differing(norms(1)) == differing({}) == ()
    assert differing(norms(4, LEAST_STEPS - 1, r1=2.0)) == ()
    once = norms(4)
    once["1"][40] *= 2.0
    assert differing(once) == ()
    once["1"] = dict.fromkeys(once["1"], float("nan"))
    assert differing(once) == ()
