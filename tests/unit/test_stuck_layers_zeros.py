"""Which steps are judged because of gradients that have become zero."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from torchobs.probes.gradients.stuck_layers import ZeroWatch


class Norms(NamedTuple):
    """What the watch reads of a measurement."""

    norms: list[float]


def seen(norms: list[float]) -> list[Any]:
    """A measured step with one optimizer."""
    return [Norms(norms)]


@pytest.mark.parametrize("apart", [1, 25, 60, 150])
def test_a_change_is_looked_at_eight_times_however_seldom_it_is_measured(apart: int) -> None:
    """And within 200 steps of it where that is more; steps that are judged are at least 25 apart."""
    watch = ZeroWatch()
    for step in range(0, 600, apart):
        watch.note(seen([1.0, 1.0]), step)
    watch.due.clear()
    judged = list[int]()
    for step in range(600, 600 + max(2_000, 20 * apart), apart):
        watch.note(seen([0.0, 1.0]), step)
        judged += [due for due, _ in watch.due]
        watch.due.clear()
    assert len(judged) == (9 if apart <= 25 else 8)
    assert min(later - earlier for earlier, later in pairwise(judged)) >= 25
    assert not watch.doubtful


def test_what_is_zero_from_the_first_step_on_is_looked_at_as_well() -> None:
    """A model whose first layers never get a gradient."""
    watch = ZeroWatch()
    for step in (1, 400, 800):
        watch.note(seen([0.0, 1.0]), step)
        assert watch.doubtful
    assert len(watch.due) == 3
