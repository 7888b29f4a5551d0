"""Training is bit for bit the same without torchobs, with it, and with every hook of ours raising at every call."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchobs
from torchobs.support import error_guard

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 200


def train(precision: str) -> str:
    """Train with everything that we hook; return a digest of every loss and weight."""
    torch.manual_seed(7)
    digest = hashlib.sha256()
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=precision == "fp16")
    data = TensorDataset(torch.randn(320, 16), torch.randint(0, 4, (320,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    done = 0
    while done < STEPS:
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=precision == "fp16"):
                loss = torch.nn.functional.cross_entropy(model(inputs).float(), labels)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            torchobs.log(tokens=16)
            with torchobs.phase("other things"):
                digest.update(loss.detach().numpy().tobytes())
            done += 1
        model.eval()
        with torch.no_grad():
            digest.update(model(data.tensors[0]).numpy().tobytes())
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_two_hundred_steps_are_bit_identical(flight_dir: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Losses, evaluations and weights after 200 steps have one digest in all three cases."""
    plain = train(precision)
    with torchobs.init(flight_dir=flight_dir, grad_interval=1) as session:
        assert session.active
        observed = train(precision)
        assert session.context is not None
        assert session.context.recorder.step >= STEPS - 1
    called: list[str] = []
    original = error_guard.CircuitBreaker.guard

    def failing(breaker: error_guard.CircuitBreaker, function: Any) -> Any:
        def fail(*args: Any) -> None:
            del args
            called.append(function.__qualname__)
            raise RuntimeError("a bug of ours")

        guarded = original(breaker, fail)

        def every_time(*args: Any) -> Any:
            breaker.is_open = False  # so that every call raises, not only the first
            return guarded(*args)

        return every_time

    monkeypatch.setattr(error_guard.CircuitBreaker, "guard", failing)
    with torchobs.init(flight_dir=flight_dir, grad_interval=1) as session:
        assert session.active
        broken = train(precision)
    monkeypatch.undo()
    assert len(set(called)) >= 8, "the hooks were not reached"
    assert (observed, broken) == (plain, plain)
