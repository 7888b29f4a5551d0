"""Ranks of gloo jobs that tests start.

`python -m tests.distributed_rank WAY` trains plainly, then watched, and says how many collectives each took.
`python -m tests.distributed_rank hang DIRECTORY PLACE [SECONDS]` is a rank of two, of which rank 1 sleeps in its sixth step, in
its `forward` or a `hook` of its backward. With `bypass` both ranks go around DDP from that step on. SECONDS: how often the slow
sensors are asked.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import os
import sys
import time
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import torchobs
from torchobs import debug, guard
from torchobs.runtime import sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Model(torch.nn.Module):
    """Two layers that are used and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = torch.nn.Linear(8, 300), torch.nn.Linear(300, 1), torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)  # most of a step, as in a model of some size: one that was made early is found in its forward
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


def _ddp() -> torch.nn.Module:
    return DistributedDataParallel(Model(), find_unused_parameters=True, bucket_cap_mb=0.005)


def _fsdp2() -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    return model


WAYS: dict[str, Callable[[], torch.nn.Module]] = {"ddp": _ddp, "fsdp2": _fsdp2}


def main(way: str) -> None:
    """Torchobs begins after some steps without it."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = WAYS[way]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    _collectives_of(_train(model, optimizer, 5))
    steps = 400 if way == "ddp" else 50  # DDP takes its own times every so many steps
    said = {"plain": _collectives_of(_train(model, optimizer, steps))}
    torchobs.init()
    said["watched"] = _collectives_of(_train(model, optimizer, steps))
    sys.stdout.write(json.dumps(said) + "\n")
    torchobs.shutdown()
    # torch 2.13 can deadlock when a group goes while a gloo thread frees a backward's work, for which it wants Python's lock
    dist.barrier()
    time.sleep(1)
    dist.destroy_process_group()


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[None]:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 8), 0.1)).sum().backward()
        optimizer.step()
        yield


def _collectives_of(training: Iterator[None]) -> int:
    group: Any = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    for _ in training:
        pass
    return int(group._get_sequence_number_for_group() - before)


AT = 6


class Hanging(torch.nn.Module):
    """Sleeps in one of its forwards, or backwards."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.inner, self.place, self.calls = torch.nn.Linear(4, 4), place, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out: torch.Tensor = self.inner(x)
        if self.calls == AT and self.place == "forward":
            time.sleep(600)
        if self.calls == AT and self.place == "hook":
            out.register_hook(lambda _: time.sleep(600))
        return out


def hang(directory: str, place: str, often_s: str = "") -> None:
    """Train until stopped; see the module."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # of the weights it hangs whether the norms of two ranks cross
    if often_s:
        sampler.OBSERVE_INTERVAL_S = float(often_s)
    torchobs.init(flight_dir=directory)
    dist.init_process_group("gloo")
    own_place = place if os.environ["RANK"] == "1" else ""
    model = DistributedDataParallel(Hanging(own_place))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples: Any = torch.full((20, 4), 1.0 + dist.get_rank())
    for step, batch in enumerate(torch.utils.data.DataLoader(samples), 1):
        alone = step >= AT and place == "bypass"
        (model.module if alone else model)(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(600)


STEPS, BAD_STEP, BAD_RANK = 6, 3, 1


def linear() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A small model with equal weights on both ranks."""
    torch.manual_seed(0)
    network = DistributedDataParallel(torch.nn.Linear(4, 1))
    return network, torch.optim.SGD(network.parameters(), lr=0.1)


def inputs(source: torch.Generator, *, bad: bool = False) -> torch.Tensor:
    """A batch of this rank's own; bad on one rank alone."""
    x = torch.randn(8, 4, generator=source)
    if bad and dist.get_rank() == BAD_RANK:
        x[0, 0] = nan
    return x


