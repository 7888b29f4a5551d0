"""The numbers in any kind of tensor: finite or not, and where; their shape, memory and samples.

No gradient, no collective, and nothing is kept.
"""

from __future__ import annotations

from enum import Enum
from math import gcd, inf, isfinite, nan, prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


MOST_ELEMENTS = 3
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""Sparse layouts with an index of rows or columns"""


def plain(tensor: Any) -> torch.Tensor | None:
    """Return floating-point values that can be read here, without autograd; ``None`` if there are none.

    Of a DTensor it is this rank's part: the whole would take a collective.
    """
    local = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(local, torch.Tensor) or local.is_meta or local.is_sparse or local.is_quantized or local.is_nested:
        return None
    if type(local).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or local.layout != torch.strided:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        local = local.detach()
        if local.numel() and not local.untyped_storage().size():
            return None  # weights that FSDP has gathered and freed again
        local = torch.view_as_real(local.resolve_conj()) if local.is_complex() else local
    if not local.is_floating_point():
        return None
    return local.float() if local.dtype.itemsize == 1 else local


class Condition(Enum):
    """The condition of a tensor's values."""

    FINITE = "finite"
    MASKED = "masked"
    """Negative infinity, as in an attention mask, and nothing else that is not finite"""
    BAD = "bad"
    UNKNOWN = "unknown"


def condition(tensor: Any) -> Condition:
    """Return the condition of a tensor's values. It waits for a device."""
    values = plain(tensor)
    if values is None:
        return Condition.UNKNOWN
    if not values.numel():
        return Condition.FINITE
    least, most = (bound.item() for bound in torch.aminmax(values))  # one pass, nothing allocated; NaN if any element is
    if isfinite(least) and isfinite(most):
        return Condition.FINITE
    return Condition.MASKED if least == -inf and most != inf and most == most else Condition.BAD  # noqa: PLR0124  # NaN


def is_finite(tensor: Any) -> bool:
    """Return whether all elements are finite; integers always are. It waits for a device."""
    with torch._C.DisableTorchFunctionSubclass():
        whole = not (tensor.is_floating_point() or tensor.is_complex())
    return whole or condition(tensor) is Condition.FINITE


def explains(operand: Any, result: Any) -> bool:
    """Return whether the samples of ``result`` that are not finite are so in ``operand``, too. It waits for a device.

    Samples lie along the first dimension of ``operand``, and along one of the same length of ``result``.
    """
    operand, result = plain(operand), plain(result)
    if operand is None or result is None or not operand.dim() or not operand.numel():
        return False
    bad = (~torch.isfinite(operand)).reshape(len(operand), -1).any(1).tolist()
    for dimension in range(result.dim()):
        if result.shape[dimension] == len(bad) and result.numel():
            spoiled = (~torch.isfinite(result)).movedim(dimension, 0).reshape(len(bad), -1).any(1).tolist()
            if any(spoiled) and all(was for was, now in zip(bad, spoiled, strict=True) if now):
                return True
    return False


