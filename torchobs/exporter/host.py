"""Metrics of the machine, for nodes without node_exporter (``--collect.host``): read by psutil, with OpenTelemetry's names.

They are collected when a page is scraped, so that rates fit the scrape times. Each collector and each file system has a thread
of its own: a scrape waits for them briefly, and otherwise shows their last results. ``statvfs`` on a network file system with a
dead server does not return, and no signal ends it; then only that daemon thread hangs, and no second one is started.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections import Counter
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from torchobs import catalog
from torchobs.exporter.exporter_metrics import HostFacts, Sample, by_attribute
from torchobs.flight.directory import find_existing, mount_of
from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torchobs.exporter.config import ExporterConfig

FRESH_S = 0.1
"""Age up to which results serve another scrape as well; as the snapshot's (``snapshot_cache``)."""
DEADLINE_S = 0.2
"""How long a scrape waits for all collectors: a hundred times their usual time, well below any scrape timeout."""
KEEP_S = 60.0
"""Greatest age of a result that is shown for lack of a newer one: one to four scrape intervals."""
FAILS = (OSError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, RuntimeError, Warning)
"""Exceptions of reading an unknown kernel's files, also by psutil, which warns about missing fields."""

OWN_PROCFS = "/proc"
_CPU_FIELDS = {mode: (mode,) for mode in catalog.CPU_MODES} | {"interrupt": ("irq", "softirq")}
"""psutil's fields by OpenTelemetry's modes. The time of guests is included in user and nice."""
_PROCFS = threading.Lock()
_log = logging.getLogger(__name__)


@contextmanager
def _procfs(path: str) -> Iterator[None]:
    """Have psutil read below ``path``, which is a global variable of psutil, hence under a lock."""
    with _PROCFS:
        before, psutil.PROCFS_PATH = psutil.PROCFS_PATH, path
        try:
            yield
        finally:
            psutil.PROCFS_PATH = before


def cpu(config: ExporterConfig) -> Iterator[Sample]:
    """Yield the processors' samples. Raises one of ``FAILS``, as all collectors do."""
    with _procfs(config.procfs):
        times = psutil.cpu_times()
    for mode, fields in _CPU_FIELDS.items():
        yield Sample(catalog.SYSTEM_CPU_TIME, {catalog.CPU_MODE.name: mode}, sum(getattr(times, name, 0.0) for name in fields))
    yield Sample(catalog.HOST_CPUS, {}, psutil.cpu_count() or 0)
    yield Sample(catalog.SYSTEM_CPU_LOAD, {}, psutil.getloadavg()[0])
    threads = dict(zip(("procs_running", "procs_blocked"), catalog.THREAD_STATES, strict=True))
    yield from by_attribute(catalog.HOST_THREADS, _numbers(f"{config.procfs}/stat", threads))


def memory(config: ExporterConfig) -> Iterator[Sample]:
    """Yield the samples of memory and swap; the states of memory add up to the total, with procps' definition of cached."""
    with _procfs(config.procfs):
        ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    used = max(0, ram.total - ram.free - ram.buffers - ram.cached)
    states = {"used": used, "free": ram.free, "buffers": ram.buffers, "cached": ram.cached}
    yield Sample(catalog.SYSTEM_MEMORY_LIMIT, {}, ram.total)
    yield from by_attribute(catalog.SYSTEM_MEMORY_USAGE, states)
    yield Sample(catalog.SYSTEM_MEMORY_AVAILABLE, {}, ram.available)
    yield Sample(catalog.SYSTEM_MEMORY_SHARED, {}, ram.shared)
    yield from by_attribute(catalog.SYSTEM_PAGING_USAGE, {"used": swap.used, "free": swap.free})
    unwritten = _numbers(f"{config.procfs}/meminfo", {"Dirty:": "dirty", "Writeback:": "writeback"})
    yield from by_attribute(catalog.HOST_MEMORY_UNWRITTEN, {k: v * 1024 for k, v in unwritten.items()})
    for number in _numbers(f"{config.procfs}/vmstat", {"oom_kill": ""}).values():
        yield Sample(catalog.HOST_OOM_KILLS, {}, number)


