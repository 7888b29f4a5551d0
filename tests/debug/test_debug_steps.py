"""``debug.training_step``, its parts and ``monitor_step`` do what a loop does, check it and count it."""

# mypy: disable-error-code="comparison-overlap, index, no-untyped-call, operator, union-attr"

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.debug.models import MODELS, hooks, step, texts
from tests.training import Recording, batch, loss_of, mlp
from torchobs import debug, guard
from torchobs.detect.spikes import WARM_UP


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_a_plain_loop(name: str) -> None:
    """To the bit, with everything asked for, twice in a row; nothing is found in healthy models, and no hook stays."""
    make, sample = MODELS[name]
    torch.manual_seed(1)
    plain = make()
    torch.manual_seed(1)
    checked = make()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, checked)]
    for number in range(3):
        torch.manual_seed(number)
        loss = step(plain, optimizers[0], sample())
        torch.manual_seed(number)
        inputs, target = sample()
        result = debug.training_step(
            checked, inputs, functional.cross_entropy, optimizers[1], target=target, activations=True, weights=True
        )
        assert (result.loss, result.problems, result.ok) == (loss.item(), (), True)
        assert result.forward.activations
        assert result.weights is not None
        assert 0 < result.optimization.update_ratio < 1
        assert result.gradient_norm > 0
        assert min(result.time_s, result.forward.time_s, result.backward.time_s, result.optimization.time_s) > 0
        assert "loss" in str(result)
        assert result.to_dict()["forward"]["inputs"][0]["name"] == "input"
        assert "_output" not in result.to_dict()["forward"]
    assert all(map(torch.equal, plain.state_dict().values(), checked.state_dict().values()))
    assert hooks(checked) == 0
    summary = debug.training_summary()
    assert (summary.total_steps, summary.anomaly_steps, summary.anomaly_rate, summary.source) == (3, 0, 0.0, "monitored")


class _Doubling(nn.Module):
    """Has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 1), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor  # type: ignore[no-any-return]


def test_a_loss_function_may_call_the_model_itself() -> None:
    """Promise: ``loss_fn(model, batch)`` and ``loss_fn(output, target)`` are one step, with the same forward pass."""
    inputs, targets = batch()

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        return functional.mse_loss(model(batch[0]) / model.factor, batch[1] / 2.0)

    def by_output(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output / 2.0, target / 2.0)

    results, both = [], (inputs, targets)
    calls: list[tuple[Any, Any, Any]] = [(both, loss_fn, None), (both, by_output, None), (inputs, by_output, targets)]
    for samples, how, target in calls:
        torch.manual_seed(0)
        model = _Doubling()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = debug.training_step(model, samples, how, optimizer, target=target)
        assert step.forward is not None
        results.append((step.loss, [row.name for row in step.forward.inputs], step.forward.output.tolist()))
    assert results[0] == results[1] == results[2]
    assert results[0][1] == ["input"]


def test_each_part_alone() -> None:
    """Forward, backward, optimizer, as a loop of one's own calls them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, targets = batch()
    forward = debug.forward_pass(model, inputs, activations=True)
    assert [row.name for row in forward.activations] == ["0", "1", "2"]
    assert [row.shape for row in forward.outputs] == [(4, 1)]
    loss = functional.mse_loss(forward.output, targets)
    backward = debug.backward_pass(model, loss)
    assert backward.loss == pytest.approx(loss.item())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimization = debug.optimization_step(optimizer)
    assert optimization.update_norm == pytest.approx(0.5 * backward.gradients.gradient_norm, rel=1e-4)
    norm = sum(x.double().square().sum() for x in before) ** 0.5
    assert optimization.update_ratio == pytest.approx(optimization.update_norm / float(norm))
    assert (optimization.learning_rates, optimization.skipped, optimization.optimizer) == ((0.5,), False, "SGD")
    with_dropout = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    assert torch.equal(debug.inference(with_dropout, inputs).output, debug.inference(with_dropout, inputs).output)
    assert not debug.inference(with_dropout, inputs).output.requires_grad
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        debug.inference(with_dropout, inputs[:, :3], activations=True)
    assert hooks(with_dropout) == 0


