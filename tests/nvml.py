# ruff: noqa: N802  # methods are named as the C functions that they stand for
"""NVIDIA's management library at the level of its C functions: the real ``pynvml`` marshals its arguments into this one."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from ctypes import c_char_p, c_int, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pynvml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SUCCESS, UNINITIALIZED, INVALID, UNSUPPORTED, NO_PERMISSION, NOT_FOUND = 0, 1, 2, 3, 4, 6
DRIVER_NOT_LOADED, TIMEOUT, LOST, RESET_REQUIRED = 9, 10, 15, 16
_RESERVED = 1 << 29
H100_UUID = "GPU-2f0a1111-0000-4000-8000-0000000000{index:02x}"


@dataclass
class Gpu:
    """A full data-centre GPU, until ``refuses`` names functions and ``fields`` lacks values."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    utilization: tuple[int, int] = (97, 41)
    used: int = 60 << 30
    total: int = 80 << 30
    milliwatts: int = 612_345
    millijoules: int = 5_000_000
    degrees: int = 64
    megahertz: int = 1755
    violation_ns: dict[int, int] = field(default_factory=lambda: {0: 7_000_000_000, 1: 0})
    ecc: dict[int, int] = field(default_factory=lambda: {0: 3, 1: 0})
    replays: int = 5
    links: list[int] = field(default_factory=lambda: [1] * 18)
    rows: tuple[int, int, int, int] = (0, 0, 0, 0)
    fields: dict[int, int] = field(default_factory=lambda: {82: 71, 138: 1000, 139: 2000, 38: 1, 45: 0, 52: 0, 59: 0, 230: 0})
    mig: bool = False
    """whether MIG mode is on"""
    refuses: dict[str, int] = field(default_factory=dict)
    """return code by the function's name"""
    everything: int = SUCCESS
    """what every function returns for it"""

    @property
    def free(self) -> int:
        """Bytes that are neither used nor the driver's."""
        return self.total - self.used - _RESERVED


def h100(index: int = 0, **more: Any) -> Gpu:
    """A full one."""
    return Gpu(H100_UUID.format(index=index), **more)


def geforce() -> Gpu:
    """A consumer card: no ECC, no NVLink, no energy counter, no violation counters."""
    missing = (
        "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetViolationStatus", "nvmlDeviceGetMigMode", "nvmlDeviceGetRemappedRows", "nvmlDeviceRegisterEvents",
    )  # fmt: skip
    refuses = dict.fromkeys(missing, UNSUPPORTED)
    return Gpu("GPU-6efc0000-0000-4000-8000-000000000000", "NVIDIA GeForce GTX 1080", fields={}, refuses=refuses)


def _put(address: int, kind: Any, value: Any) -> None:
    ctypes.cast(address, ctypes.POINTER(kind))[0] = value


def _text(address: int, length: int, text: str) -> None:
    ctypes.memmove(address, text.encode()[: length - 1] + b"\0", len(text) + 1)