def disk(config: ExporterConfig) -> Iterator[Sample]:
    """Yield the physical disks' samples."""
    with _procfs(config.procfs):
        counters = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
    # a slash in a name (cciss/c0d0) is an exclamation mark in sysfs
    physical = [name for name in counters if _is_physical(f"{config.sysfs}/block/{name.replace('/', '!')}")]
    for name in physical:
        device, counts = {catalog.SYSTEM_DEVICE.name: name}, counters[name]
        yield Sample(catalog.SYSTEM_DISK_IO_TIME, device, getattr(counts, "busy_time", 0) / 1e3)
        for direction in catalog.DISK_DIRECTION.values:
            attributes = {**device, catalog.DISK_DIRECTION.name: direction}
            yield Sample(catalog.SYSTEM_DISK_IO, attributes, getattr(counts, f"{direction}_bytes"))
            yield Sample(catalog.SYSTEM_DISK_OPERATIONS, attributes, getattr(counts, f"{direction}_count"))
            yield Sample(catalog.SYSTEM_DISK_OPERATION_TIME, attributes, getattr(counts, f"{direction}_time") / 1e3)


def network(config: ExporterConfig) -> Iterator[Sample]:
    """Yield the samples of the physical interfaces or, in a pod, which has none, of the pod's own."""
    first = f"{config.procfs}/1"  # in a mounted procfs, ``net`` is the reader's own network namespace, ``1/net`` the machine's
    is_mounted = config.procfs != OWN_PROCFS and Path(f"{first}/net/dev").exists()
    with _procfs(first if is_mounted else config.procfs):
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
    # the traffic of a bond or a bridge is counted at its members
    physical = [name for name in counters if _is_physical(f"{config.sysfs}/class/net/{name}")]
    for name in physical or [name for name in counters if name != "lo"]:
        for direction, suffix, way in (("receive", "recv", "in"), ("transmit", "sent", "out")):
            attributes = {catalog.NETWORK_INTERFACE.name: name, catalog.NETWORK_DIRECTION.name: direction}
            yield Sample(catalog.SYSTEM_NETWORK_IO, attributes, getattr(counters[name], f"bytes_{suffix}"))
            yield Sample(catalog.SYSTEM_NETWORK_ERRORS, attributes, getattr(counters[name], f"err{way}"))
            yield Sample(catalog.SYSTEM_NETWORK_DROPPED, attributes, getattr(counters[name], f"drop{way}"))


def filesystem(path: str) -> Iterator[Sample]:
    """Yield the samples of the file system that a directory is on; space that only root may use is *reserved*.

    Raises ``OSError``; may never return, on a network file system with a dead server. psutil's ``disk_usage`` has neither
    inodes nor the read-only flag.
    """
    real = os.path.realpath(path, strict=True)
    status, (point, kind) = os.statvfs(real), mount_of(real)
    attributes = {catalog.MOUNTPOINT.name: point, catalog.FILESYSTEM_TYPE.name: kind}
    size, free, available = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_bfree, status.f_bavail))
    space = {"used": max(0, size - free), "free": available, "reserved": max(0, free - available)}
    yield Sample(catalog.SYSTEM_FILESYSTEM_LIMIT, attributes, size)
    yield from by_attribute(catalog.SYSTEM_FILESYSTEM_USAGE, space, attributes)
    if status.f_files:  # 0 where inodes are allocated on demand
        inodes = {"used": max(0, status.f_files - status.f_ffree), "free": status.f_ffree}
        yield from by_attribute(catalog.SYSTEM_FILESYSTEM_INODES, inodes, attributes)
    yield Sample(catalog.HOST_FILESYSTEM_READONLY, attributes, float(bool(status.f_flag & os.ST_RDONLY)))