def test_a_bad_batch_is_told_as_such() -> None:
    """Input, then output, loss, gradients and weights, in the order in which it spreads."""
    model = mlp()
    inputs, targets = batch()
    inputs[0, 0] = nan
    result = debug.training_step(
        model, (inputs, targets), functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), activations=True
    )
    assert not result.ok
    assert texts(result)[:4] == (
        "input: 1 NaN of 32 elements", "0: 16 NaN of 64 elements", "1: 16 NaN of 64 elements", "2: 1 NaN of 4 elements",
    )  # fmt: skip
    said = {problem.text for problem in result.problems}
    assert "the loss is nan" in said
    assert "the norm of the parameters is nan after the step" in said
    assert "the total gradient norm is nan" in said
    summary = debug.training_summary()
    assert (summary.total_steps, summary.anomaly_steps, summary.loss_anomalies, summary.gradient_explosions) == (1, 1, 1, 1)
    assert (summary.anomaly_rate, summary.loss_anomaly_rate, summary.gradient_vanishing_rate) == (1.0, 1.0, 0.0)


@dataclass
class _Output:
    logits: torch.Tensor
    hidden: Any = None


class Keywords(torch.nn.Module):
    def forward(self, *, tokens: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"logits": tokens * scale, "more": _Output(tokens, [tokens.log()]), "loss": None}


def test_batches_and_outputs_of_any_nesting() -> None:
    """Dicts go by keyword, tuples by position; each tensor in them, and in a dataclass, has a name; a NaN is reported by it."""
    forward = debug.forward_pass(Keywords(), {"tokens": torch.tensor([-1.0, 1.0]), "scale": 2.0})
    assert [row.name for row in forward.inputs] == ["input.tokens"]
    assert [row.name for row in forward.outputs] == ["output.logits", "output.more.logits", "output.more.hidden[0]"]
    assert texts(forward) == ("output.more.hidden[0]: 1 NaN of 2 elements",)
    bilinear = debug.forward_pass(torch.nn.Bilinear(2, 3, 1), (torch.ones(1, 2), torch.ones(1, 3)))
    assert [row.name for row in bilinear.inputs] == ["input[0]", "input[1]"]


def test_monitored_steps_are_judged_and_counted() -> None:
    """Explosion, vanishing and a loss that is not finite, each by the norm of all gradients; sound steps are none."""
    model = mlp()
    for seed in range(30):
        model.zero_grad()
        loss = loss_of(model, seed % 3)
        loss.backward()
        assert debug.monitor_step(model, loss, seed).problems == ()

    def scaled(factor: float) -> Any:
        for parameter in model.parameters():
            parameter.grad.mul_(factor)
        return debug.monitor_step(model, 0.5)

    exploded, vanished = scaled(1e4), scaled(1e-14)
    assert (exploded.gradient_explosion, exploded.gradient_vanishing, exploded.step) == (True, False, 31)
    assert (vanished.gradient_explosion, vanished.gradient_vanishing) == (False, True)
    broken = debug.monitor_step(model, torch.tensor(inf), 99, vanishing=1e-30)
    assert debug.monitor_step(model, torch.tensor(inf), 99, vanishing=1e-30).problems == broken.problems  # counts once
    assert (broken.loss_anomaly, broken.gradient_vanishing, broken.step) == (True, False, 99)
    spike = debug.monitor_step(model, 1e4, vanishing=1e-30)
    assert spike.loss_anomaly
    assert any("far above the usual" in text for text in texts(spike))
    summary = debug.training_summary()
    assert (summary.total_steps, summary.anomaly_steps) == (34, 4)
    assert (summary.gradient_explosions, summary.gradient_vanishing, summary.loss_anomalies) == (1, 1, 2)
    assert summary.anomaly_rate == pytest.approx(4 / 34)
    debug.clear()
    assert debug.training_summary().total_steps == 0


def test_steps_that_a_loss_scaler_skips_are_no_anomalies() -> None:
    """An overflow at too large a scale is how the scaler finds a smaller one; weights stay as they are."""
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**30)
    inputs, targets = batch()
    arguments = model, (inputs, targets), functional.mse_loss, optimizer
    steps = [debug.training_step(*arguments, scaler=scaler, amp="fp16") for _ in range(25)]
    skipped = [result.optimization.skipped for result in steps]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == sorted(skipped, reverse=True)
    assert [result.problems for result in steps] == [()] * 25
    assert all((result.optimization.update_norm == 0) == result.optimization.skipped for result in steps)
    assert debug.training_summary().anomaly_steps == 0


