"""Memory at a point (``memory``), by lines of a block (``memory_growth``), by parts of a model (``memory_by_module``)."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchobs.debug import operations
from torchobs.debug.tensors import require_model, require_optimizer
from torchobs.probes.device_memory import used_devices
from torchobs.probes.leak import Tracing, count_tensors, count_types, grown_types
from torchobs.probes.nonfinite.locate import is_users_file
from torchobs.support.result import Result, fill
from torchobs.tensors.batches import FAILURES, batch_sizes, rebuilt, walk
from torchobs.tensors.losses import compute_loss
from torchobs.tensors.references import living
from torchobs.tensors.running import beside_grad, kept_memory, running_modules, state_kept
from torchobs.tensors.values import bytes_of, storages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchobs.debug.operations import MemoryUse
    from torchobs.debug.operator_watch import Live
    from torchobs.tensors.running import Backward


@dataclass(frozen=True, slots=True)
class ModuleMemory(Result):
    """One module's own memory, without the modules in it; shared tensors count once."""

    name: str
    kind: str
    parameters_bytes: int
    buffers_bytes: int
    activations_bytes: int | None
    """Kept for the backward pass, at the given batch size; ``None`` without a batch"""


@dataclass(frozen=True, slots=True)
class MemoryByModule(Result):
    """A model's memory; fields that need a batch are ``None`` without one."""

    model: str
    batch_size: int | None
    total_bytes: int
    """Sum of the following, without the peak"""
    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int | None
    """Gradients of all trainable parameters, computed already or not"""
    optimizer_state_bytes: int | None
    """Before the optimizer's first step: what that will allocate; ``None`` without an optimizer, or if unknown"""
    inputs_bytes: int | None
    activations_bytes: int | None
    """Kept for the backward pass, beside parameters, buffers and inputs; shared memory counts once"""
    peak_bytes: int | None
    """Most memory allocated at one time by forward and backward, gradients included, at this batch size"""
    modules: tuple[ModuleMemory, ...]
    """The largest first"""


def memory_by_module(
    model: Any, batch: Any = None, loss_fn: Callable[..., Any] | None = None, optimizer: Any = None
) -> MemoryByModule:
    """Measure a model's memory by component and by module, with a batch by a forward and a backward pass.

    The model is not changed: gradients are computed beside ``.grad`` (without hooks of DDP), and buffers and the random state
    are put back. Workspaces of kernels do not count, nor does the allocator's fragmentation.

    Args:
        model: the module; in train mode, as it is trained.
        batch: as for :func:`torchobs.debug.training_step`; the first dimension of its tensors is the batch size.
        loss_fn: as for it.
        optimizer: for its state.

    Raises:
        TypeError: ``model`` is no module, or the batch has no tensor. What the model raises goes on.
        ValueError: the model is on the device meta, or the optimizer has other parameters.
    """
    require_model(model, "memory_by_module")
    if optimizer is not None:
        require_optimizer(optimizer, model, "memory_by_module")
    size = None if batch is None else batch_sizes(batch).samples
    if size == 0:
        what = f"{type(batch).__name__}{' of none' if _tensors_in(batch) else ''}"
        raise TypeError(f"memory_by_module() takes a batch with a tensor of at least one sample, not {what}")
    peak, kept = (None, {}) if batch is None else _measure(model, batch, loss_fn)
    parameters, buffers, state = _bytes_used(model.parameters()), _bytes_used(model.buffers()), _optimizer_state(optimizer)
    gradients, inputs, activations = None, None, None
    if batch is not None:
        gradients, activations = sum(bytes_of(x) for x in model.parameters() if x.requires_grad), sum(kept.values())
        inputs = _bytes_used(_tensors_in(batch))
    total = sum(filter(None, (parameters, buffers, gradients, state, inputs, activations)))
    return MemoryByModule(
        type(model).__name__, size, total, parameters, buffers, gradients, state, inputs, activations, peak,
        _modules(model, kept, has_batch=batch is not None),
    )  # fmt: skip


def _modules(model: Any, kept: dict[tuple[str, str], int], *, has_batch: bool) -> tuple[ModuleMemory, ...]:
    rows, counted = list[ModuleMemory](), set[int]()

    def fresh(tensors: Iterable[Any]) -> int:
        new = [x for x in tensors if id(x) not in counted]
        counted.update(map(id, new))
        return _bytes_used(new)

    modules = {(name, type(module).__name__): module for name, module in model.named_modules()}
    for key in {**modules, **kept}:  # activations may be kept under a name that is no module of the model
        module = modules.get(key)
        sizes = (0, 0) if module is None else (fresh(module.parameters(recurse=False)), fresh(module.buffers(recurse=False)))
        activations = kept.get(key, 0)
        if any(sizes) or activations:
            rows.append(ModuleMemory(*key, *sizes, activations if has_batch else None))
    return tuple(sorted(rows, key=lambda row: -row.parameters_bytes - row.buffers_bytes - (row.activations_bytes or 0)))


