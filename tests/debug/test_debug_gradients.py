"""``debug.check_gradients`` names the parameters with a wrong gradient, and what is wrong with it."""

# mypy: disable-error-code="comparison-overlap, index, no-untyped-call, operator, union-attr"

import asyncio
import logging
import threading
from collections.abc import Callable
from logging.handlers import BufferingHandler
from math import inf, isnan, nan
from typing import Any

import pytest
import torch

from tests.debug.models import texts
from tests.training import Recording, loss_of, mlp, norm_of
from torchobs import debug
from torchobs.debug import findings, tensors


def test_norms_and_counts_are_those_of_the_gradients() -> None:
    """Total and by parameter, and a healthy model has no anomaly."""
    model = mlp()
    loss = loss_of(model)
    loss.backward()
    check = debug.check_gradients(model, loss)
    assert check.gradient_norm == pytest.approx(norm_of(model), rel=1e-9)
    assert check.loss == pytest.approx(loss.item())
    assert [row.norm for row in check.parameters] == pytest.approx([p.grad.norm().item() for p in model.parameters()])
    assert (check.problems, check.missing, check.loss_scale) == ((), (), 1.0)
    assert check.exploding(1e-3) == tuple(name for name, _ in model.named_parameters())
    assert check.vanishing(1e3) == check.exploding(1e-3)
    assert check.exploding() == check.vanishing() == ()


def test_each_sickness_is_said_in_words_with_its_parameter(caplog: pytest.LogCaptureFixture) -> None:
    """NaN, explosion, tiny and zero gradients, a parameter without one; each is logged and in the summary, once."""
    model = mlp()
    loss_of(model).backward()
    weight, bias, last, end = model.parameters()
    weight.grad[0, 0], weight.grad[0, 1] = nan, inf
    bias.grad.fill_(100.0)
    last.grad.fill_(1e-9)
    end.grad = None
    with caplog.at_level(logging.WARNING, findings.LOGGER):
        check = debug.check_gradients(model, float("nan"))
        again = debug.check_gradients(model, float("nan"))
    assert (
        texts(check)
        == texts(again)
        == (
            "loss: the loss is nan",
            "0.weight: 1 NaN and 1 Inf of 128 elements of the gradient",
            "0.bias: the gradient's norm 400 is above 10 (exploding)",
            "2.weight: the gradient's norm 4e-09 is below 1e-06 (vanishing)",
        )
    )
    assert tuple(problem.text for problem in debug.summary().problems) == tuple(problem.text for problem in check.problems)
    debug.clear()
    assert debug.summary().problems == ()
    assert (check.missing, check.exploding(), check.vanishing()) == (("2.bias",), ("0.weight", "0.bias"), ("2.weight",))
    assert isnan(check.gradient_norm or 0)
    logged = [(record.torchobs_kind, record.torchobs_subject) for record in caplog.records]  # type: ignore[attr-defined]
    assert logged == [
        ("nonfinite_loss", "loss"), ("nonfinite_gradient", "0.weight"), ("gradient_explosion", "0.bias"),
        ("gradient_vanishing", "2.weight"),
    ]  # fmt: skip


def scaled(*, fused: bool) -> tuple[Any, Any, Any]:
    """A model, an optimizer that changes nothing, a scaler."""
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.0, fused=fused), torch.amp.GradScaler("cpu", init_scale=2.0**20)


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scale_is_divided_out(session: bool, fused: bool, request: pytest.FixtureRequest) -> None:  # noqa: FBT001
    """Scaled gradients are not exploding ones, before and after ``unscale_``, by the argument or as the session knows."""
    model, optimizer, scaler = scaled(fused=fused)
    if session:
        request.getfixturevalue("run")
    for seed in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, seed)).backward()
        reference = norm_of(model) / 2.0**20
        check = debug.check_gradients(model, scaler=None if session else scaler)
        assert (check.loss_scale, check.gradient_norm) == (2.0**20, pytest.approx(reference, rel=1e-6))
        assert check.problems == ()
        if not fused:
            scaler.unscale_(optimizer)
            check = debug.check_gradients(model, scaler=None if session else scaler)
            assert (check.loss_scale, check.gradient_norm) == (1.0, pytest.approx(reference, rel=1e-6))
        scaler.step(optimizer)
        scaler.update()
    assert debug.check_gradients(model, scaler=torch.amp.GradScaler("cpu", enabled=False)).loss_scale == 1.0


