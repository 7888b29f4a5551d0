"""NaN that an optimizer makes of finite gradients, in float16, where its ``eps`` is zero; and what only looks like that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.training import Recording, recording
from torchobs import catalog
from torchobs.diagnosis.diagnosis import diagnose
from torchobs.diagnosis.load import load_reports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """A recording that measures every step."""
    torch.manual_seed(0)
    yield from recording(flight_dir, grad_interval=1)


def half(layers: int) -> nn.Sequential:
    """A network in float16, of which some units are dead."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        linear = nn.Linear(16, 16)
        nn.init.constant_(linear.bias[:2], -100.0)
        parts += [linear, nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(16, 4)).half()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    """One step of an ordinary training."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.randn(32, 16).half()).float(), torch.randint(0, 4, (32,)))
    torch.autograd.backward(loss * factor)
    optimizer.step()


def origins(run: Recording) -> list[dict[str, Any]]:
    """The attributes of what was told, with the step."""
    run.look()
    return [{**frame["attrs"], "step": frame["step"]} for frame in run.frames(catalog.EVENT_NONFINITE_ORIGIN.name)]


@pytest.mark.parametrize("layers", [1, 6], ids=["small", "large"])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop], ids=lambda kind: kind.__name__)
def test_an_eps_that_is_zero_is_named(run: Recording, flight_dir: Path, make: Any, layers: int) -> None:
    """Not the module whose derivative is last, nor the weight alone; in the first step, after which the loss is NaN."""
    model = half(layers)
    optimizer = make(model.parameters(), lr=1e-3)
    for _ in range(3):
        step(model, optimizer)
    (origin,) = origins(run)
    told = {name: origin[name] for name in ("origin", "operator", "parameter", "step")}
    assert told == {"origin": "optimizer", "operator": make.__name__, "parameter": "0.weight", "step": 1}
    (report,), _ = load_reports(list(flight_dir.glob("*.flight")))
    text = next(finding.text for finding in diagnose(report) if finding.kind == "nonfinite_origin")
    made = f"made by the optimizer ({make.__name__}), of finite gradients, in 0.weight: its eps, 1e-08, is 0 in float16"
    assert text == f"The NaN or infinity of step 1 was {made}, so that it divides 0 by 0."


def with_a_larger_eps(model: nn.Module) -> None:
    """The remedy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    for _ in range(5):
        step(model, optimizer)


def in_bfloat16(model: nn.Module) -> None:
    """Its least number is 1e-40."""
    model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(32, 16).bfloat16()).float().square().mean())
        optimizer.step()


@pytest.mark.parametrize("script", [with_a_larger_eps, in_bfloat16], ids=lambda each: each.__name__)
def test_nothing_is_said_where_it_is_not_zero(run: Recording, script: Callable[[nn.Module], None]) -> None:
    """As in every other training."""
    script(half(2))
    assert origins(run) == []


def test_gradients_that_overflow_are_not_the_optimizer_s_fault(run: Recording) -> None:
    """Its ``eps`` is zero as well, but what it keeps is not finite: the gradients were not."""
    model = half(2)
    for linear in model[0], model[2]:
        nn.init.zeros_(linear.bias)  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-7)
    step(model, optimizer, factor=1e8)
    step(model, optimizer)
    told = {origin["origin"] for origin in origins(run)}
    assert told
    assert "optimizer" not in told


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_first_steps_are_numbered_right(run: Recording, at: int) -> None:
    """While it is not known yet where a step ends."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(1, 5):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        torch.autograd.backward((loss - loss.detach() - 1.0).log() if number == at else loss)
        optimizer.step()
    assert [(origin["step"], origin["operator"]) for origin in origins(run)] == [(at, "log")]
