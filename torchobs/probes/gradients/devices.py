"""What measurements on devices share: the pools of copies and of events, and batches of what is sent together."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.tensors.device_reads import EventPool, PendingCopies

if TYPE_CHECKING:
    import torch

    from torchobs.tensors.device_reads import Device, DeviceEvent, PendingCopy

_MOST_TIMED = 64
"""Pending device timings that are kept; of a device that is further behind, the last ones"""


class Timing(NamedTuple):
    """CUDA events around a device's part of a measurement; queried in the training thread only (``pinned_buffers``)."""

    device: torch.device
    begun: DeviceEvent
    done: DeviceEvent
    numbers: PendingCopy
    """What was sent after it"""
    share: float
    """The part of all that was measured which was timed"""


class Devices:
    """Resources for measuring on devices: the pool of copies, and device timings."""

    __slots__ = ("_largest", "batched_in", "batches", "batching", "copies", "cuda", "events", "timings")

    def __init__(self, cuda: Device) -> None:
        self.cuda, self.copies = cuda, PendingCopies(cuda)
        self.timings: deque[Timing] = deque()
        self.events = EventPool(cuda)
        self.batches: dict[torch.device, Batch] = {}
        """Norms of a step's optimizers that are not sent yet"""
        self.batching = False
        """Whether what is measured on a device is not sent before :meth:`flush`"""
        self.batched_in = -1
        """The step of those"""
        self._largest: dict[torch.device, int] = {}
        """Elements of the largest measurement in the last batch"""

    def time(self, timing: Timing) -> None:
        """Keep a timing until :meth:`take_ns`; of too many, the last ones."""
        if len(self.timings) >= _MOST_TIMED:
            oldest = self.timings.popleft()
            self.events.release(oldest.device, oldest.begun, oldest.done)
        self.timings.append(timing)

    def take_ns(self) -> int:
        """Return the device time in ns of work finished since the last call. In the training thread; never waits.

        An event is queried once what was sent before it has landed. ``query`` of one that is not reached clears the error of
        an earlier launch, which nobody may have seen yet (``cudaGetLastError`` in ``CUDAEvent.h``).
        """
        spent_ns = 0
        if self.timings and not self.cuda.capturing():
            while self.timings and self.timings[0].numbers.has_landed() and self.timings[0].done.query():
                device, begun, done, _, share = self.timings.popleft()
                spent_ns += int(begun.elapsed_time(done) * 1e6 / share)
                self.events.release(device, begun, done)
        return spent_ns

    def batch(self, device: torch.device) -> Batch:
        """Return the batch of the device, which is the current one, for its current stream."""
        stream, batch = self.cuda.stream(device), self.batches.get(device)
        if batch is not None and batch.stream != stream:
            with self.cuda.within(device, batch.stream):  # elsewhere it would be read before it is computed
                self._send(batch)
            batch = None
        if batch is None:
            batch = self.batches[device] = Batch(device, stream, self._largest.get(device, 0))
        return batch

    def of_step(self, step: int, *, following: bool) -> None:
        """Note the step that is measured next. ``following``: other optimizers of the same backward pass follow.

        What was measured of a step in which not all of them stepped is sent first.
        """
        self.batching = following
        if self.batched_in != step:
            self.batched_in = step
            if self.batches:
                self.flush()

    def flush(self) -> None:
        """Send what was measured of several optimizers, in one copy for each device. In the training thread.

        Not within a capture, which may be on another stream than the batch: torch's allocator would not know of it. The batch
        is kept until after it, since the norms of the steps that follow are written after those of its step.
        """
        for device, batch in list(self.batches.items()):
            with self.cuda.on(device):
                if self.cuda.capturing():
                    continue
                with self.cuda.within(device, batch.stream):
                    self._send(batch)
            del self.batches[device]

    def _send(self, batch: Batch) -> None:
        batch.copy = self.copies.send(batch.joined())
        self._largest[batch.device] = batch.largest
        if batch.timed is not None:
            begun, done, elements = batch.timed
            share = elements / batch.elements if batch.elements else 1.0
            self.time(Timing(batch.device, begun, done, batch.copy, share))


class Batch:
    """Numbers of several optimizers of one step, on one stream of a device: they step within the backward pass, by hundreds.

    Only the largest one is timed, which in a step's first batch is not known.
    """

    __slots__ = ("_count", "_values", "_vectors", "copy", "device", "elements", "expected", "largest", "stream", "timed")

    def __init__(self, device: torch.device, stream: Any, expected: int) -> None:
        self.device, self.stream, self.expected = device, stream, expected
        self._vectors: list[Any] = []
        self._count = self.elements = self.largest = 0
        self.timed: tuple[DeviceEvent, DeviceEvent, int] | None = None
        self.copy: PendingCopy | None = None
        self._values: list[float] = []

    def add(self, vector: Any) -> BatchPart:
        """Add a vector; return its part of what will arrive."""
        self._vectors.append(vector)
        self._count += len(vector)
        return BatchPart(self, self._count - len(vector), self._count)

    def joined(self) -> Any:
        """Return all vectors as one, and let go of them."""
        import torch  # torch is optional until training begins

        vectors, self._vectors = self._vectors, []
        return torch.cat(vectors)

    def ready(self) -> bool:
        """Return True if all numbers have arrived."""
        return bool(self._values) or (self.copy is not None and self.copy.ready())

    def values(self) -> list[float]:
        """Return all numbers, which must have arrived."""
        if not self._values and self.copy is not None:
            self._values = self.copy.take()
        return self._values


class BatchPart(NamedTuple):
    """Numbers of one optimizer in a batch, on their way as a :class:`~torchobs.tensors.device_reads.PendingCopy`."""

    batch: Batch
    begin: int
    end: int

    def ready(self) -> bool:
        """Return True if all have arrived."""
        return self.batch.ready()

    def take(self) -> list[float]:
        """Return them, which must have arrived."""
        return self.batch.values()[self.begin : self.end]