def one_bad_batch(*, agree: bool, accumulate: bool = False) -> dict[str, Any]:
    """Train; one rank has a bad batch, or a bad micro-batch."""
    network, optimizer = linear()
    recovery = guard.Recovery(network, optimizer, guard.RecoveryPolicy(agree=agree, spikes=0), max_grad_norm=1.0)
    source = torch.Generator().manual_seed(dist.get_rank())
    actions = []
    for step in range(STEPS):
        batch: Any = inputs(source, bad=step == BAD_STEP)
        batch = [inputs(source), batch] if accumulate else batch
        try:
            outcome = recovery.step(batch, lambda output: output.square().mean(), accumulate=accumulate)
            actions.append(outcome.action)
        except guard.NonFiniteLossError:
            actions.append("raise")
            break
    return {"actions": actions, "weights": weights(network), "evidence": len(recovery.evidence)}


def spike() -> dict[str, Any]:
    """One rank's loss jumps; both go back."""
    network, optimizer = linear()
    recovery = guard.Recovery(network, optimizer, guard.RecoveryPolicy(agree=True, snapshot_every=5))
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank())), torch.zeros(8, 1)
    actions = []
    for step in range(40):
        target = y + 1e4 if step == 30 and dist.get_rank() == BAD_RANK else y
        actions.append(recovery.step((x, target), torch.nn.functional.mse_loss).action)
    return {"actions": actions, "weights": weights(network)}


def averaged_once() -> dict[str, Any]:
    """Micro-batches of both ranks make the step of all of them in one batch; DDP averages the gradients once."""
    network, optimizer = linear()
    recovery = guard.Recovery(network, optimizer)
    everything = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
    samples = everything[8 * dist.get_rank() :][:8]
    calls: list[object] = []
    network.register_comm_hook(calls, lambda state, bucket: (state.append(bucket), allreduce_hook(None, bucket))[1])  # type: ignore[arg-type]
    recovery.step(list(samples.split(2)), lambda output: output.square().mean(), accumulate=True)
    alone = linear()[0].module
    alone(everything).square().mean().backward()
    with torch.no_grad():
        expected = [float(value) for parameter in alone.parameters() for value in (parameter - 0.1 * parameter.grad).flatten()]
    return {"collectives": len(calls), "weights": weights(network), "expected": expected}


def held(*, agree: bool) -> dict[str, Any]:
    """``debug.nan_guard`` where each rank has gradients of its own, as under FSDP: one of them has a NaN."""
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with debug.nan_guard(optimizer, agree=agree) as guarded:
        for step in range(4):
            optimizer.zero_grad()
            network(torch.ones(2, 4)).sum().backward()
            if step == 2 and dist.get_rank() == BAD_RANK:
                network.weight.grad[0, 0] = nan  # type: ignore[index]
            optimizer.step()
    return {"held": guarded.held, "weights": weights(network)}


def out_of_memory() -> dict[str, Any]:
    """One rank has no memory left: it says so at once; the other ends with an error, too, and does not wait for ever."""
    network, optimizer = linear()
    recovery = guard.Recovery(network, optimizer, guard.RecoveryPolicy(agree=True))

    def compute(output: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == BAD_RANK:
            raise torch.OutOfMemoryError("too many samples")
        return output.square().mean()

    try:
        recovery.step(torch.ones(8, 4), compute)
    except torch.OutOfMemoryError:
        return {"error": "OutOfMemoryError"}
    except RuntimeError:  # gloo's, once the other rank is gone
        return {"error": "RuntimeError"}
    return {"error": None}


def weights(network: torch.nn.Module) -> list[float]:
    """All of them."""
    return [float(value) for parameter in network.parameters() for value in parameter.detach().flatten()]


SCENARIOS = {
    "agree": lambda: one_bad_batch(agree=True),
    "alone": lambda: one_bad_batch(agree=False),
    "micro_batches": lambda: one_bad_batch(agree=True, accumulate=True),
    "spike": spike,
    "averaged_once": averaged_once,
    "held": lambda: held(agree=True),
    "held_alone": lambda: held(agree=False),
    "out_of_memory": out_of_memory,  # the last: a process ends in it
}


def recover(rank: int, directory: str) -> None:
    """Run every scenario in which ranks have to agree, or cannot, in one job of two; the answers as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    said = {name: scenario() for name, scenario in SCENARIOS.items()}
    Path(directory, f"{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    (hang if sys.argv[1] == "hang" else main)(*sys.argv[1 + (sys.argv[1] == "hang") :])
