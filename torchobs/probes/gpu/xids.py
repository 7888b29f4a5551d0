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


class Xid(NamedTuple):
    """One XID report."""

    uuid: str
    number: int


class Xids:
    """Listens to physical GPUs; yields nothing where that is unsupported or not permitted."""

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


def _address(handle: Any) -> int:
    """Return the handle's pointer: ctypes does not compare two handles of one device as equal."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
