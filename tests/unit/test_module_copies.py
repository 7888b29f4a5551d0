"""Copies of modules that can be run while nobody who uses the original notices."""

from __future__ import annotations

import functools
import random
import threading
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from torchobs.support.module_copies import ModuleCopier, NotCopyableError


class Settings:
    """An object of a plain class."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, {"loads": [1.0]}


class Model(nn.Module):
    """Keeps what models keep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.recurrent = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LSTM(4, 4)
        self.settings, self.loads, self.act = Settings(), [[0.0]], self.activated
        self.part = functools.partial(self.activated, slope=0.1)
        self.cache: Any = self.norm.running_mean
        nn.utils.parametrizations.weight_norm(self.linear)
        self.register_state_dict_post_hook(lambda *_: self.loads.clear())  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(lambda *_: self.loads.clear())  # type: ignore[no-untyped-call]

    def activated(self, x: torch.Tensor, slope: float = 0.0) -> torch.Tensor:
        """A function of the model's own, which counts."""
        self.settings.calls += 1
        return nn.functional.leaky_relu(x, slope)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, 4)`` to the same."""
        self.settings.seen["loads"].append(2.0)
        self.loads[0].append(1.0)
        self.cache.add_(1)
        return torch.as_tensor(self.part(self.act(self.norm(self.linear(self.recurrent(x)[0])))))


def test_a_run_of_the_copy_changes_nothing_of_the_original() -> None:
    """Buffers with their versions, nested lists, objects, methods that are attributes; parameters are the same."""
    model, called = Model(), list[int]()
    model.linear.register_forward_hook(lambda *_: called.append(1))
    assert model.norm.running_mean is not None
    before = [model.norm.running_mean._version, model.norm.running_mean.tolist(), len(model.linear._forward_hooks)]
    copier = ModuleCopier()
    copy: Any = copier.copy(model)
    assert all(one is other for one, other in zip(copy.parameters(), model.parameters(), strict=True))
    torch.manual_seed(0)
    made = copy(torch.ones(8, 4))
    assert copy.cache is copy.norm.running_mean
    assert [model.norm.running_mean._version, model.norm.running_mean.tolist(), len(model.linear._forward_hooks)] == before
    assert (model.settings.calls, model.settings.seen, model.loads, called) == (0, {"loads": [1.0]}, [[0.0]], [])
    assert (copy.settings.calls, copy.loads) == (2, [[0.0, 1.0]])
    torch.manual_seed(0)
    assert torch.equal(made, model(torch.ones(8, 4)))


def test_a_tensor_with_a_graph_is_cut_off_from_it() -> None:
    """A recurrent state that is kept between two calls."""
    model: Any = nn.Linear(2, 2)
    model.state = model(torch.ones(1, 2))
    copy: Any = ModuleCopier().copy(model)
    assert model.state.grad_fn is not None
    assert copy.state.grad_fn is None
    assert copy.state.requires_grad


class Frozen(OrderedDict[str, Any]):
    """A configuration that nobody may change, as diffusers has them."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.whole = True

    def __setitem__(self, key: str, value: Any) -> None:
        if vars(self).get("whole"):
            raise TypeError(key)
        super().__setitem__(key, value)


@pytest.mark.parametrize(
    "held", [Frozen(width=[1], depth=2), OrderedDict(b=1, a=[2]), defaultdict(list, a=[1]), Counter("aab"), {"a": {1: [2]}}]
)
def test_dictionaries_of_any_class_are_copied(held: dict[str, Any]) -> None:
    """With their order, their default and their attributes; what they hold is a copy."""
    model: Any = nn.Linear(2, 2)
    model.held = held
    copy: Any = ModuleCopier().copy(model)
    assert (copy.held, type(copy.held), list(copy.held)) == (held, type(held), list(held))
    assert copy.held is not held
    assert getattr(copy.held, "whole", None) == getattr(held, "whole", None)
    assert getattr(copy.held, "default_factory", None) is getattr(held, "default_factory", None)
    assert all(one is not other for one, other in zip(copy.held.values(), held.values(), strict=True) if isinstance(one, list))


def closure(model: nn.Module) -> Any:
    """A function that refers to the model itself."""
    return lambda x: model(x)  # noqa: PLW0108  # it is the closure that matters


@pytest.mark.parametrize(
    "make",
    [
        lambda _: torch.Generator(), lambda _: random.Random(0), lambda _: threading.Lock(), closure, lambda _: iter([1]),
        lambda _: [{"deep": torch.Generator()}],
    ],
    ids=["torch's generator", "Python's generator", "lock", "closure", "iterator", "nested"],
)  # fmt: skip
def test_what_cannot_be_left_alone_is_not_copied(make: Any) -> None:
    """A run would change it, or would change the original by it."""
    model: Any = nn.Linear(2, 2)
    model.more = make(model)
    with pytest.raises(NotCopyableError):
        ModuleCopier().copy(model)
