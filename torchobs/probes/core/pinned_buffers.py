"""Pinned memory for asynchronous copies from a device, and detection of their arrival without CUDA calls.

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

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch

UNSET = 0x7FF4_B5E7_0B5E_7ED1
_LEAST = 64


class DeviceEvent(Protocol):
    """A recorded point in a stream's work."""

    def query(self) -> bool:
        """Return True if the device has reached it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the device time from this event to ``end``, in ms."""


class Device(Protocol):
    """All CUDA calls that probes make; for the training thread."""

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which ``device`` and its current stream are the current ones."""

    def capturing(self) -> bool:
        """Return True if the current stream is being captured into a graph. Does not initialise CUDA."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor has data; a fake tensor has a shape and a device only."""

    def event(self) -> DeviceEvent:
        """Record an event with timing on the current stream."""

    def empty(self, size: int) -> torch.Tensor:
        """Return an uninitialised float64 vector of ``size`` elements in pinned memory."""

    def send(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Copy asynchronously, converted to float64. The values' device is the current one."""


class Cuda:
    """:class:`Device` by ``torch.cuda``."""

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """See :class:`Device`."""
        import torch  # torch is optional until training begins

        there: AbstractContextManager[object] = torch.cuda.device(device)
        return there

    def capturing(self) -> bool:
        """See :class:`Device`."""
        import torch

        cuda: Any = torch.cuda  # torch has no types for it
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def holds(self, tensor: torch.Tensor) -> bool:
        """See :class:`Device`. Whole trainings are run on fake tensors to estimate their memory use."""
        import torch

        return type(tensor) is torch.Tensor or getattr(tensor, "fake_mode", None) is None

    def event(self) -> DeviceEvent:
        """See :class:`Device`."""
        import torch

        made: Any = torch.cuda.Event
        event = made(enable_timing=True)
        event.record()
        found: DeviceEvent = event
        return found

    def empty(self, size: int) -> torch.Tensor:
        """See :class:`Device`.

        The device is explicit because ``set_default_device("cuda")`` applies here, too, and only CPU memory can be pinned.
        A tensor made in ``inference_mode`` could not be written to outside of it.
        """
        import torch

        with torch.inference_mode(mode=False):
            return torch.empty(size, dtype=torch.float64, device="cpu", pin_memory=True)

    def send(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """See :class:`Device`. Converted on the device: a copy that converts goes through pageable memory and blocks."""
        import torch

        with torch.no_grad():
            into.copy_(values.detach().double(), non_blocking=True)


class Buffer:
    """Words of pinned memory."""

    __slots__ = ("_bits", "_numbers", "words")

    def __init__(self, numbers: torch.Tensor) -> None:
        import torch

        self._numbers, self._bits, self.words = numbers, numbers.view(torch.int64), len(numbers)

    def expect(self, begin: int, count: int) -> torch.Tensor:
        """Mark words as not arrived and return them, as the destination of a copy."""
        self._bits[begin : begin + count].fill_(UNSET)
        return self._numbers[begin : begin + count]

    def arrived(self, begin: int, count: int) -> bool:
        """Return True if all these words have arrived. From any thread."""
        return UNSET not in self._bits[begin : begin + count].tolist()

    def values(self, begin: int, count: int) -> list[float]:
        """Return the words as numbers."""
        found: list[float] = self._numbers[begin : begin + count].tolist()
        return found


class PendingCopy:
    """Numbers that are being copied into a pooled buffer."""

    __slots__ = ("_buffer", "_count", "_release")

    def __init__(self, buffer: Buffer, count: int, release: Callable[[tuple[Buffer, int]], None]) -> None:
        self._buffer: Buffer | None = buffer
        self._count, self._release = count, release

    def ready(self) -> bool:
        """Return True if all numbers have arrived."""
        return self._buffer is not None and self._buffer.arrived(0, self._count)

    def take(self) -> list[float]:
        """Return the numbers, which must have arrived, and release the buffer; the second call returns nothing."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return []
        found = buffer.values(0, self._count)
        self._release((buffer, 0))
        return found

    def __del__(self) -> None:
        """Release the buffer; its copy may still be in progress."""
        if self._buffer is not None:
            self._release((self._buffer, self._count))


class PendingCopies:
    """Pool of buffers, one per session. ``send`` is for the training thread; any thread releases buffers."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device if device is not None else Cuda()
        self._returned: deque[tuple[Buffer, int]] = deque()
        self._free: dict[int, list[Buffer]] = {}

    def send(self, values: torch.Tensor) -> PendingCopy:
        """Start to copy a vector of the current device."""
        self._collect()
        count = len(values)
        words = max(_LEAST, 1 << (count - 1).bit_length())
        free = self._free.setdefault(words, [])
        buffer = free.pop() if free else Buffer(self._device.empty(words))
        self._device.send(values, buffer.expect(0, count))
        return PendingCopy(buffer, count, self._returned.append)

    def _collect(self) -> None:
        """Reclaim released buffers, except those with a copy in progress, which would overwrite the next one's words."""
        for _ in range(len(self._returned)):
            buffer, awaited = self._returned.popleft()
            if awaited and not buffer.arrived(0, awaited):
                self._returned.append((buffer, awaited))
            else:
                self._free.setdefault(buffer.words, []).append(buffer)
