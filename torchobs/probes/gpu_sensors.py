"""GPU sensors through NVML: one function each; the driver's error reports; the GPUs that the process may use.

Calls go through ctypes without the GIL, so a slow one (microseconds to tens of milliseconds, forever on a GPU that fell off
the bus) blocks only the calling thread.

CUDA is never initialized here, and no context created.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.catalog import Metric
from torchobs.detect.action import HARDWARE_XIDS
from torchobs.probes.device_memory import has_statistics
from torchobs.support.after_fork import importing
from torchobs.support.import_hooks import imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Sensor = Callable[[Any, Any], Iterable["Reading"]]


class NvmlFault(Enum):
    """The reaction to an NVML error."""

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
    """Return the reaction to an ``NVMLError``."""
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
        self._watched: dict[int, str] = {}
        self._events: Any = None
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
        if self._events is not None:
            with suppress(self.error):
                self.api.nvmlEventSetFree(self._events)
        with suppress(self.error):
            self.api.nvmlShutdown()

    def watch(self, gpu: Gpu) -> bool:
        """Listen to a GPU's error reports; return False where that is unsupported or not permitted.

        Raises ``NVMLError`` when it is lost or the library closed.
        """
        try:
            if self._events is None:
                self._events = self.api.nvmlEventSetCreate()
            self.api.nvmlDeviceRegisterEvents(gpu.handle, _CRITICAL, self._events)
        except self.error as error:
            if fault_of(error) in {NvmlFault.LOST, NvmlFault.CLOSED}:
                raise
            return False
        self._watched[_address(gpu.handle)] = gpu.uuid
        return True

    def xids(self) -> Iterator[tuple[str, int]]:
        """Yield UUID and number of the reports since the last call, at most 64."""
        for _ in range(_MAX_REPORTS if self._watched else 0):
            try:
                event = self.api.nvmlEventSetWait_v2(self._events, 0)
            except self.error:
                return  # NVML_ERROR_TIMEOUT: no more; or the GPU is lost, which its sensors report
            uuid = self._watched.get(_address(event.device))
            if uuid is not None and event.eventType & _CRITICAL:
                yield uuid, int(event.eventData)

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


class Used(NamedTuple):
    """A CUDA device of this process, with torch's index and the driver's UUID."""

    device: str
    uuid: str
    in_use: bool
    """Whether torch's allocator holds memory on it; where that is unknown, whether the process has a context there"""


def used() -> list[Used] | None:
    """Return torch's devices; ``None`` before CUDA is initialized, or where torch has no UUIDs (before 2.5, ROCm)."""
    torch = imported("torch")
    if torch is None or torch.version.cuda is None or not torch.cuda.is_initialized():
        return None
    devices = []
    for index in range(torch.cuda.device_count()):
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is None:
            return None
        devices.append(Used(f"cuda:{index}", str(uuid), _is_in_use(torch, index)))
    return devices


def _is_in_use(torch: Any, index: int) -> bool:
    if not has_statistics(torch):
        has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        return has_context is not None and bool(has_context(index))
    stats = torch.cuda.memory_stats_as_nested_dict(index)  # empty before the first allocation
    return bool(stats.get("reserved_bytes", {}).get("all", {}).get("current", 0))


def visible(variable: str | None, boards: Sequence[str]) -> list[str]:
    """Return the UUIDs of the GPUs that CUDA would list, in its order, out of those of all GPUs in NVML's order.

    Ordinals are NVML's, which equal CUDA's if all GPUs are alike or CUDA_DEVICE_ORDER is PCI_BUS_ID. The list ends at the first
    invalid name, as in CUDA (CUDA C++ Programming Guide, "CUDA Environment Variables").
    """
    if variable is None:
        return list(boards)
    uuids: list[str] = []
    for name in map(str.strip, variable.split(",")):
        by_number = boards[int(name) : int(name) + 1] if name.isdecimal() else ()
        matches = by_number or [uuid for uuid in boards if name.startswith("GPU-") and uuid.startswith(name)]
        if len(matches) != 1:
            break
        uuids += matches
    return uuids


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


def kind(number: int) -> str:
    """Return the XID's ``error.type``: by who has to act on it, as NVIDIA recommends.

    *application*: to restart or check the program (a kernel's wild pointer, and the cleanup after it); *hardware*: to reset,
    restart or examine the hardware (its memory, NVLink, the bus; a contained memory error, too); *driver*: firmware, driver,
    harmless reports (a memory row was replaced), and numbers that the catalog lacks.

    Source: NVIDIA, "Analyzing Xid Errors with the Xid Catalog", the columns "Resolution Bucket"
    (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html).
    """
    if number in HARDWARE_XIDS:
        return "xid_hardware"
    return "xid_application" if number in _APPLICATION else "xid_driver"


