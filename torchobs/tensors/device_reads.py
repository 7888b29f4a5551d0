"""Numbers from a device without waiting: asynchronous copies into host memory that show their arrival without a device call.

A single value is first stored in memory of its device, which is one launch; what was stored in a tenth of a second is then sent
in one copy. Nothing is read while the stream is being captured into a graph.

On CUDA and XPU it is pinned, and allocated at the first step: to pin memory later would synchronise with the device, of which
torch's sync-debug mode knows nothing. Other devices (Metal's) copy into ordinary memory.

Every word holds a signalling NaN before its copy begins, which no arithmetic yields (IEEE 754-2019, 6.2: the NaN that an
operation delivers is a quiet one): a word that holds something else has arrived. Each word is checked by itself, so nothing
depends on the order in which a device writes, and an aligned write of eight bytes is atomic.

So the sampler thread detects an arrival without any CUDA call, and it must not make one: while a user's thread captures a
CUDA graph in the default mode (``capture_error_mode="global"``), an unsafe call in ANY thread invalidates the capture, and
``cudaEventQuery`` is one (CUDA's documentation of ``cudaThreadExchangeStreamCaptureMode``; torch's own watchdog of NCCL changes
its thread's mode around it). What the sampler may call: the caching allocator's figures (``memory_stats_as_nested_dict``, the
memory fraction: host memory under a lock), properties and count of the devices (cached since CUDA was initialised), and NVML,
which knows nothing of captures. Not events, not ``mem_get_info``, and no release of pinned memory, at which torch records
events: hence the pool of buffers. What needs such a call is done by the training thread, which knows whether it is capturing.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

UNSET = 0x7FF4_B5E7_0B5E_7ED1
UNSET_32 = 0x7FA0_B5E7
"""The same signalling NaN in float32"""
_LEAST = 64
_MOST_AT_ONCE, _FEWEST_AT_ONCE, _WORDS_AT_ONCE = 64, 4, 8192
"""Buffers that are allocated together: more are needed once the device is more measurements behind"""
_MOST_TIMED = 64
"""Most pending device timings that are kept, the last ones"""
PINNED = frozenset({"cuda", "xpu"})
"""Device types that copy asynchronously into pinned memory only"""


class DeviceEvent(Protocol):
    """A recorded point in a stream's work."""

    def query(self) -> bool:
        """Return whether the device has reached it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the device time from this event to ``end``, in ms."""


class Device:
    """All calls of a device that probes make, for the training thread: by ``torch.cuda``, or another type's module of torch."""

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which ``device`` and its current stream are the current ones."""
        import torch  # torch is optional until training begins

        there: Any = torch.cuda.device if device.type == "cuda" else _attribute_of(device, "device")
        context: AbstractContextManager[object] = there(device) if there is not None else nullcontext()
        return context

    def stream(self, device: torch.device) -> Any:
        """Return the device's current stream; streams can be compared. ``None`` where there are none."""
        current = _attribute_of(device, "current_stream")
        return current() if current is not None else None

    def within(self, device: torch.device, stream: Any) -> AbstractContextManager[object]:
        """Return a context in which that stream of the device, of :meth:`stream`, is the current one."""
        there: Any = _attribute_of(device, "stream")
        context: AbstractContextManager[object] = there(stream) if there is not None and stream is not None else nullcontext()
        return context

    def capturing(self) -> bool:
        """Return whether the current CUDA stream is being captured into a graph. Does not initialise CUDA."""
        import torch

        cuda: Any = torch.cuda  # torch has no types for it
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor has data; a fake tensor has a shape and a device only.

        Whole trainings are run on fake tensors to estimate their memory use.
        """
        import torch

        return type(tensor) is torch.Tensor or getattr(tensor, "fake_mode", None) is None

    def event(self, again: Any = None) -> DeviceEvent:
        """Record a CUDA event with timing on the current stream: ``again`` one of the same device, or a new one."""
        import torch

        event_class: Any = torch.cuda.Event
        event = event_class(enable_timing=True) if again is None else again
        event.record()
        recorded: DeviceEvent = event
        return recorded

    def empty(self, size: int, kind: str) -> torch.Tensor:
        """Return an uninitialised vector in host memory, for copies from that type of device, of the type :func:`wide`.

        The device is explicit because ``set_default_device("cuda")`` applies here, too, and only CPU memory can be pinned.
        A tensor made in ``inference_mode`` could not be written to outside of it.
        """
        import torch

        with torch.inference_mode(mode=False):
            return torch.empty(size, dtype=wide(torch, kind), device="cpu", pin_memory=kind in PINNED)

    def numbers(self, size: int, device: torch.device) -> torch.Tensor:
        """Return an uninitialised vector on the device, of the same type as :meth:`empty` returns."""
        import torch

        with torch.inference_mode(mode=False):
            return torch.empty(size, dtype=wide(torch, device.type), device=device)

    def store(self, value: torch.Tensor, numbers: torch.Tensor, slot: int) -> None:
        """Copy a one-element tensor into a slot of :meth:`numbers`, on the current device: one launch, which converts."""
        numbers[slot].copy_(value.detach().reshape(()), non_blocking=True)

    def send(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Copy asynchronously from the current device, converted to the type of ``into``.

        Converted on the device: a copy that converts goes through pageable memory and blocks.
        """
        import torch

        with torch.no_grad():
            into.copy_(values.detach().to(into.dtype), non_blocking=True)


