"""The loss on a CUDA device, each step's own and never waited for; loss scalers and rates that it holds, shown exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from tests import support
from tests.gpu import no_waiting
from tests.training import Recording, StepFlag, has, mlp
from torchobs.flight.step_record import RecordKind

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
    """An allocation synchronises, and torch's sync-debug mode does not see that."""
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


STREAK, SKIPPED = ("torchobs.amp.skip_streak",), ("torchobs.amp.steps_skipped",)
OVERFLOWS = [False, False, False, True, True, False, True, False, True, True]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, *, overflows: bool) -> None:
    """One step in float16, without the update."""
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.ones(4, 8, device="cuda")).float().square().mean()
    scaler.scale(loss).backward()
    if overflows:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.fill_(float("inf"))
    scaler.step(optimizer)


def marked(run: Recording) -> set[int]:
    """The steps that are marked as skipped, at their end or later."""
    return {record.step for record in run.records() if has(record, StepFlag.SKIPPED)}


def test_scale_tracker_and_skips_of_every_step(run: Recording) -> None:
    """An optimizer that the scaler itself leaves out: its skips are known at once, its scale after the copy."""
    model = mlp().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cuda", init_scale=1024.0, growth_interval=3)
    for overflows in OVERFLOWS:
        step(model, optimizer, scaler, overflows=overflows)
        scaler.update()
        torch.cuda.synchronize()
        shown = run.look()
        assert shown["torchobs.amp.scale", "0"] == scaler.get_scale()
        assert shown["torchobs.amp.growth_tracker", "0"] == scaler._get_growth_tracker()
    values = run.values()
    assert (values[SKIPPED], values[STREAK], values["torchobs.amp.overflows", "0"]) == (5, 2, 5)
    assert marked(run) == {index for index, overflows in enumerate(OVERFLOWS, 1) if overflows}
    assert values["torchobs.amp.autocast", "cuda", "float16"] == 1.0


def test_a_fused_optimizer_s_skips_are_known_later_and_nothing_waits(run: Recording) -> None:
    """It is called and does nothing: the steps are marked when ``found_inf`` has come."""
    model = mlp().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = GradScaler("cuda", init_scale=1024.0)
    with no_waiting():
        for overflows in OVERFLOWS:
            step(model, optimizer, scaler, overflows=overflows)
            scaler.update()
    torch.cuda.synchronize()
    run.records()  # ends the step in progress
    values = run.look()
    assert (values[SKIPPED], values[STREAK], values["torchobs.amp.overflows", "0"]) == (5, 2, 5)
    assert marked(run) == {index for index, overflows in enumerate(OVERFLOWS, 1) if overflows}


def test_two_fused_optimizers_that_skip_one_step_skip_one_step(run: Recording) -> None:
    """However many of a step's optimizers found an overflow, and whoever's copy comes first."""
    models = [mlp(seed).cuda() for seed in (0, 1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in models]
    scaler = GradScaler("cuda", init_scale=1024.0)
    with no_waiting():
        for index in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer, scaler, overflows=index == 2 or (index == 3 and model is models[1]))
            scaler.update()
    torch.cuda.synchronize()
    run.records()
    values = run.look()
    assert values[SKIPPED] == 2
    assert (values["torchobs.amp.overflows", "0"], values["torchobs.amp.overflows", "1"]) == (1, 2)
    assert values[STREAK] == 2


def test_a_rate_on_the_device_is_copied_and_not_waited_for(run: Recording) -> None:
    """A capturable optimizer's rate comes as a late value of the step in which it was taken."""
    model = mlp().cuda()
    rates = [torch.tensor(rate, device="cuda") for rate in (0.5, 0.25)]
    groups = [{"params": [parameter], "lr": rate} for parameter, rate in zip(model.parameters(), rates, strict=False)]
    optimizer = torch.optim.Adam(groups, lr=rates[0], capturable=True)
    with no_waiting():
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8, device="cuda")).square().mean().backward()
            optimizer.step()
    torch.cuda.synchronize()
    values = run.look()
    assert (values["torchobs.learning_rate", "0"], values["torchobs.learning_rate", "1"]) == (0.5, 0.25)
    late = [record for record in run.records() if record.kind == RecordKind.LATE and has(record, StepFlag.LEARNING_RATE)]
    assert [record.learning_rate for record in late] == [0.5]
