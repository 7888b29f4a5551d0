"""Looks at the machine when somebody asks for the page: rates are then those of the scrapes, not of a clock of ours.

Files of /proc are read in one thread, which takes half a millisecond. File systems and InfiniBand adapters, which may not
answer, are asked in threads of their own (``lane``); a scrape waits for them a little, and else gets what they said last.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.exporter.exporter_metrics import HostFacts, Sample
from torchobs.exporter.host import cpu, disk, filesystem, infiniband, memory, network, pressure
from torchobs.exporter.host.lane import Answer, Lane, ask
from torchobs.exporter.host.tree import FAILS, Tree, read
from torchobs.flight.files.location import find_existing
from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torchobs.exporter.config import ExporterConfig

FRESH_S = 0.1
"""As the snapshot's (``watch``): a look this young serves another scrape as well."""
WAIT_S = 0.25
"""How long a scrape waits for the look: less than anybody's patience, a hundred times what it takes."""
LANES_S = 0.2
"""How long the look waits for its lanes, all together."""
KEEP_S = 60.0
"""How old a lane's answer may be that is shown for want of a newer one: that is four scrapes or one."""
MOST_PATHS = 32

_AT_ONCE: Mapping[str, Callable[[Tree], Iterable[Sample]]] = {
    "cpu": cpu.collect,
    "memory": memory.collect,
    "pressure": pressure.collect,
    "disk": disk.collect,
    "network": network.collect,
}
_BEYOND = float(1 << 63)
_log = logging.getLogger(__name__)


class _Slow(NamedTuple):
    """What is asked in a lane. ``about`` is what the log calls it; the page calls a file system by its mount point.

    ``mountpoint`` is what that seems to be, as long as the file system has not answered.
    """

    collector: str
    about: str
    mountpoint: str
    lane: Lane


