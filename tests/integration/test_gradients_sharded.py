"""Sharded gradients (FSDP2, HSDP, tensor parallel), two processes over gloo: no collective of ours, norms that add up."""

from __future__ import annotations

import json
import subprocess
import sys
from math import sqrt
from typing import Any

import pytest

from tests import fork_server, support

RANKS = 2
CLIPPED_TO = 1e-3
LAYOUTS = ("fsdp", "hsdp", "tensor parallel", "fsdp1", "fsdp1 original")
PROGRAM = """
import json, os, sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import torchobs
from torchobs.flight.fold import StepFlag
from tests.training import Recording, has

rank, directory, *layouts = sys.argv[1:]
os.environ.update(RANK=rank, WORLD_SIZE="2", LOCAL_RANK=rank)
dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=int(rank), world_size=2)


def train(how):
    session = torchobs.init(flight_dir=f"{directory}/{how}/{rank}", grad_interval=1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4), torch.nn.LayerNorm(4))
    names = ("replicas", "shards") if how == "hsdp" else ("ranks",)
    mesh = init_device_mesh("cpu", (2, 1) if how == "hsdp" else (2,), mesh_dim_names=names)
    if how == "tensor parallel":
        model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    elif how.startswith("fsdp1"):
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=how.endswith("original"))
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    whole = []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        full = [getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for p in model.parameters()]
        squares = torch.tensor(sum(float(gradient.double().pow(2).sum()) for gradient in full if gradient is not None))
        if how.startswith("fsdp1"):
            dist.all_reduce(squares)
        whole.append(float(squares) ** 0.5)
        if step == 2 and how.startswith("fsdp1"):
            model.clip_grad_norm_(1e-3)
        elif step == 2 and how != "tensor parallel":  # torch itself cannot clip DTensors and tensors together
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    run = Recording(session)
    session.context.recorder.flush()
    session._sampler.stop()
    for probe, observe in session._slow:
        if probe == "gradients":
            observe()
    session.writer.publish()  # the directory need not be on tmpfs
    steps = run.steps()
    values = run.values()
    layers = {key[1]: value for key, value in values.items() if key[0] == "torchobs.grad.layer.norm"}
    found = {
        "norms": [record.grad_norm for record in steps], "whole": whole,
        "clipped": [has(record, StepFlag.CLIPPED) for record in steps],
        "ranks": values["torchobs.grad.norm_ranks",], "layers": layers, "errors": run.errors(),
    }
    torchobs.shutdown()
    return found


def to_local_calls():
    # how often autograd is given a node for a look at 300 sharded gradients
    from torch.distributed.tensor import Shard, _api, distribute_tensor
    from torchobs.probes.gradient_norms import local
    mesh = init_device_mesh("cpu", (2,))
    gradients, calls = [distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for _ in range(300)], []
    original = _api._ToTorchTensor.apply
    _api._ToTorchTensor.apply = lambda *args: calls.append(1) or original(*args)
    assert torch.is_grad_enabled() and len(local(range(300), gradients).tensors) == 300
    _api._ToTorchTensor.apply = original
    return len(calls)


print("RESULT", json.dumps({**{how: train(how) for how in layouts}, "look": {"nodes": to_local_calls()}}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank said, by layout: one pair of processes for all, since most of a process is torch's import."""
    directory = tmp_path_factory.mktemp("ranks")
    argv, environ = (sys.executable, "-c", PROGRAM), support.clean_environment()
    ranks = [
        fork_server.Python(
            [*argv, str(rank), str(directory), *LAYOUTS], cwd=support.ROOT, env=environ, stdout=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    found = [json.loads(text.split("RESULT ", 1)[1].splitlines()[0]) for text in said]
    return {how: [rank[how] for rank in found] for how in (*LAYOUTS, "look")}


@pytest.mark.parametrize("how", LAYOUTS)
def test_squares_over_the_ranks_add_up_to_the_whole(how: str, told: dict[str, list[dict[str, Any]]]) -> None:
    """Σ norm² × norm_ranks / ranks is the whole's: of tensors sharded, replicated, or plain beside DTensors.

    Promise: where torch.nn.utils clips gradients, each rank has the whole's norm, and nobody has computed or exchanged it for
    us. FSDP1 clips by a method of its own: there it is that of this rank's shard, after clipping.
    """
    found, seen = told[how], how in {"fsdp", "hsdp"}
    for step in range(3):
        ranks = 1 if step == 2 and seen else RANKS
        squares = sum(rank["norms"][step] ** 2 * ranks / RANKS for rank in found)
        whole = CLIPPED_TO if step == 2 and how.startswith("fsdp1") else found[0]["whole"][step]
        assert sqrt(squares) == pytest.approx(whole, rel=1e-3)
    norms = [rank["norms"][2] for rank in found]
    assert (norms[0] == pytest.approx(norms[1], rel=1e-6)) == seen
    if how != "fsdp1":  # which has one flat parameter
        assert {name for rank in found for name in rank["layers"]} == {"0", "2", "3"}
    assert [rank["clipped"] for rank in found] == [[False, False, seen]] * RANKS
    assert [rank["ranks"] for rank in found] == [1 if seen else RANKS] * RANKS
    assert [rank["errors"] for rank in found] == [[], []]


def test_a_look_at_shards_is_none_of_autograd_s(told: dict[str, list[dict[str, Any]]]) -> None:
    """``DTensor.to_local`` with gradients enabled builds a node for each: 2 ms for 300 of them, in every measured step."""
    assert [rank["nodes"] for rank in told["look"]] == [0, 0]
