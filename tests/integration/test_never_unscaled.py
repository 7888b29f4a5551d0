"""A scaled loss whose gradients nobody divides by the scale is told; who does so late, or by hand, is left alone."""

from __future__ import annotations

import pytest
import torch
from torch.amp import GradScaler

from tests.training import Recording, loss_of, mlp
from torchobs import catalog


@pytest.mark.parametrize("by", ["optimizer", "scaler", "hand"])
def test_gradients_that_nobody_unscales_are_told(run: Recording, by: str) -> None:
    """Not so where the scaler steps, or the script asks for the scale."""
    model, scaler = mlp(), GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(101):
        optimizer.zero_grad()
        scaler.scale(loss_of(model)).backward()  # type: ignore[no-untyped-call]
        if by == "scaler":
            scaler.step(optimizer)
            scaler.update()
            continue
        if by == "hand":
            for parameter in model.parameters():
                parameter.grad = parameter.grad / scaler.get_scale()  # type: ignore[operator, assignment]
        optimizer.step()
    run.look()
    told = [frame["attrs"] for frame in run.frames(catalog.EVENT_LOOP_MISTAKE.name)]
    assert told == ([{"kind": "never_unscaled", "optimizer": "Adam"}] if by == "optimizer" else [])


@pytest.mark.parametrize("accumulated", [16, 120])
def test_an_optimizer_of_unscaled_losses_beside_a_scaled_one_is_no_mistake(run: Recording, accumulated: int) -> None:
    """However many steps it makes before the other's first; what was told by then is taken back."""
    actor, critic, scaler = mlp(), mlp(1), GradScaler("cpu", init_scale=8.0)
    scaled, plain = torch.optim.Adam(actor.parameters()), torch.optim.SGD(critic.parameters(), lr=0.01)
    for _ in range(accumulated):
        plain.zero_grad()
        loss_of(critic).backward()  # type: ignore[no-untyped-call]
        plain.step()
        scaler.scale(loss_of(actor)).backward()  # type: ignore[no-untyped-call]
    run.whole_round()
    scaler.step(scaled)
    scaler.update()
    run.look()
    told = [
        frame["attrs"] for frame in run.frames(catalog.EVENT_LOOP_MISTAKE.name) if frame["attrs"]["kind"] == "never_unscaled"
    ]
    mistake = {"kind": "never_unscaled", "optimizer": "SGD"}
    assert told == ([mistake, {**mistake, "parameters_affected": 0}] if accumulated > 100 else [])
