"""What runs on a CUDA device, on fakes of its tensors: torch's own rules of shapes and types apply, and no value can be had.

A look at a value (``item``, ``nonzero``, a branch on a tensor) is ``DataDependentOutputException``, so that a path that is done
here synchronises nowhere. What a kernel copies inside does not show, but is known of the two that do (``Allocations``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchobs.probes.gradient_norms import count_nonfinite, device_norms
from torchobs.tensors.device_reads import Device

if TYPE_CHECKING:
    from collections.abc import Iterator

MILLION = 1_000_000
EASY = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ODD = [torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """The largest result, in bytes, that is no view, and the number of calls.

    ``vector_norm`` copies a tensor into another type first (but 16 bits into float32), ``_foreach_norm`` all of a list of
    which one does not lie densely.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.largest = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls += func.namespace == "aten"  # the others ask a fake where it is
        dtype = kwargs.get("dtype")
        if func is torch.ops.aten.linalg_vector_norm.default and dtype is not None and dtype != args[0].dtype:
            self.note(args[0].numel() * dtype.itemsize)
        if func is torch.ops.aten._foreach_norm.Scalar and not all(tensor.is_contiguous() for tensor in args[0]):
            self.note(max(tensor.numel() for tensor in args[0]) * dtype.itemsize)
        result = func(*args, **kwargs)
        if not func.is_view:
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                self.note(tensor.numel() * tensor.dtype.itemsize if isinstance(tensor, torch.Tensor) else 0)
        return result

    def note(self, size: int) -> None:
        """So many bytes were taken."""
        self.largest = max(self.largest, size)


# complex32 is experimental, says torch; people who use it have gradients of it all the same
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


@pytest.fixture(autouse=True)
def _fakes() -> Iterator[None]:
    """All tensors that a test makes are fakes, and need no GPU."""
    with FakeTensorMode(), torch.no_grad():
        yield


def of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A gradient without values."""
    return torch.empty(shape, dtype=dtype, device="cuda:0")


def scattered(dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    """One that does not lie densely: each second element of some memory."""
    return torch.empty_strided((rows, columns), (2 * columns, 2), dtype=dtype, device="cuda:0")


def sparse(dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
    """An embedding's gradient, not coalesced."""
    values = of(dtype, rows, width)
    return torch.sparse_coo_tensor(of(torch.int64, 1, rows), values, (2 * rows, width), check_invariants=False)


@pytest.mark.parametrize("dtype", [*EASY, *ODD], ids=str)
def test_norms_of_every_type_are_float64_on_the_device(dtype: torch.dtype) -> None:
    """Dense, transposed, not dense, without dimensions: one number for each, and which it is of."""
    tensors = [of(dtype, 30, 50), of(dtype, 50, 30).t(), scattered(dtype, 30, 50), of(dtype)]
    vector, order = device_norms(tensors)
    assert (vector.dtype, vector.device, vector.shape) == (torch.float64, torch.device("cuda:0"), (4,))
    assert sorted(order) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", EASY, ids=str)
def test_nothing_large_is_copied(dtype: torch.dtype) -> None:
    """A thousand million elements, transposed or values of a sparse one as well: not a megabyte is taken for them."""
    tensors = [of(dtype, 1000, MILLION), of(dtype, MILLION, 1000).t(), sparse(dtype, MILLION, 1000), of(dtype, 10)]
    with Allocations() as allocations:
        device_norms(tensors)
    assert allocations.largest < MILLION


@pytest.mark.parametrize("dtype", ODD[3:], ids=str)
def test_a_type_without_a_norm_is_copied_a_part_at_a_time(dtype: torch.dtype) -> None:
    """Eight million elements as float32; a million rows that do not lie densely are no million launches."""
    tensors = [of(dtype, 1000, MILLION), scattered(dtype, MILLION, 50)]
    with Allocations() as allocations:
        device_norms(tensors)
    assert allocations.largest <= 4 << 23
    assert allocations.calls < 2000


@pytest.mark.parametrize("dtype", [*EASY, *ODD], ids=str)
def test_elements_that_are_not_finite_are_counted_without_a_copy(dtype: torch.dtype) -> None:
    """A byte for each of eight million elements at a time (and their float32 where the type has no comparison)."""
    tensor = of(dtype, 100, MILLION)
    with Allocations() as allocations:
        count = count_nonfinite(tensor)
    assert (count.dtype, count.shape) == (torch.int64, ())
    assert allocations.largest <= (4 if dtype.itemsize == 1 else 1) << 23


def test_pinned_memory_is_the_cpu_s_whatever_the_default_device_is() -> None:
    """``set_default_device("cuda")`` holds for our calls, too, and memory of a device cannot be pinned."""
    with torch.device("cuda"), torch.inference_mode():
        pinned = Device().empty(8, "cuda")
    assert (pinned.device.type, pinned.dtype, pinned.shape) == ("cpu", torch.float64, (8,))
    assert not pinned.is_inference()
