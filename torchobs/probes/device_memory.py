"""Memory of torch's device allocators, and out-of-memory errors with the uses of the memory.

``memory_stats`` reads the allocator's own counters under its lock, without synchronizing, and creates no context on an
unused device. Only devices with memory that is, or was, reserved are listed, and only their limit is asked for: with
``cudaMallocAsync`` the memory fraction of a device needs its context. A pluggable allocator (RAPIDS') has no statistics.

What takes the memory is counted by component and module, from the optimizers that have stepped and the modules that are alive;
shapes are read and nothing is computed. A shared tensor counts once, a sharded one by its local part, a sparse one by its
stored elements. Where torch records the allocator's history it is counted by line, too.

torch calls an observer with the allocator's lock released (``CUDACachingAllocator.cpp``, ``malloc``), so it may read
statistics and a snapshot. An observer cannot be detached, and attaching needs CUDA to be initialized: one function is
attached once per process, by CUDA's own initialization, and does nothing while no session listens.

The sampler thread reads the allocators once a second for the trend (:mod:`.growth`), and publishes all series every ten.
"""

from __future__ import annotations

import inspect
import os
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.detect.growth import FastWindow, MemoryHistory, MemoryPoint, soonest
from torchobs.probes.memory_growth import GrowthGauges
from torchobs.probes.process_memory import own_limits
from torchobs.support import text
from torchobs.support.error_guard import call
from torchobs.tensors.names import all_modules, clean, layer_of, roots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torchobs.catalog import Metric
    from torchobs.detect.growth import Growth
    from torchobs.probes.context import ProbeContext
    from torchobs.probes.memory_growth import Verdict


class DeviceMemory(NamedTuple):
    """One device's allocator, in bytes and counts; ``None``: not reported. ``peak`` is since the user's last reset."""

    device: str
    allocated: int
    reserved: int
    active: int | None = None
    inactive_split: int | None = None
    peak: int | None = None
    limit: int | None = None
    retries: int | None = None
    ooms: int | None = None


def used_devices(torch: Any) -> list[DeviceMemory]:
    """Return the devices that this process uses. ``torch`` is the imported module."""
    return [*_devices_of(torch, "cuda"), *_devices_of(torch, "xpu"), *_mps_devices(torch)]


def of_stats(device: str, stats: Mapping[str, Any], limit: int | None) -> DeviceMemory | None:
    """Read the nested dictionary of ``memory_stats_as_nested_dict``; ``None`` for a device that was never used."""
    reserved = _bytes(stats, "reserved_bytes", "current")
    if not reserved and not _bytes(stats, "reserved_bytes", "peak") and not stats.get("num_ooms"):
        return None
    return DeviceMemory(
        device=device,
        allocated=_bytes(stats, "allocated_bytes", "current") or 0,
        reserved=reserved or 0,
        active=_bytes(stats, "active_bytes", "current"),
        inactive_split=_bytes(stats, "inactive_split_bytes", "current"),
        peak=_bytes(stats, "allocated_bytes", "peak"),
        limit=limit,
        retries=stats.get("num_alloc_retries"),
        ooms=stats.get("num_ooms"),
    )


def has_statistics(torch: Any) -> bool:
    """Return whether the CUDA allocator in use is torch's: one of the user's raises when its statistics are read."""
    backend = getattr(torch.cuda, "get_allocator_backend", None)
    return backend is None or backend() in {"native", "cudaMallocAsync"}


def _bytes(stats: Mapping[str, Any], name: str, which: str) -> int | None:
    value = stats.get(name, {}).get("all", {}).get(which)
    return None if value is None else int(value)


def _devices_of(torch: Any, kind: str) -> Iterator[DeviceMemory]:
    there = getattr(torch, kind, None)  # torch.xpu: since 2.3
    if there is None or not there.is_initialized() or (kind == "cuda" and not has_statistics(torch)):
        return
    for index in range(there.device_count()):
        memory = of_stats(f"{kind}:{index}", there.memory_stats_as_nested_dict(index), None)
        if memory is not None:
            yield memory._replace(limit=_limit(torch, kind, index))


def _limit(torch: Any, kind: str, index: int) -> int:
    """Return the process's limit in bytes: all device memory, or the user's fraction of it (readable since torch 2.8)."""
    total = int(getattr(torch, kind).get_device_properties(index).total_memory)
    fraction = getattr(torch._C, f"_{kind}_getMemoryFraction", None)
    return total if fraction is None else int(total * fraction(index))


