"""torchobs.tune.pipeline: equal to a loop written by hand, and after a resume to a run that was not interrupted."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import fork_server
from tests.tune.models import PAIR, Listed, StoppedError, blocks, loss_fn, weights
from torchobs import guard, tune
from torchobs.tune import checkpoint_file


def by_hand(model: nn.Module, batches: list[Any], *, dtype: torch.dtype | None, accumulate: int, epochs: int) -> None:
    """The loop as torch's documentation writes it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = epochs * math.ceil(len(batches) / accumulate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    for _ in range(epochs):
        for start in range(0, len(batches), accumulate):
            group = batches[start : start + accumulate]
            for x, y in group:
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    loss = loss_fn(model(x), y)
                scaler.scale(loss / len(group)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scaler.get_scale() == scale:
                scheduler.step()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_equal_to_a_loop_written_by_hand(dtype: torch.dtype | None) -> None:
    """Promise: accumulation (with a smaller last group), mixed precision, clipping and schedule, to the bit."""
    torch.manual_seed(3)
    batches = [(torch.randn(4, 16), torch.randn(4, 4)) for _ in range(5)]
    expected, model = blocks(), blocks()
    torch.manual_seed(5)
    by_hand(expected, batches, dtype=dtype, accumulate=2, epochs=2)
    run = tune.pipeline(model, loss_fn, lr=1e-2, accumulate=2, max_grad_norm=0.5, amp=dtype or "off")
    torch.manual_seed(5)
    run.fit(Listed(batches), 2)
    assert all(map(torch.equal, weights(expected), weights(model)))
    assert run.step == (5 if dtype is torch.float16 else 6)  # the first scale of a GradScaler is too large
    assert run.scaler.is_enabled() == (dtype is torch.float16)


def test_after_an_exception_fit_goes_on_without_what_it_left() -> None:
    """Promise: gradients and losses of a group that was not completed are of no step and of no mean."""
    batches = [(torch.randn(4, 16), torch.randn(4, 4)) for _ in range(6)]

    def made(loss_fn: Any) -> tune.Pipeline:
        torch.manual_seed(1)
        return tune.pipeline(nn.Linear(16, 4), loss_fn, accumulate=3, amp="off")

    def stopping(output: Tensor, target: Tensor) -> Tensor:
        if target is batches[4][1]:
            raise StoppedError
        return loss_fn(output, target)

    whole, run = made(loss_fn), made(stopping)
    losses = whole.fit(Listed(batches), 2).losses
    with pytest.raises(StoppedError):
        run.fit(Listed(batches), 2)
    run.loss_fn = loss_fn
    assert run.fit(Listed(batches), 2).losses == losses
    assert all(map(torch.equal, weights(whole.model), weights(run.model)))


OTHER = torch.optim.SGD([torch.ones(1)], lr=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adamx"}, "unknown optimizer 'adamx': use one of adam, adamw"),
        ({"scheduler": "steep"}, "unknown scheduler 'steep'"),
        ({"amp": "yes"}, "amp is 'bf16', 'fp16', 'off', one of their types, or 'auto', not 'yes'"),
        ({"optimizer": torch.optim.SGD}, "optimizer is one of torch.optim over the model's parameters, not type"),
        ({"checkpointing": True}, "no repeated blocks"),
        ({"ddp": "yes"}, "ddp is 'auto'"),
        ({"accumulate": 0}, "accumulate is a whole number, at least 1, not 0"),
        ({"lr": "1e-3"}, "lr is a number"),
        ({"max_grad_norm": math.nan}, "max_grad_norm is nan; it is a number above 0"),
        ({"optimizer": torch.optim.LBFGS([torch.ones(1)])}, "LBFGS calls a closure"),
        ({"optimizer": OTHER}, "none of the model's parameters"),
        ({"ddp": True}, "ranks are started by torchrun"),
    ],
)
def test_wrong_arguments_say_what_to_do(options: dict[str, Any], words: str) -> None:
    """Promise: a wrong argument is an error before the first step."""
    with pytest.raises((TypeError, ValueError), match=words):
        tune.pipeline(nn.Linear(2, 2), loss_fn, **options)


