"""Batches: the call of a model with one, the tensors in inputs and outputs, the number of samples and tokens.

The sizes are inferred from shapes and types of the tensors alone. Samples are the leading dimension that its tensors share.
Tokens, padding included, are the elements of the tensor of token ids: the one with a usual name (``input_ids``), else the only
integer tensor of two dimensions, or the first of several of one shape (a language model's inputs and targets), where the batch
has no floating-point tensor of two or more dimensions: beside images or features such integers are labels or categories.
"""

from __future__ import annotations

from collections import Counter, UserDict, deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SEQUENCES = (tuple, list, deque)
"""Classes with numbered parts"""


def call(model: Any, batch: Any) -> Any:
    """Call a model with a batch: a mapping by keywords, a tuple or list by position, anything else as the only argument."""
    if is_mapping(batch):
        return model(**dict(batch.items()))
    return model(*batch) if is_sequence(batch) else model(batch)


FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of a model, torch (out of memory included), an optimizer, or the compiler"""


def raised_by(model: Any, batch: Any) -> str | None:
    """Call a model with a batch; return class and first line of its error, ``None`` without one."""
    try:
        call(model, batch)
    except FAILURES as error:
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    """Return an error's class, and the first line of its message that has words."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {line[:200]}"


def is_mapping(values: Any) -> bool:
    """Return whether it is a mapping, or has keys and items as a mapping does."""
    if isinstance(values, Mapping):
        return True
    return not isinstance(values, type) and hasattr(values, "keys") and hasattr(values, "items")


def is_sequence(batch: Any) -> bool:
    """Return whether it is a tuple or list of several things; a packed sequence is one thing, though a tuple by its class."""
    return isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence)


