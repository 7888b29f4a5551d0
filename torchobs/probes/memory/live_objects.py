"""Count living objects by type and tensors by shape, so that two counts tell what grew.

Tensors are asked one by one through weak references. This runs in the training thread, at the beginning of a backward pass,
so that nothing is kept alive that this thread is about to drop. For 300,000 objects it takes some 0.1 s; while
``tracemalloc`` traces, ten times as long.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ref

from torchobs.support.living_objects import collections_paused, objects_of, subclasses, types_of_objects

MOST_TENSORS = 20_000
"""Tensors asked for their size, of more the last in the collector's order; each takes 4 µs."""
_OWN = ("torchobs.", "tracemalloc.", "weakref.", "torch.storage.UntypedStorage")
"""Types that a count makes more of itself"""


class Amount(NamedTuple):
    """A number of objects, and their bytes."""

    number: int = 0
    size: int = 0

    def __sub__(self, other: Amount) -> Amount:
        """Return the difference of both."""
        return Amount(self.number - other.number, self.size - other.size)


class TensorKind(NamedTuple):
    """Shape, type and device, as text."""

    shape: str
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.dtype}{self.shape} on {self.device}"


@dataclass(slots=True)
class LiveObjects:
    """One count. Memory that tensors share counts once."""

    types: Counter[int] = field(default_factory=Counter)
    """By the type's ``id``"""
    tensors: Amount = field(default_factory=Amount)
    kinds: dict[TensorKind, Amount] = field(default_factory=dict)


def count_objects(torch: Any) -> LiveObjects:
    """Count all objects that the garbage collector tracks, and the dense tensors among them."""
    with collections_paused():
        found = LiveObjects(Counter(map(id, types_of_objects())))
    storages: set[int] = set()
    with torch._C.DisableTorchFunction():  # no mode of the user's sees this
        for known in _tensors(torch)[-MOST_TENSORS:]:
            _add(found, known, storages, torch)
    return found


def grown_types(before: LiveObjects, after: LiveObjects) -> list[tuple[str, int]]:
    """Return the names of types that have more objects than before, and how many more, the most first."""
    grown = {kind: more for kind, count in after.types.items() if (more := count - before.types[kind]) > 0}
    names = {id(kind): f"{kind.__module__}.{kind.__qualname__}" for kind in subclasses(object) if id(kind) in grown}
    rows = ((name, grown[kind]) for kind, name in names.items() if not name.startswith(_OWN))
    return sorted(rows, key=lambda row: -row[1])


def grown_kinds(before: LiveObjects, after: LiveObjects) -> list[tuple[TensorKind, Amount]]:
    """Return the kinds of tensors that have more objects and no fewer bytes than before, the most bytes first."""
    differences = ((kind, amount - before.kinds.get(kind, Amount())) for kind, amount in after.kinds.items())
    rows = [(kind, more) for kind, more in differences if more.number > 0 and more.size >= 0]
    return sorted(rows, key=lambda row: (-row[1].size, -row[1].number))


def _tensors(torch: Any) -> list[ref[Any]]:
    """Return weak references to all tensors and parameters."""
    classes = {id(torch.Tensor), id(torch.nn.Parameter)}
    with collections_paused():
        return list(map(ref, objects_of(classes)))


def _add(found: LiveObjects, known: ref[Any], storages: set[int], torch: Any) -> None:
    x = known()
    if x is None or x.layout is not torch.strided or x.is_nested or x.device.type == "meta":
        return
    try:
        storage = x.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # one of functorch's, which has no memory of its own
        return
    one = Amount(1, 0 if key in storages else size)
    storages.add(key)
    found.tensors = _sum(found.tensors, one)
    shape = ", ".join(map(str, x.shape))
    kind = TensorKind(f"[{shape}]", str(x.dtype).removeprefix("torch."), str(x.device))
    found.kinds[kind] = _sum(found.kinds.get(kind, Amount()), one)


def _sum(one: Amount, other: Amount) -> Amount:
    return Amount(one.number + other.number, one.size + other.size)
