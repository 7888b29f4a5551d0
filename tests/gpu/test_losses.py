"""The loss on a CUDA device: each step's own, from the first on, and never waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from tests import support
from tests.gpu import no_waiting
from tests.training import Recording, StepFlag, has, mlp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=support.NEEDS_CUDA)


def losses(run: Recording) -> dict[int, float]:
    """The losses by step, once the device has done everything."""
    torch.cuda.synchronize()
    run.records()  # ends the step in progress
    run.look()
    return {record.step: record.loss for record in run.records() if has(record, StepFlag.LOSS)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("passes", [1, 3])
def test_the_loss_of_every_step(run: Recording, dtype: torch.dtype, passes: int) -> None:
    """Summed over the step's backward passes."""
    model = mlp().to("cuda", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch, taken = torch.randn(4, 8, device="cuda", dtype=dtype), list[list[torch.Tensor]]()
    with no_waiting():
        for _ in range(5):
            optimizer.zero_grad()
            taken.append([])
            for number in range(passes):
                loss = model(batch * (number + 1)).square().mean()
                taken[-1].append(loss.detach())
                loss.backward()
            optimizer.step()
    expected = {step: sum(map(float, values)) for step, values in enumerate(taken, 1)}
    assert losses(run) == pytest.approx(expected, rel=1e-12)


def test_pinned_memory_is_allocated_at_the_first_step_and_not_again(run: Recording) -> None:
    """To allocate it synchronises, of which torch's sync-debug mode knows nothing."""
    statistics: Any = getattr(torch.cuda, "host_memory_stats", None)
    if statistics is None:
        pytest.skip(f"torch {torch.__version__} does not count pinned memory")
    model = mlp().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    counts = list[int]()
    for _ in range(12):
        for _ in range(20):  # of 64 that the device may be behind
            optimizer.zero_grad()
            model(torch.ones(4, 8, device="cuda")).square().mean().backward()
            optimizer.step()
            counts.append(statistics()["num_host_alloc"])
        torch.cuda.synchronize()
        run.look()
    assert counts[0] > 0
    assert set(counts) == {counts[0]}


def test_the_loss_without_its_scale(run: Recording) -> None:
    """As the model computed it; also where it was divided after it was scaled."""
    model = mlp().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler, taken = GradScaler("cuda", init_scale=1024.0), list[torch.Tensor]()
    with no_waiting():
        for index in range(4):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.ones(4, 8, device="cuda")).float().square().mean()
            taken.append(loss.detach() / (1 + index % 2))
            (scaler.scale(loss) / (1 + index % 2)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert losses(run) == pytest.approx({step: float(value) for step, value in enumerate(taken, 1)}, rel=1e-5)
