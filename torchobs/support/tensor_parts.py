"""Parts of a tensor: the memory that it lies in, and evenly spaced elements that are not all of one column."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def stored(x: Any) -> tuple[Any, ...]:
    """Return the tensors that a sparse one is made of, indices and values, or the tensor."""
    import torch  # torch is optional until training begins

    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()  # noqa: SLF001  # the public ones coalesce
    if x.layout in {torch.sparse_csr, torch.sparse_bsr}:
        return x.crow_indices(), x.col_indices(), x.values()
    if x.layout in {torch.sparse_csc, torch.sparse_bsc}:
        return x.ccol_indices(), x.row_indices(), x.values()
    return (x,)


def storages(x: Any) -> Iterator[Any]:
    """Yield the storages of a tensor: of one that is made of others (sparse, jagged, sharded) theirs; opaque ones have none."""
    import torch

    if hasattr(type(x), "__tensor_flatten__"):
        named = (getattr(x, name) for name in x.__tensor_flatten__()[0])
        parts = tuple(part for part in named if isinstance(part, torch.Tensor))  # a sharded one's mesh is among them
    else:
        parts = stored(x)
    for part in parts:
        if part is not x:
            yield from storages(part)
        elif part.layout is torch.strided:
            yield part.untyped_storage()


def evenly_sampled(flat: Any, most: int) -> Any:
    """Return up to ``most`` elements of a vector: of all of its parts, and of all columns that it had as a matrix, alike.

    Every ``len / most``-th element alone is often of one column (or channel): where that is a multiple of their number. The
    stride here has no divisor in common with the number of elements, hence none with the period of a dimension, which divides
    it, so that all columns come as often. Where such a stride is a good deal larger, the vector is passed several times.
    """
    count = len(flat)
    stride = max(1, -(-count // most))
    while gcd(stride, count) > 1:
        stride += 1
    passes = min(stride, most // max(1, -(-count // stride))) or 1
    parts = [flat[index * stride // passes :: stride] for index in range(passes)]
    if passes == 1:
        return parts[0]
    import torch  # torch is optional until training begins

    return torch.cat(parts)
