"""The values of a tensor of any kind: which are looked at, their extremes and norm, and where they break a contract."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite, isinf, isnan
from typing import Any, Protocol

import torch

from torchobs.support.result import Result


class Limits(Protocol):
    """What a :class:`~torchobs.guard.contracts.Contract` says of values."""

    @property
    def min(self) -> float | None:
        """Least value allowed."""

    @property
    def max(self) -> float | None:
        """Largest value allowed."""

    @property
    def finite(self) -> bool:
        """Whether NaN and infinity are refused."""

    @property
    def max_norm(self) -> float | None:
        """Largest norm allowed."""


@dataclass(frozen=True)
class Violation(Result):
    """One thing that a tensor is not."""

    tensor: str
    """its name"""
    what: str
    """``type``, ``shape``, ``dtype``, ``device``, ``finite``, ``min``, ``max`` or ``norm``"""
    expected: str
    found: str
    where: tuple[int, ...] | None = None
    """index of the first element that is wrong; its first number is the sample, where the first dimension is the batch"""

    def __str__(self) -> str:
        place = f", the first at {list(self.where)}" if self.where else ""
        return f"{self.tensor}: {self.what}: {self.found}{place}; expected {self.expected}"


class TensorValues:
    """The least and largest value of a tensor and its norm, on their way from the device."""

    def __init__(self, contract: Limits, x: torch.Tensor, name: str) -> None:
        self._contract, self._name, self._shape = contract, name, shape_of(x)
        self._values = self._dense_values(x)
        self._event: Any = None
        self._numbers: torch.Tensor | list[float] = []
        if self._values.numel():
            self._start()

    def _dense_values(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values to look at as a dense tensor of ordered numbers; an empty one if there is nothing to look at."""
        contract = self._contract
        ordered = contract.min is not None or contract.max is not None
        floating = x.dtype.is_floating_point or x.dtype.is_complex
        wanted = ordered or contract.max_norm is not None or (contract.finite and floating)
        if not wanted or x.device.type == "meta" or type(x).__name__ == "FakeTensor":
            return torch.empty(0, device="cpu")
        values = dense_values(x.detach())
        if not values.dtype.is_complex:
            return values
        if ordered:
            raise ValueError(f"{self._name} is complex, and complex numbers are in no order: use max_norm")
        return torch.view_as_real(values.resolve_conj())

    def _start(self) -> None:
        values = self._values
        numbers = list(torch.aminmax(values))
        if self._contract.max_norm is not None:
            numbers.append(norm_of(values))
        if values.device.type == "cpu":
            self._numbers = [float(number) for number in numbers]
            return
        # MPS has no float64
        together = torch.stack(
            [number.to(torch.float32 if values.device.type == "mps" else torch.float64) for number in numbers]
        )
        self._numbers = together
        if values.device.type == "cuda":
            pinned = torch.empty(len(numbers), dtype=together.dtype, device="cpu", pin_memory=True)
            self._numbers = pinned.copy_(together, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))

    def done(self) -> bool:
        """Return True if :meth:`wait` would not wait."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> list[Violation]:
        """Return what is wrong with the values. Where it is, is looked for only if something is."""
        if not self._values.numel():
            return []
        if self._event is not None:
            self._event.synchronize()
        least, largest, *norm = self._numbers if isinstance(self._numbers, list) else self._numbers.tolist()
        contract, found = self._contract, []
        if contract.finite and (isnan(least) or isinf(least) or isinf(largest)):
            found.append(self._not_finite())
        if isnan(least) and (contract.min is not None or contract.max is not None):
            least, largest = self._extremes_beside_nan()
        dtype = self._values.dtype
        if contract.min is not None and least < (low := rounded(contract.min, dtype)):
            found.append(self._beyond("min", f"{contract.min:g} or more", least, self._values < low))
        if contract.max is not None and largest > (high := rounded(contract.max, dtype)):
            found.append(self._beyond("max", f"{contract.max:g} or less", largest, self._values > high))
        if norm and contract.max_norm is not None and not norm[0] <= contract.max_norm:
            found.append(Violation(self._name, "norm", f"{contract.max_norm:g} or less", f"{norm[0]:.6g}"))
        return found

    def _not_finite(self) -> Violation:
        wrong = ~torch.isfinite(self._values)
        nans = int(torch.isnan(self._values).sum())
        counts = ((nans, "NaN"), (int(wrong.sum()) - nans, "Inf"))
        found = f"{' and '.join(f'{number:,} {word}' for number, word in counts if number)} among {wrong.numel():,} values"
        return Violation(self._name, "finite", "finite values", found, self._place(wrong))

    def _beyond(self, what: str, expected: str, extreme: float, wrong: torch.Tensor) -> Violation:
        found = f"{extreme:g}, and {int(wrong.sum()):,} of {wrong.numel():,} values are beyond"
        return Violation(self._name, what, expected, found, self._place(wrong))

    def _extremes_beside_nan(self) -> tuple[float, float]:
        values = self._values
        least = torch.where(torch.isnan(values), inf, values).min()
        largest = torch.where(torch.isnan(values), -inf, values).max()
        return float(least), float(largest)

    def _place(self, wrong: torch.Tensor) -> tuple[int, ...] | None:
        """Return the index of the first wrong element; None where the values do not have the tensor's own shape."""
        dimensions = len(self._shape)
        if wrong.shape[:dimensions] != self._shape:
            return None
        flat = int(wrong.reshape(-1).to(torch.uint8).argmax())
        index: list[int] = []
        for size in reversed(wrong.shape):
            flat, position = divmod(flat, size)
            index.insert(0, position)
        return tuple(index[:dimensions])


@lru_cache(maxsize=256)
def rounded(bound: float, dtype: torch.dtype) -> float:
    """Return a bound as the tensor's type has it: 0.1 in float32 is more than 0.1, and keeps ``max=0.1`` all the same."""
    return float(torch.tensor(bound, dtype=dtype, device="cpu")) if dtype.is_floating_point and isfinite(bound) else bound


def norm_of(values: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm; of half precision in float32, where squares do not overflow."""
    wide = torch.float64 if not values.is_floating_point() or values.dtype == torch.float64 else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(values.to(wide))
    return norm


def dense_values(x: torch.Tensor) -> torch.Tensor:
    """Return the values of any kind of tensor that torch.aminmax takes; those of a sparse one without its zeros."""
    if hasattr(x, "to_local"):  # a DTensor: each rank checks its part
        x = x.to_local()
    if x.is_nested or x.layout in {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}:
        x = x.values().clone() if x.is_complex() else x.values()  # torch has no real view of a view of such a tensor
    elif x.is_sparse:
        x = x.coalesce().values()
    if x.is_quantized:
        x = x.dequantize()
    if x.dtype is torch.bool:
        return x.to(torch.uint8)
    if not x.dtype.is_signed and x.dtype.itemsize > 1:  # uint16 to uint64, of which torch knows no extremes
        return x.to(torch.int64 if x.dtype.itemsize < 8 else torch.float64)  # noqa: PLR2004  # bytes
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 1 else x


def shape_of(x: torch.Tensor) -> tuple[Any, ...]:
    """Return the shape; ``*`` for a dimension of unequal lengths of a nested tensor, of which torch has none."""
    if not (x.is_nested and x.layout is torch.strided):
        return tuple(x.shape)
    sizes: list[Any] = []
    for dimension in range(x.dim()):
        try:
            sizes.append(x.size(dimension))
        except RuntimeError:
            sizes.append("*")
    return tuple(sizes)
