"""GPU probe: which GPUs this rank samples, their series, and a lost GPU or driver.

A rank samples the GPUs on which its torch holds memory, or the only one it sees, so that each of eight ranks has the series of
its GPU, whether ranks see all GPUs or one each. After a minute local rank 0 also samples a few values of the others that it
sees, because idle GPUs are worth knowing of. Some of them may be in use by other ranks: queries take the maximum by ``hw.id``.

The probe has a thread of its own: a lost GPU can block an NVML call forever, and the heartbeat must go on.
"""

from __future__ import annotations

import logging
import threading
import time
from math import nan
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.catalog import Kind
from torchobs.config import settings
from torchobs.probes.gpu_sensors import (
    MEANINGS,
    RESET_REQUIRED,
    Gpu,
    Library,
    NvmlFault,
    NvmlUnavailableError,
    Sensors,
    Used,
    fault_of,
    kind,
    used,
    visible,
)
from torchobs.support.after_fork import renew_in_child
from torchobs.support.error_guard import call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchobs.catalog import Metric
    from torchobs.probes.context import ProbeContext
    from torchobs.probes.gpu_sensors import Reading

    Key = tuple[Metric, tuple[tuple[str, str], ...]]


_STATES = ("ok", "degraded", "failed")
_GPU = ("hw.type", "gpu")


class SampledGpu:
    """A sampled GPU and its series. Counters start at the first reading; a gauge without a reading is absent."""

    def __init__(self, context: ProbeContext, gpu: Gpu, *, idle: bool) -> None:
        self._context = context
        self.gpu, self.idle, self.sensors = gpu, idle, Sensors(gpu, idle=idle)
        self.fresh = True
        """Whether its handle and sensors have to be created again"""
        self._gauges: set[Key] = set()
        self._totals: dict[Key, float] = {}
        self._state = ""

    def show(self, readings: Iterable[Reading]) -> None:
        """Publish these readings; gauges without one become absent."""
        fresh = set()
        for metric, value, attributes in readings:
            key = metric, attributes
            if metric.kind is Kind.COUNTER:
                grown = max(0.0, value - self._totals.get(key, value))  # a total that fell (driver reload) restarts the count
                self._totals[key] = value
                self.count(metric, attributes, int(grown) if metric.integer else grown)
            else:
                fresh.add(key)
                self._set(metric, attributes, value)
        for metric, attributes in self._gauges - fresh:
            self._set(metric, attributes, nan)
        self._gauges = fresh

    def count(self, metric: Metric, attributes: tuple[tuple[str, str], ...], amount: float) -> None:
        """Add to a counter; 0 creates it."""
        self._context.count(metric, amount, {"hw.id": self.gpu.uuid, **dict(attributes)})

    def state(self, state: str) -> bool:
        """Publish the device's state; return whether it has changed."""
        for name in _STATES:
            self._set(catalog.HW_STATUS, (_GPU, ("hw.state", name)), name == state)
        before, self._state = self._state, state
        return state != before

    def _set(self, metric: Metric, attributes: tuple[tuple[str, str], ...], value: float) -> None:
        self._context.set_gauge(metric, value, {"hw.id": self.gpu.uuid, **dict(attributes)})


IDLE_GPUS_AFTER_S = 60.0
logger = logging.getLogger("torchobs")


