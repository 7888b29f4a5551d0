"""``profile_memory`` and ``memory_tracking``: memory at a point of the program, and what grew between two."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchobs.debug import resources
from torchobs.debug.values import is_uninitialized
from torchobs.probes.memory.allocators import has_statistics
from torchobs.support.living_objects import collections_paused, living, types_of_objects
from torchobs.support.result import Result, fill

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torchobs.debug.operator_watch import Live
    from torchobs.debug.resources import MemoryUse

MOST_ROWS = 15
"""Rows of each table"""
_OWN = ("torchobs.debug.", "tracemalloc.", "weakref.")


@dataclass(frozen=True, slots=True)
class DeviceMemory(Result):
    """One CUDA device, in bytes, as torch's allocator has it."""

    device: str
    allocated: int
    reserved: int
    peak: int


@dataclass(frozen=True, slots=True)
class TensorGroup(Result):
    """Live tensors of one shape, type and device; memory that several share counts once."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    count: int
    size: int


@dataclass(frozen=True, slots=True)
class MemoryPoint(Result):
    """Memory at a point of the program, in bytes."""

    label: str
    host: int
    """Resident memory of the process"""
    host_peak: int
    """The most so far"""
    devices: tuple[DeviceMemory, ...]
    tensors: int
    """Live tensors that Python knows; those of a graph alone are not among them"""
    tensor_size: int
    largest: tuple[TensorGroup, ...]


@dataclass(frozen=True, slots=True)
class LineGrowth(Result):
    """A line of the program whose memory grew."""

    location: str
    size: int
    """Bytes more than at the beginning"""
    count: int
    """Blocks, or tensors, more"""


@dataclass(frozen=True, slots=True)
class ObjectGrowth(Result):
    """A class with more objects than at the beginning."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class MemoryGrowth(Result):
    """What grew between two points; ``None`` and empty before the second one."""

    label: str
    host: MemoryUse | None = None
    gpu_memory: MemoryUse | None = None
    tensor_size: int = 0
    """Bytes of tensors that were made in between and are live"""
    tensor_peak: int = 0
    """The most of them at one time"""
    tensor_lines: tuple[LineGrowth, ...] = ()
    """Where they were made"""
    python_lines: tuple[LineGrowth, ...] = ()
    """Where Python's own memory grew, by ``tracemalloc``"""
    objects: tuple[ObjectGrowth, ...] = ()
    """Classes of objects that the garbage collector tracks"""


def profile_memory(label: str = "") -> MemoryPoint:
    """Return the memory of the process, of its CUDA devices, and of the live tensors by shape. It takes some tens of ms.

    Nobody's peaks are reset.
    """
    reading, tensors = resources.read(), _tensors()
    groups: dict[Any, list[int]] = {}
    storages: set[int] = set()
    for x in tensors:
        storage = x.untyped_storage()
        group = groups.setdefault((tuple(map(int, x.shape)), str(x.dtype).removeprefix("torch."), str(x.device)), [0, 0])
        group[0] += 1
        if id(storage) not in storages:
            storages.add(id(storage))
            group[1] += storage.nbytes()
    every = (TensorGroup(*key, *counted) for key, counted in groups.items())
    rows = sorted(every, key=lambda row: -row.size)
    return MemoryPoint(
        label=label, host=reading.host, host_peak=reading.host_peak, devices=_devices(), tensors=len(tensors),
        tensor_size=sum(row.size for row in rows), largest=tuple(rows[:MOST_ROWS]),
    )  # fmt: skip


def _tensors() -> list[Any]:
    """Return the live dense tensors."""
    import torch

    return [
        x
        for x in living(torch.Tensor)
        if not is_uninitialized(x) and x.layout is torch.strided and not x.is_nested and _is_real(x)
    ]


def _is_real(x: Any) -> bool:
    return x.device.type != "meta" and type(x).__name__ not in {"FakeTensor", "FunctionalTensor", "DTensor"}


def _devices() -> tuple[DeviceMemory, ...]:
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_initialized() or not has_statistics(torch):
        return ()
    return tuple(
        DeviceMemory(f"cuda:{i}", cuda.memory_allocated(i), cuda.memory_reserved(i), cuda.max_memory_allocated(i))
        for i in range(cuda.device_count())
    )


@contextmanager
def memory_tracking(label: str = "") -> Iterator[MemoryGrowth]:
    """Find what grows in a ``with`` block; it yields a :class:`MemoryGrowth` that the end fills.

    Tensors that this thread makes in it are found by their line with a dispatch mode, which slows small operators several
    times; Python's own memory with ``tracemalloc``, which is begun if it is off, and ended then. Garbage is collected first
    and last. An exception goes on, and the result is filled all the same.
    """
    from torchobs.debug.operator_watch import AllocationWatch  # torch is optional until training begins

    growth, own = MemoryGrowth(label), not tracemalloc.is_tracing()
    if own:
        tracemalloc.start()
    gc.collect()
    objects, before, lines = _counted(), resources.read(), tracemalloc.take_snapshot()
    watch = AllocationWatch(lines=True)
    try:
        with watch:
            yield growth
    finally:
        gc.collect()
        grown = _grown(objects)
        after, later = resources.read(), tracemalloc.take_snapshot()
        if own:
            tracemalloc.stop()
        host, device = resources.use(before, after)
        live = watch.live()
        fill(
            growth, host=host, gpu_memory=device, tensor_size=watch.current, tensor_peak=watch.peak,
            tensor_lines=_by_line(live), python_lines=_python_lines(later, lines), objects=grown,
        )  # fmt: skip


def _by_line(live: Iterable[Live]) -> tuple[LineGrowth, ...]:
    sizes: dict[str, list[int]] = {}
    for one in live:
        row = sizes.setdefault(one.location, [0, 0])
        row[0], row[1] = row[0] + one.size, row[1] + 1
    rows = sorted((LineGrowth(location, *row) for location, row in sizes.items()), key=lambda row: -row.size)
    return tuple(rows[:MOST_ROWS])


def _python_lines(later: tracemalloc.Snapshot, lines: tracemalloc.Snapshot) -> tuple[LineGrowth, ...]:
    from torchobs.debug.operator_watch import NOT_THE_USERS

    grown = (one for one in later.compare_to(lines, "lineno") if one.size_diff > 0)
    rows = [
        LineGrowth(f"{one.traceback[0].filename}:{one.traceback[0].lineno}", one.size_diff, one.count_diff)
        for one in grown
        if not one.traceback[0].filename.startswith(NOT_THE_USERS)
    ]
    return tuple(sorted(rows, key=lambda row: -row.size)[:MOST_ROWS])


def _counted() -> Counter[type]:
    with collections_paused():
        return Counter(types_of_objects())


def _grown(before: Counter[type]) -> tuple[ObjectGrowth, ...]:
    more = ((f"{kind.__module__}.{kind.__qualname__}", count) for kind, count in (_counted() - before).most_common())
    rows = [ObjectGrowth(name, count) for name, count in more if not name.startswith(_OWN)]
    return tuple(rows[:MOST_ROWS])
