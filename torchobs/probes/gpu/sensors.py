"""GPU sensors: one function each, with alternatives where a GPU or driver does not support it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.catalog import Metric
from torchobs.probes.gpu.nvml import NvmlFault, fault_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchobs.probes.gpu.nvml import Gpu, Library

    Sensor = Callable[[Any, Any], Iterable["Reading"]]

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

_SW_POWER, _SW_THERMAL, _HW_THERMAL, _HW_POWER_BRAKE = 0x04, 0x20, 0x40, 0x80
_REASON_BITS = {"power": _SW_POWER | _HW_POWER_BRAKE, "thermal": _SW_THERMAL | _HW_THERMAL}
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
    yield from _memory_of(api.nvmlDeviceGetMemoryInfo(handle, version=_MEMORY_V2))


def _memory_before_510(api: Any, handle: Any) -> Iterator[Reading]:
    yield from _memory_of(api.nvmlDeviceGetMemoryInfo(handle))


def _memory_of(info: Any) -> Iterator[Reading]:
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


class _Throttling:
    """Estimates throttling time where the driver does not count it (GeForce): current reasons held since the last reading."""

    def __init__(self) -> None:
        self._looked: float | None = None
        self._total_s = dict.fromkeys(_REASON_BITS, 0.0)

    def __call__(self, api: Any, handle: Any) -> Iterator[Reading]:
        reasons = api.nvmlDeviceGetCurrentClocksThrottleReasons(handle)  # the name that every driver version has
        before, self._looked = self._looked, time.monotonic()
        for reason, bits in _REASON_BITS.items():
            if before is not None and reasons & bits:
                self._total_s[reason] += self._looked - before
            yield Reading(catalog.GPU_THROTTLE_TIME, self._total_s[reason], (("reason", reason),))


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


def _gpu_sensors() -> list[list[Sensor]]:
    """Return the sensors of a GPU; of each list the first supported one is used."""
    return [
        [_utilization], [_memory, _memory_before_510], [_power], [_POWER_LIMIT], [_ENERGY], [_TEMPERATURE],
        [_memory_temperature], [_CLOCK], [_CLOCK_LIMIT], [_throttled, _Throttling()], [_ecc], [_pcie_replays], [_nvlink],
        [_nvlink_io], [_nvlink_errors],
    ]  # fmt: skip


def _idle_gpu_sensors() -> list[list[Sensor]]:
    return [[_utilization], [_memory, _memory_before_510], [_power]]


class Sensors:
    """Supported sensors of one device."""

    def __init__(self, gpu: Gpu, *, idle: bool) -> None:
        self.gpu = gpu
        self._supported = _idle_gpu_sensors() if idle else _gpu_sensors()
        self.has_state = not idle

    def read(self, library: Library) -> list[Reading]:
        """Read all sensors. Raises ``NVMLError`` when the device is lost or the library closed."""
        readings: list[Reading] = []
        for alternatives in list(self._supported):
            while alternatives:
                try:
                    readings += alternatives[0](library.api, self.gpu.handle)
                    break
                except library.error as error:
                    if fault_of(error) in {NvmlFault.LOST, NvmlFault.CLOSED}:
                        raise
                    if fault_of(error) is not NvmlFault.UNSUPPORTED:
                        break
                    del alternatives[0]
        self._supported = [alternatives for alternatives in self._supported if alternatives]
        return readings

    def state(self, library: Library, readings: list[Reading]) -> str:
        """Return the GPU's state: a value of ``hw.state``."""
        pending, failed = self._row_remapping(library)
        if failed:
            return "failed"
        uncorrected = any(("error.type", "ecc_uncorrected") in one.attributes and one.value for one in readings)
        return "degraded" if pending or uncorrected or self._wants_recovery(library) else "ok"

    def _row_remapping(self, library: Library) -> tuple[bool, bool]:
        """Return whether a row remapping is pending until a reset, and whether one has failed."""
        _, _, pending, failed = self._ask(library, library.api.nvmlDeviceGetRemappedRows, (0, 0, False, False))
        return bool(pending), bool(failed)

    def _wants_recovery(self, library: Library) -> bool:
        """Return True if the driver asks for a reset of the GPU or node (since R550)."""
        return any(self._ask(library, lambda handle: _fields(library.api, handle, [_FIELD_RECOVERY_ACTION]), (0,)))

    def _ask(self, library: Library, question: Callable[[Any], Any], unknown: Any) -> Any:
        """Return the driver's answer about the device, or ``unknown``. Raises ``NVMLError`` as :meth:`read` does."""
        try:
            return question(self.gpu.handle)
        except library.error as error:
            if fault_of(error) in {NvmlFault.LOST, NvmlFault.CLOSED}:
                raise
            return unknown
