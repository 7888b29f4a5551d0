"""Selects the GPUs that this rank samples, and handles a lost GPU or driver.

A rank samples the GPUs on which its torch holds memory, or the only one it sees, so that each of eight ranks has the series of
its GPU, whether ranks see all GPUs or one each. After a minute local rank 0 also samples a few values of the others that it
sees, because idle GPUs are worth knowing of. Some of them may be in use by other ranks: queries take the maximum by ``hw.id``.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.probes.gpu.devices import Used, used, visible
from torchobs.probes.gpu.nvml import RESET_REQUIRED, Gpu, Library, NvmlFault, NvmlUnavailableError, fault_of
from torchobs.probes.gpu.sensors import Sensors
from torchobs.probes.gpu.series import GpuSeries
from torchobs.probes.gpu.xids import MEANINGS, Xids, kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchobs.flight.writer.writer import FlightWriter

IDLE_GPUS_AFTER_S = 60.0
logger = logging.getLogger("torchobs")


class GpuAssignment(NamedTuple):
    """Inputs that decide which GPUs this rank samples."""

    local_rank: int
    visible_devices: str | None
    """``CUDA_VISIBLE_DEVICES``"""


@dataclass(slots=True)
class _Member:
    gpu: Gpu
    sensors: Sensors
    series: GpuSeries
    idle: bool
    fresh: bool = True
    """True if its handle and sensors have to be created again"""


class GpuMonitor:
    """Not thread-safe except for :meth:`mark_unresponsive`: one thread runs the rounds."""

    def __init__(
        self,
        writer: FlightWriter,
        assignment: GpuAssignment,
        find_used: Callable[[], list[Used] | None] = used,
    ) -> None:
        self._writer, self._assignment, self._find_used = writer, assignment, find_used
        self._library: Library | None = None
        self._xids: Xids | None = None
        self._members: dict[str, _Member] = {}
        self._began = time.monotonic()
        self._logged: set[str] = set()
        self.absent = False
        """True if no later attempt could find NVML"""

    def round(self) -> None:
        """Sample every GPU once."""
        library = self._library or self._open()
        if library is None:
            return
        try:
            self._update_members(library)
            for member in self._members.values():
                self._sample(library, member)
            self._report_xids()
        except library.error as error:
            self._close_after(library, error)

    def mark_unresponsive(self, why: str) -> None:
        """Clear all GPU series until a GPU answers again. Called by another thread than the blocked one."""
        for member in list(self._members.values()):
            member.series.show([])
            self._writer.event(catalog.EVENT_GPU_LOST.name, {"hw.id": member.gpu.uuid, "reason": "silent"})
        self._warn_limited("silent", f"{why}; GPU metrics are absent until it does")

    def close(self) -> None:
        """Release the library."""
        library, self._library = self._library, None
        if self._xids is not None:
            self._xids.close()
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
            self._xids = Xids(self._library)
            if self._library.has_mig:
                self._warn_limited("mig", "no GPU metrics of GPUs in MIG mode: dcgm-exporter has those of their instances")
            for member in self._members.values():
                member.fresh = True  # its handle belongs to the old library
        return self._library

    def _close_after(self, library: Library, error: Exception) -> None:
        """Reopen the library in the next round: the driver was unloaded or replaced, or somebody shut our library down."""
        for member in self._members.values():
            member.series.show([])
        self._library = self._xids = None
        library.close()
        self._warn_limited("closed", f"GPU metrics pause: NVML says {error}")

    def _update_members(self, library: Library) -> None:
        for gpu, idle in self._selected(library):
            member = self._members.get(gpu.uuid)
            if member is None:
                series = GpuSeries(self._writer.table, gpu.uuid)
                self._members[gpu.uuid] = _Member(gpu, Sensors(gpu, idle=idle), series, idle)
            elif member.idle and not idle:
                member.idle, member.fresh = False, True

    def _selected(self, library: Library) -> Iterator[tuple[Gpu, bool]]:
        """Yield the GPUs to sample, and True for an idle one."""
        devices = self._devices(library)
        include_idle = self._assignment.local_rank == 0 and time.monotonic() - self._began >= IDLE_GPUS_AFTER_S
        for gpu, in_use in devices:
            if in_use or len(devices) == 1:
                yield gpu, False
            elif include_idle:
                yield gpu, True

    def _devices(self, library: Library) -> list[tuple[Gpu, bool]]:
        """Return the devices that the process sees, and whether it uses them."""
        known = self._find_used()
        if known is None:
            uuids = visible(self._assignment.visible_devices, library.boards)
            return [(library.gpus[uuid], False) for uuid in uuids if uuid in library.gpus]
        found = []
        for one in known:
            gpu = library.gpus.get(f"GPU-{one.uuid}")
            if gpu is not None:
                found.append((gpu, one.in_use))
                self._describe(gpu, one)
        return found

    def _describe(self, gpu: Gpu, one: Used) -> None:
        if not one.in_use:
            return
        attributes = {"hw.id": gpu.uuid, "UUID": gpu.uuid, "device": one.device, "hw.model": gpu.model}
        cell = self._writer.table.cell(catalog.RANK_GPU_INFO, attributes)
        if cell is not None:
            cell.set(1.0)

    def _watch_xids(self, member: _Member) -> None:
        if member.sensors.has_state and self._xids is not None and self._xids.watch(member.gpu):
            for error in catalog.XID_ERRORS:
                member.series.add(catalog.HW_ERRORS, (_GPU, ("error.type", error)), 0)

    def _sample(self, library: Library, member: _Member) -> None:
        try:
            if member.fresh:
                self._reopen(library, member)
            readings = member.sensors.read(library)
            state = member.sensors.state(library, readings) if member.sensors.has_state else ""
        except library.error as error:
            if fault_of(error) is NvmlFault.CLOSED:
                raise
            self._mark_lost(member, error)
        else:
            member.series.show(readings)
            if state:
                member.series.state(state)

    def _reopen(self, library: Library, member: _Member) -> None:
        member.gpu = library.reopen(member.gpu)
        member.sensors = Sensors(member.gpu, idle=member.idle)
        self._watch_xids(member)
        member.fresh = False

    def _mark_lost(self, member: _Member, error: Exception) -> None:
        member.fresh = True
        member.series.show([])
        if member.series.state("failed"):
            reason = "reset_required" if getattr(error, "value", 0) == RESET_REQUIRED else "lost"
            self._writer.event(catalog.EVENT_GPU_LOST.name, {"hw.id": member.gpu.uuid, "reason": reason})
            logger.warning("torchobs: GPU %s is lost: NVML says %s", member.gpu.uuid, error)

    def _report_xids(self) -> None:
        for xid in self._xids.fresh() if self._xids is not None else ():
            attributes = {"hw.id": xid.uuid, "xid": xid.number, "meaning": MEANINGS.get(xid.number, "")}
            self._writer.event(catalog.EVENT_GPU_XID.name, attributes)
            member = self._members.get(xid.uuid)
            if member is not None:
                member.series.add(catalog.HW_ERRORS, (_GPU, ("error.type", kind(xid.number))), 1)

    def _warn_limited(self, cause: str, message: str) -> None:
        """Log a cause once, at INFO: most machines have no GPU."""
        if cause not in self._logged:
            self._logged.add(cause)
            logger.info("torchobs: %s", message)


_GPU = ("hw.type", "gpu")