class GpuMonitor:
    """Not thread-safe except for :meth:`mark_unresponsive`: one thread runs the rounds."""

    def __init__(
        self,
        context: ProbeContext,
        local_rank: int,
        visible_devices: str | None,
        find_used: Callable[[], list[Used] | None] = used,
    ) -> None:
        """``visible_devices``: ``CUDA_VISIBLE_DEVICES``, which counts until torch shows which devices it uses."""
        self._context, self._find_used = context, find_used
        self._local_rank, self._visible_devices = local_rank, visible_devices
        self._library: Library | None = None
        self._gpus: dict[str, SampledGpu] = {}
        self._began = time.monotonic()
        self._logged: set[str] = set()
        self.absent = False
        """Whether no later attempt could load NVML"""

    def round(self) -> None:
        """Sample every GPU once."""
        library = self._library or self._open()
        if library is None:
            return
        try:
            self._update_gpus(library)
            for sampled in self._gpus.values():
                self._sample(library, sampled)
            self._report_xids(library)
        except library.error as error:
            self._close_after(library, error)

    def mark_unresponsive(self, why: str) -> None:
        """Clear all GPU series until a GPU answers again. Called by another thread than the blocked one."""
        for sampled in list(self._gpus.values()):
            sampled.show([])
            self._context.writer.event(catalog.EVENT_GPU_LOST.name, {"hw.id": sampled.gpu.uuid, "reason": "silent"})
        self._warn_limited("silent", f"{why}; GPU metrics are absent until it does")

    def close(self) -> None:
        """Release the library."""
        library, self._library = self._library, None
        if library is not None:
            library.close()

    def _open(self) -> Library | None:
        try:
            self._library = Library()
        except ImportError:
            self.absent = True
            self._warn_limited("absent", "no GPU metrics: nvidia-ml-py is not installed")
        except NvmlUnavailableError as error:
            self.absent = error.fault is NvmlFault.ABSENT
            self._warn_limited("absent", f"no GPU metrics: NVML says {error}")
        else:
            if self._library.has_mig:
                self._warn_limited("mig", "no GPU metrics of GPUs in MIG mode: dcgm-exporter has those of their instances")
            for sampled in self._gpus.values():
                sampled.fresh = True  # its handle belongs to the old library
        return self._library

    def _close_after(self, library: Library, error: Exception) -> None:
        """Reopen the library in the next round: the driver was unloaded or replaced, or other code shut our library down."""
        for sampled in self._gpus.values():
            sampled.show([])
        self._library = None
        library.close()
        self._warn_limited("closed", f"GPU metrics pause: NVML says {error}")

    def _update_gpus(self, library: Library) -> None:
        for gpu, idle in self._selected(library):
            sampled = self._gpus.get(gpu.uuid)
            if sampled is None:
                self._gpus[gpu.uuid] = SampledGpu(self._context, gpu, idle=idle)
            elif sampled.idle and not idle:
                sampled.idle, sampled.fresh = False, True

    def _selected(self, library: Library) -> Iterator[tuple[Gpu, bool]]:
        """Yield the GPUs to sample, and True for an idle one."""
        devices = self._devices(library)
        include_idle = self._local_rank == 0 and time.monotonic() - self._began >= IDLE_GPUS_AFTER_S
        for gpu, in_use in devices:
            if in_use or len(devices) == 1:
                yield gpu, False
            elif include_idle:
                yield gpu, True

    def _devices(self, library: Library) -> list[tuple[Gpu, bool]]:
        """Return the devices that the process sees, and whether it uses them."""
        in_process = self._find_used()
        if in_process is None:
            uuids = visible(self._visible_devices, library.boards)
            return [(library.gpus[uuid], False) for uuid in uuids if uuid in library.gpus]
        devices = []
        for device in in_process:
            gpu = library.gpus.get(f"GPU-{device.uuid}")
            if gpu is not None:
                devices.append((gpu, device.in_use))
                attributes = {"hw.id": gpu.uuid, "UUID": gpu.uuid, "device": device.device, "hw.model": gpu.model}
                self._context.set_gauge(catalog.RANK_GPU_INFO, 1.0 if device.in_use else None, attributes)
        return devices

    def _sample(self, library: Library, sampled: SampledGpu) -> None:
        try:
            if sampled.fresh:
                self._reopen(library, sampled)
            readings = sampled.sensors.read(library)
            state = sampled.sensors.state(library, readings) if sampled.sensors.has_state else ""
        except library.error as error:
            if fault_of(error) is NvmlFault.CLOSED:
                raise
            self._mark_lost(sampled, error)
        else:
            sampled.show(readings)
            if state:
                sampled.state(state)

    def _reopen(self, library: Library, sampled: SampledGpu) -> None:
        sampled.gpu = library.reopen(sampled.gpu)
        sampled.sensors = Sensors(sampled.gpu, idle=sampled.idle)
        if sampled.sensors.has_state and library.watch(sampled.gpu):
            for error in catalog.XID_ERRORS:
                sampled.count(catalog.HW_ERRORS, (_GPU, ("error.type", error)), 0)
        sampled.fresh = False

    def _mark_lost(self, sampled: SampledGpu, error: Exception) -> None:
        sampled.fresh = True
        sampled.show([])
        if sampled.state("failed"):
            reason = "reset_required" if getattr(error, "value", 0) == RESET_REQUIRED else "lost"
            self._context.writer.event(catalog.EVENT_GPU_LOST.name, {"hw.id": sampled.gpu.uuid, "reason": reason})
            logger.warning("torchobs: GPU %s is lost: NVML says %s", sampled.gpu.uuid, error)

    def _report_xids(self, library: Library) -> None:
        for uuid, number in library.xids():
            attributes = {"hw.id": uuid, "xid": number, "meaning": MEANINGS.get(number, "")}
            self._context.writer.event(catalog.EVENT_GPU_XID.name, attributes)
            if uuid in self._gpus:
                self._gpus[uuid].count(catalog.HW_ERRORS, (_GPU, ("error.type", kind(number))), 1)

    def _warn_limited(self, cause: str, message: str) -> None:
        """Log a cause once, at INFO: most machines have no GPU."""
        if cause not in self._logged:
            self._logged.add(cause)
            logger.info("torchobs: %s", message)