def test_further_epochs_are_trained(tmp_path: Path) -> None:
    """Promise: with more epochs, after a resume or in a second call, the schedule is longer, not at its end and rate 0."""
    run = tune.pipeline(blocks(dropout=0.0), loss_fn, lr=1e-2, amp="off")
    run.fit([PAIR] * 2, 2, checkpoint=tmp_path / "run.pt")
    assert run.scheduler.get_last_lr() == [0.0]
    again = tune.pipeline(blocks(dropout=0.0), loss_fn, lr=1e-2, amp="off").resume(tmp_path / "run.pt")
    for longer in (run, again):
        rates: list[float] = []

        def note(optimizer: Any, _args: Any, _kwargs: Any, rates: list[float] = rates) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

        longer.optimizer.register_step_pre_hook(note)
        longer.fit([PAIR] * 2, 4)
        assert rates == pytest.approx([1e-2 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(4, 8)])
    assert all(map(torch.equal, weights(run.model), weights(again.model)))
    limited = tune.pipeline(blocks(dropout=0.0), loss_fn, total_steps=3, amp="off").resume(tmp_path / "run.pt")
    limited.fit([PAIR] * 2, 3)
    assert limited.total_steps == 3  # what the caller says holds


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the checkpoints of two ranks, which have looked at themselves."""
    folder = tmp_path_factory.mktemp("ranks")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.tune.two_ranks"]
    done = fork_server.run([*argv, str(folder)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_two_ranks_are_one_with_twice_the_batch(of_two_ranks: Path) -> None:
    """Promise: under torchrun DDP is set up, averages in the last micro-batch alone, and rank 0 writes the checkpoint."""
    model = nn.Linear(4, 2)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    x, y = torch.arange(32.0).view(8, 4) / 32, torch.arange(16.0).view(8, 2) / 16
    loss_fn(model(x), y).backward()
    state = checkpoint_file.load(of_two_ranks / "ddp.pt", torch.device("cpu"))
    assert state["counts"]["step"] == 1
    torch.testing.assert_close(state["model"]["weight"], model.weight.detach() - 0.1 * gradient(model.weight))
    torch.testing.assert_close(state["model"]["bias"], model.bias.detach() - 0.1 * gradient(model.bias))


def test_two_sharded_ranks_are_one_with_twice_the_batch(of_two_ranks: Path) -> None:
    """Promise: a model that FSDP has sharded is clipped by the norm of all shards, and saves no checkpoint."""
    torch.manual_seed(3)
    batches = Listed([(torch.randn(4, 16), torch.randn(4, 4)) for _ in range(5)])
    alone = tune.pipeline(blocks(depth=2, dropout=0.0), loss_fn, lr=1e-2, accumulate=2, max_grad_norm=0.05, amp="off")
    alone.fit(batches, 2)
    sharded = torch.load(of_two_ranks / "fsdp.pt", weights_only=True)
    torch.testing.assert_close(sharded, dict(alone.model.state_dict()), rtol=1e-4, atol=1e-5)


def gradient(weight: Tensor) -> Tensor:
    """The parameter's gradient, which is there."""
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("stop_at", [5, 6])
def test_resumed_is_the_run_that_was_not_interrupted(tmp_path: Path, stop_at: int) -> None:
    """Promise: to the bit, within an epoch or not, where neither loader nor model draws a random number."""
    path, batches = tmp_path / "run.pt", [(torch.randn(4, 16), torch.randn(4, 4)) for _ in range(5)]
    first_weights = blocks(dropout=0.0).state_dict()

    def made(loss_fn: Any = loss_fn) -> tune.Pipeline:
        model = blocks(dropout=0.0)
        model.load_state_dict(first_weights)
        return tune.pipeline(model, loss_fn, lr=1e-2, accumulate=2, warmup_steps=2, amp=torch.bfloat16)

    run = made()
    losses = run.fit(Listed(batches), 3).losses
    calls = 0

    def stopping(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 5 * (stop_at // 3) + 2 * (stop_at % 3):  # an epoch has three steps, of 2, 2 and 1 batches
            raise StoppedError
        return loss_fn(output, target)

    with pytest.raises(StoppedError):
        made(stopping).fit(Listed(batches), 3, checkpoint=path, every=1)
    second = made().resume(path)
    assert second.step == stop_at
    rest = second.fit(Listed(batches), 3).losses
    assert rest == losses[-len(rest) :]
    assert all(map(torch.equal, weights(run.model), weights(second.model)))
    assert run.scheduler.state_dict() == second.scheduler.state_dict()
    assert run.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"]


def test_a_resume_begins_without_gradients(tmp_path: Path) -> None:
    """Promise: micro-batches that were computed before it are of no step after it."""
    run = tune.pipeline(nn.Linear(16, 4), loss_fn, accumulate=2, amp="off", scheduler="constant")
    run.save(tmp_path / "run.pt")
    batch = torch.randn(4, 16), torch.randn(4, 4)
    run.train_step(batch)
    run.resume(tmp_path / "run.pt")
    assert all(weight.grad is None for weight in run.model.parameters())
    run.train_step(batch)
    assert run.step == 0


def test_the_rates_of_a_scheduler_of_one_s_own_are_left_alone() -> None:
    """Promise: every part may be replaced; further epochs go on with the rates that the other scheduler has set."""
    run = tune.pipeline(nn.Linear(16, 4), loss_fn, lr=1.0, optimizer="sgd", amp="off")
    run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, gamma=0.1)
    batches = Listed([(torch.randn(4, 16), torch.randn(4, 4))] * 2)
    for epochs in (1, 2, 3):
        run.fit(batches, epochs)
        assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.1**epochs)


