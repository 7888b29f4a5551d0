"""The memory that a tensor of any kind lies in."""

from __future__ import annotations

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
