"""What the exporter says of ranks together: who is slow and in what, who is behind, who is missing, the whole gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rank_files import BORN_NS, Clock, File, S, scanner_of
from torchobs import catalog
from torchobs.catalog import PHASES
from torchobs.flight.step_record import RecordKind, StepFlag
from torchobs.ranks.comparison import whole_norm
from torchobs.ranks.snapshot import RunSummary, Snapshot

FAST = (0.01, 0.02, 0.05, 0.01, 0.01)
LATE_DATA = (0.04, 0.02, 0.02, 0.01, 0.01)
"""As long as the others' in all: they wait for it within backward."""


class Node:
    """Ranks of one run on one machine, and an exporter."""

    def __init__(self, directory: Path, ranks: int, groups: int = 0, local_world_size: int = 0, world_size: int = 0) -> None:
        """``groups``: replica groups of so many ranks each; 0: none, all ranks train together."""
        here, everywhere = local_world_size or ranks, world_size or ranks
        sizes: dict[str, Any] = {"local_world_size": here, "world_size": everywhere}
        places = [{"rank": rank, **sizes} for rank in range(ranks)]
        if groups:
            places = [{"replica_group": group, **place} for group in range(groups) for place in places]
        self.files = [File(directory, seed=seed, **place).hold() for seed, place in enumerate(places, 1)]
        self.clock = Clock()
        self.steps = [0] * len(self.files)
        self.scanner = scanner_of(directory, self.clock)

    def train(self, times: Sequence[Sequence[float]], steps: int, norms: Sequence[float] | None = None) -> Snapshot:
        """Let every rank take steps of such phases within ten seconds, and look."""
        self.clock.seconds += 10.0
        now_ns = BORN_NS + round(self.clock.seconds * S)
        for rank, (file, phases) in enumerate(zip(self.files, times, strict=True)):
            padded, own_s = (*phases, *[0.0] * (9 - len(phases))), sum(phases[:5])
            norm = 1.0 if norms is None else norms[rank]
            for step in range(self.steps[rank], self.steps[rank] + steps):
                flags = StepFlag.LOSS | StepFlag.GRAD_NORM
                file.writer.append(step + 1, now_ns - S, RecordKind.STEP, flags, 1, own_s, 2.0, norm, 1e-3, padded, 0, 0)
            self.steps[rank] += steps
            file.beat(self.clock.seconds)
            file.writer.fold()
            file.save()
        return self.scanner.scan()

    def close(self) -> None:
        for file in self.files:
            file.release()
        self.scanner.close()


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Closed at the end."""
    made: list[Node] = []
    yield made
    for node in made:
        node.close()


def of(nodes: list[Node], directory: Path, ranks: int, **resource: int) -> Node:
    """A node of so many ranks, closed at the end."""
    nodes.append(Node(directory, ranks, **resource))
    return nodes[-1]


def test_the_slow_rank_is_found_though_all_take_the_same_time(flight_dir: Path, nodes: list[Node]) -> None:
    """DDP's others wait within backward for the one whose data is late: 0.1 s each, of which they work 0.07 s."""
    node = of(nodes, flight_dir, 4)
    times = [FAST, FAST, LATE_DATA, FAST]
    node.train(times, 1)
    snapshot = node.train(times, 20)
    standings = [rank.standing for rank in snapshot.ranks]
    assert [one.slowdown if one else None for one in standings] == pytest.approx([1.0, 1.0, 0.1 / 0.07, 1.0])
    late = standings[2]
    assert late is not None
    assert late.excess_s == pytest.approx({"data": 0.03, "optimizer": 0.0, "other": 0.0, "between": 0.0})
    assert max(
        (value, rank.rank, phase) for rank in snapshot.ranks if rank.standing for phase, value in rank.standing.excess_s.items()
    )[1:] == ("2", "data")


@pytest.mark.parametrize("waiting", ["forward", "backward", "optimizer", "other"])
def test_who_waits_while_another_evaluates_alone_is_not_slow(flight_dir: Path, nodes: list[Node], waiting: str) -> None:
    """Wherever in its step it waits, and also while only one of the ranks has ended the step of the evaluation."""
    node = of(nodes, flight_dir, 2)
    waits = tuple(own_s + 60.0 * (phase == waiting) for phase, own_s in zip(PHASES[:5], FAST, strict=True))
    node.train([FAST, FAST], 1)
    node.train([FAST, FAST], 40)
    node.train([(*FAST, 60.0), FAST], 1)
    snapshots = [node.train([FAST, waits], 1), *(node.train([FAST, FAST], 20) for _ in range(6))]
    for snapshot in snapshots:
        standings = [rank.standing for rank in snapshot.ranks if rank.standing]
        assert [one.slowdown for one in standings] == pytest.approx([1.0, 1.0])
        assert [max(one.excess_s.values()) for one in standings] == pytest.approx([0.0, 0.0])


