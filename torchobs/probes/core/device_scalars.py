"""Read scalars from a device without synchronising: copy them asynchronously, deliver them once they have arrived.

Arrival is detected by :mod:`torchobs.probes.core.pinned_buffers`. Nothing is read while the stream is being captured into a
graph.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from torchobs.probes.core.pinned_buffers import Buffer, Cuda

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchobs.probes.core.pinned_buffers import Device

_SLOTS = 1024
_SETTLE_POLLS, _SETTLE_POLL_S = 50, 0.001


class _Pending(NamedTuple):
    slot: int
    deliver: Callable[[float], None]


class DeviceValues:
    """Ring of pinned slots for pending values, allocated at first use."""

    def __init__(self, device: Device | None = None) -> None:
        self.cuda = device if device is not None else Cuda()
        """All CUDA calls in the training thread go through it"""
        self._ring: Buffer | None = None
        self._pending: deque[_Pending] = deque()
        self._next = 0
        self.dropped = 0
        self.unread: set[str] = set()
        """Device types that are not read: asynchronous copies are known to work on CUDA only"""

    def take(self, value: torch.Tensor, deliver: Callable[[float], None]) -> bool:
        """Read a one-element tensor: at once on the CPU, else :meth:`poll` calls ``deliver`` later.

        Return True if the value was or will be delivered; False during graph capture, on a device other than CPU and CUDA,
        for a fake tensor, or with 1,024 values pending.
        """
        if not self.cuda.holds(value):
            return False
        if value.device.type == "cpu":
            deliver(float(value.item()))
            return True
        if value.device.type != "cuda":
            if value.device.type != "meta":  # which has no values
                self.unread.add(value.device.type)
            return False
        return self.expect(value, deliver)

    def expect(self, value: torch.Tensor, deliver: Callable[[float], None]) -> bool:
        """Copy the value of a CUDA tensor for delivery later. Return as :meth:`take` does."""
        with self.cuda.on(value.device):
            if self.cuda.capturing():
                return False
            if len(self._pending) >= _SLOTS:
                self.dropped += 1
                return False
            if self._ring is None:
                self._ring = Buffer(self.cuda.empty(_SLOTS))
            slot = self._next
            self._next = (slot + 1) % _SLOTS
            self.cuda.send(value.reshape(1), self._ring.expect(slot, 1))
        self._pending.append(_Pending(slot, deliver))
        return True

    def poll(self) -> None:
        """Deliver the values that have arrived, oldest first, without a CUDA call. One thread at a time, any."""
        pending, ring = self._pending, self._ring
        while pending and ring is not None and ring.arrived(pending[0].slot, 1):
            arrived = pending.popleft()
            arrived.deliver(ring.values(arrived.slot, 1)[0])

    def settle(self, rest: Callable[[float], None] = time.sleep) -> None:
        """Wait up to 50 ms for pending values, so that the last step is complete. Does not synchronise."""
        for _ in range(_SETTLE_POLLS):
            self.poll()
            if not self._pending:
                return
            rest(_SETTLE_POLL_S)
