"""Loops told by events, and the records of their runs, as they are compared with golden ones."""

from __future__ import annotations

import functools
import itertools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchobs
from torchobs.flight.layout import PHASE_NAMES
from torchobs.flight.step_record import RecordKind, StepFlag

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.flight.step_record import StepRecord

KEPT = 45
"""Steps of a loop that are kept, its last ones: those before its end and around its last change"""
_FLAGS = {name.lower(): value for name, value in vars(StepFlag).items() if name.isupper()}
_NUMBERS = ("loss", "norm")

LOOPS = {
    "plain": "b X b X b X",
    "accumulation": "b b b X b b b X",
    "generative adversarial": "b D b G b D b G b D b G b D b G",
    "two groups after one pass": "b A B b A B b A B b A B",
    "three critics, one generator": "b C b C b C b G b C b C b C b G b C",
    "delayed actor": "b C b C b P b C b C b P b C",
    "soft actor-critic": "b q b p b a b q b p b a b q b p b a",
    "one optimizer called thrice a pass": "b X X X b X X X b X X X b X X X",
    "closure": "L! L! L!",
    "optimizers in the backward pass": "{x y z} {x y z} {x y z} {x y z}",
    "the same, and a head of its own": "{x y} H {x y} H {x y} H {x y} H",
    "a fold after another": "b A b A b A b Y b Y b Y",
    "generator twice": "b C b G b G b C b G b G b C b G b G",
    "made anew for each step": "b X~ b X~ b X~ b X~",
    "no backward pass at all": "X X X",
    "backward once, then gradients from elsewhere": "b X " + "X " * 300,
    "gradients given anew": "b X b X " + "X+ " * 40,
    "by hand": "b X u b X u b b X u",
    "by hand, without an optimizer": "b u b u",
    "two tasks in turn": "b A b B b A b B b A b B",
    "sharpness-aware": "b ^ b X b ^ b X b ^ b X",
    "warm-up of one player": "b G b G b D b G b D b G",
    "closure, and the backward pass before it": "b D? b G? b D? b G? b D? b G?",
    "skipped by the loss scaler": "b X b X- b X b X- b X",
    "updates by hand": "b = b = b = b = b =",
    "updates by hand behind an optimizer": "b X b X b = b = b = b X b X",
}
"""``b`` a backward pass; ``X`` optimizer X steps, ``X!`` with a closure that does the backward pass, ``X?`` with one that does
not, ``X~`` made anew, ``X+`` with other gradients, ``X-`` skipped; ``{x y}`` a backward pass in which optimizers step; ``u``
``torchobs.step()``; ``^`` and ``=``: the parameters are changed without an optimizer, and their gradients dropped."""


class EventLoop:
    """Real optimizers of torch's, by name, that do what the events say."""

    def __init__(self, events: str) -> None:
        self.events: list[str] = re.findall(r"\{[^}]*\}|\S+", events)
        names = sorted({name for event in self.events for name in re.findall(r"[A-Za-z]", event)} - {"b", "u"}) or ["X"]
        self.inside = {name for event in self.events if event[0] == "{" for name in re.findall(r"[a-z]", event)}
        self.layers = {name: torch.nn.Linear(3, 1, bias=name not in self.inside) for name in names}
        self.optimizers = {name: self._made(name) for name in names}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if any("-" in event for event in self.events) else None
        self.passes, self.stepped = 0, set[str]()
        for name in self.inside:
            hook: Any = functools.partial(self._step_within, name)
            self.layers[name].weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _made(self, name: str) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layers[name].parameters(), lr=0.01)

    def _step_within(self, name: str, _: torch.Tensor) -> None:
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()

    def loss(self) -> torch.Tensor:
        """Of all layers together, another one each time."""
        self.passes += 1
        losses = torch.stack([layer(torch.full((2, 3), 0.1 * self.passes)).square().mean() for layer in self.layers.values()])
        total = losses.sum()
        return total if self.scaler is None else self.scaler.scale(total)

    def backward(self) -> torch.Tensor:
        """A backward pass; the gradients of optimizers that have stepped are dropped before it."""
        for name in self.stepped:
            self.optimizers[name].zero_grad()
        self.stepped.clear()
        loss = self.loss()
        torch.autograd.backward(loss)
        return loss

    def run(self) -> None:
        for event in self.events:
            if event == "b" or event[0] == "{":
                self.backward()
            elif event == "u":
                torchobs.step()
            elif event in "^=":
                self._update()
            else:
                self._step(event[0], event[1:])

    def _update(self) -> None:
        for parameter in itertools.chain.from_iterable(layer.parameters() for layer in self.layers.values()):
            with torch.no_grad():
                parameter.sub_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad, alpha=0.01)
            parameter.grad = None

    def _step(self, name: str, how: str) -> None:
        if how == "~":
            self.optimizers[name] = self._made(name)
        for parameter in self.layers[name].parameters():
            if how == "-":
                parameter.grad = torch.full_like(parameter, torch.inf)
            elif how == "+" or parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)
        optimizer: Any = self.optimizers[name]
        if self.scaler is not None:
            self.scaler.step(optimizer)
            self.scaler.update(4.0)
        else:
            optimizer.step({"!": self.backward, "?": lambda: None}.get(how))
        self.stepped.add(name)


def columns(records: list[StepRecord]) -> dict[str, str]:
    """Return what is compared of the last records: exact columns run-length encoded, losses and norms with four digits."""
    steps = [record for record in records if record.kind == RecordKind.STEP]
    kept = steps[-KEPT:]
    return {
        "steps": f"{kept[0].step}-{kept[-1].step}" if kept else "",
        "passes": _runs(record.losses for record in kept),
        "flags": _runs("+".join(name for name, value in _FLAGS.items() if record.flags & value) for record in kept),
        "rate": _runs(f"{record.learning_rate:.4g}" for record in kept),
        "phases": _runs(
            "+".join(name for name, spent in zip(PHASE_NAMES, record.phase_s, strict=True) if spent) for record in kept
        ),
        "loss": " ".join(f"{record.loss:.4g}" for record in kept),
        "norm": " ".join(f"{record.grad_norm:.4g}" for record in kept),
    }


def _runs(values: Iterable[object]) -> str:
    return " ".join(f"{value or '-'}*{len(list(group))}" for value, group in itertools.groupby(values))


def assert_alike(found: dict[str, str], expected: dict[str, str]) -> None:
    """Compare; of losses and norms another machine or torch may have other last digits."""
    exact = found.keys() - set(_NUMBERS)
    assert {name: found[name] for name in sorted(exact)} == {name: expected[name] for name in sorted(exact)}
    for name in _NUMBERS:
        numbers = [[float(number) for number in side[name].split()] for side in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=1e-4), name
