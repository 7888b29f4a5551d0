"""The device allocators: what is in use, what is held, peaks that nobody else's reset takes away, growth, and the end of it.

The sampler thread asks once a second for the floor whose trend is judged (``growth``), and shows everything every ten.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.growth import FastWindow, MemoryPoint
from torchobs.probes.memory.allocators import used_devices
from torchobs.probes.memory.growth import Floor, GrowthGauges, Judged
from torchobs.probes.memory.oom import OomObserver

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.detect.growth import Growth
    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.memory.allocators import DeviceMemory

ROUNDS = 10
"""Rounds of the sampler from look to look: one takes some 30 µs a device."""


class DeviceMemoryProbe:
    """Reads ``memory_stats``, once a device is in use."""

    name = "device_memory"

    def __init__(
        self, look: Callable[[], list[DeviceMemory]] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``look`` returns the devices in use, by default torch's."""
        self._look_at, self._clock = look, clock
        self._oom = OomObserver()

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        import torch  # optional until training begins

        self._context = context
        self._look = self._look_at or (lambda: used_devices(torch))
        # what a device in use by now has gone through was before our time; all of one that comes later is in it
        self._devices = {memory.device: _Device(context, memory, before=memory) for memory in self._look()}
        self._gauges = GrowthGauges(context, "device")
        self._rounds, self._model = 0, context.recorder.models.changes
        self._oom.install(context)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._oom.remove()

    def sample(self) -> None:
        """Look at what is in use, once a second."""
        self._rounds += 1
        if self._rounds >= ROUNDS:
            self._see()

    def observe(self) -> None:
        """Show everything, and judge the trends."""
        self._see()
        step, now = self._context.recorder.step, self._clock()
        for device in self._devices.values():
            device.show()
            device.point(step, now)
        self._show_growth()

    def _show_growth(self) -> None:
        self._gauges.show([device.judge() for device in self._devices.values()])

    def _see(self) -> None:
        self._rounds, recorder, changed = 0, self._context.recorder, False
        if self._model != recorder.models.changes:
            self._model = recorder.models.changes
            for device in self._devices.values():
                device.begin()
        for memory in self._look():
            if memory.device not in self._devices:
                self._devices[memory.device] = _Device(self._context, memory)
            changed = self._devices[memory.device].see(memory, recorder.step, self._clock()) or changed
        if changed:
            self._show_growth()


class _Device:
    """One device's series. ``before`` is what it showed before our time."""

    def __init__(self, context: ProbeContext, memory: DeviceMemory, before: DeviceMemory | None = None) -> None:
        table, device = context.writer.table, {"device": memory.device}
        self._table, self._attributes, self._memory = table, device, memory
        self._floor, self._fast = Floor(), FastWindow()
        self._trends: tuple[Growth | None, Growth | None] = (None, None)
        self._peak, self._seen_peak = memory.allocated, before.peak if before else None
        self._counters = [
            (table.cell(catalog.MEMORY_ALLOC_RETRIES, device), _Total(before.retries if before else 0)),
            (table.cell(catalog.MEMORY_OOMS, device), _Total(before.ooms if before else 0)),
        ]

    def begin(self) -> None:
        """Another model is trained from here on."""
        self._floor.begin()
        self._fast.begin()

    def see(self, memory: DeviceMemory, step: int, now: float) -> bool:
        """Take in a look; tell whether it is to be said at once.

        The allocator's peak is a peak of ours if it has moved: what it stood at before our time was not seen by us, and one
        that went down was reset by its user, so that it has been reached since.
        """
        self._memory = memory
        self._floor.see(memory.allocated)
        self._peak = max(self._peak, memory.allocated)
        if memory.peak is not None and memory.peak != self._seen_peak:
            self._peak, self._seen_peak = max(self._peak, memory.peak), memory.peak
        limit, used = memory.limit, memory.allocated
        return limit is not None and self._fast.see(MemoryPoint(step, now, used), limit - used, limit)

    def point(self, step: int, now: float) -> None:
        """Make a point of what was seen since the last one."""
        self._trends = self._floor.point(step, now)

    def judge(self) -> Judged:
        """Return the trend and the bytes left."""
        fast, limit = self._fast.growth, self._memory.limit
        left = None if limit is None else limit - self._memory.allocated
        return Judged(fast or self._trends[0], (*self._trends, fast), left)

    def show(self) -> None:
        """Set the gauges, count on."""
        memory = self._memory
        for metric, value in (
            (catalog.MEMORY_DEVICE_ALLOCATED, memory.allocated),
            (catalog.MEMORY_DEVICE_RESERVED, memory.reserved),
            (catalog.MEMORY_DEVICE_ACTIVE, memory.active),
            (catalog.MEMORY_DEVICE_INACTIVE_SPLIT, memory.inactive_split),
            (catalog.MEMORY_DEVICE_PEAK, self._peak),
            (catalog.MEMORY_DEVICE_LIMIT, memory.limit),
        ):
            cell = self._table.cell(metric, self._attributes) if value is not None else None
            if cell is not None and value is not None:
                cell.set(float(value))
        for (counter, total), now in zip(self._counters, (memory.retries, memory.ooms), strict=True):
            if counter is not None and now is not None:
                counter.add(total.grown(now))


class _Total:
    """A total of the allocator's, which its user may set to 0 (``reset_accumulated_memory_stats``)."""

    def __init__(self, value: int | None) -> None:
        self._value = value or 0

    def grown(self, value: int) -> int:
        """Return by how much it has grown since it was seen last."""
        grown, self._value = value - (self._value if value >= self._value else 0), value
        return grown
