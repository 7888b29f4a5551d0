"""Processors: time by mode, load, threads that run or wait for a disk. Source: proc(5), /proc/stat and /proc/loadavg."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.exporter.exporter_metrics import Sample
from torchobs.exporter.host.tree import count, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchobs.exporter.host.tree import Tree

_COLUMNS = ("user", "nice", "system", "idle", "iowait", "interrupt", "interrupt", "steal")
"""OpenTelemetry's names for what the kernel has; behind them are guests, whose time is in user's and nice's already."""
_LOAD = re.compile(r"\d{1,9}\.\d{1,9}", re.ASCII)


class Stat(NamedTuple):
    """What /proc/stat says. Times in seconds."""

    times_s: Mapping[str, float]
    """of all processors together, by mode"""
    cpus: int
    runnable: int | None
    blocked: int | None


def parse(stat: str, ticks_per_s: int) -> Stat:
    """Return what the text of /proc/stat says. Raises ``ValueError`` if it is none."""
    lines = [line.split() for line in stat.splitlines() if line.startswith(("cpu", "procs_"))]
    total = next((words[1:] for words in lines if words[0] == "cpu"), None)
    if not total:
        raise ValueError("/proc/stat has no line 'cpu'")
    times_s = dict.fromkeys(catalog.CPU_MODES, 0.0)
    for mode, ticks in zip(_COLUMNS, total, strict=False):
        times_s[mode] += count(ticks) / ticks_per_s
    threads = {words[0]: count(words[1]) for words in lines if words[0].startswith("procs_") and len(words) > 1}
    cpus = sum(words[0] != "cpu" for words in lines) - sum(words[0].startswith("procs_") for words in lines)
    return Stat(times_s, cpus, threads.get("procs_running"), threads.get("procs_blocked"))


def load(loadavg: str) -> float:
    """Return the load average of the last minute. Raises ``ValueError``."""
    found = _LOAD.match(loadavg)
    if not found:
        raise ValueError(f"no load average: {loadavg[:40]!r}")
    return float(found[0])


def booted_ns(stat: str) -> int | None:
    """Return when the machine was booted, Unix ns, from the text of /proc/stat; ``None`` if it does not say."""
    found = re.search(r"^btime (\d{1,11})$", stat, re.ASCII | re.MULTILINE)
    return int(found[1]) * 1_000_000_000 if found else None


def collect(tree: Tree) -> Iterator[Sample]:
    """Yield what there is to say of the processors. Raises one of ``tree.FAILS``."""
    stat = parse(read(f"{tree.procfs}/stat"), os.sysconf("SC_CLK_TCK"))
    for mode, seconds in stat.times_s.items():
        yield Sample(catalog.SYSTEM_CPU_TIME, {catalog.CPU_MODE.name: mode}, seconds)
    yield Sample(catalog.HOST_CPUS, {}, stat.cpus)
    for state, number in zip(catalog.THREAD_STATES, (stat.runnable, stat.blocked), strict=True):
        if number is not None:
            yield Sample(catalog.HOST_THREADS, {catalog.THREAD_STATE.name: state}, number)
    yield Sample(catalog.SYSTEM_CPU_LOAD, {}, load(read(f"{tree.procfs}/loadavg")))