def _address(handle: Any) -> int:
    """Return the handle's pointer: ctypes does not compare two handles of one device as equal."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


_UNKNOWN = 0xFFFF_FFFF
"""NVML_VALUE_NOT_AVAILABLE as an unsigned integer"""
_ALL_LINKS = 0xFFFF_FFFF
_MEMORY_V2 = 0x0200_0028
_VOLATILE, _CORRECTED, _UNCORRECTED = 0, 0, 1
_SM = 1

# Fields (nvml.h, "Field Identifiers").
_FIELD_MEMORY_TEMPERATURE = 82
_FIELD_NVLINK_SENT, _FIELD_NVLINK_RECEIVED = 138, 139
_FIELD_RECOVERY_ACTION = 230
_FIELDS_NVLINK_ERRORS = (38, 45, 52, 59, 160)
"""flit CRC, data CRC, replay, recovery, data ECC: totals over all links"""

_POLICIES = {"power": 0, "thermal": 1}


class Reading(NamedTuple):
    """Value of a gauge, or the driver's total of a counter."""

    metric: Metric
    value: float
    attributes: tuple[tuple[str, str], ...] = ()


_TYPE = ("hw.type", "gpu")


def _utilization(api: Any, handle: Any) -> Iterator[Reading]:
    """Utilization in percent; impossible values of old drivers are dropped."""
    rates = api.nvmlDeviceGetUtilizationRates(handle)
    if rates.gpu <= 100:  # noqa: PLR2004  # percent
        yield Reading(catalog.HW_GPU_UTILIZATION, rates.gpu / 100, (("hw.gpu.task", "general"),))
    if rates.memory <= 100:  # noqa: PLR2004  # percent
        yield Reading(catalog.GPU_MEMORY_BUSY, rates.memory / 100)


def _memory(api: Any, handle: Any) -> Iterator[Reading]:
    """Memory in use without the driver's reserve, as nvidia-smi shows it."""
    info = api.nvmlDeviceGetMemoryInfo(handle, version=_MEMORY_V2)
    yield Reading(catalog.HW_GPU_MEMORY_USAGE, info.used)
    yield Reading(catalog.HW_GPU_MEMORY_LIMIT, info.total)


def _power(api: Any, handle: Any) -> Iterator[Reading]:
    milliwatts = api.nvmlDeviceGetPowerUsage(handle)
    if milliwatts != _UNKNOWN:
        yield Reading(catalog.HW_POWER, milliwatts / 1e3, (_TYPE,))


def _single(metric: Metric, read: Callable[[Any, Any], float], *attributes: tuple[str, str]) -> Sensor:
    """Return a sensor of one value, which ``read`` returns for NVML and a device."""
    return lambda api, handle: [Reading(metric, read(api, handle), attributes)]


_POWER_LIMIT = _single(catalog.GPU_POWER_LIMIT, lambda api, handle: api.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3)
_ENERGY = _single(catalog.HW_ENERGY, lambda api, handle: api.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, _TYPE)
_TEMPERATURE = _single(
    catalog.HW_TEMPERATURE, lambda api, handle: api.nvmlDeviceGetTemperature(handle, 0), ("hw.sensor_location", "gpu")
)
_CLOCK = _single(catalog.GPU_CLOCK_FREQUENCY, lambda api, handle: api.nvmlDeviceGetClockInfo(handle, _SM) * 1e6)
_CLOCK_LIMIT = _single(catalog.GPU_CLOCK_LIMIT, lambda api, handle: api.nvmlDeviceGetMaxClockInfo(handle, _SM) * 1e6)


def _memory_temperature(api: Any, handle: Any) -> Iterator[Reading]:
    (degrees,) = _fields(api, handle, [_FIELD_MEMORY_TEMPERATURE])
    yield Reading(catalog.HW_TEMPERATURE, degrees, (("hw.sensor_location", "memory"),))


def _throttled(api: Any, handle: Any) -> Iterator[Reading]:
    for reason, policy in _POLICIES.items():
        violated = api.nvmlDeviceGetViolationStatus(handle, policy)
        yield Reading(catalog.GPU_THROTTLE_TIME, violated.violationTime / 1e9, (("reason", reason),))


def _errors(kind: str, total: float) -> Reading:
    return Reading(catalog.HW_ERRORS, total, (_TYPE, ("error.type", kind)))