def walk(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of any nesting of tuples, lists, mappings and dataclasses, each with its path."""
    if isinstance(values, torch.Tensor):
        yield name, values
    elif hasattr(values, "items") and not isinstance(values, type):  # also of what cannot be made again: that is to be refused
        for key, value in values.items():
            yield from walk(value, f"{name}.{key}")
    elif isinstance(values, SEQUENCES):
        for index, value in enumerate(values):
            yield from walk(value, f"{name}[{index}]")
    elif is_dataclass(values) and not isinstance(values, type):
        for field in fields(values):
            yield from walk(getattr(values, field.name, None), f"{name}.{field.name}")


def rebuilt(values: Any, function: Callable[[Any], Any], *, anew: bool = False) -> Any:
    """Return a structure of the same class with each part replaced by what a function returns; itself where that changes none.

    With ``anew``, unchanged sequences, mappings and dataclasses are made again, too.
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
        return {field.name: getattr(values, field.name) for field in fields(values) if hasattr(values, field.name)}
    return None


def with_parts(values: Any, parts: dict[Any, Any]) -> Any:
    """Return a structure with other parts, of the same class; a dictionary for a mapping that cannot be copied.

    The constructors of the user's classes are not called: they may take other arguments, or change what they are given.
    """
    if isinstance(values, tuple):
        kind: Any = type(values)
        # torch's own (torch.return_types) are made by their class alone
        return kind(parts.values()) if hasattr(kind, "n_fields") else tuple.__new__(kind, parts.values())
    copied: Any
    if isinstance(values, deque):
        copied = copy(values)  # with its greatest length
        copied.clear()
        copied.extend(parts.values())
        return copied
    if isinstance(values, list):
        copied = copy(values)
        list.__setitem__(copied, slice(None), parts.values())
        return copied
    if is_mapping(values):
        return _mapping_with(values, parts)
    copied = copy(values)
    for place, part in parts.items():
        object.__setattr__(copied, place, part)  # it may be frozen
    for name in list(getattr(copied, "__dict__", ())):
        if isinstance(getattr(type(copied), name, None), cached_property):
            del copied.__dict__[name]  # computed of the original's parts
    return copied


def _mapping_with(values: Any, parts: dict[Any, Any]) -> Any:
    has_own_items = isinstance(values, (dict, UserDict)) or hasattr(type(values), "__copy__")
    if not has_own_items or not isinstance(values, MutableMapping):
        return parts  # a copy may hold the same dictionary in an attribute: writing there would change the original
    copied = copy(values)  # whatever its constructor takes
    for place, part in parts.items():
        copied[place] = part  # ModelOutput has no update()
    return copied


MOST_TENSORS, MOST_DEPTH = 64, 4
"""Most parts that are examined: a batch may be a list of a million numbers"""
TOKEN_NAMES = ("input_ids", "token_ids", "tokens", "src_tokens", "ids", "decoder_input_ids", "idx")
"""Usual names of token ids, the first one found counts: those of Transformers, torchtune, fairseq, and GPTs written by hand"""
NO_TOKENS = ("mask", "label", "labels", "target", "targets", "type_ids", "position_ids", "lengths", "seq_lens")
"""Endings of names of integer tensors that are no tokens"""
_LEAST_DIMENSIONS = 2


class BatchSizes(NamedTuple):
    """Sizes of one batch; 0 where one cannot be inferred."""

    tokens: int
    samples: int


class _Leaf(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: str
    """``ids`` for 32- and 64-bit integers, ``float``, or neither"""


def batch_sizes(batch: Any) -> BatchSizes:
    """Return the sizes of a batch: a tensor, or containers of tensors (mappings, sequences, dataclasses), nested."""
    leaves = list(islice(_leaves(batch, "", MOST_DEPTH), MOST_TENSORS))
    return BatchSizes(_tokens(leaves), _samples(batch, leaves))


def _leaves(part: Any, name: str, depth: int) -> Iterator[_Leaf]:
    if (batched := getattr(part, "batch_sizes", None)) is not None and hasattr(part, "sorted_indices"):
        yield _Leaf(name, (int(batched[0]),), "")  # a PackedSequence: how many sequences there are at the first time step
    elif hasattr(part, "dim") and hasattr(part, "dtype"):
        yield _Leaf(name, _shape(part), _kind(str(part.dtype)))
    elif depth:
        for key, item in items(part):
            yield from _leaves(item, key or name, depth - 1)


def _shape(tensor: Any) -> tuple[int, ...]:
    if getattr(tensor, "is_nested", False):  # one of ragged rows has no shape as a whole
        return (int(tensor.size(0)),)
    return tuple(int(length) for length in tensor.shape)


def items(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a container with their names, "" in a sequence."""
    if isinstance(part, Mapping):
        yield from ((str(key), item) for key, item in islice(part.items(), MOST_TENSORS))
    elif isinstance(part, Sequence) and not isinstance(part, (str, bytes)):
        names = getattr(part, "_fields", ())
        yield from ((names[at] if at < len(names) else "", item) for at, item in enumerate(islice(part, MOST_TENSORS)))
    elif is_dataclass(part) and not isinstance(part, type):
        yield from ((field.name, getattr(part, field.name, None)) for field in fields(part))


def _kind(dtype: str) -> str:
    if dtype in {"torch.int64", "torch.int32"}:
        return "ids"
    return "float" if "float" in dtype else ""


def _samples(batch: Any, leaves: list[_Leaf]) -> int:
    lengths = [leaf.shape[0] for leaf in leaves if leaf.shape]
    if not lengths:
        return 0
    many = _uncollated(batch, leaves)
    if many:
        return many
    votes = Counter(lengths).most_common()  # of equals the first
    return votes[0][0]


def _uncollated(batch: Any, leaves: list[_Leaf]) -> int:
    """Return the number of samples of a batch of unstacked samples; 0 for any other.

    Object detection has ``tuple(zip(*samples))``, so equally long sequences of images and of targets, or the list of samples:
    neither has a leading dimension that all tensors share, or has tensors without one, which no collation leaves.
    """
    if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes)) or hasattr(batch, "dim"):
        return 0
    parts = list(islice(batch, MOST_TENSORS))
    shared = len({leaf.shape[:1] for leaf in leaves}) == 1 and bool(leaves[0].shape)
    inner = [part for part in parts if isinstance(part, (list, tuple))]
    plain = any(not isinstance(item, (list, tuple, Mapping)) and not hasattr(item, "dim") for part in inner for item in part)
    if shared and not plain:
        return 0
    if len(inner) == len(batch) and len({len(part) for part in inner}) == 1 and not _is_list_of_samples(inner):
        return len(inner[0])
    unstacked = all(isinstance(part, (Mapping, tuple)) for part in parts)
    return len(batch) if unstacked and not hasattr(batch, "_fields") else 0


def _is_list_of_samples(parts: list[Any]) -> bool:
    """Return whether these are samples, with parts of several kinds (image and label); parts of one kind are a column."""
    looked_at = (islice(part, MOST_TENSORS) for part in parts)
    return any(len({item.dim() if hasattr(item, "dim") else type(item) for item in part}) > 1 for part in looked_at)


def _tokens(leaves: list[_Leaf]) -> int:
    ids = [leaf for leaf in leaves if leaf.kind == "ids" and len(leaf.shape) >= _LEAST_DIMENSIONS]
    for name in TOKEN_NAMES:
        for leaf in ids:
            if leaf.name == name:
                return _elements(leaf)
    flat = [leaf for leaf in ids if len(leaf.shape) == _LEAST_DIMENSIONS and not leaf.name.lower().endswith(NO_TOKENS)]
    features = any(leaf.kind == "float" and len(leaf.shape) >= _LEAST_DIMENSIONS for leaf in leaves)
    return _elements(flat[0]) if len({leaf.shape for leaf in flat}) == 1 and not features else 0


def _elements(leaf: _Leaf) -> int:
    count = 1
    for length in leaf.shape:
        count *= length
    return count
