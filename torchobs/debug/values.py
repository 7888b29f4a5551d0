"""The numbers inside any kind of tensor, as plain dense tensors that statistics can be computed of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torchobs.support.storages import stored


@dataclass(frozen=True, slots=True)
class Values:
    """What statistics are computed of."""

    tensor: Any
    """A strided, real tensor on the same device; ``None`` if there are no numbers to read"""
    kind: str
    """What they are of: elements, magnitudes, stored elements, local shard ..., or why there are none"""
    nan: Any = None
    """A mask of NaN where ``tensor`` does not show them (the magnitude of ``inf + nan j`` is inf)"""


def require_tensor(x: Any, function: str) -> None:
    """Raise ``TypeError`` with advice if ``x`` is no tensor."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{function}() takes a torch.Tensor, not {type(x).__name__}: convert it by torch.as_tensor()")


def values_of(x: Any) -> Values:
    """Return the numbers of a tensor. Call it under ``no_grad``.

    An uncoalesced sparse tensor is coalesced, and a strided nested tensor is put together, which on a device waits for it;
    everything else does not. Of a DTensor it is the local shard: no collective is called.
    """
    import torch

    if _has_no_data(torch, x):
        return Values(None, "no data")
    x = x.detach()
    if hasattr(x, "placements") and hasattr(x, "device_mesh"):
        local = values_of(x.to_local())
        return Values(local.tensor, f"{local.kind} of the local shard", local.nan)
    try:
        return _real(torch, *_dense(torch, x))
    except (NotImplementedError, TypeError):  # by a TypeError a class of tensors says that it does not know the operator
        return Values(None, f"unreadable: torch converts no {str(x.dtype).removeprefix('torch.')} of this layout")


def is_uninitialized(x: Any) -> bool:
    """Return True for a parameter of a lazy module that has no shape yet."""
    import torch

    lazy: Any = torch.nn.parameter
    return isinstance(x, lazy.UninitializedTensorMixin)


def _has_no_data(torch: Any, x: Any) -> bool:
    if is_uninitialized(x) or x.device.type == "meta":
        return True
    return type(x).__name__ == "FakeTensor" or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _dense(torch: Any, x: Any) -> tuple[Any, str]:
    if x.is_nested:
        parts = [x.values()] if x.layout is torch.jagged else [part.reshape(-1) for part in x.unbind()]
        return torch.cat([part.reshape(-1) for part in parts]) if parts else x.new_empty(0), "elements"
    if x.layout is torch.sparse_coo:
        return x.coalesce().values(), "stored elements"
    if x.layout in {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}:
        return x.values(), "stored elements"
    if x.layout is not torch.strided:
        return x.to_dense(), "elements"
    is_quantised = x.is_quantized or type(x).dequantize is not torch.Tensor.dequantize  # or by a class of its own: torchao's
    return (x.dequantize(), "dequantised elements") if is_quantised else (x, "elements")


def _real(torch: Any, dense: Any, kind: str) -> Values:
    if dense.is_complex():
        wide = dense.to(torch.complex64) if dense.dtype is torch.complex32 else dense
        return Values(wide.abs(), f"magnitudes of {kind}", torch.isnan(wide))
    if not dense.dtype.is_floating_point or dense.dtype.itemsize > 1:
        if dense.numel():
            dense.reshape(-1)[:1].double()  # raises for packed types, which have no conversion
        return Values(dense, kind)
    return Values(dense.float(), kind)  # float8 has no isnan


def shape_of(x: Any) -> tuple[int | str, ...]:
    """Return the shape; a dimension of unequal lengths (nested) is ``"*"``, an uninitialised parameter has none."""
    if is_uninitialized(x):
        return ()
    if not x.is_nested:
        return tuple(map(int, x.shape))
    return tuple(_length(x, dimension) for dimension in range(x.dim()))


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
    import torch

    if _has_no_data(torch, x):
        return 0
    if hasattr(x, "placements") and hasattr(x, "device_mesh"):
        return bytes_of(x.to_local())
    if hasattr(type(x), "__tensor_flatten__") and not x.is_nested:  # made of others: quantised values and their scales
        return sum(bytes_of(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return sum(int(part.numel() * part.element_size()) for part in stored(x))