def test_the_summary_is_the_session_s_where_no_step_was_monitored(run: Recording) -> None:
    """Of all its steps and verdicts, from the last ``clear()`` on; the flight file counts steps that are monitored."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for seed in range(4):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
    run.look()
    summary = debug.training_summary()
    assert (summary.source, summary.anomaly_steps) == ("recorded", 0)
    assert summary.total_steps >= 3  # the last one is pending until the next begins
    debug.clear()
    assert debug.training_summary().total_steps <= 1
    for loss in (1.0, 1.0, nan):
        debug.monitor_step(model, loss)
    values = run.look()
    assert (values["torchobs.debug.steps",], values["torchobs.debug.anomaly_steps",]) == (3, 1)
    assert values["torchobs.debug.step_anomalies", "loss_anomaly"] == 1
    assert values["torchobs.debug.step_anomalies", "gradient_explosion"] == 0


MODEL = mlp()
SGD = torch.optim.SGD(MODEL.parameters())


def graded(norm: float) -> nn.Module:
    """A model with gradients of this norm each."""
    model = nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, norm / parameter.numel() ** 0.5)
    return model


def test_a_caller_s_threshold_holds_for_the_whole_verdict() -> None:
    """Promise: nothing that it allows is an anomaly, of the step or of a parameter, and what it does not allow is one."""
    checks: list[Callable[..., Any]] = [debug.check_gradients, lambda model, **limits: debug.monitor_step(model, 1.0, **limits)]
    for check in checks:
        assert check(graded(300.0)).problems
        assert check(graded(300.0), exploding=1e6).problems == ()
        assert check(graded(3.0), exploding=1.0).problems
        assert check(graded(1e-8)).problems
        assert check(graded(1e-8), vanishing=1e-20).problems == ()
        assert check(graded(1e-3), vanishing=0.1).problems
        for limits in ({"exploding": 0.0}, {"vanishing": nan}):
            with pytest.raises(ValueError, match="a threshold of a norm is above 0"):
                check(graded(1.0), **limits)
    model, (inputs, targets) = mlp(), batch()
    arguments = model, (inputs, 1e3 * targets + 1e3), functional.mse_loss, torch.optim.SGD(model.parameters(), lr=1e-6)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match="a threshold of a norm is above 0"):
        debug.training_step(*arguments, exploding=-1.0)
    assert all(map(torch.equal, before, model.parameters()))
    assert not debug.training_step(*arguments).ok
    assert debug.training_step(*arguments, exploding=1e9).problems == ()


def test_a_large_norm_that_is_usual_is_no_explosion() -> None:
    """Promise: of a loss that is a sum over the batch, from the 20th step on; ten times as much is one, and so is its drift."""
    chance, model = Random(0), nn.Linear(4, 4)

    def step(norm: float) -> bool:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, norm)
        monitored = debug.monitor_step(model, 1.0)
        assert monitored.gradient_explosion == (not monitored.ok) == any("exploding" in text for text in texts(monitored))
        return monitored.gradient_explosion

    explosions = [step(chance.lognormvariate(5.0, 0.2)) for _ in range(100)]
    assert explosions == [True] * WARM_UP + [False] * (100 - WARM_UP)
    assert step(15e3)
    assert not step(150.0)


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, packed: PackedSequence) -> torch.Tensor:
        out, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        return self.head(out.sum(1))  # type: ignore[no-any-return]


def test_a_packed_sequence_is_one_argument() -> None:
    """Promise: it is given as it is, though torch has made it a tuple."""
    model, batch = _Packed(), pack_padded_sequence(torch.randn(4, 6, 5), torch.tensor([6, 5, 3, 2]), batch_first=True)
    assert torch.equal(debug.forward_pass(model, batch).output, model(batch))
    step = debug.training_step(model, batch, lambda out: out.square().mean(), torch.optim.SGD(model.parameters(), 0.1))
    assert step.problems == ()
    assert debug.trace_nan(model, batch) is None
    usage = debug.memory_by_module(model, batch)
    assert usage.batch_size == 4
    with torch.no_grad():
        batch.data[3, 2] = float("nan")
    origin = debug.trace_nan(model, (batch, torch.zeros(4, 3)), nn.functional.mse_loss)
    assert origin is not None
    assert origin.kind == "input"


def test_scripted_modules_take_no_hooks_and_are_looked_at_from_outside() -> None:
    """Promise: no function raises because of them, twice in a row, and the optimizer steps."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    model, x = nn.Sequential(scripted, nn.Linear(8, 2)), torch.randn(5, 4)
    for _ in range(2):
        for module in (model, scripted):
            assert debug.memory_by_module(module, x).activations_bytes > 0
            assert debug.inference(module, x).problems == ()
            optimizer = torch.optim.SGD(module.parameters(), 0.1)
            step = debug.training_step(module, x, lambda out: out.square().mean(), optimizer, activations=True)
            assert step.optimization.update_norm > 0
        assert [row.name for row in debug.forward_pass(model, x, activations=True).activations] == ["1"]
        assert debug.trace_nan(model, x) is None


