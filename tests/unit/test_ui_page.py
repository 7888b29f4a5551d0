"""Parts of the live page, from numbers alone."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.ui import row, run
from torchobs import catalog
from torchobs.exporter.ui.page import rendered
from torchobs.exporter.ui.view_model import Choice, _memory, model
from torchobs.ranks.metric_values import Readings


@pytest.mark.parametrize("ranks", [None, 1.0, 4.0])
def test_the_norm_of_a_shard_is_said_to_be_one(ranks: float | None) -> None:
    """FSDP's gradients that are not clipped: each rank has another norm, and none is the model's."""
    one = row(values={} if ranks is None else {catalog.GRAD_NORM_RANKS.name: {(): ranks}})
    page = rendered(model((run(one),), Choice(), {}, [], 0.0))
    assert f"<h3>Gradient norm{' of its shard' if ranks == 4 else ''}</h3>" in page["curves"]


def test_a_share_of_memory_says_whose_it_is() -> None:
    """Promise: beside a process's memory stands how full the machine or the cgroup is, by name; of devices the fullest."""
    mib = 2.0**20
    process = Readings({"torchobs.memory.host.rss": {(): 324 * mib}, "torchobs.memory.host.utilization": {("machine",): 0.31}})
    assert _memory(process) == (324 * mib, ("machine", 0.31))
    devices = Readings(
        {
            catalog.MEMORY_DEVICE_RESERVED.name: {("cuda:0",): 1 * mib, ("cuda:1",): 3 * mib},
            catalog.MEMORY_DEVICE_LIMIT.name: {("cuda:0",): 4 * mib, ("cuda:1",): 4 * mib},
        }
    )
    assert _memory(devices) == (4 * mib, ("cuda:1", 0.75))
    shown = replace(row(), memory=324 * mib, fullest=("machine", 0.31))
    page = "".join(rendered(model((run(shown),), Choice(), {}, [], 0.0)).values())
    assert re.search(r"324 MiB[^(]*\(machine 31 % full\)", page.replace("\xa0", " "))
