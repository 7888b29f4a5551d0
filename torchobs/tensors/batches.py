"""How a model is called with a batch, and the tensors in what goes in and comes out, whatever structure they are in."""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEQUENCES = (tuple, list, deque)
"""Classes whose parts have a place by number"""


def call(model: Any, batch: Any) -> Any:
    """Call a model with a batch: a mapping by keywords, a tuple or list by position, anything else as the only argument."""
    if is_mapping(batch):
        return model(**dict(batch.items()))
    return model(*batch) if is_sequence(batch) else model(batch)


def is_mapping(values: Any) -> bool:
    """Return True for a mapping, and for what has keys and items as one does."""
    if isinstance(values, Mapping):
        return True
    return not isinstance(values, type) and hasattr(values, "keys") and hasattr(values, "items")


def is_sequence(batch: Any) -> bool:
    """Return True for a tuple or list of several things; a packed sequence is one, though torch has made it a tuple."""
    from torch.nn.utils.rnn import PackedSequence

    return isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence)


def walk(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of any nesting of tuples, lists, mappings and dataclasses, each with its path."""
    import torch

    if isinstance(values, torch.Tensor):
        yield name, values
    elif hasattr(values, "items") and not isinstance(values, type):  # also of what cannot be made again: that is to be refused
        for key, value in values.items():
            yield from walk(value, f"{name}.{key}")
    elif isinstance(values, SEQUENCES):
        for index, value in enumerate(values):
            yield from walk(value, f"{name}[{index}]")
    elif is_dataclass(values) and not isinstance(values, type):
        for each in fields(values):
            yield from walk(getattr(values, each.name, None), f"{name}.{each.name}")


def rebuilt(values: Any, function: Callable[[Any], Any], *, anew: bool = False) -> Any:
    """Return a structure of the same class whose parts are what a function makes of them; itself where that changes none.

    With ``anew``, sequences, mappings and dataclasses of which nothing changes are made again, too.
    """
    if (parts := parts_of(values)) is None:
        return values
    changed = {place: function(part) for place, part in parts.items()}
    if anew and (isinstance(values, (Mapping, *SEQUENCES)) or is_dataclass(values)):
        return with_parts(values, changed)
    return values if all(part is parts[place] for place, part in changed.items()) else with_parts(values, changed)


def parts_of(values: Any) -> dict[Any, Any] | None:
    """Return the parts of a tuple, list, mapping or dataclass by their place, or None of anything else."""
    if is_mapping(values):
        return dict(values.items())
    if isinstance(values, SEQUENCES):
        return dict(enumerate(values))
    if is_dataclass(values) and not isinstance(values, type):
        return {each.name: getattr(values, each.name) for each in fields(values) if hasattr(values, each.name)}
    return None


def with_parts(values: Any, parts: dict[Any, Any]) -> Any:
    """Return a structure with other parts, of the same class; a dictionary for a mapping of which no copy has its own items.

    The constructors of the user's classes are not called: they may take other arguments, or change what they are given.
    """
    if isinstance(values, tuple):
        kind: Any = type(values)
        # torch's own (torch.return_types) are made by their class alone
        return kind(parts.values()) if hasattr(kind, "n_fields") else tuple.__new__(kind, parts.values())
    made: Any
    if isinstance(values, deque):
        made = copy(values)  # with its greatest length
        made.clear()
        made.extend(parts.values())
        return made
    if isinstance(values, list):
        made = copy(values)
        list.__setitem__(made, slice(None), parts.values())
        return made
    if is_mapping(values):
        return _mapping_with(values, parts)
    made = copy(values)
    for place, part in parts.items():
        object.__setattr__(made, place, part)  # it may be frozen
    for name in list(getattr(made, "__dict__", ())):
        if isinstance(getattr(type(made), name, None), cached_property):
            del made.__dict__[name]  # computed of the original's parts
    return made


def _mapping_with(values: Any, parts: dict[Any, Any]) -> Any:
    has_own_items = isinstance(values, (dict, UserDict)) or hasattr(type(values), "__copy__")
    if not has_own_items or not isinstance(values, MutableMapping):
        return parts  # a copy may hold the same dictionary in an attribute: writing there would change the original
    made = copy(values)  # whatever its constructor takes
    for place, part in parts.items():
        made[place] = part  # ModelOutput has no update()
    return made
