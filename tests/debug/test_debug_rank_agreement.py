"""``debug.ddp`` with two real ranks over gloo: what differs is named on both."""

# mypy: disable-error-code="no-untyped-call, attr-defined"

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests import fork_server
from torchobs import debug


def rank_main(rank: int, directory: str) -> None:
    """Four comparisons on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    said: dict[str, Any] = {"begun": debug.ddp(model).to_dict()}
    torch.manual_seed(rank)
    model(torch.randn(6, 4)).sum().backward()
    said["trained"] = debug.ddp(model).to_dict()
    with torch.no_grad():
        model.module[0].weight[0, 0] += 1e-6 * rank
        model.module[2].weight.grad[0, 0] = float(rank)
    said["differ"] = debug.ddp(model).to_dict()
    model.module.train(mode=rank == 0)
    said["mode"] = debug.ddp(model.module).to_dict()
    Path(directory, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank was told."""
    return fork_server.said_by_ranks(rank_main, tmp_path_factory.mktemp("ranks"))


def test_equal_ranks_agree(said: list[dict[str, Any]]) -> None:
    """Also after a backward pass with different data: gradients are equal, batch norm's buffers differ, which is usual."""
    for rank, one in enumerate(said):
        assert (one["begun"]["agree"], one["begun"]["world_size"], one["begun"]["rank"]) == (True, 2, rank)
        trained = one["trained"]
        assert (trained["agree"], trained["anomalies"]) == (True, [])
        assert {row["kind"] for row in trained["disagreements"]} == {"buffer"}


def test_what_differs_is_named_on_both_ranks(said: list[dict[str, Any]]) -> None:
    """One weight by 1e-6, one gradient, with rank and norms."""
    for one in said:
        rows = {(row["kind"], row["name"]): row for row in one["differ"]["disagreements"]}
        assert not one["differ"]["agree"]
        assert rows["parameter", "0.weight"]["ranks"] == rows["gradient", "2.weight"]["ranks"] == [1]
        assert set(rows) - {("parameter", "0.weight"), ("gradient", "2.weight")} == {
            ("buffer", "1.running_mean"), ("buffer", "1.running_var"),
        }  # fmt: skip
        assert len(rows["gradient", "2.weight"]["norms"]) == 2
        assert one["mode"]["structure_differs"] == [1]


def test_one_process_agrees_with_itself() -> None:
    """Without a process group; any types of parameters."""
    model = nn.Linear(3, 3).to(torch.bfloat16)
    model.register_buffer("frequencies", torch.ones(2, dtype=torch.complex64))
    found = debug.ddp(model)
    assert (found.agree, found.world_size, found.disagreements, found.anomalies) == (True, 1, (), ())
    with pytest.raises(TypeError, match="ddp"):
        debug.ddp(3)