def _mps_devices(torch: Any) -> Iterator[DeviceMemory]:
    """Yield Metal's one device: its allocator keeps no peaks, and its initialization cannot be checked."""
    if not torch.backends.mps.is_available():
        return
    reserved = torch.mps.driver_allocated_memory()
    if reserved:
        limit = getattr(torch.mps, "recommended_max_memory", None)
        yield DeviceMemory("mps:0", torch.mps.current_allocated_memory(), reserved, limit=limit() if limit else None)


MOST_MODULES = 5


class Components(NamedTuple):
    """Bytes of each component, and the largest modules as ``name, size``."""

    sizes: dict[str, int]
    modules: list[str]


def components(context: ProbeContext, device: str) -> Components:
    """Count the tensors on that device (``cpu``, ``cuda:0``)."""
    from torchobs.tensors.values import stored  # which imports torch: there is a model by now

    optimizers, models = context.recorder.optimizers(), roots(all_modules(_dont_wait))
    named = {id(tensor): (tensor, name) for model in models for name, tensor in model.named_parameters()}
    parameters = {id(parameter): parameter for parameter in context.trained()}
    parameters |= {key: tensor for key, (tensor, _) in named.items()}
    state: dict[int, list[Any]] = {}
    for optimizer in optimizers:
        for parameter, values in list(optimizer.state.items()):
            state.setdefault(id(parameter), []).extend(values.values() if isinstance(values, dict) else [values])
    buffers = [(tensor, layer_of(clean(name))) for model in models for name, tensor in model.named_buffers()]
    sizes, layers, counted = Counter[str](), Counter[str](), set[int]()

    def add(component: str, tensor: Any, layer: str) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if not hasattr(local, "untyped_storage") or str(local.device) != device or id(local) in counted:
            return
        counted.add(id(local))
        size = sum(int(part.numel()) * int(part.element_size()) for part in stored(local))
        sizes[component] += size
        layers[layer] += size

    for key, parameter in parameters.items():
        layer = layer_of(clean(named[key][1])) if key in named else "unknown"
        add("parameters", parameter, layer)
        add("gradients", parameter.grad, layer)
        for value in state.get(key, ()):
            add("optimizer_state", value, layer)
    for tensor, layer in buffers:
        add("buffers", tensor, layer)
    rows = [f"{layer}, {text.size(size)}" for layer, size in layers.most_common(MOST_MODULES) if layer != "unknown"]
    return Components({name: sizes[name] for name in ("parameters", "gradients", "optimizer_state", "buffers")}, rows)


def _dont_wait() -> None:
    """There is nothing to yield to: this is the thread that failed."""


_FAILED_REQUEST = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory(?:: you tried to allocate (\d{1,18}) bytes)?"
)
MAX_LOCATIONS = 8
MOST_BLOCKS = 50_000
"""Blocks of all devices up to which a snapshot is taken: it lists them all, with their stacks, some 10 µs each"""
MIN_INTERVAL_S = 1.0
"""At most one event a second: a script that halves the batch until it fits fails often, and the ring is small."""


class OomObserver:
    """Writes ``torchobs.memory.out_of_memory`` events. Part of the device memory probe."""

    def __init__(self) -> None:
        self._attach: Callable[[], object] | None = None
        self._last = -MIN_INTERVAL_S

    def install(self, context: ProbeContext) -> None:
        """Listen, and attach the observer when CUDA is initialized, or at once if it is."""
        import torch

        if not hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):
            return  # a build without CUDA
        self._context, self._torch = context, torch
        breaker = context.breaker("oom")  # of its own: an allocator without observers (cudaMallocAsync) has statistics
        _Listening.to = breaker.guard(self.record_oom)
        if not _Listening.attached:
            self._attach = breaker.guard(_attach)
            lazily: Any = torch.cuda._lazy_call
            lazily(self._attach)

    def remove(self) -> None:
        """Stop listening; remove our pending call from CUDA's initialization."""
        if self._attach is None and _Listening.to is None:
            return
        _Listening.to = None
        queue = self._torch.cuda._queued_calls
        queue[:] = [entry for entry in queue if entry[0] is not self._attach]

    def record_oom(self, device: int, requested: int, limit: int, free: int) -> None:
        """Write the event. Called in the thread that ran out of memory, before the exception is raised."""
        now = time.monotonic()
        if now - self._last < MIN_INTERVAL_S:
            return
        self._last = now
        stats = self._torch.cuda.memory_stats_as_nested_dict(device)
        attributes: dict[str, Any] = {
            "device": f"cuda:{device}",
            "requested": requested,
            "limit": limit,
            "free": free,
            **summary(stats),
        }
        attributes |= memory_use(self._context, f"cuda:{device}")
        if has_history(self._torch) and (segments := segments_in_time(self._torch)) is not None:
            package = os.path.dirname(self._torch.__file__)
            attributes["largest"] = largest_allocations({"segments": segments}, device, package)
        self._context.event(catalog.EVENT_OUT_OF_MEMORY, attributes)