def test_a_flood_is_logged_and_recorded_in_part(run: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """Of a hundred sick parameters eight are logged and are events, with kind, name and sentence; the result has them all."""
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in range(50)])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, nan)
    assert len(debug.check_gradients(model).problems) == 100
    events = [event["attrs"] for event in run.frames("torchobs.debug.finding")]
    assert len(caplog.records) == len(events) == findings.FLOOD
    names = {(event["function"], event["kind"], event["name"]) for event in events}
    assert ("check_gradients", "nonfinite_gradient", "0.weight") in names
    assert "1 NaN" in events[0]["message"]


class _Adapted(torch.nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(8, 8).requires_grad_(False)  # noqa: FBT003  # torch's own order
        self.down, self.up = torch.nn.Parameter(torch.randn(2, 8)), torch.nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + x @ self.down.T @ self.up.T


def _headed() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    torch.nn.init.zeros_(model.get_parameter("2.weight"))
    return model


@pytest.mark.parametrize(("make", "first", "zero"), [(_Adapted, "up", "down"), (_headed, "2.weight", "0.weight")])
def test_zeros_that_are_about_to_learn_are_no_anomaly(make: Callable[[], torch.nn.Module], first: str, zero: str) -> None:
    """Before its first step a parameter of zeros passes no gradient on, which is remarked; after it, that is vanishing."""
    torch.manual_seed(0)
    model = make()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(4, 8)
    steps = [debug.training_step(model, (x, x + 1), torch.nn.functional.mse_loss, optimizer) for _ in range(3)]
    assert [step.problems for step in steps] == [()] * 3
    checks = [step.backward.gradients for step in steps]
    remark = f"{first} is all zeros and has a gradient: until its first step it may pass none on to {zero}"
    assert [check.remarks for check in checks] == [(remark,), (), ()]
    model.get_parameter(zero).grad.zero_()
    assert texts(debug.check_gradients(model)) == (f"{zero}: the gradient's norm is exactly zero (vanishing)",)


def test_a_sparse_gradient_is_that_of_its_stored_elements() -> None:
    """Its norm is the dense one's."""
    model = torch.nn.Embedding(50, 4, sparse=True)
    (model(torch.tensor([1, 1, 2, 7])) * torch.randn(4, 4)).sum().backward()
    (row,) = debug.check_gradients(model).parameters
    assert (row.numel, row.zero_count, row.norm) == (200, 0, pytest.approx(model.weight.grad.to_dense().norm().item()))


def test_in_an_event_loop_other_tasks_run_while_the_same_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computation waits until another task of the loop has run: a blocked loop would never let it end."""
    model = mlp()
    loss_of(model).backward()
    assert str(asyncio.run(debug.acheck_gradients(model))) == str(debug.check_gradients(model))
    turned = threading.Event()
    monkeypatch.setattr(tensors, "record_findings", lambda *_: turned.wait(30) and ())

    async def program() -> Any:
        async def other() -> None:
            turned.set()

        return await asyncio.gather(debug.ainspect_tensor(torch.zeros(3), "x"), other())

    assert asyncio.run(program())[0].problems == ()


def test_a_bridge_hands_findings_to_the_training_s_logger() -> None:
    """Once each, with their fields, until it is closed; then they go where they went before."""
    kept, logger = BufferingHandler(100), logging.getLogger("training of one's own")
    logger.addHandler(kept)
    try:
        with debug.logging_bridge(logger):
            debug.logging_bridge(logging.getLogger("another")).close()
            debug.inspect_tensor(torch.tensor([nan]), "x")
            debug.inspect_tensor(torch.tensor([nan]), "x")  # held back
            logger.setLevel(logging.ERROR)
            debug.inspect_tensor(torch.tensor([nan]), "y")
        logger.setLevel(logging.NOTSET)
        debug.inspect_tensor(torch.tensor([nan]), "z")
    finally:
        logger.removeHandler(kept)
    assert [(record.getMessage(), vars(record)["torchobs_kind"]) for record in kept.buffer] == [
        ("inspect_tensor: x: 1 NaN of 1 elements", "nonfinite_tensor")
    ]
    assert (findings.logger.handlers, findings.logger.propagate) == ([], True)


def test_without_any_gradient_it_asks_for_backward() -> None:
    """Called too late or too early."""
    check = debug.check_gradients(mlp())
    assert texts(check) == (
        "Sequential: no parameter of Sequential has a gradient: was backward() called, and not yet zero_grad()?",
    )
    assert check.gradient_norm is None
    assert debug.check_gradients(torch.nn.Module()).problems == ()