def test_what_is_long_ago_does_not_count(flight_dir: Path, nodes: list[Node]) -> None:
    """A rank that was slow in its first minutes is not slow for the rest of the day."""
    node = of(nodes, flight_dir, 2)
    node.train([FAST, LATE_DATA], 1)
    node.train([FAST, LATE_DATA], 100)
    snapshot = [node.train([FAST, FAST], 20) for _ in range(4)][-1]
    assert [rank.standing.slowdown for rank in snapshot.ranks if rank.standing] == pytest.approx([1.0, 1.0])


def test_few_steps_and_a_single_rank_say_nothing(flight_dir: Path, nodes: list[Node]) -> None:
    """There is no slowdown before sixteen steps, and none without peers."""
    node = of(nodes, flight_dir, 2)
    node.train([FAST, LATE_DATA], 1)
    snapshot = node.train([FAST, LATE_DATA], 10)
    assert [(rank.standing.slowdown, rank.standing.excess_s) for rank in snapshot.ranks if rank.standing] == [(None, {})] * 2
    node.files[1].release()
    node.files[1].path.unlink()
    node.files[0].beat(node.clock.seconds)
    assert [rank.standing for rank in node.scanner.scan().ranks] == [None]


def test_who_is_behind_and_who_is_missing(flight_dir: Path, nodes: list[Node]) -> None:
    """Of eight that the launcher started here two have a file, and one of them has done five steps less."""
    node = of(nodes, flight_dir, 2, local_world_size=8, world_size=16)
    node.train([FAST, FAST], 3)
    file = node.files[0]
    for step in range(4, 9):
        file.step(step, node.clock.seconds - 0.5)
    file.save()
    snapshot = node.scanner.scan()
    assert [rank.standing.behind for rank in snapshot.ranks if rank.standing] == [0, 5]
    assert snapshot.runs == (RunSummary("gpt", "run-1", here=2, missing=6, step_spread=5, grad_norm=None),)


def test_a_replica_group_is_compared_with_no_other(flight_dir: Path, nodes: list[Node]) -> None:
    """A group with slower data and fewer steps is neither slow nor behind; within a group a rank is, in the same way."""
    node = of(nodes, flight_dir, 2, groups=2)
    times = [FAST, FAST, LATE_DATA, LATE_DATA]
    node.train(times, 1)
    for file in node.files[:2]:
        file.step(2, node.clock.seconds - 0.5)
    node.steps[:2] = [2, 2]
    snapshot = node.train(times, 20)
    standings = {rank.rank: rank.standing for rank in snapshot.ranks if rank.standing}
    assert [one.behind for one in standings.values()] == [0] * 4
    assert {rank: one.slowdown for rank, one in standings.items()} == pytest.approx(
        dict.fromkeys(("0-g0", "0-g1", "1-g0", "1-g1"), 1.0)
    )
    assert snapshot.runs[0].step_spread == 0
    other = flight_dir / "other"
    other.mkdir(mode=0o700)
    slow = of(nodes, other, 2, groups=2)
    times = [FAST, FAST, FAST, LATE_DATA]
    slow.train(times, 1)
    snapshot = slow.train(times, 20)
    factors = [rank.standing.slowdown for rank in snapshot.ranks if rank.standing]
    assert factors == pytest.approx([1.0, 1.0, 1.0, 0.1 / 0.07])


def test_shards_make_a_whole(flight_dir: Path, nodes: list[Node]) -> None:
    """Two ranks with a shard each: the root of the sum of squares."""
    node = of(nodes, flight_dir, 2)
    for file in node.files:
        file.set(catalog.GRAD_NORM_RANKS, 2.0)
    snapshot = node.train([FAST, FAST], 2, norms=[3.0, 4.0])
    assert snapshot.runs[0].grad_norm == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("parts", "world_size", "norm"),
    [
        ([(2.0, 1.0), (2.0, 1.0)], 2, 2.0),
        ([(2.0, None)], 1, 2.0),
        ([(3.0, 2.0), (4.0, 2.0), (3.0, 2.0), (4.0, 2.0)], 4, 5.0),
        ([(1.0, 4.0), (1.0, 4.0), (1.0, 4.0), (1.0, 4.0)], 4, 2.0),
        ([(3.0, 2.0), (4.0, 2.0)], 4, None),
        ([(3.0, 2.0), (None, 2.0)], 2, None),
        ([], 0, None),
    ],
)
def test_the_whole_s_norm(parts: list[tuple[float | None, float | None]], world_size: int, norm: float | None) -> None:
    """Replicas, shards, replicas of shards; nothing where a part is elsewhere or not measured."""
    found = whole_norm(parts, world_size)
    assert found == (norm if norm is None else pytest.approx(norm))