STUCK_S = 15.0
"""A round takes milliseconds, or a second per GPU while the driver loads their state (no persistence mode)."""
END_WAIT_S = 0.04
"""How long the end of the process waits for a last round, and for the thread's end"""


class GpuProbe:
    """Samples GPUs through NVML. The sampler thread starts it; without the library its thread ends at once."""

    name = "gpu"

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._round_done = threading.Event()
        renew_in_child(self, _wake=threading.Event, _round_done=threading.Event)
        self._busy_since: float | None = None
        self._ending = self._unresponsive = False

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context = context
        local_rank = context.writer.header.resource.get("local_rank", 0)
        self._monitor = GpuMonitor(context, int(local_rank), settings.environment().get("CUDA_VISIBLE_DEVICES"))
        self._breaker = context.breaker(self.name)

    def remove(self) -> None:
        """Sample once more and end the thread; a blocked one is abandoned (:class:`~torchobs.probes.context.Probe`)."""
        thread, self._thread = self._thread, None
        alive = thread is not None and thread.is_alive()
        if alive and self._busy_since is None:
            self._round_done.clear()
            self._wake.set()
            self._round_done.wait(END_WAIT_S)
        self._ending = True
        if thread is not None and alive:
            self._wake.set()
            thread.join(END_WAIT_S)

    def observe(self) -> None:
        """Wake the thread for a round, unless one is in progress."""
        if self._ending or self._monitor.absent:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchobs-gpu", daemon=True)
            self._thread.start()
        busy_since = self._busy_since
        if busy_since is None:
            self._unresponsive = False
            self._wake.set()
        elif not self._unresponsive and time.monotonic() - busy_since > STUCK_S:
            self._unresponsive = True
            self._monitor.mark_unresponsive(f"the GPU driver has not answered for {STUCK_S:g} s")

    def _run(self) -> None:
        captures = self._context.training.captures
        while not self._monitor.absent:
            self._wake.wait()
            self._wake.clear()
            if self._ending:
                break
            self._busy_since = time.monotonic()
            try:
                if captures.begin_round(self.name):  # it may collect garbage as any thread may, and asks torch's allocator
                    call(self._breaker, self._monitor.round)
            finally:
                captures.end_round(self.name)
            self._busy_since = None
            if not self._monitor.absent:  # most machines without one would have a series for nothing
                self._context.spent_ns[self.name] = time.thread_time_ns()
            self._round_done.set()
        self._monitor.close()
