"""Use of processor, memory, device memory and disk, against the container's limits; a call if it is too high."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import psutil

from torchobs import catalog
from torchobs.guard.records import Category, Severity, count, record_event
from torchobs.probes.device_memory import used_devices
from torchobs.support import cgroup
from torchobs.support.arguments import is_number
from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.support.import_hooks import imported
from torchobs.support.result import Checked, Problem, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

PERCENT, LEAST_BYTES = 100, 2**20
"""Thresholds up to the first are percentages, from the second on bytes"""
LEAST_CPU_S = 0.1
"""Shorter times say nothing: the kernel counts a processor's use in ticks of 10 ms"""
_log = logging.getLogger("torchobs.guard")


@dataclass(frozen=True)
class Usage(Result):
    """One resource: a processor in cores, others in bytes; the fields of the other unit are ``None``."""

    resource: str
    where: str
    """``container`` or ``machine``, a device, or a file system's path"""
    used_bytes: int | None
    limit_bytes: int | None
    used_cores: float | None
    limit_cores: float | None
    percent: float
    threshold: float
    """in percent"""

    @property
    def ok(self) -> bool:
        """Whether it is at or below its threshold."""
        return self.percent <= self.threshold


@dataclass(frozen=True)
class ResourceReport(Checked):
    """All resources at one moment: ``report["memory"]`` is one of them; with several devices the first."""

    usages: tuple[Usage, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Resources above their threshold."""
        texts = ((usage, f"at {usage.percent:.0f} %, above {usage.threshold:.0f} %") for usage in self.usages if not usage.ok)
        return tuple(Problem(usage.resource, usage.where, f"{usage.resource} is {text}") for usage, text in texts)


class ResourceGuard:
    """Made by :func:`resources`. ``check()`` looks once; as a context manager it looks regularly, in its own thread."""

    def __init__(
        self,
        thresholds: Mapping[str, float],
        on_exceed: Callable[[ResourceReport], object] | None,
        path: str | os.PathLike[str],
        interval_s: float,
        root: str = "",
    ) -> None:
        self._thresholds, self._on_exceed, self._path, self._interval_s = thresholds, on_exceed, os.fspath(path), interval_s
        self._root = root
        self._above: frozenset[tuple[str, str]] = frozenset()
        self._cpu = _cpu_seconds(root)
        self._last_cpu: tuple[str, str, float, float] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._breaker = CircuitBreaker("guard.resources")

    def check(self) -> ResourceReport:
        """Look once; the processor's use is the mean since the last look.

        The first look waits until ``LEAST_CPU_S`` after the guard was made; a look sooner than that after another repeats its
        use of the processor. A resource that is newly above its threshold is recorded as an event, and ``on_exceed`` is called
        with the report; again only once the resource has been below.
        """
        usages = tuple(self._usage(*reading) for reading in self._readings() if reading[-1] > 0)
        report, before = ResourceReport(usages), self._above
        self._above = frozenset((usage.resource, usage.where) for usage in usages if not usage.ok)
        new = [usage for usage in usages if (usage.resource, usage.where) in self._above - before]
        for usage in new:
            _record(usage)
        if new and self._on_exceed is not None:
            self._on_exceed(report)
        return report

    def _usage(self, resource: str, where: str, used: float, limit: float) -> Usage:
        threshold = self._thresholds[resource]
        threshold = threshold if threshold <= PERCENT else 100.0 * threshold / limit
        share = 100.0 * used / limit
        if resource == "cpu":
            return Usage(resource, where, None, None, used, limit, share, threshold)
        return Usage(resource, where, int(used), int(limit), None, None, share, threshold)

    def __enter__(self) -> ResourceGuard:  # noqa: PYI034  # typing.Self needs Python 3.11
        """Start looking, every ``interval_s``. An exception of ``on_exceed`` is logged, and ends it."""
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="torchobs-resources", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s) and not self._breaker.is_open:
            call(self._breaker, self.check)
        for failure in self._breaker.failures:
            _log.error("resources are watched no more: %s at %s", failure.exception, failure.location)

    def _readings(self) -> Iterator[tuple[str, str, float, float]]:
        """Yield resource, where, used and limit of the resources with a threshold."""
        if "cpu" in self._thresholds and (cpu := self._cpu_usage()) is not None:
            yield cpu
        if "memory" in self._thresholds:
            yield _memory(self._root)
        torch = imported("torch")
        if "gpu_memory" in self._thresholds and torch is not None:
            for device in used_devices(torch):
                yield "gpu_memory", device.device, device.reserved, device.limit or 0
        if "disk" in self._thresholds:
            disk = psutil.disk_usage(self._path)
            yield "disk", self._path, disk.used, disk.used + disk.free  # root's reserve is not ours

    def _cpu_usage(self) -> tuple[str, str, float, float] | None:
        if self._last_cpu is None:
            time.sleep(max(0.0, self._cpu.at_s + LEAST_CPU_S - time.monotonic()))
        before, now = self._cpu, _cpu_seconds(self._root)
        if now.at_s - before.at_s >= LEAST_CPU_S:
            self._cpu = now
            if now.where == before.where:  # else a quota has come or gone
                used = round(now.used_s - before.used_s, 3) / (now.at_s - before.at_s)  # a kernel's tick may be late or early
                self._last_cpu = "cpu", now.where, min(max(used, 0.0), now.cores), now.cores
        return self._last_cpu


def resources(
    *,
    cpu: float | None = 90.0,
    memory: float | None = 90.0,
    gpu_memory: float | None = 90.0,
    disk: float | None = 90.0,
    on_exceed: Callable[[ResourceReport], object] | None = None,
    path: str | os.PathLike[str] = ".",
    interval_s: float = 10.0,
) -> ResourceGuard:
    """Watch resources against thresholds: percent of what this container may have (else the machine), or bytes from 1 MiB on.

    ``with guard.resources(on_exceed=...):`` watches a training; ``guard.resources().check()`` looks once. A resource above its
    threshold is also an event of the run. Without this function, the alerts on the same limits are ``TorchobsCpuSaturated``,
    ``TorchobsOutOfMemoryNear``, ``TorchobsGpuMemoryNearLimit`` and ``TorchobsFilesystemFull``.

    Args:
        cpu: threshold for the cores that it may use, by quota and affinity; None does not look. Likewise:
        memory: memory that cannot be reclaimed, of the memory limit.
        gpu_memory: memory reserved by torch, of each device that this process uses (or of its allowed fraction).
        disk: the file system of ``path``.
        on_exceed: called with the report when a resource gets above its threshold; in the watching thread.
        path: where the training writes.
        interval_s: how often to look, in seconds.

    Raises:
        ValueError: a threshold is neither a percentage nor a number of bytes, or the interval is no time.
        TypeError: ``on_exceed`` cannot be called.
        OSError: ``path`` does not exist.
    """
    thresholds = {"cpu": cpu, "memory": memory, "gpu_memory": gpu_memory, "disk": disk}
    for name, threshold in thresholds.items():
        if threshold is not None and not (
            is_number(threshold) and (0 <= threshold <= PERCENT or (name != "cpu" and LEAST_BYTES <= threshold < inf))
        ):
            in_bytes = "" if name == "cpu" else ", or bytes, from 1 MiB (2**20) on"
            raise ValueError(f"{name} is {threshold!r}; a threshold is a percentage, from 0 to 100{in_bytes}, or None")
        if threshold is not None and 0 < threshold < 1:
            raise ValueError(f"{name} is {threshold!r}, less than one percent: as a share it is {100 * threshold:g} percent")
    if not (is_number(interval_s) and 0 < interval_s <= threading.TIMEOUT_MAX):
        raise ValueError(f"interval_s is {interval_s!r}; it is a time in seconds")
    if on_exceed is not None and not callable(on_exceed):
        raise TypeError(f"on_exceed is {type(on_exceed).__name__}; it is a function that takes the report")
    psutil.disk_usage(os.fspath(path))  # raises if there is no such path
    wanted = {name: threshold for name, threshold in thresholds.items() if threshold is not None}
    return ResourceGuard(wanted, on_exceed, path, interval_s)


@dataclass(frozen=True, slots=True)
class _CpuReading:
    where: str
    used_s: float
    cores: float
    at_s: float


def _cpu_seconds(root: str = "") -> _CpuReading:
    """Return the CPU time used so far by a container with a quota, else on the allowed processors."""
    now = time.monotonic()
    every = psutil.cpu_times(percpu=True)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
    cores = float(len(allowed))
    groups = cgroup.of_process("cpu", root) if sys.platform == "linux" else None
    quota = cgroup.cpu_of(groups, root) if groups is not None else None
    if quota is not None and quota.limit is not None and quota.used_s is not None:
        return _CpuReading("container", quota.used_s, min(quota.limit, cores), now)
    return _CpuReading("machine", sum(_busy(times) for index, times in enumerate(every) if index in allowed), cores, now)


def _busy(times: Any) -> float:
    others = ("idle", "iowait", "guest", "guest_nice")  # guests are in user time
    return float(sum(times) - sum(getattr(times, name, 0.0) for name in others))


def _memory(root: str) -> tuple[str, str, float, float]:
    machine = psutil.virtual_memory()
    groups = cgroup.of_process("memory", root) if sys.platform == "linux" else None
    tightest = cgroup.tightest(groups, root) if groups is not None else None
    if tightest is not None and tightest[1].limit is not None and tightest[1].limit < machine.total:
        return "memory", "container", tightest[1].pinned, tightest[1].limit
    return "memory", "machine", machine.total - machine.available, machine.total


def _record(usage: Usage) -> None:
    count(catalog.GUARD_EXCEEDED, 1, Category.RESOURCES, Severity.WARNING, resource=usage.resource)
    about = {"resource": usage.resource, "where": usage.where, "percent": round(usage.percent, 1), "threshold": usage.threshold}
    record_event(catalog.EVENT_GUARD_RESOURCE, Category.RESOURCES, Severity.WARNING, **about)
    _log.warning("%s of %s is at %.0f %%, above %.0f %%", usage.resource, usage.where, usage.percent, usage.threshold)
