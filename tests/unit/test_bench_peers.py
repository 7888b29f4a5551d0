"""The interval that the comparison with other tools gives beside a median."""

from __future__ import annotations

import pytest

from tests.bench.peers import interval_of_median


@pytest.mark.parametrize(
    ("count", "lowest", "highest", "certainty"),
    [(1, 1, 1, 0), (3, 1, 3, 0.75), (6, 1, 6, 0.9688), (9, 2, 8, 0.9609),
     (10, 2, 9, 0.9785), (12, 3, 10, 0.9614), (20, 6, 15, 0.9586), (30, 10, 21, 0.9572)],
)  # fmt: skip
def test_ranks_of_the_sign_test(count: int, lowest: int, highest: int, certainty: float) -> None:
    """As statistical tables have them for 95 %; below six values all there is, and how little that says."""
    found = interval_of_median([float(value) for value in range(1, count + 1)])
    assert found[:2] == (lowest, highest)
    assert found[2] == pytest.approx(certainty, abs=1e-4)
