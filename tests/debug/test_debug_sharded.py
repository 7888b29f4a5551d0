"""Functions of ``debug`` on sharded models (FSDP1, FSDP2), with two real ranks over gloo."""

# mypy: disable-error-code="no-untyped-call"

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import fork_server
from torchobs import debug

LAYOUTS = ("fsdp1", "fsdp1 original", "fsdp2")


def sharded(layout: str) -> nn.Module:
    """A model with a block that is gathered again for the backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2))
    if layout == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    from torch.distributed.fsdp import FullyShardedDataParallel, wrap

    policy = wrap.ModuleWrapPolicy({nn.Sequential})
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=layout.endswith("original"), auto_wrap_policy=policy
    )


def rank_main(rank: int, directory: str) -> None:
    """All calls on one rank. One that waits for the other for ever ends with an error."""
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    said = {}
    for layout in LAYOUTS:
        batch = torch.ones(6, 4)
        found: dict[str, Any] = {"agreement": debug.ddp(sharded(layout)).to_dict()}
        flops = debug.count_flops(sharded(layout), batch)
        found["flops"] = [flops.forward, flops.backward, list(flops.unknown)]
        found["parameters"] = debug.memory_usage(sharded(layout), batch).parameters
        batch[3, 1] = float("nan") if rank else 1.0
        model = sharded(layout)
        origin = debug.trace_nan(model, batch)
        found["origin"] = None if origin is None else [origin.kind, origin.sample]
        found["next loss"] = model(torch.ones(6, 4)).sum().item()  # the other rank takes part in it
        said[layout] = found
    Path(directory, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank was told."""
    return fork_server.said_by_ranks(rank_main, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_no_disagreement(said: list[dict[str, Any]], layout: str) -> None:
    """Promise: ``ddp`` does not compare what is different by design, and says how many parameters that are."""
    for one in said:
        agreement = one[layout]["agreement"]
        assert (agreement["agree"], agreement["anomalies"]) == (True, [])
        assert agreement["sharded"] == (2 if layout == "fsdp1" else 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_on_one_rank_is_traced_there_and_the_other_goes_on(said: list[dict[str, Any]], layout: str) -> None:
    """Promise: both go through the same collectives, whatever they find."""
    assert [one[layout]["origin"] for one in said] == [None, ["input", 3]]
    assert said[0][layout]["next loss"] == said[1][layout]["next loss"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_models_are_measured(said: list[dict[str, Any]], layout: str) -> None:
    """The whole model's products, both passes, and the ranks' parts of the parameters; the gathering multiplies nothing."""
    products = 2 * 6 * (4 * 8 + 8 * 2)
    for one in said:
        assert one[layout]["flops"] == [products, products + 2 * 6 * 8 * 2, []]
    assert sum(one[layout]["parameters"] for one in said) == 4 * 58