def _ecc(api: Any, handle: Any) -> Iterator[Reading]:
    yield _errors("ecc_corrected", api.nvmlDeviceGetTotalEccErrors(handle, _CORRECTED, _VOLATILE))
    yield _errors("ecc_uncorrected", api.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _VOLATILE))


def _pcie_replays(api: Any, handle: Any) -> Iterator[Reading]:
    yield _errors("pcie_replay", api.nvmlDeviceGetPcieReplayCounter(handle))


def _nvlink(api: Any, handle: Any) -> Iterator[Reading]:
    links = [api.nvmlDeviceGetNvLinkState(handle, 0)]
    for link in range(1, api.NVML_NVLINK_MAX_LINKS):
        try:
            links.append(api.nvmlDeviceGetNvLinkState(handle, link))
        except api.NVMLError as error:
            if fault_of(error) is not NvmlFault.UNSUPPORTED:
                raise
            break
    yield Reading(catalog.GPU_NVLINK_LINKS, sum(links))


def _nvlink_io(api: Any, handle: Any) -> Iterator[Reading]:
    fields = [(_FIELD_NVLINK_SENT, _ALL_LINKS), (_FIELD_NVLINK_RECEIVED, _ALL_LINKS)]
    for direction, kibibytes in zip(("transmit", "receive"), _fields(api, handle, fields), strict=True):
        yield Reading(catalog.GPU_NVLINK_IO, kibibytes * 1024, (("network.io.direction", direction),))


def _nvlink_errors(api: Any, handle: Any) -> Iterator[Reading]:
    yield _errors("nvlink", sum(_fields(api, handle, list(_FIELDS_NVLINK_ERRORS), all_of_them=False)))


def _fields(api: Any, handle: Any, fields: list[Any], *, all_of_them: bool = True) -> list[float]:
    """Return the fields' values. Raises ``NVMLError`` if one (``all_of_them``) or all of them are unavailable."""
    values, refused = [], 0
    for field in api.nvmlDeviceGetFieldValues(handle, fields):
        if field.nvmlReturn == api.NVML_SUCCESS:
            values.append(float(getattr(field.value, _UNION[field.valueType])))
        else:
            refused = field.nvmlReturn
    if refused and (all_of_them or not values):
        raise api.NVMLError(refused)
    return values


_UNION = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Union member for each ``nvmlValueType_t``"""


_IDLE_GPU: tuple[Sensor, ...] = (_utilization, _memory, _power)
_GPU: tuple[Sensor, ...] = (
    *_IDLE_GPU, _POWER_LIMIT, _ENERGY, _TEMPERATURE, _memory_temperature, _CLOCK, _CLOCK_LIMIT, _throttled, _ecc,
    _pcie_replays, _nvlink, _nvlink_io, _nvlink_errors,
)  # fmt: skip


class Sensors:
    """Supported sensors of one device."""

    def __init__(self, gpu: Gpu, *, idle: bool) -> None:
        self._gpu = gpu
        self._supported = list(_IDLE_GPU if idle else _GPU)
        self.has_state = not idle

    def read(self, library: Library) -> list[Reading]:
        """Read all sensors. Raises ``NVMLError`` when the device is lost or the library closed."""
        readings: list[Reading] = []
        for sensor in list(self._supported):
            try:
                readings += sensor(library.api, self._gpu.handle)
            except library.error as error:
                if fault_of(error) in {NvmlFault.LOST, NvmlFault.CLOSED}:
                    raise
                if fault_of(error) is NvmlFault.UNSUPPORTED:
                    self._supported.remove(sensor)
        return readings

    def state(self, library: Library, readings: list[Reading]) -> str:
        """Return the GPU's state: a value of ``hw.state``."""
        _, _, pending, failed = self._ask(library, library.api.nvmlDeviceGetRemappedRows, (0, 0, False, False))
        if failed:
            return "failed"
        uncorrected = any(("error.type", "ecc_uncorrected") in reading.attributes and reading.value for reading in readings)
        # the driver asks for a reset of the GPU or node (since R550)
        wants_recovery = self._ask(library, lambda handle: _fields(library.api, handle, [_FIELD_RECOVERY_ACTION]), (0,))
        return "degraded" if pending or uncorrected or any(wants_recovery) else "ok"

    def _ask(self, library: Library, question: Callable[[Any], Any], unknown: Any) -> Any:
        """Return the driver's answer about the device, or ``unknown``. Raises ``NVMLError`` as :meth:`read` does."""
        try:
            return question(self._gpu.handle)
        except library.error as error:
            if fault_of(error) in {NvmlFault.LOST, NvmlFault.CLOSED}:
                raise
            return unknown
