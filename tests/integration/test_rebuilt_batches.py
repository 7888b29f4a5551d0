"""Batches and outputs made again with other tensors: the original stays as it is, whatever class it has."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from torchobs.guard.recovery import on_cpu, split
from torchobs.tensors.batches import rebuilt


class Held(MutableMapping[str, Any]):
    """Keeps its items in an attribute, which a shallow copy shares."""

    def __init__(self, **items: Any) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Pair(namedtuple("Pair", ["x", "y"])):  # noqa: PYI024  # its own __new__ is what matters
    """Takes one argument, and has two parts."""

    __slots__ = ()

    def __new__(cls, both: Any) -> Pair:  # noqa: PYI034  # Self is not in all versions of Python
        return super().__new__(cls, both, both)


class Named(list[Any]):
    """Takes a name before its parts."""

    def __init__(self, name: str, parts: Any) -> None:
        super().__init__(parts)
        self.name = name


@dataclass
class Cached:
    """Keeps what it has computed."""

    x: Tensor

    @cached_property
    def total(self) -> float:
        return float(self.x.sum())


def test_a_mapping_that_keeps_its_items_in_an_attribute_is_not_written_to() -> None:
    """Promise: a batch of any class is the same after parts of it have been made."""
    batch = Held(x=torch.ones(8), name="a")
    part = rebuilt(batch, _first)
    assert part["x"].shape == (1,)
    assert part["name"] == "a"
    assert batch["x"].shape == (8,)


def test_structures_are_made_again_without_their_constructors() -> None:
    """Promise: classes whose constructors take other arguments keep their class, and no value computed of other parts."""
    pair = rebuilt(Pair(torch.ones(8)), _first)
    assert type(pair) is Pair
    assert pair.y.shape == (1,)
    named = rebuilt(Named("a", [torch.ones(8), 3]), _first)
    assert type(named) is Named
    assert (named.name, named[0].shape, named[1]) == ("a", (1,), 3)
    cached = Cached(torch.ones(8))
    assert cached.total == 8
    assert rebuilt(cached, _first).total == 1
    assert cached.total == 8
    assert rebuilt(torch.max(torch.ones(8, 2), 0), _first).values.shape == (1,)


def _first(part: Any) -> Any:
    return part[:1] if isinstance(part, Tensor) else part


class Opaque(Tensor):
    """Does not let itself be cut."""

    def __getitem__(self, index: Any) -> Tensor:
        return self


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    """Promise: nothing goes through the model twice in the belief that it is a part."""
    with pytest.raises(ValueError, match="cannot be split"):
        split([torch.ones(8).as_subclass(Opaque)], 4)


def test_evidence_shares_no_containers() -> None:
    """Promise: a copy on the CPU does not change with the batch, whose lists and mappings without tensors are copied, too."""
    batch = {"x": torch.ones(2), "ids": [1, 2], "more": {"a": [3]}}
    kept = on_cpu(batch)
    batch["ids"].append(3)  # type: ignore[attr-defined]
    batch["more"]["a"].append(4)  # type: ignore[index]
    assert kept["ids"] == [1, 2]
    assert kept["more"] == {"a": [3]}