wrong: Any = debug
"""To be called as nobody who checks types would"""


BATCH = torch.zeros(1, 2)


WRONG: dict[str, Callable[[], Any]] = {
    r"inspect_tensor\(\) takes a torch.Tensor, not list": lambda: wrong.inspect_tensor([1.0]),
    "one of torch.optim over the model's.*not function": lambda: wrong.training_step(MODEL, BATCH, None, functional.mse_loss),
    "the optimizer has none of the model's parameters": lambda: wrong.training_step(nn.Linear(2, 1), BATCH, None, SGD),
    "LBFGS calls a closure": lambda: wrong.training_step(MODEL, BATCH, None, torch.optim.LBFGS(MODEL.parameters())),
    r"memory_by_module\(\) takes an optimizer that": lambda: wrong.memory_by_module(nn.Linear(2, 1), None, None, SGD),
    "'auto', or a dtype, not 'half'": lambda: wrong.training_step(MODEL, batch(), functional.mse_loss, SGD, amp="half"),
    "not tuple": lambda: wrong.profile((torch.zeros(3), torch.zeros(3))),
    "loss_fn is a function, .* or loss_fn.output, target., not int": lambda: wrong.training_step(MODEL, BATCH, 3, SGD),
    "loss_fn takes 3 arguments": lambda: wrong.training_step(MODEL, BATCH, functional.triplet_margin_loss, SGD),
    "whole numbers, 1 or more, not 100, '3', 10, 1000": lambda: wrong.enable("basic", memory_every="3"),
    "takes a name, or nothing, in parentheses, not int": lambda: wrong.operation(3),
    "takes at least one batch, not '3'": lambda: wrong.check_dataloader([1], batches="3"),
    "slow_s is a number of seconds above 0, not '3'": lambda: wrong.context("x", slow_s="3"),
    "samples is a whole number, 1 or more, not 0": lambda: wrong.context("x", samples=0),
    "a loss is a tensor, not float: return what loss_fn computes": lambda: wrong.backward_pass(MODEL, 1.0),
    "one element, not the shape": lambda: wrong.training_step(MODEL, batch()[0], lambda y: y, SGD),
    "the loss has no graph": lambda: wrong.backward_pass(MODEL, torch.ones(1)),
    "takes a loss of one number, not .*: reduce it, or leave it out": lambda: wrong.check_gradients(MODEL, torch.ones(3)),
    "a batch with a tensor of at least one sample": lambda: wrong.memory_by_module(nn.Linear(2, 1), {"texts": ["a"]}),
    "no directory": lambda: wrong.profile(lambda: None, trace="absent/x.json"),
    "are logged to 'torchobs.debug' already": lambda: wrong.logging_bridge(logging.getLogger("torchobs.debug")),
}


def test_wrong_arguments_are_refused_with_a_word() -> None:
    """Promise: a wrong argument is an error that says what to do, before anything is done."""
    for words, call in WRONG.items():
        with pytest.raises((TypeError, ValueError), match=words):
            call()


class Table(nn.Module):
    """Keeps what its first pass makes, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        out: torch.Tensor = self.layer(x) * self.table
        return out


@pytest.mark.parametrize("look", [debug.inference, guard.safe_inference])
def test_a_model_that_fills_a_table_in_its_first_pass_can_be_trained_afterwards(look: Callable[..., Any]) -> None:
    """Promise: nothing that a look at it leaves in a model is a tensor that autograd refuses; TorchScript is taken, too."""
    model, x = Table(), torch.randn(2, 4)
    look(model, x)
    model(x).sum().backward()
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    scripted(x).sum().backward()
    assert getattr(look(scripted, x), "ok", True)