class Collector:
    """Repeats a call in a daemon thread, never twice at a time, and keeps its newest result. To be used by one thread."""

    def __init__(self, name: str, about: str, call: Callable[[], Iterable[Sample]], clock: Callable[[], float]) -> None:
        """``about``: what it collects, in the log."""
        self.name, self._about, self._call, self._clock = name, about, call, clock
        self._thread: threading.Thread | None = None
        self._result: tuple[tuple[Sample, ...], float] = (), -math.inf
        self._problem = ""
        """what was logged last"""
        self.errors = 0

    def begin(self) -> None:
        """Start the call, unless the last one has not returned."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=f"host-{self.name}", daemon=True)
            self._thread.start()

    def wait(self, timeout_s: float) -> tuple[Sample, ...]:
        """Wait for the call begun last, at most ``timeout_s``, and return the newest samples, unless they are too old."""
        if self._thread is not None:
            self._thread.join(max(0.0, timeout_s))
        samples, at_s = self._result
        return samples if self._clock() - at_s <= KEEP_S else ()

    def _run(self) -> None:
        samples, problem = tuple[Sample, ...](), ""
        try:
            samples = tuple(self._call())
        except FAILS as failure:
            problem = repr(failure)
            self.errors += 1
        if problem and problem != self._problem:
            _log.warning("host: %s: %s", self._about, problem)
        self._result, self._problem = (samples, self._clock()), problem


class HostMetrics:
    """Collects the machine's metrics. To be used in one event loop; ``latest`` may be read by any thread."""

    def __init__(self, config: ExporterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._collectors = [*_collectors(config, clock)]
        self._running: asyncio.Future[None] | None = None
        self._looked_s = -FRESH_S
        self._booted_ns = 0
        with suppress(*FAILS), _procfs(config.procfs):
            self._booted_ns = int(psutil.boot_time()) * 10**9
        self.latest: HostFacts | None = None

    async def refresh(self) -> None:
        """Update ``latest``; collectors that do not answer in time keep their values. Simultaneous scrapes share one update."""
        if self._running is None or self._running.done():
            if self._clock() - self._looked_s < FRESH_S:
                return
            self._running = asyncio.ensure_future(asyncio.to_thread(self.collect))
        await asyncio.wait({self._running})

    def collect(self) -> None:
        """Collect now, for at most :data:`DEADLINE_S`."""
        began_s = self._clock()
        samples: list[Sample] = []
        for collector in self._collectors:
            collector.begin()
        for collector in self._collectors:
            samples += collector.wait(began_s + DEADLINE_S - self._clock())
        self._looked_s = self._clock()
        errors = Counter(dict.fromkeys(self._config.collect_host, 0))
        for collector in self._collectors:
            errors[collector.name] += collector.errors
        took = Sample(catalog.EXPORTER_HOST_DURATION, {}, self._looked_s - began_s)
        collection = (took, *by_attribute(catalog.EXPORTER_HOST_ERRORS, errors))
        self.latest = HostFacts(tuple(_once(samples)), collection, self._booted_ns)


def _collectors(config: ExporterConfig, clock: Callable[[], float]) -> Iterator[Collector]:
    for collect in (cpu, memory, disk, network):
        if collect.__name__ in config.collect_host:
            yield Collector(collect.__name__, collect.__name__, partial(collect, config), clock)
    if "filesystem" in config.collect_host:
        yield Collector("filesystem", "file system of the flight files", partial(_of_flight_files, config), clock)
        for path in dict.fromkeys(config.host_paths):
            yield Collector("filesystem", f"file system of {path}", partial(filesystem, path), clock)


def _of_flight_files(config: ExporterConfig) -> Iterable[Sample]:
    path = find_existing(config.flight_dir, config.runtime_dir)
    return filesystem(path) if path is not None else ()


def _numbers(path: str, names: Mapping[str, str]) -> dict[str, int]:
    """Return values of a file such as /proc/vmstat that psutil does not offer; ``names`` maps its keys to result names.

    Missing lines, or a missing file, are left out. Raises ``ValueError``.
    """
    try:
        words = [line.split() for line in Path(path).read_text("utf-8", "replace").splitlines()]
    except OSError:
        return {}
    return {names[fields[0]]: int(fields[1]) for fields in words if len(fields) > 1 and fields[0] in names}


def _is_physical(link: str) -> bool:
    """Return whether an entry of sysfs (``/sys/block/X``, ``/sys/class/net/X``) links to a physical device.

    Loop devices, RAM disks, bonds, bridges and containers' interfaces are below ``devices/virtual``, and so is the head of a
    multipath NVMe disk; its paths (``nvme0c0n1``) are counted. NVMe over fabrics is there, too, but counts as physical.
    """
    try:
        target = f"{Path(link).readlink()}/"
    except OSError:
        return False
    return "/virtual/" not in target or "/virtual/nvme-fabrics/" in target


def _once(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Yield the samples, each series once: two directories may be on one file system."""
    keys = set()
    for sample in samples:
        attributes = {name: value if value.isascii() else labels.text(value) for name, value in sample.attributes.items()}
        key = sample.metric.name, *attributes.values()
        if key not in keys:
            keys.add(key)
            yield Sample(sample.metric, attributes, sample.value)
