"""A process group that the training thread destroys while the sampler thread asks about it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from torchobs.probes.lifecycle import collectives
from torchobs.probes.lifecycle.collectives import CollectivesProbe
from torchobs.probes.lifecycle.distributed import DistributedProbe


class Destroyed:
    """`torch.distributed` in between: the group was there, and what is asked of it raises as torch does."""

    def is_initialized(self) -> bool:
        """It was."""
        return True

    def get_backend(self) -> str:
        """Too late."""
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")

    def get_world_size(self) -> int:
        """Likewise."""
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")


@pytest.mark.parametrize("method", ["_read_group", "_world_size"])
def test_it_is_no_fault_of_the_probe(method: str) -> None:
    """Nothing is published, and the probe stays on."""
    probe: Any = DistributedProbe() if method == "_read_group" else CollectivesProbe()
    probe._distributed = Destroyed()
    probe._context = SimpleNamespace(recorder=SimpleNamespace(step=1, optimizers=list), writer=None)
    assert not getattr(probe, method)()
    if method == "_world_size":
        probe._say_if_empty({})
        assert probe._told == ""


def group(backend: str, count: Callable[[], int]) -> Any:
    """A process group of two ranks."""
    return SimpleNamespace(group_name=backend, backend=backend, size=lambda: 2, _get_sequence_number_for_group=count)


def test_a_group_that_does_not_count_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a group of a backend without numbers, or one that is just destroyed, leaves the counts of those behind it."""
    some = [group("ucc", Destroyed().get_world_size), group("gloo", Destroyed().get_world_size), group("nccl", lambda: 7)]
    monkeypatch.setattr(collectives, "groups", lambda: some)
    published: list[tuple[str, float]] = []
    probe: Any = CollectivesProbe()
    probe._distributed = SimpleNamespace(get_backend=lambda group: group.backend)
    probe._context = SimpleNamespace(set_gauge=lambda _, value, labels: published.append((labels["group"], value)))
    probe._publish_counts()
    assert (published, probe._living) == ([("nccl", 7)], {"nccl"})
