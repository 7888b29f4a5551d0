"""``debug.training_step``, its parts and ``monitor_step`` do what a loop does, check it and count it."""

# mypy: disable-error-code="no-untyped-call, union-attr, operator, index, comparison-overlap"
# a parameter may have no gradient, and here it has one; torch has no types for `backward`

from math import inf, nan
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.debug.models import MODELS, step
from tests.training import Recording, batch, loss_of, mlp
from torchobs import debug


def hooks(model: torch.nn.Module) -> int:
    """How many forward hooks its modules have."""
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_a_plain_loop(name: str) -> None:
    """To the bit, with everything asked for, twice in a row; nothing is found in healthy models, and no hook stays."""
    make, sample = MODELS[name]
    torch.manual_seed(1)
    one = make()
    torch.manual_seed(1)
    other = make()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (one, other)]
    for number in range(3):
        torch.manual_seed(number)
        loss = step(one, optimizers[0], sample())
        torch.manual_seed(number)
        inputs, target = sample()
        found = debug.training_step(
            other, optimizers[1], functional.cross_entropy, inputs, target, activations=True, weights=True
        )
        assert (found.loss, found.anomalies, found.anomaly_detected) == (loss.item(), (), False)
        assert found.forward.activations
        assert found.weights is not None
        assert 0 < found.optimization.update_ratio < 1
        assert found.gradient_norm > 0
        assert min(found.time, found.forward.time, found.backward.time, found.optimization.time) > 0
        assert "loss" in str(found)
        assert found.to_dict()["forward"]["inputs"][0]["name"] == "input"
        assert "_output" not in found.to_dict()["forward"]
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    assert hooks(other) == 0
    summary = debug.training_summary()
    assert (summary.total_steps, summary.anomaly_steps, summary.anomaly_rate, summary.source) == (3, 0, 0.0, "monitored")


def test_an_optimizer_with_a_closure_steps_as_in_a_plain_loop() -> None:
    """LBFGS computes loss and gradients several times in a step: to the bit, and the first time is checked."""
    torch.manual_seed(1)
    one, other = mlp(), mlp()
    other.load_state_dict(one.state_dict())
    plain, watched = (torch.optim.LBFGS(model.parameters(), max_iter=4) for model in (one, other))
    inputs, targets = batch()

    def closure() -> torch.Tensor:
        plain.zero_grad()
        loss = functional.mse_loss(one(inputs), targets)
        loss.backward()
        return loss

    for _ in range(3):
        loss = plain.step(closure)
        found = debug.training_step(other, watched, functional.mse_loss, inputs, targets)
        assert (found.loss, found.anomalies) == (loss.item(), ())
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))
    with pytest.raises(TypeError, match=r"LBFGS needs a closure: give optimization_step\(\) closure="):
        debug.optimization_step(watched)
    assert debug.optimization_step(plain, closure=closure).optimizer == "LBFGS"
    before = {name: value.clone() for name, value in other.state_dict().items()}
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(TypeError, match="a loss scaler takes no closure"):
        debug.training_step(other, watched, functional.mse_loss, inputs, targets, scaler=scaler)
    assert all(map(torch.equal, before.values(), other.state_dict().values()))


def test_an_optimizer_of_another_model_is_told() -> None:
    """The loss is sound, and so are the gradients: only nothing is ever learned."""
    inputs, targets = batch()
    found = debug.training_step(mlp(), torch.optim.SGD(mlp().parameters(), lr=0.1), functional.mse_loss, inputs, targets)
    assert found.anomalies == ("the optimizer (SGD) has none of the model's parameters: make it of model.parameters()",)
    assert found.anomaly_detected
    assert debug.training_summary().anomaly_steps == 1


def test_each_part_alone() -> None:
    """Forward, backward, optimizer, as a loop of one's own calls them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs, targets = batch()
    forward = debug.forward_pass(model, inputs, activations=True)
    assert [row.name for row in forward.activations] == ["0", "1", "2"]
    assert [row.shape for row in forward.outputs] == [(4, 1)]
    loss = functional.mse_loss(forward.output, targets)
    backward = debug.backward_pass(loss, model)
    assert backward.gradients is not None
    assert backward.loss == pytest.approx(loss.item())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimization = debug.optimization_step(optimizer)
    assert optimization.update_norm == pytest.approx(0.5 * backward.gradients.total_norm, rel=1e-4)
    norm = sum(x.double().square().sum() for x in before) ** 0.5
    assert optimization.update_ratio == pytest.approx(optimization.update_norm / float(norm))
    assert (optimization.learning_rates, optimization.skipped, optimization.optimizer) == ((0.5,), False, "SGD")
    assert debug.backward_pass(loss_of(mlp())).gradients is None


def test_a_bad_batch_is_told_as_such() -> None:
    """Input, then output, loss, gradients and weights, in the order in which it spreads."""
    model = mlp()
    inputs, targets = batch()
    inputs[0, 0] = nan
    found = debug.training_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), functional.mse_loss, inputs, targets, activations=True
    )
    assert found.anomaly_detected
    assert found.anomalies[:4] == (
        "input: 1 NaN of 32 elements", "0: 16 NaN of 64 elements", "1: 16 NaN of 64 elements", "2: 1 NaN of 4 elements",
    )  # fmt: skip
    assert "the loss is nan" in found.anomalies
    assert "the norm of the parameters is nan after the step" in found.anomalies
    assert "the total gradient norm is nan" in found.anomalies
    summary = debug.training_summary()
    assert (summary.total_steps, summary.anomaly_steps, summary.loss_anomalies, summary.gradient_explosions) == (1, 1, 1, 1)
    assert (summary.anomaly_rate, summary.loss_anomaly_rate, summary.gradient_vanishing_rate) == (1.0, 1.0, 0.0)


def test_inference_leaves_every_mode_as_it_was() -> None:
    """Eval mode and no graph inside; each module's own mode afterwards, also after an exception."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(8))
    model[2].eval()
    modes = [module.training for module in model.modules()]
    inputs, _ = batch()
    found, again = debug.inference(model, inputs), debug.inference(model, inputs)
    assert torch.equal(found.output, again.output)  # no dropout
    assert not found.output.requires_grad
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        debug.inference(model, inputs[:, :3], activations=True)
    assert [module.training for module in model.modules()] == modes
    assert hooks(model) == 0