def has_history(torch: Any) -> bool:
    """Return whether torch records where each block was allocated."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return bool(enabled is not None and enabled())


def segments_in_time(torch: Any) -> Any:
    """Return the allocators' segments, or ``None`` if to list them would take longer than some 0.5 s.

    A snapshot is of all devices. An older torch, which cannot leave out the history of all that was ever freed, is not asked.
    """
    stats = [torch.cuda.memory_stats_as_nested_dict(device) for device in range(torch.cuda.device_count())]
    listed = sum(_count(counts, "allocation") + _count(counts, "inactive_split") for counts in stats)
    without = "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters
    return torch.cuda.memory_snapshot(include_traces=False) if without and listed <= MOST_BLOCKS else None


def _count(stats: Mapping[str, Any], what: str) -> int:
    return int(stats.get(what, {}).get("all", {}).get("current") or 0)


def memory_use(context: ProbeContext, device: str) -> dict[str, Any]:
    """Return the sizes of the uses of that device's memory, as attributes of the event; empty if that is unknown."""
    breakdown = call(context.breaker("oom"), components, context, device)
    if breakdown is None or not any(breakdown.sizes.values()):
        return {}
    return {**breakdown.sizes, **({"modules": breakdown.modules} if breakdown.modules else {})}


def host_shortage(context: ProbeContext, error: BaseException) -> dict[str, Any] | None:
    """Return the event's attributes if the host's memory ran out; ``None`` for another error.

    That is a ``MemoryError`` (numpy's, too), or the ``RuntimeError`` of torch's CPU allocator, which has no class of its own.
    A kernel that has no memory left rather kills; a limit of the address space, where there is one, is what refuses.
    """
    match = _FAILED_REQUEST.search(str(error)) if type(error) is RuntimeError else None
    if match is None and not isinstance(error, MemoryError):
        return None
    asked = {"requested": int(match[1])} if match is not None and match[1] else {}
    limit = min((limit for _, limit in own_limits()), default=None)
    return {"device": "cpu", **asked, **({} if limit is None else {"limit": limit}), **memory_use(context, "cpu")}


def summary(stats: Mapping[str, Any]) -> dict[str, int]:
    """Return the main figures of the allocator's nested statistics: ``torch.cuda.memory_summary`` in one line."""
    memory = of_stats("", stats, None)
    if memory is None:
        return {}
    allocations = stats.get("allocation", {}).get("all", {}).get("current")
    figures = {
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "active": memory.active,
        "inactive_split": memory.inactive_split,
        "allocations": allocations,
        "alloc_retries": memory.retries,
        "ooms": memory.ooms,
    }
    return {name: value for name, value in figures.items() if value is not None}


def largest_allocations(snapshot: Mapping[str, Any], device: int, package: str) -> list[str]:
    """Return the code locations that hold most of a device's memory, as ``file:line size B in n blocks``.

    ``snapshot`` is from ``torch.cuda.memory._snapshot``; a block's location is its innermost Python frame outside ``package``.
    """
    sizes, blocks = Counter[str](), Counter[str]()
    for segment in snapshot["segments"]:
        for block in segment["blocks"] if segment.get("device", device) == device else ():
            if block["state"] == "active_allocated":
                location = _location(block.get("frames", ()), package)
                sizes[location] += block["size"]
                blocks[location] += 1
    return [f"{location} {size} B in {blocks[location]} blocks" for location, size in sizes.most_common(MAX_LOCATIONS)]


def _location(frames: Iterable[Mapping[str, Any]], package: str) -> str:
    python = [frame for frame in frames if str(frame["filename"]).endswith(".py")]
    outside = next((frame for frame in python if not frame["filename"].startswith(f"{package}/")), None)
    frame = outside or (python[0] if python else None)
    return f"{frame['filename']}:{frame['line']}" if frame else "unknown"


class _Listening:
    """This process's listener, and whether the observer is attached."""

    to: Callable[[int, int, int, int], object] | None = None
    attached = False


def _attach() -> None:
    import torch

    built_in: Any = torch._C
    built_in._cuda_attach_out_of_memory_observer(_observe)
    _Listening.attached = True


def _observe(device: int, requested: int, limit: int, free: int) -> None:
    listener = _Listening.to
    if listener is not None:
        listener(device, requested, limit, free)


ROUNDS = 10
"""Sampler rounds between two readings: one takes some 30 µs a device."""


