"""XIDs: the driver's reports of GPU errors, read without waiting."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.gpu.nvml import NvmlFault, fault_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.probes.gpu.nvml import Gpu, Library

_CRITICAL = 0x8
_MAX_REPORTS = 64

MEANINGS = {
    13: "graphics engine exception",
    31: "memory page fault",
    43: "reset channel verification error",
    45: "preemptive cleanup after an earlier error",
    48: "uncorrectable ECC error",
    61: "internal microcontroller breakpoint",
    62: "internal microcontroller halt",
    63: "row remapping or page retirement",
    64: "row remapping or page retirement failed",
    68: "video processor exception",
    69: "graphics engine class error",
    74: "NVLink error",
    79: "fell off the bus",
    92: "high rate of corrected ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP timeout",
    120: "GSP error",
    121: "C2C link error",
    137: "NVLink memory access error",
    140: "unrecovered ECC error",
    145: "NVLink RLW error",
    149: "NVLink NETIR error",
    154: "recovery action changed",
}
"""Source: NVIDIA, "XID Errors" (docs.nvidia.com/deploy/xid-errors)."""

_APPLICATION = frozenset(
    {8, 11, 13, 25, 31, 32, 37, 39, 40, 41, 43, 45, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89}
    | {*range(96, 106), *range(126, 136), 137, 139, 141}
)
_HARDWARE = frozenset({46, 48, 54, 62, 64, 74, 79, 94, 95, 136, 140, 143, *range(144, 151), 156, 157, 158, 167, 168, 171, 172})


class Xid(NamedTuple):
    """One XID report."""

    uuid: str
    number: int


class Xids:
    """Listens to GPUs; yields nothing where that is unsupported or not permitted."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._watched: dict[int, str] = {}
        self._set: Any = None

    def watch(self, gpu: Gpu) -> bool:
        """Listen to one more GPU; return True on success. Raises ``NVMLError`` when it is lost or the library closed."""
        api = self._library.api
        try:
            if self._set is None:
                self._set = api.nvmlEventSetCreate()
            api.nvmlDeviceRegisterEvents(gpu.handle, _CRITICAL, self._set)
        except self._library.error as error:
            if fault_of(error) in {NvmlFault.LOST, NvmlFault.CLOSED}:
                raise
            return False
        self._watched[_address(gpu.handle)] = gpu.uuid
        return True

    def fresh(self) -> Iterator[Xid]:
        """Yield the reports since the last call, at most 64."""
        for _ in range(_MAX_REPORTS if self._watched else 0):
            try:
                event = self._library.api.nvmlEventSetWait_v2(self._set, 0)
            except self._library.error:
                return  # NVML_ERROR_TIMEOUT: no more; or the GPU is lost, which its sensors report
            uuid = self._watched.get(_address(event.device))
            if uuid is not None and event.eventType & _CRITICAL:
                yield Xid(uuid, int(event.eventData))

    def close(self) -> None:
        """Stop listening."""
        events, self._set = self._set, None
        if events is not None:
            try:
                self._library.api.nvmlEventSetFree(events)
            except self._library.error:
                return


def kind(number: int) -> str:
    """Return the XID's ``error.type``: whose affair it is, by the action that NVIDIA recommends.

    *application*: to restart or check the program (a kernel's wild pointer, and the cleanup after it); *hardware*: to reset,
    restart or examine the hardware (its memory, NVLink, the bus; a contained memory error, too); *driver*: firmware, driver,
    what may be ignored (a memory row was replaced), and what the catalog does not have.

    Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog", the columns "Resolution Bucket"
    (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html).
    """
    if number in _HARDWARE:
        return "xid_hardware"
    return "xid_application" if number in _APPLICATION else "xid_driver"


def _address(handle: Any) -> int:
    """Return the handle's pointer: ctypes does not compare two handles of one device as equal."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