def test_another_optimizer_goes_on_with_the_schedule() -> None:
    """Promise: before the first step and after some, its rates are those that the pipeline's own would have had."""

    def rates(steps_before: int | None) -> list[float]:
        schedule = list[float]()
        run = tune.pipeline(nn.Linear(16, 4), loss_fn, lr=1.0, warmup_steps=2, total_steps=8, amp="off")
        for step in range(8):
            if step == steps_before:
                run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1.0)
            schedule.append(run.optimizer.param_groups[0]["lr"])
            run.train_step(PAIR)
        return schedule

    assert rates(0) == rates(3) == rates(None)
    run = tune.pipeline(nn.Linear(16, 4), loss_fn, total_steps=2, amp="off")
    run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2)
    run.optimizer = torch.optim.SGD(run.model.parameters())
    with pytest.raises(ValueError, match="the scheduler is of another optimizer"):
        run.fit([PAIR], 1)


@pytest.mark.parametrize(("returned", "words"), [(1.0, "not float"), (torch.ones(2), r"not one of shape \(2,\)")])
def test_a_loss_that_is_none_is_refused(returned: Any, words: str) -> None:
    """Promise: the error says what a loss function returns."""
    run = tune.pipeline(nn.Linear(2, 1), lambda *_: returned, amp="off", scheduler="constant")
    with pytest.raises(TypeError, match=f"a tensor of one number, {words}"):
        run.train_step((torch.ones(1, 2), torch.ones(1, 1)))


def test_a_schedule_without_an_end_says_what_to_do() -> None:
    """Promise: cosine without a number of steps is an error that names the argument, before the model has changed."""
    run = tune.pipeline(nn.Linear(2, 2), loss_fn)
    before = weights(run.model)
    with pytest.raises(ValueError, match="pass total_steps"):
        run.train_step((torch.ones(1, 2), torch.ones(1, 2)))
    assert all(map(torch.equal, before, weights(run.model)))


@pytest.mark.parametrize(
    ("loader", "epochs", "words"),
    [
        ([], 1, "no batch for epoch 1"),
        (iter([PAIR]), 1, "no length: pass total_steps"),
        (PAIR, 1, r"a list of batches as \[\(input, target\)\], not a batch"),
        ("run.pt", 1, "not str"),
        ([PAIR], "1", "epochs and every are whole numbers"),
    ],
)
def test_a_loader_of_nonsense_is_refused(loader: Any, epochs: Any, words: str) -> None:
    """Promise: what cannot be trained on is an error, not a mean loss of 0."""
    with pytest.raises((TypeError, ValueError), match=words):
        tune.pipeline(blocks(), loss_fn, amp="off").fit(loader, epochs)


def test_a_loader_without_a_length() -> None:
    """Promise: with total_steps it trains; used up before its last epoch it is an error."""
    run = tune.pipeline(blocks(), loss_fn, total_steps=4, amp="off")
    with pytest.raises(ValueError, match="no batch for epoch 2: an iterator is used up"):
        run.fit(iter([PAIR] * 2), 2)
    assert run.step == 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_from_before_a_group_are_dropped(accumulate: int) -> None:
    """Promise: a look at gradients before training, or between steps, changes no step; those of a group add up."""
    plain, looked_at = blocks(dropout=0.0), blocks(dropout=0.0)
    options: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "scheduler": "constant", "max_grad_norm": None, "amp": "off"}
    runs = [tune.pipeline(model, loss_fn, accumulate=accumulate, **options) for model in (plain, looked_at)]
    for number in range(4):
        if number % accumulate == 0:
            loss_fn(looked_at(PAIR[0]), 3 * PAIR[1]).backward()
        for run in runs:
            with pytest.raises(TypeError, match="must be Tensor"):
                run.train_step("text")  # which is none of the group
            run.train_step((PAIR[0] * (number + 1), PAIR[1]))
    assert runs[1].step == 4 // accumulate
    assert all(map(torch.equal, weights(plain), weights(looked_at)))


def with_nan(*, at: int, of: int) -> list[tuple[Tensor, Tensor]]:
    """Batches with a NaN in one of them."""
    torch.manual_seed(3)
    batches = [(torch.randn(4, 16), torch.randn(4, 4)) for _ in range(of)]
    batches[at][0][1, 2] = math.nan
    return batches


