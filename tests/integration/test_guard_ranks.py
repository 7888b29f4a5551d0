"""Two gloo ranks with a recovery around their steps: what they do together, and what neither does alone."""

from __future__ import annotations

from math import isfinite
from typing import Any

import pytest

from tests import fork_server, guard_rank


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says of each scenario: one job for all of them."""
    return fork_server.said_by_ranks(guard_rank.main, tmp_path_factory.mktemp("ranks"))


def test_ranks_skip_together_if_they_may(said: list[dict[str, Any]]) -> None:
    """Promise: of two ranks both skip the step in which one has a bad batch, and their weights stay the same."""
    for scenario in ("agree", "micro_batches"):
        first, second = (one[scenario] for one in said)
        assert first["actions"] == second["actions"] == ["none", "none", "none", "skip", "none", "none"]
        assert first["weights"] == second["weights"]
        assert all(isfinite(weight) for weight in first["weights"])


def test_a_rank_alone_does_not_skip(said: list[dict[str, Any]]) -> None:
    """Promise: without ``agree`` it is an error on both ranks: the gradients of the bad batch have reached the other, too."""
    assert [one["alone"]["actions"] for one in said] == [["none", "none", "none", "raise"]] * 2


def test_ranks_go_back_together(said: list[dict[str, Any]]) -> None:
    """Promise: a loss that jumps on one rank puts both back to their snapshots, of the same step."""
    first, second = (one["spike"] for one in said)
    assert first["actions"] == second["actions"]
    assert first["actions"].count("restore") == 1
    assert first["actions"][30] == "restore"
    assert first["weights"] == second["weights"]


def test_gradients_are_averaged_once_for_a_step(said: list[dict[str, Any]]) -> None:
    """Promise: micro-batches of all ranks make the step of all samples in one batch, with one exchange of gradients."""
    for one in said:
        assert one["averaged_once"]["collectives"] == 1
        assert one["averaged_once"]["weights"] == pytest.approx(one["averaged_once"]["expected"], rel=1e-5)


def test_a_rank_without_memory_ends_both(said: list[dict[str, Any]]) -> None:
    """Promise: the error is the original one where it happened, and an error, no endless wait, where it did not."""
    assert [one["out_of_memory"]["error"] for one in said] == ["RuntimeError", "OutOfMemoryError"]


def test_steps_are_held_back_together_if_ranks_agree(said: list[dict[str, Any]]) -> None:
    """Promise: where each rank has gradients of its own, ``agree`` holds a step back on both; without it one goes on alone."""
    together, alone = ([one[scenario] for one in said] for scenario in ("held", "held_alone"))
    assert [one["held"] for one in together] == [1, 1]
    assert together[0]["weights"] == together[1]["weights"]
    assert [one["held"] for one in alone] == [0, 1]
    assert alone[0]["weights"] != alone[1]["weights"]
