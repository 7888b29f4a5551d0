"""Collectives of a real process group, by torch's flight recorder: what is counted, at which level, and what is shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.training import loss_of, mlp, recording
from torchobs.probes.lifecycle import collectives
from torchobs.probes.lifecycle.collectives import Dump, GroupStatus

if TYPE_CHECKING:
    from pathlib import Path


SIZE = ("torchobs.collective.size",)


def of_collectives(values: dict[tuple[str, ...], Any]) -> dict[tuple[str, ...], Any]:
    """The series that are about them."""
    return {key: value for key, value in values.items() if key[0].startswith("torchobs.collective.")}


@pytest.mark.usefixtures("group")
def test_sizes_are_counted_once_each_from_level_advanced_on(flight_dir: Path) -> None:
    """What came before the first reading is still in the recorder, and so counted, too; gloo has no durations."""
    model, tensor, read = mlp(), torch.ones(1000), []
    for run in recording(flight_dir, level="advanced"):
        for calls in (2, 3):
            for _ in range(calls):
                dist.all_reduce(tensor)
            run.look()  # the slow sensors are asked, and the next backward reads
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            read.append(of_collectives(run.look()))
    first, second = ([one["torchobs.collective.input", "all_reduce"], sum(one[SIZE].counts)] for one in read)
    assert [after - before for before, after in zip(first, second, strict=True)] == [3 * 4000, 3]
    assert first[0] >= 2 * 4000
    assert {key[0] for key in read[1]} == {SIZE[0], "torchobs.collective.input"}


def test_a_rank_in_many_groups_has_series_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh of many dimensions, or a group for each expert, makes as many; the default group is the first."""

    class Pair:
        def size(self) -> int:
            return 2

    names = {number: collectives._Group(str(number), {"backend": "nccl", "group": str(number)}) for number in range(20)}
    world = SimpleNamespace(pg_names={Pair(): group.name for group in names.values()})
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    probe = collectives.CollectivesProbe()
    probe._groups = {("nccl", number): group for number, group in names.items()}
    dump = Dump(dict.fromkeys(reversed(range(20)), GroupStatus(9, 9)), ())
    assert [number for (_, number), _ in probe._shown({"nccl": dump})] == list(range(8))


@pytest.mark.usefixtures("group")
def test_a_group_of_one_has_no_series_at_level_basic(flight_dir: Path) -> None:
    """It waits for nobody."""
    for run in recording(flight_dir):
        dist.all_reduce(torch.ones(8))
        run.look()
        loss_of(mlp()).backward()  # type: ignore[no-untyped-call]
        assert of_collectives(run.look()) == {}
