"""Scalars that a device has still to compute: copied without waiting, delivered when they have arrived (``landing``).

Nothing here ever synchronises, and nothing is taken while the stream is being captured into a graph.
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
_RESTS, _REST_S = 50, 0.001


class _Pending(NamedTuple):
    slot: int
    deliver: Callable[[float], None]


class DeviceValues:
    """The pinned ring, made at first use."""

    def __init__(self, device: Device | None = None) -> None:
        self.cuda = device if device is not None else Cuda()
        """Everything that is asked of CUDA in the training thread goes there"""
        self._ring: Buffer | None = None
        self._pending: deque[_Pending] = deque()
        self._next = 0
        self.dropped = 0
        self.unread: set[str] = set()
        """Kinds of device of which nothing is read: copies that nobody waits for are known to work on CUDA's alone"""

    def take(self, value: torch.Tensor, deliver: Callable[[float], None]) -> bool:
        """Read a one-element tensor: at once on the CPU, else ``deliver`` is called later, by :meth:`poll`.

        Returns whether the value was or will be delivered; not during graph capture, on a device other than CUDA's, of
        a fake tensor, or with 1,024 values under way.
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
        """Have the value of a device's tensor delivered later. As :meth:`take`."""
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
        """Deliver what has arrived, oldest first, without a CUDA call. Any one thread at a time."""
        pending, ring = self._pending, self._ring
        while pending and ring is not None and ring.arrived(pending[0].slot, 1):
            arrived = pending.popleft()
            arrived.deliver(ring.values(arrived.slot, 1)[0])

    def settle(self, rest: Callable[[float], None] = time.sleep) -> None:
        """Give what is under way 50 ms to arrive, for a program that ends has a last step. No device is waited for."""
        for _ in range(_RESTS):
            self.poll()
            if not self._pending:
                return
            rest(_REST_S)
