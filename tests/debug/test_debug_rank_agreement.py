"""``debug.compare_ranks`` with two real ranks, and ``debug.check_devices``: what differs, or lies elsewhere, is named."""
# mypy: disable-error-code="attr-defined, no-untyped-call"

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests import fork_server
from tests.debug.models import MODELS, hooks, texts
from torchobs import debug

LAYOUTS = ("fsdp1", "fsdp2")


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
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=policy)


def shards(rank: int, layout: str) -> dict[str, Any]:
    """The results of a sharded model with a NaN in one rank's batch."""
    batch = torch.ones(6, 4)
    result: dict[str, Any] = {"agreement": debug.compare_ranks(sharded(layout)).to_dict()}
    flops = debug.count_flops(sharded(layout), batch)
    result["flops"] = [flops.forward, flops.backward, list(flops.unknown)]
    result["parameters"] = debug.memory_by_module(sharded(layout), batch).parameters_bytes
    batch[3, 1] = float("nan") if rank else 1.0
    model = sharded(layout)
    origin = debug.trace_nan(model, batch)
    result["origin"] = None if origin is None else [origin.kind, origin.sample]
    result["next loss"] = model(torch.ones(6, 4)).sum().item()  # the other rank takes part in it
    return result


def rank_main(rank: int, directory: str) -> None:
    """All calls on one rank. One that waits for the other for ever ends with an error."""
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    said = replicas(rank) | {layout: shards(rank, layout) for layout in LAYOUTS}
    Path(directory, f"{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def replicas(rank: int) -> dict[str, Any]:
    """Four comparisons."""
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    said: dict[str, Any] = {"begun": debug.compare_ranks(model).to_dict()}
    torch.manual_seed(rank)
    model(torch.randn(6, 4)).sum().backward()
    said["trained"] = debug.compare_ranks(model).to_dict()
    with torch.no_grad():
        model.module[0].weight[0, 0] += 1e-6 * rank
        model.module[2].weight.grad[0, 0] = float(rank)
    said["differ"] = debug.compare_ranks(model).to_dict()
    model.module.train(mode=rank == 0)
    said["mode"] = debug.compare_ranks(model.module).to_dict()
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results on each rank."""
    return fork_server.said_by_ranks(rank_main, tmp_path_factory.mktemp("ranks"))


def test_ranks_that_agree_and_ranks_that_differ(said: list[dict[str, Any]]) -> None:
    """After a backward pass with different data batch norm's buffers differ, which is usual; what differs is named on both."""
    for rank, answers in enumerate(said):
        assert (answers["begun"]["ok"], answers["begun"]["world_size"], answers["begun"]["rank"]) == (True, 2, rank)
        trained = answers["trained"]
        assert (trained["ok"], trained["problems"]) == (True, [])
        assert {row["kind"] for row in trained["disagreements"]} == {"buffer"}
        rows = {(row["kind"], row["name"]): row for row in answers["differ"]["disagreements"]}
        assert not answers["differ"]["ok"]
        assert rows["parameter", "0.weight"]["ranks"] == rows["gradient", "2.weight"]["ranks"] == [1]
        assert len(rows["gradient", "2.weight"]["norms"]) == 2
        assert answers["mode"]["structure_differs"] == [1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sharded_models(said: list[dict[str, Any]], layout: str) -> None:
    """Promise: shards are no disagreement; a NaN on one rank is traced there, and both go through the same collectives.

    FLOPs are the whole model's products, both passes, and the gathering multiplies nothing.
    """
    products = 2 * 6 * (4 * 8 + 8 * 2)
    for answers in said:
        agreement = answers[layout]["agreement"]
        assert (agreement["ok"], agreement["problems"]) == (True, [])
        assert agreement["sharded"] == (2 if layout == "fsdp1" else 4)
        assert answers[layout]["flops"] == [products, products + 2 * 6 * 8 * 2, []]
    assert sum(answers[layout]["parameters"] for answers in said) == 4 * 58
    assert [answers[layout]["origin"] for answers in said] == [None, ["input", 3]]
    assert said[0][layout]["next loss"] == said[1][layout]["next loss"]


def test_one_process_agrees_with_itself() -> None:
    """Without a process group; any types of parameters."""
    model = nn.Linear(3, 3).to(torch.bfloat16)
    model.register_buffer("frequencies", torch.ones(2, dtype=torch.complex64))
    comparison = debug.compare_ranks(model)
    assert (comparison.ok, comparison.world_size, comparison.disagreements, comparison.problems) == (True, 1, (), ())
    with pytest.raises(TypeError, match="compare_ranks"):
        debug.compare_ranks(3)


class Copying(nn.Module):
    """Sends its input to another device and back in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.to("meta")
        out: torch.Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_found_in_healthy_models(name: str) -> None:
    """And neither buffers nor random state nor gradients change."""
    make, sample = MODELS[name]
    model, (inputs, _) = make(), sample()
    before, random = [x.clone() for x in model.state_dict().values()], torch.get_rng_state()
    check = debug.check_devices(model, inputs, optimizer=torch.optim.Adam(model.parameters()))
    assert (check.device, check.misplaced, check.copies, check.error, check.problems) == ("cpu", (), (), None, ())
    assert check.devices[0].parameters == len(list(model.parameters()))
    assert check.devices[0].inputs == 1
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert torch.equal(random, torch.get_rng_state())
    assert hooks(model) == 0


def test_a_parameter_and_an_input_elsewhere_are_named() -> None:
    """The forward pass that fails for it raises nothing."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 2))
    model[1].bias = nn.Parameter(torch.zeros(2, device="meta"))
    check = debug.check_devices(model, {"input": torch.zeros(3, 4, device="meta")})
    assert [(row.kind, row.name, row.device) for row in check.misplaced] == [
        ("parameter", "1.bias", "meta"), ("input", "input.input", "meta"),
    ]  # fmt: skip
    assert "1.bias: the parameter is on meta, not on cpu" in texts(check)
    assert "misplaced" in str(check)


def test_state_of_the_optimizer_elsewhere() -> None:
    """Its step counts belong on the CPU and are not meant."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert debug.check_devices(model, optimizer=optimizer).problems == ()
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(2, 4, device="meta")
    (row,) = debug.check_devices(model, optimizer=optimizer).misplaced
    assert (row.kind, row.name) == ("optimizer state", "weight.exp_avg")


def test_a_silent_copy_is_told_with_its_line() -> None:
    """Twelve floats, once a call, from the line of the model."""
    (copy,) = debug.check_devices(Copying(), torch.zeros(3, 4)).copies
    assert (copy.operator, copy.source, copy.target, copy.count, copy.size_bytes) == ("_to_copy", "cpu", "meta", 1, 48)
    assert f"{__file__}:" in copy.location