class DeviceMemoryProbe:
    """Reads ``memory_stats`` once a device is in use."""

    name = "device_memory"

    def __init__(
        self, read_devices: Callable[[], list[DeviceMemory]] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``read_devices`` returns the devices in use, by default torch's."""
        self._read_devices, self._clock = read_devices, clock
        self._oom = OomObserver()

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        import torch  # optional until training begins

        self._context = context
        self._read = self._read_devices or (lambda: used_devices(torch))
        # of a device in use by now, earlier events are not counted; of a later one all are
        self._devices = {memory.device: _Device(context, memory, before=memory) for memory in self._read()}
        self._gauges = GrowthGauges(context, "device")
        self._rounds, self._model = 0, context.recorder.models.changes
        self._oom.install(context)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._oom.remove()

    def sample(self) -> None:
        """Read the allocators, once a second."""
        self._rounds += 1
        if self._rounds >= ROUNDS:
            self._update()

    def observe(self) -> None:
        """Publish all series and evaluate the trends."""
        self._update()
        step, now = self._context.recorder.step, self._clock()
        for device in self._devices.values():
            device.show()
            device.point(step, now)
        self._show_growth()

    def _show_growth(self) -> None:
        self._gauges.show([device.verdict() for device in self._devices.values()])

    def _update(self) -> None:
        self._rounds, recorder, changed = 0, self._context.recorder, False
        if self._model != recorder.models.changes:
            self._model = recorder.models.changes
            for device in self._devices.values():
                device.begin()
        for memory in self._read():
            if memory.device not in self._devices:
                self._devices[memory.device] = _Device(self._context, memory)
            changed = self._devices[memory.device].see(memory, recorder.step, self._clock()) or changed
        if changed:
            self._show_growth()


class _Device:
    """Series of one device. ``before``: its statistics before ``init()``."""

    def __init__(self, context: ProbeContext, memory: DeviceMemory, before: DeviceMemory | None = None) -> None:
        self._context, self._attributes, self._memory = context, {"device": memory.device}, memory
        self._floor, self._fast = MemoryHistory(), FastWindow()
        self._trends: tuple[Growth | None, Growth | None] = (None, None)
        self._peak, self._last_peak = memory.allocated, before.peak if before else None
        self._retries, self._ooms = (before.retries or 0, before.ooms or 0) if before else (0, 0)
        for metric in (catalog.MEMORY_ALLOC_RETRIES, catalog.MEMORY_OOMS):
            context.count(metric, 0, self._attributes)

    def begin(self) -> None:
        """Restart the history: another model is trained from here on."""
        self._floor.begin()
        self._fast.begin()

    def see(self, memory: DeviceMemory, step: int, now: float) -> bool:
        """Record a reading; return whether fast growth has to be reported at once.

        The allocator's peak counts once it has moved: a value from before ``init()`` is not ours, and one that went down was
        reset by the user and reached since.
        """
        self._memory = memory
        self._floor.see(memory.allocated)
        self._peak = max(self._peak, memory.allocated)
        if memory.peak is not None and memory.peak != self._last_peak:
            self._peak, self._last_peak = max(self._peak, memory.peak), memory.peak
        limit, used = memory.limit, memory.allocated
        return limit is not None and self._fast.see(MemoryPoint(step, now, used), limit - used, limit)

    def point(self, step: int, now: float) -> None:
        """Add the readings since the last point to the history."""
        self._trends = self._floor.point(step, now)

    def verdict(self) -> Verdict:
        """Return the growth, and when it will reach the limit."""
        fast, limit = self._fast.growth, self._memory.limit
        left_s = None if limit is None else soonest((*self._trends, fast), limit - self._memory.allocated)
        return fast or self._trends[0], left_s

    def show(self) -> None:
        """Set the gauges and advance the counters."""
        memory = self._memory
        for metric, value in (
            (catalog.MEMORY_DEVICE_ALLOCATED, memory.allocated),
            (catalog.MEMORY_DEVICE_RESERVED, memory.reserved),
            (catalog.MEMORY_DEVICE_ACTIVE, memory.active),
            (catalog.MEMORY_DEVICE_INACTIVE_SPLIT, memory.inactive_split),
            (catalog.MEMORY_DEVICE_PEAK, self._peak),
            (catalog.MEMORY_DEVICE_LIMIT, memory.limit),
        ):
            self._context.set_gauge(metric, value, self._attributes)
        self._retries = self._count(catalog.MEMORY_ALLOC_RETRIES, self._retries, memory.retries)
        self._ooms = self._count(catalog.MEMORY_OOMS, self._ooms, memory.ooms)

    def _count(self, metric: Metric, before: int, now: int | None) -> int:
        """Count the growth of an allocator's counter, which the user may reset (``reset_accumulated_memory_stats``)."""
        if now is None:
            return before
        self._context.count(metric, now - before if now >= before else now, self._attributes)
        return now