def bad_elements(tensor: Any) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the first three elements that are not finite."""
    values = plain(tensor)
    if values is None:
        return ()
    indices = torch.nonzero(~torch.isfinite(values))[:MOST_ELEMENTS].tolist()
    return tuple(tuple(index[: tensor.dim()]) for index in indices)


def values_of(x: Any) -> tuple[Any, str]:
    """Return the numbers of a tensor as a strided, real one on the same device, and what they are. Call it under ``no_grad``.

    Where there are none it is ``None``, and why. An uncoalesced sparse tensor is coalesced, and a strided nested one is put
    together, which on a device waits for it; nothing else does. Of a DTensor it is the local shard, without a collective.
    """
    if is_without_data(x):
        return None, "no data"
    try:
        values, kind = dense(x.detach())
        if values.is_complex():
            values = values.to(torch.complex64) if values.dtype is torch.complex32 else values
            values, kind = values.abs().masked_fill_(values.isnan(), nan), f"magnitudes of {kind}"  # that of inf + nan j is inf
        values.reshape(-1)[:1].float()  # packed types have no conversion
    except (NotImplementedError, TypeError):  # by a TypeError a class of tensors says that it does not know the operator
        return None, f"unreadable: torch converts no {name_of(x.dtype)} of this layout"
    return values, kind


def dense(x: Any) -> tuple[Any, str]:
    """Return the elements of any kind of tensor that has data as a strided one, and what they are."""
    if hasattr(x, "placements") and hasattr(x, "device_mesh"):
        values, kind = dense(x.to_local())
        return values, f"{kind} of the local shard"
    if x.is_nested:
        parts = [x.values()] if x.layout is torch.jagged else x.unbind()
        return torch.cat([part.reshape(-1) for part in parts]) if len(parts) else x.new_empty(0), "elements"
    if x.layout is torch.sparse_coo:
        return x.coalesce().values(), "stored elements"
    if x.layout in COMPRESSED:
        return x.values(), "stored elements"
    if x.layout is not torch.strided:
        return x.to_dense(), "elements"
    is_quantised = x.is_quantized or type(x).dequantize is not torch.Tensor.dequantize  # or by a class of its own: torchao's
    return (x.dequantize(), "dequantised elements") if is_quantised else (x, "elements")


def is_uninitialized(x: Any) -> bool:
    """Return whether it is a parameter of a lazy module, without a shape yet."""
    lazy: Any = torch.nn.parameter
    return isinstance(x, lazy.UninitializedTensorMixin)


def is_without_data(x: Any) -> bool:
    """Return whether a tensor has no elements to look at: of a lazy module, meta, fake, or of a transformation."""
    if is_uninitialized(x) or x.device.type == "meta":
        return True
    return type(x).__name__ == "FakeTensor" or torch._C._functorch.is_functorch_wrapped_tensor(x)


def unwrapped(x: Any) -> Any:
    """Return the tensor within a wrapper of ``torch.func.grad``, ``vjp`` and ``jvp``, which has the values; else itself."""
    functorch: Any = torch._C._functorch
    while functorch.is_gradtrackingtensor(x):
        x = functorch.get_unwrapped(x)
    return x


def shape_of(x: Any) -> tuple[int | str, ...]:
    """Return the shape; a dimension of unequal lengths (nested) is ``"*"``, an uninitialised parameter has none."""
    if is_uninitialized(x):
        return ()
    return tuple(_length(x, dimension) for dimension in range(x.dim())) if x.is_nested else tuple(map(int, x.shape))


def _length(x: Any, dimension: int) -> int | str:
    try:
        size = x.size(dimension)
    except RuntimeError:
        return "*"
    return size if type(size) is int else "*"


def elements_of(x: Any) -> int:
    """Return the number of elements, implicit zeros of a sparse tensor included."""
    if is_uninitialized(x):
        return 0
    return int(x.numel()) if x.is_nested else prod(map(int, x.shape))


def bytes_of(x: Any) -> int:
    """Return the bytes that hold the tensor's elements (of a sparse one with its indices, of a DTensor the local shard)."""
    if is_without_data(x):
        return 0
    if hasattr(x, "placements") and hasattr(x, "device_mesh"):
        return bytes_of(x.to_local())
    if hasattr(type(x), "__tensor_flatten__") and not x.is_nested:  # made of others: quantised values and their scales
        return sum(bytes_of(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return sum(int(part.numel() * part.element_size()) for part in stored(x))


def name_of(attribute: Any) -> str:
    """Return the usual name of a type or layout."""
    return str(attribute).removeprefix("torch.")


def stored(x: Any) -> tuple[Any, ...]:
    """Return a sparse tensor's indices and values, or any other tensor."""
    if x.layout is torch.sparse_coo:
        return x._indices(), x._values()  # the public ones coalesce
    if x.layout in COMPRESSED:
        by_row = x.layout in {torch.sparse_csr, torch.sparse_bsr}
        return (x.crow_indices(), x.col_indices(), x.values()) if by_row else (x.ccol_indices(), x.row_indices(), x.values())
    return (x,)


def storages(x: Any) -> Iterator[Any]:
    """Yield the storages of a tensor, or of the tensors in it (sparse, jagged, sharded); opaque ones have none."""
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
    return torch.cat(parts)


def greatest_magnitude(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the greatest magnitude in tensors (in shards: this rank's), NaN if there is one, and 0 without tensors.

    It is finite where all are: the squares of a norm could overflow.
    """
    detached: list[Any] = [tensor.detach() for tensor in tensors]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in detached]
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in local]
    norms = torch._foreach_norm([tensor for tensor in dense if tensor.numel()], inf) if dense else []  # as torch's own clipping
    return torch.stack([norm.to(norms[0].device) for norm in norms]).max() if norms else torch.zeros(())
