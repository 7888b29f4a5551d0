"""CUDA events that are used again: to make or to destroy one is a call of the driver, and a destruction may fall anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from torchobs.probes.core.pinned_buffers import Device, DeviceEvent


class EventPool:
    """Events with timing, by device, to which an event is bound when it is first recorded. For the training thread."""

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
