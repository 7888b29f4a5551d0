"""The machine's own numbers, for nodes without node_exporter (``--collect.host``): psutil's, under OpenTelemetry's names.

They are read when somebody asks for the page, so that rates are those of the scrapes. Each collector and each file system has
a thread of its own (``detached``): a scrape waits for them a little, and else shows what they said last.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import psutil

from torchobs import catalog
from torchobs.exporter.detached_call import FAILS, DetachedCall
from torchobs.exporter.exporter_metrics import HostFacts, Sample
from torchobs.flight.files.location import find_existing
from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torchobs.exporter.config import ExporterConfig

FRESH_S = 0.1
"""As the snapshot's (``watch``): a look this young serves another scrape as well."""
FILE_SYSTEM_FRESH_S = 1.0
"""Several scrapers are no reason to trouble a file server more."""
DEADLINE_S = 0.2
"""How long a scrape waits for all answers together: less than anybody's patience, a hundred times what they take."""
KEEP_S = 60.0
"""How old an answer may be that is shown for want of a newer one: that is four scrapes or one."""
MOST_PATHS = 32
MOST_DEVICES = 64
"""Disks, interfaces of which there are series: a machine with 1,000 virtual functions is not to fill the page."""

OWN_PROCFS = "/proc"
_CPU_FIELDS = {mode: (mode,) for mode in catalog.CPU_MODES} | {"interrupt": ("irq", "softirq")}
"""psutil's fields by OpenTelemetry's modes. Guests' time is in user's and nice's already."""
_BEYOND = float(1 << 63)
_PROCFS = threading.Lock()
T = TypeVar("T")
_log = logging.getLogger(__name__)


class Roots(NamedTuple):
    """Where the kernel's files are: a container may have the machine's mounted elsewhere."""

    procfs: str
    sysfs: str


@contextmanager
def _procfs(path: str) -> Iterator[None]:
    """Have psutil read below ``path``, which is a variable of the module and would hold for all threads."""
    with _PROCFS:
        before, psutil.PROCFS_PATH = psutil.PROCFS_PATH, path
        try:
            yield
        finally:
            psutil.PROCFS_PATH = before


def cpu(roots: Roots) -> Iterator[Sample]:
    """Yield what there is to say of the processors. Raises one of ``detached.FAILS``, as the others do."""
    with _procfs(roots.procfs):
        times = psutil.cpu_times()
    for mode, fields in _CPU_FIELDS.items():
        yield Sample(catalog.SYSTEM_CPU_TIME, {catalog.CPU_MODE.name: mode}, sum(getattr(times, name, 0.0) for name in fields))
    yield Sample(catalog.HOST_CPUS, {}, psutil.cpu_count() or 0)
    yield Sample(catalog.SYSTEM_CPU_LOAD, {}, psutil.getloadavg()[0])
    threads = dict(zip(("procs_running", "procs_blocked"), catalog.THREAD_STATES, strict=True))
    yield from _by_state(catalog.HOST_THREADS, catalog.THREAD_STATE, _numbers(f"{roots.procfs}/stat", threads))


def memory(roots: Roots) -> Iterator[Sample]:
    """Yield what there is to say of memory and swap; the states of memory add up to its limit, caches being procps'."""
    with _procfs(roots.procfs):
        ram, swap = psutil.virtual_memory(), psutil.swap_memory()
    used = max(0, ram.total - ram.free - ram.buffers - ram.cached)
    states = {"used": used, "free": ram.free, "buffers": ram.buffers, "cached": ram.cached}
    yield Sample(catalog.SYSTEM_MEMORY_LIMIT, {}, ram.total)
    yield from _by_state(catalog.SYSTEM_MEMORY_USAGE, catalog.MEMORY_STATE, states)
    yield Sample(catalog.SYSTEM_MEMORY_AVAILABLE, {}, ram.available)
    yield Sample(catalog.SYSTEM_MEMORY_SHARED, {}, ram.shared)
    yield from _by_state(catalog.SYSTEM_PAGING_USAGE, catalog.PAGING_STATE, {"used": swap.used, "free": swap.free})
    unwritten = _numbers(f"{roots.procfs}/meminfo", {"Dirty:": "dirty", "Writeback:": "writeback"})
    yield from _by_state(catalog.HOST_MEMORY_UNWRITTEN, catalog.UNWRITTEN_STATE, {k: v * 1024 for k, v in unwritten.items()})
    for number in _numbers(f"{roots.procfs}/vmstat", {"oom_kill": ""}).values():
        yield Sample(catalog.HOST_OOM_KILLS, {}, number)


