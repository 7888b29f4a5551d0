"""A process group that the training thread destroys while the sampler thread asks about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
