"""One rank of a run for the test of the alerts: `alert_run.py NAME` does what is called so below.

In real seconds: a step takes 0.04 s, nearly all of it sleep, so that thirty of them train at once on two processors.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

STEP_S = 0.04
FOREVER_S = 600.0
LONG_S = 65.0
"""Longer than the minute after which an exporter may call a rank hung."""
CHECKPOINT = Path(os.environ["TORCHOBS_DIR"]) / f"{os.environ['TORCHOBS_RUN_ID']}.pt"


class Trained(nn.Module):
    """A small regression; `pause_s` is how long a forward pass takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.pause_s = STEP_S

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.pause_s)
        return self.layers(x)  # type: ignore[no-any-return]  # a module's call is


torch.manual_seed(0)
MODEL = Trained()
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.01)


def during(seconds: float) -> Iterator[int]:
    """As many numbers as there are steps in so many seconds; on a busy machine it takes longer."""
    yield from range(round(seconds / STEP_S))


def loss_of(model: Callable[[Tensor], Tensor] = MODEL) -> Tensor:
    """Mean squared error on a batch of its own."""
    inputs = torch.randn(32, 8)
    return nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))


def backward(loss: Tensor) -> None:
    """After the gradients of the last step are gone."""
    OPTIMIZER.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]


def train(seconds: float = FOREVER_S) -> None:
    """Plain steps."""
    for _ in during(seconds):
        backward(loss_of())
        OPTIMIZER.step()


def crash(seconds: float = 10.0) -> None:
    """An exception of the script's own."""
    train(seconds)
    raise RuntimeError("no such sample")


def hang() -> None:
    """It stands still in a step for 80 s, and then goes on."""
    for number in during(15):
        backward(loss_of())
        if number == 250:
            time.sleep(80)
        OPTIMIZER.step()


def persistent_nan() -> None:
    """A batch with NaN: the weights are lost, and it trains on."""
    train(8)
    backward(loss_of() * float("nan"))
    OPTIMIZER.step()
    train()


def single_nan() -> None:
    """One batch has no finite loss, and moves nothing."""
    train(10)
    backward(loss_of() * float("nan"))
    OPTIMIZER.zero_grad(set_to_none=False)
    OPTIMIZER.step()
    train(12)


def explosion() -> None:
    """Ten steps in a row have a gradient ten thousand times the usual one; clipping keeps the weights."""
    for number in during(22):
        backward(loss_of() * (1e4 if 250 <= number < 260 else 1.0))
        nn.utils.clip_grad_norm_(MODEL.parameters(), 1.0)
        OPTIMIZER.step()


def scaled(overflows: Callable[[int], bool], seconds: float) -> None:
    """Train with a loss scaler, whose gradients overflow in these steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for number in during(seconds):
        OPTIMIZER.zero_grad()
        scaler.scale(loss_of()).backward()  # type: ignore[no-untyped-call]
        if overflows(number):
            next(MODEL.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
        scaler.step(OPTIMIZER)
        scaler.update()


def straggle() -> None:
    """Three ranks of gloo, the last of which takes five times as long between its steps; the others wait for it."""
    torch.distributed.init_process_group("gloo")
    replica = nn.parallel.DistributedDataParallel(MODEL)
    for _ in range(130):
        backward(loss_of(replica))
        OPTIMIZER.step()
        time.sleep(5 * STEP_S if torch.distributed.get_rank() == 2 else STEP_S)  # the last of three
    torch.distributed.destroy_process_group()


class SlowToRead(Dataset[Any]):
    """Each sample takes 50 ms."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.05)
        return torch.full((8,), index / 1e6)


def starve() -> None:
    """A loader whose batches come half as fast as they are trained."""
    for _, inputs in zip(during(115), DataLoader(SlowToRead(), batch_size=2), strict=False):
        backward(nn.functional.mse_loss(MODEL(inputs), inputs.sum(1, keepdim=True)))
        OPTIMIZER.step()


def slow_down() -> None:
    """From some time on its steps take three times as long."""
    train(14)
    MODEL.pause_s *= 3
    train(14)


def leak() -> None:
    """Each step keeps a quarter of a MiB, some 6 MB a second: four minutes are needed to tell that from a warm-up."""
    kept = []
    for _ in during(FOREVER_S):
        kept.append(torch.ones(65536))
        backward(loss_of())
        OPTIMIZER.step()


def fail_to_save() -> None:
    """A checkpoint is saved once; then its folder is gone for some time."""
    train(2)
    torch.save(MODEL.state_dict(), CHECKPOINT)
    train(8)
    for _ in range(12):
        train(1)
        try:
            torch.save(MODEL.state_dict(), CHECKPOINT.parent / "gone" / "model.pt")
        except RuntimeError:
            continue
    torch.save(MODEL.state_dict(), CHECKPOINT)
    train(4)


def evaluate() -> None:
    """One evaluation that lasts long."""
    train(10)
    MODEL.eval()
    with torch.no_grad():
        for _ in during(LONG_S):
            loss_of()
    MODEL.train()
    train(6)


def compile_long() -> None:
    """A backend of torch.compile that takes its time."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        del inputs
        time.sleep(LONG_S)
        return graph.forward

    compiled = torch.compile(MODEL.layers, backend=backend)
    for _ in range(250):
        time.sleep(STEP_S)
        backward(loss_of(compiled))
        OPTIMIZER.step()


def warm_up() -> None:
    """The learning rate rises for a long time, and falls then."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(OPTIMIZER, lambda step: min(step / 400, 1.0) * 0.999**step)
    for _ in during(24):
        backward(loss_of())
        OPTIMIZER.step()
        scheduler.step()


def accumulate() -> None:
    """Eight backward passes to a step."""
    for number in during(24):
        (loss_of() / 8).backward()  # type: ignore[no-untyped-call]
        if number % 8 == 7:  # the last of eight
            OPTIMIZER.step()
            OPTIMIZER.zero_grad()


def resume() -> None:
    """From the checkpoint if there is one; it saves another every two seconds."""
    if CHECKPOINT.exists():
        MODEL.load_state_dict(torch.load(CHECKPOINT))
    for _ in range(7):
        train(2)
        torch.save(MODEL.state_dict(), CHECKPOINT)


def slow_first_step() -> None:
    """Cold caches."""
    MODEL.pause_s = LONG_S
    backward(loss_of())
    OPTIMIZER.step()
    MODEL.pause_s = STEP_S
    train(10)


def idle() -> None:
    """As a person at a notebook: trained, looked at, trained on."""
    train(6)
    time.sleep(LONG_S)
    train(6)


BEHAVIOURS: dict[str, Callable[[], None]] = {
    "train_briefly": lambda: train(12),
    "crash_soon": lambda: crash(1.0),
    "scaler_stuck": lambda: scaled(lambda number: 250 <= number < 400, 24),
    "scaler_calibrates": lambda: scaled(lambda number: number < 4, 22),
}
"""Those that are no function's alone"""

if __name__ == "__main__":
    torchobs.init()
    (BEHAVIOURS.get(sys.argv[1]) or globals()[sys.argv[1]])()
