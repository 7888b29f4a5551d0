"""Steps to be sampled: the same ones on all ranks, whatever each of them measures."""

from __future__ import annotations

import pytest

from torchobs.detect.alike_interval import alike_interval, taken


@pytest.mark.parametrize(
    ("unit", "target", "expected"),
    [(10.0, 10.0, 1), (20.0, 10.0, 1), (9.9, 10.0, 2), (5.0, 10.0, 2), (4.9, 10.0, 4), (0.01, 10.0, 1024), (1e-3, 10.0, 16384)],
)
def test_the_interval_reaches_its_target(unit: float, target: float, expected: int) -> None:
    """By the smallest power of two."""
    assert alike_interval(unit, target) == expected


@pytest.mark.parametrize("unit", [0.0, 1e-300, 5e-324])
def test_no_duration_is_too_short(unit: float) -> None:
    """Also none at all gives an interval."""
    assert alike_interval(unit, 10.0) == 1 << 40


def test_ranks_that_measure_differently_take_the_same() -> None:
    """What the slower samples less often, the faster samples as well; the first powers of two come in any case."""
    mine, other = alike_interval(0.0101, 10.0), alike_interval(0.0097, 10.0)
    assert mine != other
    fewer, more = (set(taken(range(100_000), one)) for one in sorted((mine, other), reverse=True))
    assert fewer < more
    assert {1, 2, 4, 8, 512} <= fewer
    assert len([number for number in fewer if number > max(mine, other)]) >= 47
    assert taken(range(-3, 1), 1) == []
