"""NVIDIA's management library (``pynvml``): its devices, and what its errors mean.

Calls go through ctypes without the GIL, so a slow one (microseconds to tens of milliseconds, forever on a GPU that fell off
the bus) blocks only the calling thread.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from torchobs.support.after_fork import importing


class NvmlFault(Enum):
    """What to do about an NVML error."""

    UNSUPPORTED = "never ask this device for it again"
    LOST = "the device is gone; look whether it comes back"
    CLOSED = "the library has to be initialised again: the driver was unloaded or exchanged"
    ABSENT = "there is no such library here"
    PASSING = "try again next time"


_FAULTS = {
    2: NvmlFault.UNSUPPORTED,  # invalid argument: a missing link
    3: NvmlFault.UNSUPPORTED,
    4: NvmlFault.UNSUPPORTED,  # no permission
    13: NvmlFault.UNSUPPORTED,  # the driver is older than the function
    25: NvmlFault.UNSUPPORTED,  # the driver is older than the argument's version
    26: NvmlFault.UNSUPPORTED,  # the driver is newer than the argument's version
    15: NvmlFault.LOST,
    16: NvmlFault.LOST,  # reset required
    28: NvmlFault.LOST,  # GPU not found
    1: NvmlFault.CLOSED,
    9: NvmlFault.CLOSED,
    18: NvmlFault.CLOSED,  # library and driver are of different versions
    12: NvmlFault.ABSENT,
}
"""By ``nvmlReturn_t``; its numbers are part of NVML's ABI"""

RESET_REQUIRED = 16


def fault_of(error: Any) -> NvmlFault:
    """Return what to do about an ``NVMLError``."""
    return _FAULTS.get(error.value, NvmlFault.PASSING)


class Gpu(NamedTuple):
    """A device."""

    uuid: str
    handle: Any
    model: str


class NvmlUnavailableError(Exception):
    """The library cannot be initialized; the message is NVML's, ``fault`` the kind of error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.fault = fault_of(error)


class Library:
    """The initialized library.

    Raises :class:`NvmlUnavailableError`, or ``ImportError``; its methods raise ``error``, which is ``pynvml.NVMLError``.
    """

    def __init__(self) -> None:
        with importing():  # in a thread of our own
            import pynvml

        self.api: Any = pynvml
        self.error: type[Exception] = pynvml.NVMLError
        self.has_mig = False
        """Whether a GPU is in MIG mode: none of its instances is sampled"""
        try:
            pynvml.nvmlInit()
        except self.error as error:
            raise NvmlUnavailableError(error) from None
        try:
            self.boards, self.gpus = self._list_devices()
        except self.error as error:
            self.close()
            raise NvmlUnavailableError(error) from None

    def close(self) -> None:
        """Shut down our use of it; others in the process may go on."""
        try:
            self.api.nvmlShutdown()
        except self.error:
            return

    def reopen(self, gpu: Gpu) -> Gpu:
        """Return the device with a new handle."""
        return gpu._replace(handle=self.api.nvmlDeviceGetHandleByUUID(gpu.uuid))

    def _list_devices(self) -> tuple[list[str], dict[str, Gpu]]:
        """Return the UUIDs of all GPUs by their index, and those that can be sampled: not lost, and not in MIG mode."""
        boards: list[str] = []
        gpus: dict[str, Gpu] = {}
        for index in range(self.api.nvmlDeviceGetCount()):
            try:
                handle = self.api.nvmlDeviceGetHandleByIndex(index)
                gpu = Gpu(self.api.nvmlDeviceGetUUID(handle), handle, self.api.nvmlDeviceGetName(handle))
                in_mig_mode = self._is_in_mig_mode(handle)
            except self.error as error:
                if fault_of(error) is NvmlFault.CLOSED:
                    raise
                boards.append(f"lost-{index}")  # it keeps its index, so that those of the others stay
                continue
            boards.append(gpu.uuid)
            if in_mig_mode:
                self.has_mig = True
            else:
                gpus[gpu.uuid] = gpu
        return boards, gpus

    def _is_in_mig_mode(self, handle: Any) -> bool:
        try:
            mode, _ = self.api.nvmlDeviceGetMigMode(handle)
        except self.error as error:
            if fault_of(error) is NvmlFault.UNSUPPORTED:
                return False
            raise
        return bool(mode)
