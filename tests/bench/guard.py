"""What the guard's functions cost on the CPU: ``python -m tests.bench.guard``. The least of some repetitions, on one thread."""

from __future__ import annotations

import logging
import tempfile
import time
import timeit
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from torchobs import guard

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 60
CONTRACTS = {
    "check: shape, dtype, device": guard.Contract("batch 10", dtype=torch.float32, device="cpu", finite=False),
    "check: finite": guard.Contract(),
    "check: all of it, range and norm too": guard.Contract(
        "batch 10", dtype="floating", device="cpu", min=-100, max=100, max_norm=1e3
    ),
}


def main() -> None:
    """Print times, beside what torch itself takes for a pass over the values, or for the same step."""
    torch.set_num_threads(1)
    logging.getLogger("torchobs.guard").setLevel(logging.ERROR)
    small, logits = torch.randn(32, 10), torch.randn(512, 1000)
    _print("torch.aminmax, 320 values", lambda: torch.aminmax(small))
    for name, contract in CONTRACTS.items():
        _print(name, partial(contract.check, small))
    _print("torch.aminmax, 512,000 values", lambda: torch.aminmax(logits), 20)
    _print("sanitize_outputs, 512,000 values", lambda: guard.sanitize_outputs(logits), 20)
    _print("check_outputs, classes", lambda: guard.check_outputs(logits, classes=1), 5)
    _print("check_outputs, classes and reference", lambda: guard.check_outputs(logits, classes=1, reference=logits), 2)
    _models()
    _steps()
    _print("resources().check() after the first", guard.resources(interval_s=60).check, 20)


def _models() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(10)))
    _print("check_model, 10 million weights", lambda: guard.check_model(model), 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        torch.save(model.state_dict(), path)
        _print("torch.load, 42 MB", lambda: torch.load(path, weights_only=True), 1)
        _print("load, 42 MB", lambda: guard.load(path), 1)
        _print("scan_file, 42 MB", lambda: guard.scan_file(path), 1)


def _steps() -> None:
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512))]
    model: Any = torch.nn.Sequential(*layers)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(256, 512)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = model(batch).square().mean()
        return value

    def plain() -> None:
        optimizer.zero_grad()
        loss(x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    without = guard.Recovery(model, optimizer, guard.RecoveryPolicy(spikes=0))
    snapshots = guard.Recovery(model, optimizer, guard.RecoveryPolicy(snapshot_every=1, least_excess=1e9))
    ways: dict[str, Callable[[], object]] = {
        "a step by hand, 2 million weights": plain,
        "Recovery.step": lambda: without.step(x, loss),
        "Recovery.step with a snapshot": lambda: snapshots.step(x, loss),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(STEPS):  # in turn, in processor time: the machine may be busy
        for name, way in ways.items():
            begun = time.process_time()
            way()
            times[name].append(time.process_time() - begun)
    for name, found in times.items():
        print(f"{name:42}{median(found) * 1e6:12,.1f} µs of processor time, the median")


def _print(name: str, call: Callable[[], object], calls: int = 2000) -> None:
    call()
    print(f"{name:42}{min(timeit.repeat(call, number=calls, repeat=9)) / calls * 1e6:12,.1f} µs")


if __name__ == "__main__":
    main()