def _measure(model: Any, batch: Any, loss_fn: Callable[..., Any] | None) -> tuple[int, dict[tuple[str, str], int]]:
    """Return the most memory at one time, and what each module keeps, by its path and class."""
    from torchobs.debug.operator_watch import AllocationWatch

    there = [*model.parameters(), *model.buffers(), *_tensors_in(batch)]

    def passes(backward: Backward) -> tuple[int, dict[tuple[str, str], int]]:
        modules, watch = Counter[tuple[str, str]](), AllocationWatch()
        with state_kept(model), torch.inference_mode(mode=False), torch.enable_grad(), running_modules(model) as names, watch:

            def add_storage(storage: Any) -> None:
                modules[names[-1] if names else ("", type(model).__name__)] += storage.nbytes()

            with kept_memory(there, add_storage):
                loss = compute_loss(model, batch, loss_fn)
            backward(loss)
            del loss
        return watch.peak, modules

    return beside_grad(model, passes)


def _tensors_in(values: Any) -> list[Any]:
    return [x for _, x in walk(values)]


def resized(values: Any, size: int, other: int) -> Any:
    """Return the batch with another number of samples, the first ones or repeated ones; other values as they are."""
    from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

    if isinstance(values, torch.Tensor):
        is_batched = values.dim() > 0 and not values.is_nested and values.shape[0] == size
        return values[torch.arange(other, device=values.device) % size] if is_batched else values
    if isinstance(values, PackedSequence):
        padded, lengths = pad_packed_sequence(values, batch_first=True)
        chosen = torch.arange(other, device="cpu") % len(lengths)
        taken = padded[chosen.to(padded.device)]
        return pack_padded_sequence(taken, lengths[chosen], batch_first=True, enforce_sorted=False)
    return rebuilt(values, lambda part: resized(part, size, other))


