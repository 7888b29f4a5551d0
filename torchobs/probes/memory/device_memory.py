"""Device allocator metrics: memory in use and reserved, peaks that survive the user's resets, growth, retries and OOMs.

The sampler thread reads the allocators once a second for the trend (:mod:`.growth`), and publishes all series every ten.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.detect.growth import FastWindow, MemoryPoint
from torchobs.probes.memory.allocators import used_devices
from torchobs.probes.memory.growth import Floor, GrowthGauges, GrowthVerdict
from torchobs.probes.memory.oom import OomObserver

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.detect.growth import Growth
    from torchobs.probes.core.context import ProbeContext
    from torchobs.probes.memory.allocators import DeviceMemory
    from torchobs.probes.memory.leak import Suspicion

ROUNDS = 10
"""Sampler rounds between two readings: one takes some 30 µs a device."""


class DeviceMemoryProbe:
    """Reads ``memory_stats`` once a device is in use."""

    name = "device_memory"

    def __init__(
        self,
        read_devices: Callable[[], list[DeviceMemory]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        suspicion: Suspicion | None = None,
    ) -> None:
        """``read_devices`` returns the devices in use, by default torch's. ``suspicion``: what the leak probe is told by."""
        self._suspicion = suspicion
        self._read_devices, self._clock = read_devices, clock
        self._oom = OomObserver()

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        import torch  # optional until training begins

        self._context = context
        self._read = self._read_devices or (lambda: used_devices(torch))
        # of a device in use by now, earlier events are not counted; of a later one all are
        self._devices = {memory.device: _Device(context, memory, before=memory) for memory in self._read()}
        self._gauges = GrowthGauges(context, "device")
        self._rounds, self._model = 0, context.recorder.models.changes
        self._oom.install(context)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._oom.remove()

    def sample(self) -> None:
        """Read the allocators, once a second."""
        self._rounds += 1
        if self._rounds >= ROUNDS:
            self._update()

    def observe(self) -> None:
        """Publish all series and evaluate the trends."""
        self._update()
        step, now = self._context.recorder.step, self._clock()
        for device in self._devices.values():
            device.show()
            device.point(step, now)
        self._show_growth()

    def _show_growth(self) -> None:
        told = self._gauges.show([device.verdict() for device in self._devices.values()])
        if told and self._suspicion is not None:
            self._suspicion.device = True

    def _update(self) -> None:
        self._rounds, recorder, changed = 0, self._context.recorder, False
        if self._model != recorder.models.changes:
            self._model = recorder.models.changes
            for device in self._devices.values():
                device.begin()
        for memory in self._read():
            if memory.device not in self._devices:
                self._devices[memory.device] = _Device(self._context, memory)
            changed = self._devices[memory.device].see(memory, recorder.step, self._clock()) or changed
        if changed:
            self._show_growth()


class _Device:
    """Series of one device. ``before``: its statistics before ``init()``."""

    def __init__(self, context: ProbeContext, memory: DeviceMemory, before: DeviceMemory | None = None) -> None:
        table, device = context.writer.table, {"device": memory.device}
        self._context, self._attributes, self._memory = context, device, memory
        self._floor, self._fast = Floor(), FastWindow()
        self._trends: tuple[Growth | None, Growth | None] = (None, None)
        self._peak, self._seen_peak = memory.allocated, before.peak if before else None
        self._counters = [
            (table.cell(catalog.MEMORY_ALLOC_RETRIES, device), _Counter(before.retries if before else 0)),
            (table.cell(catalog.MEMORY_OOMS, device), _Counter(before.ooms if before else 0)),
        ]

    def begin(self) -> None:
        """Restart the history: another model is trained from here on."""
        self._floor.begin()
        self._fast.begin()

    def see(self, memory: DeviceMemory, step: int, now: float) -> bool:
        """Record a reading; return True if fast growth has to be reported at once.

        The allocator's peak counts once it has moved: a value from before ``init()`` is not ours, and one that went down was
        reset by the user and reached since.
        """
        self._memory = memory
        self._floor.see(memory.allocated)
        self._peak = max(self._peak, memory.allocated)
        if memory.peak is not None and memory.peak != self._seen_peak:
            self._peak, self._seen_peak = max(self._peak, memory.peak), memory.peak
        limit, used = memory.limit, memory.allocated
        return limit is not None and self._fast.see(MemoryPoint(step, now, used), limit - used, limit)

    def point(self, step: int, now: float) -> None:
        """Add the readings since the last point to the history."""
        self._trends = self._floor.point(step, now)

    def verdict(self) -> GrowthVerdict:
        """Return the trends and the bytes left."""
        fast, limit = self._fast.growth, self._memory.limit
        left = None if limit is None else limit - self._memory.allocated
        return GrowthVerdict(fast or self._trends[0], (*self._trends, fast), left)

    def show(self) -> None:
        """Set the gauges and advance the counters."""
        memory = self._memory
        for metric, value in (
            (catalog.MEMORY_DEVICE_ALLOCATED, memory.allocated),
            (catalog.MEMORY_DEVICE_RESERVED, memory.reserved),
            (catalog.MEMORY_DEVICE_ACTIVE, memory.active),
            (catalog.MEMORY_DEVICE_INACTIVE_SPLIT, memory.inactive_split),
            (catalog.MEMORY_DEVICE_PEAK, self._peak),
            (catalog.MEMORY_DEVICE_LIMIT, memory.limit),
        ):
            self._context.set_gauge(metric, value, self._attributes)
        for (counter, total), now in zip(self._counters, (memory.retries, memory.ooms), strict=True):
            if counter is not None and now is not None:
                counter.add(total.increase(now))


class _Counter:
    """An allocator counter, which the user may reset (``reset_accumulated_memory_stats``)."""

    def __init__(self, value: int | None) -> None:
        self._value = value or 0

    def increase(self, value: int) -> int:
        """Return its growth since the last reading."""
        increase, self._value = value - (self._value if value >= self._value else 0), value
        return increase