class Host:
    """The newest of the machine's numbers. To be used in one event loop; ``latest`` may be read by any thread."""

    def __init__(self, config: ExporterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._tree, self._clock = Tree(config.procfs, config.sysfs), clock
        self._at_once = {
            name: partial(collect, self._tree) for name, collect in _AT_ONCE.items() if name in config.collect_host
        }
        self._slow = [*_slow(config, self._tree, clock)]
        self._errors = dict.fromkeys(config.collect_host, 0)
        self._told: dict[str, str] = {}
        self._heard_s: dict[str, float] = {}
        self._mountpoints = {slow.about: slow.mountpoint for slow in self._slow}
        self._thread = ThreadPoolExecutor(1, "host")
        self._running: asyncio.Future[None] | None = None
        self._looked_s = -FRESH_S
        self._booted_ns = 0
        self.latest: HostFacts | None = None

    async def look(self) -> None:
        """Renew ``latest``, or leave it as it is when the machine does not answer in time."""
        if self._running is None:
            if self._clock() - self._looked_s < FRESH_S:
                return
            self._running = asyncio.get_running_loop().run_in_executor(self._thread, self.take)
        running = self._running
        await asyncio.wait({running}, timeout=WAIT_S)
        if running.done() and self._running is running:
            self._running = None
            if (problem := running.exception()) is not None:
                _log.error("host: a look failed, the last one is shown: %r", problem, exc_info=problem)

    def take(self) -> None:
        """Look now."""
        began_s = self._clock()
        said: list[Sample] = []
        for name, collect in self._at_once.items():
            said += self._heard(name, name, ask(collect, self._clock))
        for slow in self._slow:  # not before: threads that take the GIL from each other at every read take twice the time
            slow.lane.begin()
        deadline_s = self._clock() + LANES_S
        for slow in self._slow:
            answer = slow.lane.wait(deadline_s - self._clock())
            if answer is not None and self._clock() - answer.at_s <= KEEP_S:
                said += self._heard(slow.collector, slow.about, answer)
                self._mountpoints[slow.about] = _mountpoint(answer.said) or self._mountpoints[slow.about]
        self._looked_s = self._clock()
        own = tuple(self._of_itself(self._looked_s - began_s))
        self.latest = HostFacts(tuple(_once(said)), own, self._booted())

    def close(self) -> None:
        """End the thread; one that does not answer is left behind."""
        self._thread.shutdown(wait=False)

    def _heard(self, collector: str, about: str, answer: Answer) -> Iterable[Sample]:
        """Return what was said; count a failure, and say it once."""
        if answer.at_s > self._heard_s.get(about, -math.inf):
            self._heard_s[about] = answer.at_s
            if answer.failure is not None:
                self._errors[collector] += 1
                self._tell(about, str(answer.failure))
            else:
                self._told.pop(about, None)
        return answer.said

    def _tell(self, about: str, problem: str) -> None:
        if self._told.get(about) != problem:
            _log.warning("host: %s: %s", about, problem)
            self._told[about] = problem

    def _of_itself(self, took_s: float) -> Iterator[Sample]:
        yield Sample(catalog.EXPORTER_HOST_DURATION, {}, took_s)
        name = catalog.HOST_COLLECTOR.name
        for collector, errors in self._errors.items():
            yield Sample(catalog.EXPORTER_HOST_ERRORS, {name: collector}, errors)
        stuck: dict[tuple[str, str], bool] = {}
        for slow in self._slow:
            key = slow.collector, self._mountpoints[slow.about]
            stuck[key] = stuck.get(key, False) or slow.lane.is_stuck
            if slow.lane.is_stuck:
                self._tell(slow.about, "no answer for seconds, and it is not asked again until there is one")
        for (collector, mountpoint), is_so in stuck.items():
            own = {name: collector, catalog.MOUNTPOINT.name: labels.text(mountpoint)}
            yield Sample(catalog.EXPORTER_HOST_STUCK, own, float(is_so))

    def _booted(self) -> int:
        if not self._booted_ns:
            try:
                self._booted_ns = cpu.booted_ns(read(f"{self._tree.procfs}/stat")) or 0
            except FAILS:
                return 0
        return self._booted_ns


def _slow(config: ExporterConfig, tree: Tree, clock: Callable[[], float]) -> Iterator[_Slow]:
    if "infiniband" in config.collect_host:
        yield _Slow("infiniband", "infiniband", "", Lane(partial(infiniband.collect, tree), clock))
    if "filesystem" in config.collect_host:
        flight = partial(_of_flight_files, config.flight_dir, config.runtime_dir)
        yield _Slow("filesystem", "file system of the flight files", "", Lane(flight, clock))
        if len(config.host_paths) > MOST_PATHS:
            _log.error("host: %d directories, of which the first %d are told of", len(config.host_paths), MOST_PATHS)
        for path in dict.fromkeys(config.host_paths[:MOST_PATHS]):
            lane = Lane(partial(filesystem.collect, path), clock)
            yield _Slow("filesystem", f"file system of {path}", filesystem.mountpoint(path), lane)


def _of_flight_files(flight_dir: str | None, runtime_dir: str | None) -> Iterator[Sample]:
    path = find_existing(flight_dir, runtime_dir)
    if path is not None:
        yield from filesystem.collect(path)


def _mountpoint(said: Iterable[Sample]) -> str:
    return next((one.attributes.get(catalog.MOUNTPOINT.name, "") for one in said), "")


def _once(said: Iterable[Sample]) -> Iterator[Sample]:
    """Yield what a page and OTLP can show, each series once: two directories may be on one file system."""
    seen = set()
    for one in said:
        attributes = {name: value if value.isascii() else labels.text(value) for name, value in one.attributes.items()}
        key = one.metric.name, *attributes.values()
        if key not in seen and math.isfinite(one.value) and 0 <= one.value < _BEYOND:
            seen.add(key)
            yield Sample(one.metric, attributes, one.value)