class FakeNvml:
    """Stands where ``pynvml`` has the loaded library. ``calls`` counts the C calls by name."""

    def __init__(self, gpus: list[Gpu]) -> None:
        self.gpus = gpus
        self.loaded = True
        """whether the kernel driver is there"""
        self.initialised = 0
        self.calls: dict[str, int] = {}
        self.xids: deque[tuple[Gpu, int]] = deque()
        self.listening: set[str] = set()
        self.hangs = threading.Event()
        """while clear, every question to a device blocks"""
        self.hangs.set()
        for name, argtypes in _SIGNATURES.items():
            setattr(self, name, ctypes.CFUNCTYPE(c_int, *argtypes)(self._exported(name)))

    def _exported(self, name: str) -> Callable[..., int]:
        function = getattr(self, f"_{name}", None) or self._showing(name.removeprefix("nvmlDeviceGet"))
        of_device = name.startswith("nvmlDeviceGet") and name not in _WITHOUT_DEVICE

        def call(*arguments: Any) -> int:
            self.calls[name] = self.calls.get(name, 0) + 1
            if not self.loaded:
                return DRIVER_NOT_LOADED
            if not self.initialised and name != "nvmlInitWithFlags":
                return UNINITIALIZED
            if not of_device and name != "nvmlDeviceRegisterEvents":
                return int(function(*arguments) or SUCCESS)
            self.hangs.wait()
            gpu = self._at(arguments[0])
            refused = gpu.everything or gpu.refuses.get(name, SUCCESS)
            return int(refused or function(gpu, *arguments[1:]) or SUCCESS)

        return call

    def _showing(self, name: str) -> Callable[..., None]:
        kind, _, value = _SHOWN[name]
        return lambda gpu, *arguments: _put(arguments[-1], kind, value(gpu, *arguments[:-1]))

    def _at(self, handle: int) -> Gpu:
        return self.gpus[handle // 0x1000 - 1]

    def _handles(self) -> Iterator[tuple[str, int]]:
        for index, gpu in enumerate(self.gpus):
            yield gpu.uuid, (index + 1) * 0x1000

    def _nvmlInitWithFlags(self, _: int) -> None:
        self.initialised += 1

    def _nvmlShutdown(self) -> None:
        self.initialised -= 1

    def _nvmlDeviceGetCount_v2(self, out: int) -> None:
        _put(out, c_uint, len(self.gpus))

    def _nvmlDeviceGetHandleByIndex_v2(self, index: int, out: int) -> int:
        _put(out, c_void_p, (index + 1) * 0x1000)
        return self.gpus[index].everything

    def _nvmlDeviceGetHandleByUUID(self, uuid: bytes, out: int) -> int:
        handle = dict(self._handles()).get(uuid.decode())
        if handle is None:
            return NOT_FOUND
        _put(out, c_void_p, handle)
        return self._at(handle).everything

    def _nvmlDeviceGetUUID(self, gpu: Gpu, out: int, length: int) -> None:
        _text(out, length, gpu.uuid)

    def _nvmlDeviceGetName(self, gpu: Gpu, out: int, length: int) -> None:
        _text(out, length, gpu.name)

    def _nvmlDeviceGetMigMode(self, gpu: Gpu, current: int, pending: int) -> None:
        _put(current, c_uint, gpu.mig)
        _put(pending, c_uint, gpu.mig)

    def _nvmlDeviceGetNvLinkState(self, gpu: Gpu, link: int, out: int) -> int:
        if link >= len(gpu.links):
            return INVALID
        _put(out, c_uint, gpu.links[link])
        return SUCCESS

    def _nvmlDeviceGetFieldValues(self, gpu: Gpu, count: int, out: int) -> None:
        values = ctypes.cast(out, ctypes.POINTER(pynvml.c_nvmlFieldValue_t))
        for index in range(count):
            value = gpu.fields.get(values[index].fieldId)
            values[index].nvmlReturn = UNSUPPORTED if value is None else SUCCESS
            values[index].valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            values[index].value.ullVal = value or 0

    def _nvmlDeviceGetRemappedRows(self, gpu: Gpu, *out: int) -> None:
        for address, value in zip(out, gpu.rows, strict=True):
            _put(address, c_uint, value)

    def _nvmlEventSetCreate(self, out: int) -> None:
        _put(out, c_void_p, 0xE000)

    def _nvmlDeviceRegisterEvents(self, gpu: Gpu, kinds: int, _: int) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError
        self.listening.add(gpu.uuid)

    def _nvmlEventSetWait_v2(self, _: int, out: int, timeout_ms: int) -> int:
        assert timeout_ms == 0, "nobody waits in here"
        if not self.xids:
            return TIMEOUT
        gpu, number = self.xids.popleft()
        device = ctypes.cast(c_void_p(dict(self._handles())[gpu.uuid]), pynvml.c_nvmlDevice_t)
        _put(out, pynvml.c_nvmlEventData_t, pynvml.c_nvmlEventData_t(device, 0x8, number, 0, 0))
        return SUCCESS

    def _nvmlEventSetFree(self, _: int) -> None:
        self.listening.clear()


_P, _U = c_void_p, c_uint
_UTILIZATION, _MEMORY, _VIOLATION = pynvml.c_nvmlUtilization_t, pynvml.c_nvmlMemory_v2_t, pynvml.c_nvmlViolationTime_t
_SHOWN: dict[str, tuple[Any, int, Callable[..., Any]]] = {
    "UtilizationRates": (_UTILIZATION, 0, lambda gpu: _UTILIZATION(*gpu.utilization)),
    "MemoryInfo_v2": (_MEMORY, 0, lambda gpu: _MEMORY(0x2000028, gpu.total, _RESERVED, gpu.free, gpu.used)),
    "PowerUsage": (c_uint, 0, lambda gpu: gpu.milliwatts),
    "EnforcedPowerLimit": (c_uint, 0, lambda _: 700_000),
    "TotalEnergyConsumption": (c_ulonglong, 0, lambda gpu: gpu.millijoules),
    "Temperature": (c_uint, 1, lambda gpu, _: gpu.degrees),
    "ClockInfo": (c_uint, 1, lambda gpu, _: gpu.megahertz),
    "MaxClockInfo": (c_uint, 1, lambda _, __: 1980),
    "ViolationStatus": (_VIOLATION, 1, lambda gpu, policy: _VIOLATION(0, gpu.violation_ns[policy])),
    "TotalEccErrors": (c_ulonglong, 2, lambda gpu, kind, _: gpu.ecc[kind]),
    "PcieReplayCounter": (c_uint, 0, lambda gpu: gpu.replays),
}
"""What `nvmlDeviceGet…` puts at its last argument: its type, the number of arguments before it, and the value."""
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    **{f"nvmlDeviceGet{name}": (_P, *[_U] * more, _P) for name, (_, more, _) in _SHOWN.items()},
    "nvmlInitWithFlags": (c_uint,),
    "nvmlShutdown": (),
    "nvmlDeviceGetCount_v2": (_P,),
    "nvmlDeviceGetHandleByIndex_v2": (_U, _P),
    "nvmlDeviceGetHandleByUUID": (c_char_p, _P),
    "nvmlDeviceGetUUID": (_P, _P, _U),
    "nvmlDeviceGetName": (_P, _P, _U),
    "nvmlDeviceGetMigMode": (_P, _P, _P),
    "nvmlDeviceGetNvLinkState": (_P, _U, _P),
    "nvmlDeviceGetFieldValues": (_P, c_int, _P),
    "nvmlDeviceGetRemappedRows": (_P, *[_P] * 4),
    "nvmlEventSetCreate": (_P,),
    "nvmlDeviceRegisterEvents": (_P, c_ulonglong, _P),
    "nvmlEventSetWait_v2": (_P, _P, _U),
    "nvmlEventSetFree": (_P,),
}
_WITHOUT_DEVICE = frozenset({"nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByUUID"})


def installed(gpus: list[Gpu], monkeypatch: Any) -> FakeNvml:
    """Put a library with these GPUs where ``pynvml`` would load the driver's; a test's end takes it out again."""
    library = FakeNvml(gpus)
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return library
