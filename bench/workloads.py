"""What the benchmarks train: five models, one in three sizes of batch, as endless generators that yield after each step."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


class Observer:
    """What watches a training; this one does nothing, or needs no call."""

    def step(self, model: torch.nn.Module) -> AbstractContextManager[object]:
        """Enclose what a step does after its batch has come."""
        del model
        return nullcontext()

    def after(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        """End the step, before its gradients are cleared."""


NOBODY = Observer()


def mlp(observer: Observer = NOBODY, *, compiled: bool = False, device: str = "cpu", batch: int = 64) -> Iterator[None]:
    """A 3-layer perceptron with AdamW, in steps of about 1 ms, 10 ms with a batch of 1,200, 50 ms with 5,500 (one thread)."""
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    data = TensorDataset(torch.randn(50, batch, 128, device=device), torch.randint(0, 10, (50, batch), device=device))
    return _classify(model, optimizer, DataLoader(data, batch_size=None), observer, torch.compile(model) if compiled else model)


def _classify(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any], observer: Observer, forward: Any
) -> Iterator[None]:
    while True:
        for inputs, labels in loader:
            with observer.step(model):
                loss = cross_entropy(forward(inputs), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            observer.after(model, loss)
            yield


def cnn(observer: Observer = NOBODY, *, device: str = "cpu") -> Iterator[None]:
    """A small convolutional network with SGD and Nesterov momentum, in steps of about 50 ms on two cores."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        convolution = torch.nn.Conv2d(inputs, outputs, 3, padding=1)
        layers += [convolution, torch.nn.BatchNorm2d(outputs), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(128 * 16, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    data = TensorDataset(torch.randn(768, 3, 32, 32, device=device), torch.randint(0, 10, (768,), device=device))
    return _classify(model, optimizer, DataLoader(data, batch_size=48, shuffle=True), observer, model)


def gpt(observer: Observer = NOBODY, *, device: str = "cpu", large: bool = False) -> Iterator[None]:
    """The example's GPT with clipping, about 80 ms a step on two cores; ``large``: GPT-2's 85 million weights, in bfloat16."""
    from examples import char_gpt

    options = char_gpt.Options(layers=12, heads=12, width=768, block_size=1024, batch_size=8) if large else char_gpt.Options()
    torch.manual_seed(0)
    model = char_gpt.GPT(options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    length = options.block_size + 1
    text = char_gpt.read_text(2000 * length)
    blocks = TensorDataset(text[: len(text) // length * length].view(-1, length).to(device))
    while True:
        for (block,) in DataLoader(blocks, batch_size=options.batch_size, shuffle=True, drop_last=True):
            with observer.step(model):
                with torch.autocast(device, torch.bfloat16) if large else nullcontext():
                    loss = char_gpt.cross_entropy(model(block[:, :-1]), block[:, 1:])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            observer.after(model, loss)
            yield


def pinn(observer: Observer = NOBODY, *, device: str = "cpu") -> Iterator[None]:
    """A physics-informed network, in steps of some ms: Burgers' equation at 1,000 points, whose terms are derivatives.

    Four calls of ``torch.autograd.grad`` come before each backward pass, and no loader. Layers and points are DeepXDE's.
    """
    torch.manual_seed(0)
    widths = (2, 20, 20, 20, 20)
    hidden = [part for pair in pairwise(widths) for part in (torch.nn.Linear(*pair), torch.nn.Tanh())]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(widths[-1], 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    points = torch.rand(1000, 2, device=device, requires_grad=True)
    edges = torch.rand(200, 2, device=device)

    def slope(of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(of, points, torch.ones_like(of), create_graph=True)[0]

    while True:
        with observer.step(model):
            u = model(points)
            u_x, u_t = slope(u)[:, :1], slope(u)[:, 1:]
            u_xx, u_tt = slope(u_x)[:, :1], slope(u_t)[:, 1:]
            equation = u_t + u * u_x - 0.01 / torch.pi * u_xx + 0.0 * u_tt
            loss = equation.square().mean() + model(edges).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        observer.after(model, loss)
        yield


WORKLOADS: dict[str, tuple[Callable[..., Iterator[None]], int, int]] = {
    "mlp": (mlp, 40, 200),
    "mlp-10ms": (partial(mlp, batch=1_200), 20, 100),
    "mlp-50ms": (partial(mlp, batch=5_500), 10, 40),
    "compiled": (partial(mlp, compiled=True), 40, 200),  # by inductor, which needs a C++ compiler
    "cnn": (cnn, 15, 20),
    "gpt": (gpt, 12, 20),
    "pinn": (pinn, 40, 60),
}
"""Name → (training, steps per block, pairs of blocks with and without an observer)."""