def disk(roots: Roots) -> Iterator[Sample]:
    """Yield what there is to say of the physical disks."""
    with _procfs(roots.procfs):
        found = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
    # a slash in a name (cciss/c0d0) is an exclamation mark in sysfs
    physical = [name for name in found if _is_physical(f"{roots.sysfs}/block/{name.replace('/', '!')}")]
    for name in _bounded(physical, "disks"):
        own, counts = {catalog.SYSTEM_DEVICE.name: name}, found[name]
        yield Sample(catalog.SYSTEM_DISK_IO_TIME, own, getattr(counts, "busy_time", 0) / 1e3)
        for direction in catalog.DISK_DIRECTION.values:
            one = {**own, catalog.DISK_DIRECTION.name: direction}
            yield Sample(catalog.SYSTEM_DISK_IO, one, getattr(counts, f"{direction}_bytes"))
            yield Sample(catalog.SYSTEM_DISK_OPERATIONS, one, getattr(counts, f"{direction}_count"))
            yield Sample(catalog.SYSTEM_DISK_OPERATION_TIME, one, getattr(counts, f"{direction}_time") / 1e3)


def network(roots: Roots) -> Iterator[Sample]:
    """Yield what there is to say of the physical interfaces, or, in a pod, which has none, of its own."""
    first = f"{roots.procfs}/1"  # of a mounted tree: its ``net`` is the reader's own namespace and not the machine's
    is_mounted = roots.procfs != OWN_PROCFS and Path(f"{first}/net/dev").exists()
    with _procfs(first if is_mounted else roots.procfs):
        found = psutil.net_io_counters(pernic=True, nowrap=False)
    # a bond's or a bridge's traffic is that of its members
    physical = [name for name in found if _is_physical(f"{roots.sysfs}/class/net/{name}")]
    for name in _bounded(physical or [name for name in found if name != "lo"], "network interfaces"):
        for direction, suffix, way in (("receive", "recv", "in"), ("transmit", "sent", "out")):
            own = {catalog.NETWORK_INTERFACE.name: name, catalog.NETWORK_DIRECTION.name: direction}
            yield Sample(catalog.SYSTEM_NETWORK_IO, own, getattr(found[name], f"bytes_{suffix}"))
            yield Sample(catalog.SYSTEM_NETWORK_ERRORS, own, getattr(found[name], f"err{way}"))
            yield Sample(catalog.SYSTEM_NETWORK_DROPPED, own, getattr(found[name], f"drop{way}"))


def filesystem(path: str) -> Iterator[Sample]:
    """Yield what there is to say of the file system that a directory is on; space that only root may use is reserved.

    Raises ``OSError``; may never return: a network file system whose server is gone answers no call. psutil's ``disk_usage``
    has no inodes, and not whether anything can be written.
    """
    real = os.path.realpath(path, strict=True)
    status, (point, kind) = os.statvfs(real), mount_of(real)
    own = {catalog.MOUNTPOINT.name: point, catalog.FILESYSTEM_TYPE.name: kind}
    size, free, available = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_bfree, status.f_bavail))
    space = {"used": max(0, size - free), "free": available, "reserved": max(0, free - available)}
    yield Sample(catalog.SYSTEM_FILESYSTEM_LIMIT, own, size)
    yield from _by_state(catalog.SYSTEM_FILESYSTEM_USAGE, catalog.FILESYSTEM_STATE, space, own)
    if status.f_files:  # 0 where inodes are made as they are needed
        inodes = {"used": max(0, status.f_files - status.f_ffree), "free": status.f_ffree}
        yield from _by_state(catalog.SYSTEM_FILESYSTEM_INODES, catalog.INODE_STATE, inodes, own)
    yield Sample(catalog.HOST_FILESYSTEM_READONLY, own, float(bool(status.f_flag & os.ST_RDONLY)))