def normed() -> nn.Sequential:
    """A model with statistics, which a batch changes before its loss is known."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4))


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_nan_stops_a_fit_before_the_step(
    accumulate: int, max_grad_norm: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: the result and the log say where and why; weights and statistics are those of the step before."""
    options: dict[str, Any] = {"amp": "off", "scheduler": "constant", "accumulate": accumulate, "max_grad_norm": max_grad_norm}
    run, spared = (tune.pipeline(normed(), loss_fn, **options) for _ in range(2))
    result = run.fit(with_nan(at=5, of=8), 2)
    spared.fit(with_nan(at=5, of=8)[: 5 - 5 % accumulate], 1)
    (problem,) = result.problems
    assert str(problem) == "epoch 1, batch 6: the loss is nan, and so is a value of the batch"
    assert (bool(result), result.losses, result.steps, result.nonfinite_at) == (False, (), 5 // accumulate, "epoch 1, batch 6")
    assert "fit() stopped: epoch 1, batch 6: the loss is nan" in caplog.text
    assert all(map(torch.equal, run.model.state_dict().values(), spared.model.state_dict().values()))
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_gradient_that_is_not_finite_stops_a_fit() -> None:
    """Promise: also where the loss is: the root of 0 has none."""
    run = tune.pipeline(nn.Linear(16, 4), lambda output, target: (output * 0).sqrt().sum() + target.sum(), amp="off")
    before = weights(run.model)
    result = run.fit([PAIR], 1)
    assert [str(problem) for problem in result.problems] == ["epoch 1, batch 1: a gradient is not finite"]
    assert all(map(torch.equal, before, weights(run.model)))


def test_a_nan_under_a_loss_scaler_stops_too() -> None:
    """Promise: and a further fit goes on, with the scaler as it is after a step that it skipped."""
    run, batches = tune.pipeline(normed(), loss_fn, amp="fp16", scheduler="constant"), with_nan(at=2, of=4)
    result = run.fit(batches, 1)
    assert (result.ok, result.nonfinite_at) == (False, "epoch 1, batch 3")
    again = run.fit([*batches[:2], *batches[3:]], 1)
    assert again.ok
    assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())


def test_with_a_recovery_a_nan_is_skipped() -> None:
    """Promise: training goes on as without the batch, says where it was, and keeps it; beyond the budget it is an error."""
    options: dict[str, Any] = {"amp": "off", "scheduler": "constant"}
    run = tune.pipeline(normed(), loss_fn, recovery=guard.RecoveryPolicy(spikes=0), **options)
    spared = tune.pipeline(normed(), loss_fn, **options)
    batches = with_nan(at=2, of=5)
    result = run.fit(batches, 1)
    expected = spared.fit([*batches[:2], *batches[3:]], 1).losses
    assert result.losses == pytest.approx(expected)
    assert (result.ok, result.steps, result.skipped_steps, result.nonfinite_at) == (True, 4, 1, "epoch 1, batch 3")
    assert all(map(torch.equal, weights(run.model), weights(spared.model)))
    assert run.recovery.evidence[0].batch[0].isnan().any()
    with pytest.raises(ValueError, match=r"recovery works in fit\(\)"):
        run.train_step(PAIR)
    with pytest.raises(guard.NonFiniteLossError):
        tune.pipeline(normed(), loss_fn, recovery=guard.RecoveryPolicy(nonfinite=0), **options).fit(batches, 1)
    with pytest.raises(TypeError, match=r"recovery is a guard\.RecoveryPolicy, not str"):
        tune.pipeline(normed(), loss_fn, recovery="skip", **options)
    with pytest.raises(ValueError, match="torch clips no sparse gradients"):
        tune.pipeline(nn.Embedding(4, 4, sparse=True), loss_fn, **options)


def test_an_optimizer_of_one_s_own_and_batches_by_name() -> None:
    """Promise: an optimizer object is taken as it is, and loss_fn(model, batch) gets the batch; blocks can be recomputed."""
    model = blocks(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def by_name(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_fn(model(batch["x"]), batch["y"])

    run = tune.pipeline(model, by_name, optimizer=optimizer, scheduler="constant", amp="off", checkpointing=True)
    assert run.optimizer is optimizer
    result = run.fit([{"x": PAIR[0], "y": PAIR[1]}] * 3, 1)
    assert (result.ok, result.steps) == (True, 3)
    assert result.samples_per_s is not None
    assert result.samples_per_s > 0
    plain = tune.pipeline(blocks(dropout=0.0), loss_fn, optimizer="sgd", lr=0.5, scheduler="constant", amp="off")
    plain.fit([PAIR] * 3, 1)
    assert all(map(torch.equal, weights(model), weights(plain.model)))
    for options in ({"lr": 0.1}, {"momentum": 0.9}):
        with pytest.raises(ValueError, match="go into the optimizer"):
            tune.pipeline(model, by_name, optimizer=optimizer, **options)  # type: ignore[arg-type]
