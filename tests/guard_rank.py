"""One of two gloo ranks: every scenario in which ranks have to agree, or cannot, in one job; the answers as JSON."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
from math import nan
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from torchobs import debug, guard

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
            outcome = recovery.step(batch, lambda part: network(part).square().mean(), accumulate=accumulate)
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
        actions.append(recovery.step((x, target), lambda part: torch.nn.functional.mse_loss(network(part[0]), part[1])).action)
    return {"actions": actions, "weights": weights(network)}


def averaged_once() -> dict[str, Any]:
    """Micro-batches of both ranks make the step of all of them in one batch; DDP averages the gradients once."""
    network, optimizer = linear()
    recovery = guard.Recovery(network, optimizer)
    everything = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
    own = everything[8 * dist.get_rank() :][:8]
    calls: list[object] = []
    network.register_comm_hook(calls, lambda state, bucket: (state.append(bucket), allreduce_hook(None, bucket))[1])  # type: ignore[arg-type]
    recovery.step(list(own.split(2)), lambda part: network(part).square().mean(), accumulate=True)
    alone = linear()[0].module
    alone(everything).square().mean().backward()
    with torch.no_grad():
        expected = [float(value) for each in alone.parameters() for value in (each - 0.1 * each.grad).flatten()]
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

    def compute(part: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == BAD_RANK:
            raise torch.OutOfMemoryError("too many samples")
        loss: torch.Tensor = network(part).square().mean()
        return loss

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


def main(rank: int, directory: str) -> None:
    """Run all of them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    said = {name: scenario() for name, scenario in SCENARIOS.items()}
    Path(directory, f"{rank}.json").write_text(json.dumps(said))