def mount_of(path: str) -> tuple[str, str]:
    """Return the mount point that an absolute path is on, and its type, without asking the file system; '' if unknown."""
    with _procfs(OWN_PROCFS):  # our own mounts, whatever the tree is: statvfs follows a path in our own namespace
        mounts = psutil.disk_partitions(all=True)
    holding = [one for one in mounts if path == one.mountpoint or path.startswith(f"{one.mountpoint.rstrip('/')}/")]
    best = max(reversed(holding), key=lambda one: len(one.mountpoint), default=None)  # the last of equals lies over the others
    return (best.mountpoint, best.fstype) if best else ("", "")


@dataclass(slots=True)
class _Source:
    """Something to ask. ``about`` is what the log calls it, ``mountpoint`` what the page calls a file system."""

    collector: str
    about: str
    call: DetachedCall
    mountpoint: str = ""
    told: str = ""
    """the problem that stands on the log"""
    heard_s: float = -math.inf


class HostMetrics:
    """The newest of the machine's numbers. To be used in one event loop; ``latest`` may be read by any thread."""

    def __init__(self, config: ExporterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._roots, self._clock = Roots(config.procfs, config.sysfs), clock
        self._sources = [*_sources(config, self._roots, clock)]
        self._errors = dict.fromkeys(config.collect_host, 0)
        self._running: asyncio.Future[None] | None = None
        self._looked_s = -FRESH_S
        self._booted_ns = 0
        self.latest: HostFacts | None = None

    async def look(self) -> None:
        """Renew ``latest``; what does not answer in time is left as it is. Scrapes at the same time share one look."""
        if self._running is None:
            if self._clock() - self._looked_s < FRESH_S:
                return
            self._running = asyncio.ensure_future(asyncio.to_thread(self.take))
        running = self._running
        await asyncio.wait({running})
        if self._running is running:
            self._running = None
            if (problem := running.exception()) is not None:
                _log.error("host: a look failed, the last one is shown: %r", problem, exc_info=problem)

    def take(self) -> None:
        """Look now, for :data:`DEADLINE_S` at most."""
        began_s = self._clock()
        said: list[Sample] = []
        for source in self._sources:
            source.call.begin()
        for source in self._sources:
            answer = source.call.wait(began_s + DEADLINE_S - self._clock())
            if answer is not None and answer.at_s > source.heard_s:
                source.heard_s = answer.at_s
                self._errors[source.collector] += answer.failure is not None
                self._log_once(source, repr(answer.failure) if answer.failure is not None else "")
                points = (one.attributes.get(catalog.MOUNTPOINT.name, "") for one in answer.said)
                source.mountpoint = next(points, "") or source.mountpoint
            if source.call.is_stuck:
                self._log_once(source, "no answer for seconds, and it is not asked again until there is one")
            if answer is not None and self._clock() - answer.at_s <= KEEP_S:
                said += answer.said
        self._looked_s = self._clock()
        self.latest = HostFacts(tuple(_once(said)), tuple(self._own(self._looked_s - began_s)), self._boot_time_ns())

    def _log_once(self, source: _Source, problem: str) -> None:
        if problem and problem != source.told:
            _log.warning("host: %s: %s", source.about, problem)
        source.told = problem

    def _own(self, took_s: float) -> Iterator[Sample]:
        yield Sample(catalog.EXPORTER_HOST_DURATION, {}, took_s)
        yield from _by_state(catalog.EXPORTER_HOST_ERRORS, catalog.HOST_COLLECTOR, self._errors)
        stuck: dict[str, bool] = {}
        for source in self._sources:
            if source.collector == "filesystem":
                stuck[source.mountpoint] = stuck.get(source.mountpoint, False) or source.call.is_stuck
        for point, is_stuck in stuck.items():
            own = {catalog.HOST_COLLECTOR.name: "filesystem", catalog.MOUNTPOINT.name: labels.text(point)}
            yield Sample(catalog.EXPORTER_HOST_STUCK, own, float(is_stuck))

    def _boot_time_ns(self) -> int:
        if not self._booted_ns:
            try:
                with _procfs(self._roots.procfs):
                    self._booted_ns = int(psutil.boot_time()) * 10**9
            except FAILS:
                return 0
        return self._booted_ns


def _sources(config: ExporterConfig, roots: Roots, clock: Callable[[], float]) -> Iterator[_Source]:
    for collect in (cpu, memory, disk, network):
        if collect.__name__ in config.collect_host:
            yield _Source(collect.__name__, collect.__name__, DetachedCall(partial(collect, roots), clock))
    if "filesystem" in config.collect_host:
        flight = DetachedCall(partial(_of_flight_files, config), clock, FILE_SYSTEM_FRESH_S)
        yield _Source("filesystem", "file system of the flight files", flight)
        if len(config.host_paths) > MOST_PATHS:
            _log.error("host: %d directories, of which the first %d are told of", len(config.host_paths), MOST_PATHS)
        for path in dict.fromkeys(config.host_paths[:MOST_PATHS]):
            call = DetachedCall(partial(filesystem, path), clock, FILE_SYSTEM_FRESH_S)
            point = ""
            with suppress(*FAILS):
                point, _ = mount_of(os.path.abspath(path))  # noqa: PTH100  # resolve() asks the file system, which may not answer
            yield _Source("filesystem", f"file system of {path}", call, point)


def _of_flight_files(config: ExporterConfig) -> Iterable[Sample]:
    path = find_existing(config.flight_dir, config.runtime_dir)
    return filesystem(path) if path is not None else ()


def _by_state(
    metric: catalog.Metric, state: catalog.Attribute, numbers: Mapping[str, float], own: Mapping[str, str] | None = None
) -> Iterator[Sample]:
    return (Sample(metric, {**(own or {}), state.name: name}, number) for name, number in numbers.items())


def _numbers(path: str, names: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers behind those words in a file such as /proc/vmstat, which psutil has not, by the words' names.

    A kernel without the file or a line has no such number. Raises ``ValueError``.
    """
    try:
        words = [line.split() for line in Path(path).read_text("utf-8", "replace").splitlines()]
    except OSError:
        return {}
    return {names[one[0]]: int(one[1]) for one in words if len(one) > 1 and one[0] in names}


def _is_physical(link: str) -> bool:
    """Return True if an entry of sysfs (``/sys/block/X``, ``/sys/class/net/X``) leads to a device of the machine's own.

    Loop devices, RAM disks, bonds, bridges and containers' interfaces live below ``devices/virtual``, and so does the head of
    a multipath NVMe disk, whose paths (``nvme0c0n1``) are counted. Only NVMe over a fabric is there and is a device.
    """
    try:
        target = f"{Path(link).readlink()}/"
    except OSError:
        return False
    return "/virtual/" not in target or "/virtual/nvme-fabrics/" in target


def _bounded(names: Sequence[T], what: str) -> Sequence[T]:
    if len(names) > MOST_DEVICES:
        _log.warning("host: %d %s, of which the first %d are shown", len(names), what, MOST_DEVICES)
    return names[:MOST_DEVICES]


def _once(said: Iterable[Sample]) -> Iterator[Sample]:
    """Yield what a page and OTLP can show, each series once: two directories may be on one file system."""
    seen = set()
    for one in said:
        attributes = {name: value if value.isascii() else labels.text(value) for name, value in one.attributes.items()}
        key = one.metric.name, *attributes.values()
        if key not in seen and math.isfinite(one.value) and 0 <= one.value < _BEYOND:
            seen.add(key)
            yield Sample(one.metric, attributes, one.value)
