"""Where numbers arrive that a device has still to compute: pinned memory, and how it shows that they are there.

Every word holds a signalling NaN before its copy begins, which no arithmetic yields (IEEE 754-2019, 6.2: the NaN that an
operation delivers is a quiet one): a word that holds something else has arrived. Each word tells for itself, so nothing depends
on the order in which a device writes, and an aligned one of eight bytes is there as a whole or not at all.

So the sampler thread learns of an arrival without any CUDA call, and it must not make one: while a user's thread captures a
CUDA graph in the default mode (``capture_error_mode="global"``), an unsafe call in ANY thread invalidates the capture, and
``cudaEventQuery`` is one (CUDA's documentation of ``cudaThreadExchangeStreamCaptureMode``; torch's own watchdog of NCCL changes
its thread's mode around it). What the sampler may call: the caching allocator's figures (``memory_stats_as_nested_dict``, the
memory fraction: host memory under a lock), properties and count of the devices (cached since CUDA was initialised), and NVML,
which knows nothing of captures. Not events, not ``mem_get_info``, and no release of pinned memory, at which torch records
events: hence buffers that are lent and come back. What needs such a call is done by the training thread, which knows whether
it is capturing.
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
    """A point in a device's work."""

    def query(self) -> bool:
        """Return True if the device has come to it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return how long the device took from here to ``end``, another one, in ms."""


class Device(Protocol):
    """What is asked of CUDA, in the training thread: everything that the probes do there goes through here."""

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        """Make a device the current one, whose current stream is meant from here on."""

    def capturing(self) -> bool:
        """Return True if the current stream is being captured into a graph. Never the first to touch CUDA."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if there are numbers in a tensor: a fake one has a shape and a device, and no more."""

    def event(self) -> DeviceEvent:
        """Record one, with its time, on the current stream."""

    def empty(self, size: int) -> torch.Tensor:
        """Return so many float64 of pinned memory."""

    def send(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """Copy to float64 without waiting. The values' device is the current one."""


class Cuda:
    """The real one."""

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
        """See :class:`Device`. Whole trainings are run on fakes, to estimate what memory they will need."""
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

        The CPU has to be named: ``set_default_device("cuda")`` applies to us as well, and only the CPU's memory can be pinned.
        And memory made in ``inference_mode`` could not be written to outside of it.
        """
        import torch

        with torch.inference_mode(mode=False):
            return torch.empty(size, dtype=torch.float64, device="cpu", pin_memory=True)

    def send(self, values: torch.Tensor, into: torch.Tensor) -> None:
        """See :class:`Device`. Converted on the device: a copy that has to convert goes through pageable memory, and waits."""
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
        """Return the words that a copy may be sent to."""
        self._bits[begin : begin + count].fill_(UNSET)
        return self._numbers[begin : begin + count]

    def arrived(self, begin: int, count: int) -> bool:
        """Return True if all of them are there. From any thread."""
        return UNSET not in self._bits[begin : begin + count].tolist()

    def values(self, begin: int, count: int) -> list[float]:
        """Return them."""
        found: list[float] = self._numbers[begin : begin + count].tolist()
        return found


class PendingCopy:
    """Some numbers on their way."""

    __slots__ = ("_buffer", "_count", "_give")

    def __init__(self, buffer: Buffer, count: int, give: Callable[[tuple[Buffer, int]], None]) -> None:
        self._buffer: Buffer | None = buffer
        self._count, self._give = count, give

    def ready(self) -> bool:
        """Return True if they are there."""
        return self._buffer is not None and self._buffer.arrived(0, self._count)

    def take(self) -> list[float]:
        """Return them, once, when they are there; the memory goes back."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return []
        found = buffer.values(0, self._count)
        self._give((buffer, 0))
        return found

    def __del__(self) -> None:
        """Nobody wants them any more, and they may still be on their way."""
        if self._buffer is not None:
            self._give((self._buffer, self._count))


class PendingCopies:
    """Lends buffers; one for all of a session. ``send`` is for the training thread, what comes back comes from any."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device if device is not None else Cuda()
        self._back: deque[tuple[Buffer, int]] = deque()
        self._free: dict[int, list[Buffer]] = {}

    def send(self, values: torch.Tensor) -> PendingCopy:
        """Copy a vector of the current device without waiting."""
        self._collect()
        count = len(values)
        words = max(_LEAST, 1 << (count - 1).bit_length())
        free = self._free.setdefault(words, [])
        buffer = free.pop() if free else Buffer(self._device.empty(words))
        self._device.send(values, buffer.expect(0, count))
        return PendingCopy(buffer, count, self._back.append)

    def _collect(self) -> None:
        """Take back what is free; a copy that is still on its way would land in the next one's words."""
        for _ in range(len(self._back)):
            buffer, awaited = self._back.popleft()
            if awaited and not buffer.arrived(0, awaited):
                self._back.append((buffer, awaited))
            else:
                self._free.setdefault(buffer.words, []).append(buffer)