class Keywords(torch.nn.Module):
    def forward(self, *, tokens: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"logits": tokens * scale, "hidden": [tokens, tokens + 1], "loss": None}


def test_batches_and_outputs_of_any_nesting() -> None:
    """Dicts go by keyword, tuples by position; each tensor in them has a name."""
    found = debug.forward_pass(Keywords(), {"tokens": torch.ones(2), "scale": 2.0})
    assert [row.name for row in found.inputs] == ["input.tokens"]
    assert [row.name for row in found.outputs] == ["output.logits", "output.hidden[0]", "output.hidden[1]"]
    bilinear = torch.nn.Bilinear(2, 3, 1)
    assert [row.name for row in debug.forward_pass(bilinear, (torch.ones(1, 2), torch.ones(1, 3))).inputs] == [
        "input[0]",
        "input[1]",
    ]


def test_monitored_steps_are_judged_and_counted() -> None:
    """Explosion, vanishing and a loss that is not finite, each by the norm of all gradients; sound steps are none."""
    model = mlp()
    for seed in range(30):
        model.zero_grad()
        loss = loss_of(model, seed % 3)
        loss.backward()
        assert debug.monitor_step(model, loss, seed).anomalies == ()

    def scaled(factor: float) -> Any:
        for parameter in model.parameters():
            parameter.grad.mul_(factor)
        return debug.monitor_step(model, 0.5)

    exploded, vanished = scaled(1e4), scaled(1e-14)
    assert (exploded.gradient_explosion, exploded.gradient_vanishing, exploded.step) == (True, False, 31)
    assert (vanished.gradient_explosion, vanished.gradient_vanishing) == (False, True)
    broken = debug.monitor_step(model, torch.tensor(inf), 99, vanishing=1e-30)
    assert (broken.loss_anomaly, broken.gradient_vanishing, broken.step) == (True, False, 99)
    spike = debug.monitor_step(model, 1e4, vanishing=1e-30)
    assert spike.loss_anomaly
    assert any("far above the usual" in text for text in spike.anomalies)
    found = debug.training_summary()
    assert (found.total_steps, found.anomaly_steps) == (34, 4)
    assert (found.gradient_explosions, found.gradient_vanishing, found.loss_anomalies) == (1, 1, 2)
    assert found.anomaly_rate == pytest.approx(4 / 34)
    debug.clear()
    assert debug.training_summary().total_steps == 0


def test_steps_that_a_loss_scaler_skips_are_no_anomalies() -> None:
    """An overflow at too large a scale is how the scaler finds a smaller one; weights stay as they are."""
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**30)
    half = torch.autocast("cpu", torch.float16)
    inputs, targets = batch()
    given = model, optimizer, functional.mse_loss, inputs, targets
    steps = [debug.training_step(*given, scaler=scaler, autocast=half) for _ in range(25)]
    skipped = [one.optimization.skipped for one in steps]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == sorted(skipped, reverse=True)
    assert [one.anomalies for one in steps] == [()] * 25
    assert all((one.optimization.update_norm == 0) == one.optimization.skipped for one in steps)
    assert debug.training_summary().anomaly_steps == 0


def test_the_flight_file_counts_checked_steps(run: Recording) -> None:
    """So that the exporter's summary can say the same."""
    model = mlp()
    for seed in range(3):
        model.zero_grad()
        loss = loss_of(model, seed)
        loss.backward()
        debug.monitor_step(model, loss)
    debug.monitor_step(model, nan)
    values = run.look()
    assert (values["torchobs.debug.steps",], values["torchobs.debug.anomaly_steps",]) == (4, 1)
    assert values["torchobs.debug.step_anomalies", "loss_anomaly"] == 1
    assert values["torchobs.debug.step_anomalies", "gradient_explosion"] == 0


def test_without_monitored_steps_the_summary_is_the_session_s(run: Recording) -> None:
    """Of all its steps and verdicts, from the last ``clear()`` on."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(steps: int) -> None:
        for seed in range(steps):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            optimizer.step()

    train(4)
    run.look()
    found = debug.training_summary()
    assert (found.source, found.anomaly_steps) == ("recorded", 0)
    assert found.total_steps >= 3  # the last one is pending until the next begins
    debug.clear()
    assert debug.training_summary().total_steps <= 1


MODEL = mlp()
SGD = torch.optim.SGD(MODEL.parameters())
