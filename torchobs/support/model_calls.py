"""How a model is called with a batch, and the tensors in what goes in and comes out."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def call(model: Any, batch: Any) -> Any:
    """Call a model with a batch: a mapping by keywords, a tuple or list by position, anything else as the only argument."""
    if isinstance(batch, dict) or (hasattr(batch, "keys") and hasattr(batch, "items")):
        return model(**dict(batch.items()))
    return model(*batch) if is_sequence(batch) else model(batch)


def is_sequence(batch: Any) -> bool:
    """Return True for a tuple or list of several things; a packed sequence is one, though torch has made it a tuple."""
    from torch.nn.utils.rnn import PackedSequence

    return isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence)


def walk(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of any nesting of tuples, lists, mappings and dataclasses, each with its path."""
    import torch

    if isinstance(values, torch.Tensor):
        yield name, values
    elif isinstance(values, dict) or hasattr(values, "items"):
        for key, value in values.items():
            yield from walk(value, f"{name}.{key}")
    elif isinstance(values, (tuple, list)):
        for index, value in enumerate(values):
            yield from walk(value, f"{name}[{index}]")
    elif is_dataclass(values) and not isinstance(values, type):
        for each in fields(values):
            yield from walk(getattr(values, each.name, None), f"{name}.{each.name}")
