"""A model that is compiled in several ways, and of which a part can be ill; what was told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional

from tests.training import Recording
from torchobs import catalog

AT, WIDTH = 3, 8
LINES = {"log": "torch.log(", "div": "h / (", "acos": "torch.acos("}
BACKWARD_LINES = {"sqrt": "torch.sqrt(", "pow": "torch.pow("}
WAYS = ("whole", "in_place", "blocks", "blocks_in_place")
FILTERS = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch's, of a graph that begins within a graph
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]


class Block(nn.Module):
    """A residual block with dropout, that can be ill; it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop, self.ill = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), ""
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, WIDTH)`` to the same."""
        h = self.drop(self.linear(self.norm(x)))
        if self.ill == "log":
            h = h + torch.log(-1 - h.abs())
        if self.ill == "div":
            h = h / (h - h.detach())
        if self.ill == "acos":
            h = h + torch.acos(2 + h.abs())
        if self.ill == "sqrt":
            h = h + torch.sqrt(h.relu() * 0)
        if self.ill == "pow":
            h = h + torch.pow(h.relu() * 0, 0.5)
        return torch.as_tensor(x + h)


class Net(nn.Module):
    """Blocks between two layers, with batch normalisation."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3), nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if way == "in_place":
            self.compile(backend="aot_eager")
        for index, block in enumerate(list(self.blocks)):
            if way == "blocks":
                self.blocks[index] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
            elif way == "blocks_in_place":
                block.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, 4)`` to ``(N, 3)``."""
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return torch.as_tensor(self.last(self.norm(h)))


def made(way: str) -> tuple[Net, Any]:
    """The model, and what is called."""
    model = Net(way)
    return model, torch.compile(model, backend="aot_eager") if way == "whole" else model


def train(model: nn.Module, called: Any, sickness: str = "", *, steps: int = 4) -> None:
    """Train; ``sickness``: of the second block, or of a sample of the batch, or of a weight, in the third step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for number in range(1, steps + 1):
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        ill = sickness if number == AT else ""
        blocks[1].ill = ill if ill in LINES else ""
        if ill == "input":
            x[3, 1] = float("nan")
        loss = functional.cross_entropy(called(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if number != AT:
            optimizer.step()


def train_to_bad_gradients(model: nn.Module, called: Any, sickness: str, *, clips: bool = False) -> None:
    """Train in a function of its own; of the third step the loss is finite, and gradients are not. ``sickness``: as above."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for number in range(1, AT + 1):
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        blocks[1].ill = sickness if number == AT else ""
        optimizer.zero_grad()
        functional.cross_entropy(called(x), y).backward()  # type: ignore[no-untyped-call]
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def ill_model() -> tuple[Net, Any]:
    """One whose next loss is NaN."""
    model, called = made("whole")
    model.blocks[1].ill = "log"  # type: ignore[assignment]
    return model, called


def ill_block() -> Block:
    """A block that takes the logarithm of negative numbers."""
    block = Block()
    block.ill = "log"
    return block


def told(run: Recording) -> dict[str, Any]:
    """What was said, once."""
    run.look()
    assert run.frames(catalog.EVENT_PROBE_DISABLED.name) == []
    (frame,) = run.frames(catalog.EVENT_NONFINITE_ORIGIN.name)
    return {"step": frame["step"], **frame["attrs"]}


def refused(run: Recording) -> None:
    """The hint stays as it was."""
    found = told(run)
    assert (found["operator"], "trace_nan" in found["note"]) == ("compiled_function", True)


def source_line(words: str) -> str:
    """``file:line`` of this module's line of code with these words."""
    with Path(__file__).open(encoding="utf-8") as file:
        number = next(place for place, line in enumerate(file, 1) if f"h = {words}" in line or f"h + {words}" in line)
    return f"{__file__}:{number}"
