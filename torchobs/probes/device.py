"""Scalars that a device has still to compute: copied without waiting, delivered when they have arrived.

A copy goes into a preallocated pinned ring with ``non_blocking``, an event behind it; the value is read once ``query()`` says
so. Nothing here ever synchronises, and nothing is taken while the stream is being captured into a graph.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_SLOTS = 1024


class _Pending(NamedTuple):
    event: Any
    slot: int
    deliver: Callable[[float], None]


class DeviceValues:
    """The pinned ring, made at first use."""

    def __init__(self) -> None:
        self._ring: torch.Tensor | None = None
        self._pending: deque[_Pending] = deque()
        self._next = 0
        self.dropped = 0

    def take(self, value: torch.Tensor, deliver: Callable[[float], None]) -> bool:
        """Read a one-element tensor: at once on the CPU, else ``deliver`` is called later, by :meth:`poll`.

        Returns whether the value was or will be delivered; not during graph capture, on a device without events, or with
        1,024 values under way.
        """
        if value.device.type == "cpu":
            deliver(float(value.item()))
            return True
        if value.device.type != "cuda":
            return False
        return self._take_cuda(value, deliver)

    def _take_cuda(self, value: torch.Tensor, deliver: Callable[[float], None]) -> bool:
        import torch  # torch is optional until training begins

        if torch.cuda.is_current_stream_capturing():
            return False
        if len(self._pending) >= _SLOTS:
            self.dropped += 1
            return False
        if self._ring is None:
            self._ring = torch.empty(_SLOTS, dtype=torch.float64, pin_memory=True)
        slot = self._next
        self._next = (slot + 1) % _SLOTS
        with torch.no_grad(), torch.cuda.device(value.device):
            # converted on the device: a copy that has to convert goes through pageable memory, and waits
            self._ring[slot : slot + 1].copy_(value.detach().reshape(1).double(), non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
            event.record()
        self._pending.append(_Pending(event, slot, deliver))
        return True

    def poll(self) -> None:
        """Deliver what has arrived, oldest first. Any one thread at a time."""
        pending, ring = self._pending, self._ring
        while pending and ring is not None and pending[0].event.query():
            arrived = pending.popleft()
            arrived.deliver(float(ring[arrived.slot].item()))
