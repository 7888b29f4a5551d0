"""Read scalars from a device without synchronising: copy them asynchronously, deliver them once they have arrived.

A value is first stored in memory of its device, which is one launch; what was stored in a tenth of a second is then sent in one
copy. Arrival is detected by :mod:`torchobs.tensors.device_reads`. Nothing is read while the stream is being captured into
a graph.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.tensors.device_reads import Buffer, Cuda

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from torchobs.tensors.device_reads import Device

_SLOTS = 1024
EVERY_S = 0.1
"""Time between two copies: the interval at which the sampler thread looks"""
_SETTLE_POLLS, _SETTLE_POLL_S = 50, 0.001


class _Pending(NamedTuple):
    slot: int
    deliver: Callable[[float], None]


class _Ring:
    """Values of one stream of a device: work of another stream has an order of its own, and may be much later."""

    __slots__ = ("device", "landing", "next", "pending", "sent_s", "stored", "stream", "unsent")

    def __init__(self, device: torch.device, stream: Any, stored: torch.Tensor, landing: Buffer) -> None:
        self.device, self.stream, self.stored, self.landing = device, stream, stored, landing
        self.next = 0
        self.sent_s = float("-inf")
        self.unsent: list[_Pending] = []
        """Stored on the device; in consecutive slots"""
        self.pending: deque[_Pending] = deque()
        """On their way"""


class DeviceValues:
    """Rings of slots for pending values, in memory of the device and of the host, allocated at first use."""

    def __init__(
        self, device: Device | None = None, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cuda = device if device is not None else Cuda()
        """All calls of a device in the training thread go through it"""
        self._every_s, self._clock = every_s, clock
        self._rings: dict[tuple[torch.device, Any], _Ring] = {}
        self.dropped = 0
        self.unread: dict[str, str] = {}
        """Why device types are not read: the class of what torch raised"""

    def take(self, value: torch.Tensor, deliver: Callable[[float], None]) -> bool:
        """Read a one-element tensor: at once on the CPU, else :meth:`poll` calls ``deliver`` later.

        Return True if the value was or will be delivered; False during graph capture, on a device that cannot copy, for a fake
        tensor, or with 1,024 values pending.
        """
        if not self.cuda.holds(value):
            return False
        kind = value.device.type
        if kind == "cpu":
            deliver(float(value.item()))
            return True
        if kind == "cuda":
            return self.expect(value, deliver)
        if kind == "meta" or kind in self.unread:  # a meta tensor has no value
            return False
        try:
            return self.expect(value, deliver)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            self.unread[kind] = type(error).__name__
            return False

    def expect(self, value: torch.Tensor, deliver: Callable[[float], None]) -> bool:
        """Have the value of a device's tensor delivered later. Return as :meth:`take` does."""
        device = value.device
        with self.cuda.on(device):
            if self.cuda.capturing():
                return False
            stream = self.cuda.stream(device)
            ring = self._rings.get((device, stream))
            if ring is None:
                stored, landing = self.cuda.numbers(_SLOTS, device), Buffer(self.cuda.empty(_SLOTS, device.type))
                ring = self._rings[device, stream] = _Ring(device, stream, stored, landing)
            if len(ring.pending) + len(ring.unsent) >= _SLOTS:
                self.dropped += 1
                return False
            slot = ring.next
            self.cuda.store(value, ring.stored, slot)
            ring.unsent.append(_Pending(slot, deliver))
            ring.next = (slot + 1) % _SLOTS
            if not ring.next or self._clock() - ring.sent_s >= self._every_s:
                self._send(ring)
        return True

    def _send(self, ring: _Ring) -> None:
        """Send what was stored. The ring's stream is the current one."""
        begin, count = ring.unsent[0].slot, len(ring.unsent)
        self.cuda.send(ring.stored[begin : begin + count], ring.landing.expect(begin, count))
        ring.pending.extend(ring.unsent)
        ring.unsent.clear()
        ring.sent_s = self._clock()

    def send_rest(self) -> None:
        """Send what is stored on devices, at the end, in the thread that ends the session."""
        for ring in self._rings.values():
            if ring.unsent:
                with self.cuda.on(ring.device), self.cuda.within(ring.device, ring.stream):
                    if not self.cuda.capturing():
                        self._send(ring)

    def poll(self) -> None:
        """Deliver the values that have arrived, oldest first, without a call of a device. One thread at a time, any."""
        for ring in list(self._rings.values()):
            pending, landing = ring.pending, ring.landing
            while pending and landing.arrived(pending[0].slot, 1):
                arrived = pending.popleft()
                arrived.deliver(landing.values(arrived.slot, 1)[0])

    def settle(self, rest: Callable[[float], None] = time.sleep) -> None:
        """Wait up to 50 ms for pending values, so that the last step is complete. Does not synchronise."""
        for _ in range(_SETTLE_POLLS):
            self.poll()
            if not any(ring.pending for ring in self._rings.values()):
                return
            rest(_SETTLE_POLL_S)


def is_on_device(number: Any) -> bool:
    """Return True for a tensor that is not on the CPU: ``float`` of it would synchronise."""
    return not getattr(number, "is_cpu", True)