def _bytes_used(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors; those in the same memory count at most the size of that memory."""
    memory: dict[int, tuple[int, int]] = {}
    for x in tensors:
        parts = list(storages(x))
        key = (parts[0].data_ptr() if parts else 0) or -id(x)
        memory[key] = sum(part.nbytes() for part in parts), memory.get(key, (0, 0))[1] + bytes_of(x)
    return sum(min(whole or used, used) for whole, used in memory.values())


def _optimizer_state(optimizer: Any) -> int | None:
    """Return the bytes of an optimizer's state once all parameters have one.

    Before its first step, another optimizer of its class steps on the device meta, where nothing is allocated or computed.
    """
    if optimizer is None:
        return None
    groups = [{**group, "params": [x for x in group["params"] if x.requires_grad]} for group in optimizer.param_groups]
    if len(optimizer.state) >= sum(len(group["params"]) for group in groups):
        return sum(map(bytes_of, _tensors_in([dict(state) for state in optimizer.state.values()])))
    for group in groups:
        group["params"] = [torch.nn.Parameter(torch.empty_like(x, device="meta")) for x in group["params"]]
        for x in group["params"]:
            x.grad = torch.empty_like(x)
        group.pop("param_names", None)
        group.update({name: False for name in ("fused", "foreach") if name in group})
    tried = None
    try:
        tried = type(optimizer)(groups)
        getattr(type(tried).step, "__wrapped__", type(tried).step)(tried)  # without hooks
    except FAILURES:  # its constructor takes other arguments, or it refuses tensors without data
        if tried is None or not tried.state:
            return None
    return sum(int(x.nbytes) for x in _tensors_in([dict(state) for state in tried.state.values()]))


MOST_ROWS = 15
"""Rows of each table"""


@dataclass(frozen=True, slots=True)
class DeviceMemory(Result):
    """One device, as torch's allocator has it."""

    device: str
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class TensorGroup(Result):
    """Live tensors of one shape, type and device; shared memory counts once."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPoint(Result):
    """Memory at a point of the program."""

    label: str
    host_bytes: int
    """Resident memory of the process"""
    host_peak_bytes: int
    """The most so far"""
    devices: tuple[DeviceMemory, ...]
    tensors: int
    """Live tensors with a Python object; tensors that only a graph keeps have none"""
    tensor_bytes: int
    largest: tuple[TensorGroup, ...]


@dataclass(frozen=True, slots=True)
class Growth(Result):
    """A line of the program, or a class of objects, with more memory than at the beginning."""

    name: str
    """``file:line``, or module and class"""
    size_bytes: int | None
    """``None`` for objects: their size is unknown"""
    count: int
    """Additional blocks, tensors or objects"""


@dataclass(frozen=True, slots=True)
class MemoryGrowth(Result):
    """What grew between two points; ``None`` and empty before the second one."""

    label: str
    host: MemoryUse | None = None
    gpu_memory: MemoryUse | None = None
    tensor_bytes: int = 0
    """Live tensors that were made in between"""
    tensor_peak_bytes: int = 0
    """The most of them at one time"""
    tensor_lines: tuple[Growth, ...] = ()
    """Where they were made"""
    python_lines: tuple[Growth, ...] = ()
    """Where Python's own memory grew, by ``tracemalloc``"""
    objects: tuple[Growth, ...] = ()
    """Classes of objects that the garbage collector tracks"""


def memory(label: str = "") -> MemoryPoint:
    """Return the memory of the process, of its devices, and of the live tensors by shape. It takes some tens of ms.

    Nobody's peaks are reset.
    """
    reading, counted = operations.read(), count_tensors(living(torch.Tensor))
    rows = [
        TensorGroup(kind.shape, kind.dtype, kind.device, count, counted.sizes[kind]) for kind, count in counted.tensors.items()
    ]
    devices = tuple(DeviceMemory(x.device, x.allocated, x.reserved, x.peak or x.allocated) for x in used_devices(torch))
    return MemoryPoint(
        label=label, host_bytes=reading.host, host_peak_bytes=reading.host_peak, devices=devices,
        tensors=counted.tensors.total(), tensor_bytes=counted.sizes.total(),
        largest=tuple(sorted(rows, key=lambda row: -row.size_bytes)[:MOST_ROWS]),
    )  # fmt: skip


@contextmanager
def memory_growth(label: str = "") -> Iterator[MemoryGrowth]:
    """Find what grows in a ``with`` block; it yields a :class:`MemoryGrowth` that the end fills.

    A dispatch mode finds the lines that make tensors in this thread; it slows small operators several times. ``tracemalloc``
    finds the lines of Python's own memory; it is started, and stopped at the end, if it is off. Garbage is collected before
    and after. An exception goes on, and the result is filled all the same.
    """
    from torchobs.debug.operator_watch import AllocationWatch  # torch is optional until training begins

    growth = MemoryGrowth(label)
    tracing = Tracing()
    tracing.start()
    gc.collect()
    objects, before, snapshots = count_types(), operations.read(), tracing.snapshot()
    watch = AllocationWatch(lines=True)
    try:
        with watch:
            yield growth
    finally:
        gc.collect()
        grown = tuple(Growth(name, None, more) for name, more in grown_types(objects, count_types())[:MOST_ROWS])
        after, snapshots = operations.read(), snapshots + tracing.snapshot()
        tracing.stop()
        host, device = operations.use(before, after)
        live = watch.live()
        fill(
            growth, host=host, gpu_memory=device, tensor_bytes=watch.current, tensor_peak_bytes=watch.peak,
            tensor_lines=_by_line(live), python_lines=_python_lines(snapshots), objects=grown,
        )  # fmt: skip


def _by_line(live: Iterable[Live]) -> tuple[Growth, ...]:
    sizes, counts = Counter[str](), Counter[str]()
    for storage in live:
        sizes[storage.location] += storage.size
        counts[storage.location] += 1
    return tuple(Growth(location, size, counts[location]) for location, size in sizes.most_common(MOST_ROWS))


def _python_lines(snapshots: list[tracemalloc.Snapshot]) -> tuple[Growth, ...]:
    """Return the lines that grew between two snapshots; a forked child has one alone, and no lines."""
    compared = snapshots[1].compare_to(snapshots[0], "lineno") if len(snapshots) > 1 else []
    rows = [
        Growth(f"{line.traceback[0].filename}:{line.traceback[0].lineno}", line.size_diff, line.count_diff)
        for line in compared
        if line.size_diff > 0 and is_users_file(line.traceback[0].filename)
    ]
    return tuple(sorted(rows, key=lambda row: -(row.size_bytes or 0))[:MOST_ROWS])