def wide(torch: Any, kind: str) -> Any:
    """Return the type in which a type of device computes norms: float64, which Metal and some of Intel's GPUs lack."""
    return torch.float64 if kind in {"cuda", "cpu"} else torch.float32


def _attribute_of(device: torch.device, name: str) -> Any:
    """Return the attribute of that name in torch's module for the device type; ``None`` if there is none."""
    import torch

    return getattr(getattr(torch, device.type, None), name, None)


class Buffer:
    """Words of host memory."""

    __slots__ = ("_bits", "_numbers", "_unset", "words")

    def __init__(self, numbers: torch.Tensor) -> None:
        import torch

        self._numbers, self.words, double = numbers, len(numbers), numbers.dtype is torch.float64
        self._bits = numbers.view(torch.int64 if double else torch.int32)
        self._unset = UNSET if double else UNSET_32

    def expect(self, begin: int, count: int) -> torch.Tensor:
        """Mark words as not arrived and return them, as the destination of a copy."""
        self._bits[begin : begin + count].fill_(self._unset)
        return self._numbers[begin : begin + count]

    def arrived(self, begin: int, count: int) -> bool:
        """Return whether all these words have arrived. From any thread."""
        return self._unset not in self._bits[begin : begin + count].tolist()

    def values(self, begin: int, count: int) -> list[float]:
        """Return the words as numbers."""
        numbers: list[float] = self._numbers[begin : begin + count].tolist()
        return numbers


