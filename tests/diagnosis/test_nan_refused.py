"""What torch refuses in a forward pass without a graph, as a policy's that acts, is traced to the variable that held it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import torchobs
from tests.diagnosis.observing import Observed, read
from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

AT = 7
Act = Any


class Odd:
    """An object that must not be asked for anything."""

    asked: list[str] = []  # noqa: RUF012  # of all of them

    def __getattribute__(self, name: str) -> Any:
        Odd.asked.append(name)
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        Odd.asked.append("repr")
        return "odd"

    def __hash__(self) -> int:
        return 1

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of torch's calls."""
        del types
        Odd.asked.append("torch_function")
        return func(*args, **(kwargs or {}))


class OddTensor(torch.Tensor):
    """A tensor of the user's own class."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As above."""
        Odd.asked.append("torch_function")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]  # torch's


def sampled(policy: nn.Module, observation: torch.Tensor) -> torch.Tensor:
    """What the policy does, without a graph."""
    with torch.no_grad():
        return torch.as_tensor(torch.distributions.Categorical(logits=policy(observation)).sample())  # type: ignore[no-untyped-call]


def end_of(act: Callable[[nn.Module, int], object], directory: Path) -> Observed:
    """Train until it ends by itself; return what is said of it."""
    torch.manual_seed(0)
    with suppress(ValueError, RuntimeError), torchobs.init(flight_dir=directory, log_level="CRITICAL"):
        policy = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
        for number in range(1, AT + 3):
            act(policy, number)
            optimizer.zero_grad()
            torch.autograd.backward(policy(torch.randn(8, 4)).square().mean())
            optimizer.step()
    return read(directory)


def tensor(policy: nn.Module, number: int) -> None:
    """An observation with a NaN, beside labels of which some are missing; these are no part of it."""
    labels = torch.full((100, 1), float("nan"))
    observation = torch.randn(3, 4)
    if number == AT:
        observation[1, 2] = float("nan")
    sampled(policy, observation)
    del labels


def array(policy: nn.Module, number: int) -> None:
    """An environment's."""
    observation: Any = np.ones((3, 4))
    observation.flags.writeable = False
    if number == AT:
        observation = observation * np.array([[1.0], [np.inf], [1.0]])
    sampled(policy, torch.as_tensor(observation.copy(), dtype=torch.float32))


def dictionary(policy: nn.Module, number: int) -> None:
    """One of several observations, among what is not to be touched."""
    odd, own = [{Odd(): Odd()}, Odd()], torch.full((3, 4), float("nan")).as_subclass(OddTensor)
    alone = Odd()
    observations = {"speed": torch.randn(3, 4), "place": torch.randn(3, 4)}
    if number == AT:
        observations["place"][1, 0] = float("nan")
        Odd.asked.clear()
    sampled(policy, observations["place"])
    del odd, own, alone


def loss(policy: nn.Module, number: int) -> None:
    """A loss function refuses it, in an evaluation."""
    observation = torch.randn(3, 4)
    if number == AT:
        observation[1] = float("nan")
    with torch.no_grad():
        nn.functional.binary_cross_entropy(policy(observation).sigmoid(), torch.ones(3, 2))


@pytest.mark.parametrize(
    ("act", "name", "by"),
    [
        (tensor, "observation", "Categorical"),
        (array, "observation", "Categorical"),
        (dictionary, "observations['place']", "Categorical"),
        (loss, "observation", "binary_cross_entropy"),
    ],
)
def test_the_observation_is_named_with_its_line(act: Act, name: str, by: str, tmp_path: Path) -> None:
    """The outermost variable whose samples agree, and no code of the user's is run to find it."""
    observed = end_of(act, tmp_path)
    (told,) = observed.events(catalog.EVENT_NONFINITE_ORIGIN)
    assert (told.attributes["origin"], told.attributes["parameter"], told.attributes["operator"]) == ("input", name, by)
    assert (told.attributes["sample"], told.step) == (1, AT)
    file, _, line = told.attributes["location"].rpartition(":")
    assert file == __file__
    code = act.__code__
    assert code.co_firstlineno < int(line) <= max(each for *_, each in code.co_lines() if each is not None)
    assert f"seen in {name}, in sample 1 ({file}:{line}), the outermost variable that held it" in observed.text(
        "nonfinite_origin"
    )
    assert Odd.asked == []


def shape(policy: nn.Module, number: int) -> None:
    """An error of another kind, with a NaN beside."""
    observation = torch.full((3, 4), float("nan"))
    with torch.no_grad():
        nn.functional.cross_entropy(policy(observation), torch.ones(2 if number == AT else 3, dtype=torch.long))


def own(policy: nn.Module, number: int) -> None:
    """A refusal of the script's own, of something that it knows better."""
    observation = policy(torch.full((3, 4), float("nan"))).detach()
    if number == AT:
        raise ValueError(observation)


@pytest.mark.parametrize("act", [shape, own])
def test_other_exceptions_say_nothing_of_values_nearby(act: Act, tmp_path: Path) -> None:
    """They may be ordinary: labels that are missing, a result that is left out."""
    assert end_of(act, tmp_path).events(catalog.EVENT_NONFINITE_ORIGIN) == []