class PendingCopy:
    """Numbers that are being copied into a pooled buffer."""

    __slots__ = ("_buffer", "_count", "_release")

    def __init__(self, buffer: Buffer, count: int, release: Callable[[tuple[Buffer, int]], None]) -> None:
        self._buffer: Buffer | None = buffer
        self._count, self._release = count, release

    def ready(self) -> bool:
        """Return whether all numbers have arrived."""
        return self._buffer is not None and self._buffer.arrived(0, self._count)

    def has_landed(self) -> bool:
        """Return whether the last number has arrived, taken or not: what the device did before the copy is done."""
        return self._buffer is None or self._buffer.arrived(self._count - 1, 1)

    def take(self) -> list[float]:
        """Return the numbers, which must have arrived, and release the buffer; the second call returns nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return []
        numbers = buffer.values(0, self._count)
        self._release((buffer, 0))
        return numbers

    def __del__(self) -> None:
        """Release the buffer; its copy may still be in progress."""
        if self._buffer is not None:
            self._release((self._buffer, self._count))


class PendingCopies:
    """Pool of buffers, one per session. ``send`` is for the training thread; any thread releases buffers."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device if device is not None else Device()
        self._returned: deque[tuple[tuple[str, int], Buffer, int]] = deque()
        self._free: dict[tuple[str, int], list[Buffer]] = {}
        self._allocated: dict[tuple[str, int], int] = {}

    def send(self, values: torch.Tensor) -> PendingCopy:
        """Start to copy a vector of the current device."""
        self._collect()
        count = len(values)
        key = values.device.type, max(_LEAST, 1 << (count - 1).bit_length())
        free = self._free.setdefault(key, [])
        if not free:
            self._allocate(key)
        buffer = free.pop()
        self._device.send(values, buffer.expect(0, count))
        return PendingCopy(buffer, count, lambda released: self._returned.append((key, *released)))

    def _allocate(self, key: tuple[str, int]) -> None:
        """Allocate buffers of a size, and as many again whenever all are in use."""
        (kind, words), allocated = key, self._allocated.get(key, 0)
        count = allocated or min(_MOST_AT_ONCE, max(_FEWEST_AT_ONCE, _WORDS_AT_ONCE // words))
        together = self._device.empty(count * words, kind)
        self._free[key] += [Buffer(together[words * index : words * (index + 1)]) for index in range(count)]
        self._allocated[key] = allocated + count

    def _collect(self) -> None:
        """Reclaim released buffers, except those with a copy in progress, which would overwrite the next one's words."""
        for _ in range(len(self._returned)):
            key, buffer, awaited = self._returned.popleft()
            if awaited and not buffer.arrived(0, awaited):
                self._returned.append((key, buffer, awaited))
            else:
                self._free.setdefault(key, []).append(buffer)


class EventPool:
    """Events with timing, by device, to which an event is bound when it is first recorded. For the training thread.

    They are used again: to make or to destroy one is a call of the driver, and a destruction may fall anywhere.
    """

    __slots__ = ("_cuda", "_free")

    def __init__(self, cuda: Device) -> None:
        self._cuda = cuda
        self._free: dict[torch.device, list[DeviceEvent]] = {}

    def record(self, device: torch.device) -> DeviceEvent:
        """Record an event on the current stream of that device, which is the current one."""
        free = self._free.get(device)
        return self._cuda.event(free.pop()) if free else self._cuda.event()

    def release(self, device: torch.device, *events: DeviceEvent) -> None:
        """Take events of that device back."""
        self._free.setdefault(device, []).extend(events)


_SLOTS, _MOST_COPIES = _LEAST, _MOST_AT_ONCE
"""Values in a copy, and copies on their way: the pool has buffers for those from the first step on, and pins no more memory"""
EVERY_S = 0.1
"""Time between two copies: the interval at which the sampler thread looks"""
_SETTLE_POLLS, _SETTLE_POLL_S = 50, 0.001


class _Values:
    """Values of one stream of a device: work of another stream has an order of its own, and may be much later."""

    __slots__ = ("device", "next", "pending", "sent_s", "stored", "stream", "unsent")

    def __init__(self, device: torch.device, stream: Any, stored: torch.Tensor) -> None:
        self.device, self.stream, self.stored = device, stream, stored
        self.next = 0
        self.sent_s = float("-inf")
        self.unsent: list[Callable[[float], None]] = []
        """Receivers of the values stored on the device in the slots before ``next``"""
        self.pending: deque[tuple[PendingCopy, list[Callable[[float], None]]]] = deque()
        """Copies on their way"""


class DeviceValues:
    """Single values, by stream: slots in memory of the device, allocated at first use, and copies of these."""

    def __init__(
        self, device: Device | None = None, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cuda = device if device is not None else Device()
        """All calls of a device in the training thread go through it"""
        self._every_s, self._clock = every_s, clock
        self._copies = PendingCopies(self.cuda)
        self._streams: dict[tuple[torch.device, Any], _Values] = {}
        self.dropped = 0
        self.unread: dict[str, str] = {}
        """Why device types are not read: the class of torch's error"""

    def take(self, value: torch.Tensor, deliver: Callable[[float], None]) -> bool:
        """Read a one-element tensor: at once on the CPU, else :meth:`poll` calls ``deliver`` later.

        Return whether the value was or will be delivered; False during graph capture, on a device that cannot copy, for a fake
        tensor, or with too many copies pending.
        """
        if not self.cuda.holds(value):
            return False
        kind = value.device.type
        if kind == "cpu":
            deliver(float(value.item()))
            return True
        if kind == "meta" or kind in self.unread:  # a meta tensor has no value
            return False
        try:
            return self.expect(value, deliver)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if kind == "cuda":
                raise
            self.unread[kind] = type(error).__name__
            return False

    def expect(self, value: torch.Tensor, deliver: Callable[[float], None]) -> bool:
        """Have the value of a device's tensor delivered later. Return as :meth:`take` does."""
        device = value.device
        with self.cuda.on(device):
            if self.cuda.capturing():
                return False
            key = device, self.cuda.stream(device)
            values = self._streams.get(key)
            if values is None:
                values = self._streams[key] = _Values(*key, self.cuda.numbers(_SLOTS, device))
            if len(values.pending) >= _MOST_COPIES:
                self.dropped += 1
                return False
            self.cuda.store(value, values.stored, values.next)
            values.unsent.append(deliver)
            values.next += 1
            if values.next == _SLOTS or self._clock() - values.sent_s >= self._every_s:
                self._send(values)
        return True

    def _send(self, values: _Values) -> None:
        """Send the stored values. Their stream is the current one."""
        stored = values.stored[values.next - len(values.unsent) : values.next]
        values.pending.append((self._copies.send(stored), values.unsent))
        values.next, values.unsent, values.sent_s = values.next % _SLOTS, [], self._clock()

    def send_rest(self) -> None:
        """Send all values stored on devices, in the thread that ends the session."""
        for values in self._streams.values():
            if values.unsent:
                with self.cuda.on(values.device), self.cuda.within(values.device, values.stream):
                    if not self.cuda.capturing():
                        self._send(values)

    def poll(self) -> None:
        """Deliver the values that have arrived, oldest first, without a call of a device. One thread at a time, any."""
        for values in list(self._streams.values()):
            while values.pending and values.pending[0][0].ready():
                copy, delivers = values.pending.popleft()
                for deliver, number in zip(delivers, copy.take(), strict=True):
                    deliver(number)

    def settle(self, rest: Callable[[float], None] = time.sleep) -> None:
        """Wait up to 50 ms for pending values, so that the last step is complete. Does not synchronise."""
        for _ in range(_SETTLE_POLLS):
            self.poll()
            if not any(values.pending for values in self._streams.values()):
                return
            rest(_SETTLE_POLL_S)


def is_on_device(number: Any) -> bool:
    """Return whether it is a tensor that is not on the CPU: ``float`` of it would synchronise."""
    return not getattr(number, "is_cpu", True)


class Timing(NamedTuple):
    """CUDA events around a device's part of a measurement; queried in the training thread only."""

    device: torch.device
    begun: DeviceEvent
    done: DeviceEvent
    numbers: PendingCopy
    """The copy that was sent after it"""


class Devices:
    """Resources for measuring on devices: the pool of copies, and device timings."""

    __slots__ = ("copies", "cuda", "events", "timings")

    def __init__(self, cuda: Device) -> None:
        self.cuda, self.copies = cuda, PendingCopies(cuda)
        self.timings: deque[Timing] = deque()
        self.events = EventPool(cuda)

    def time(self, timing: Timing) -> None:
        """Keep a timing until :meth:`take_ns`; if there are too many, the last ones."""
        if len(self.timings) >= _MOST_TIMED:
            oldest = self.timings.popleft()
            self.events.release(oldest.device, oldest.begun, oldest.done)
        self.timings.append(timing)

    def take_ns(self) -> int:
        """Return the device time in ns of work finished since the last call. In the training thread; never waits.

        An event is queried once what was sent after it has landed. ``query`` of one that is not reached clears the error of
        an earlier launch, which may not have been seen yet (``cudaGetLastError`` in ``CUDAEvent.h``).
        """
        spent_ns = 0
        if self.timings and not self.cuda.capturing():
            while self.timings and self.timings[0].numbers.has_landed() and self.timings[0].done.query():
                device, begun, done, _ = self.timings.popleft()
                spent_ns += int(begun.elapsed_time(done) * 1e6)
                self.events.release(device, begun, done)
        return spent_ns
