"""Memory and swap. Source: proc(5), /proc/meminfo; the kernel's OOM kills are in /proc/vmstat since Linux 4.13."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.exporter.exporter_metrics import Sample
from torchobs.exporter.host.tree import count, read

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchobs.exporter.host.tree import Tree

_WANTED = ("MemTotal", "MemFree", "MemAvailable", "Buffers", "Cached", "SwapTotal", "SwapFree", "Dirty", "Writeback", "Shmem",
           "SReclaimable")  # fmt: skip
_LINE = re.compile(rf"^({'|'.join(_WANTED)}): +(\d+) kB$", re.ASCII | re.MULTILINE)
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.ASCII | re.MULTILINE)


def parse(meminfo: str) -> dict[str, int]:
    """Return the amounts of /proc/meminfo that are of use, in bytes by name. Raises ``ValueError`` if there is no total."""
    found = {name: count(number) * 1024 for name, number in _LINE.findall(meminfo)}
    if "MemTotal" not in found:
        raise ValueError("/proc/meminfo has no line 'MemTotal'")
    return found


def usage(amounts: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by OpenTelemetry's states, which add up to the total: caches are what procps' ``free`` takes for them."""
    free, buffers = amounts.get("MemFree", 0), amounts.get("Buffers", 0)
    cached = amounts.get("Cached", 0) + amounts.get("SReclaimable", 0)
    used = max(0, amounts["MemTotal"] - free - buffers - cached)
    return dict(zip(catalog.MEMORY_STATES, (used, free, buffers, cached), strict=True))


def oom_kills(vmstat: str) -> int | None:
    """Return how many processes the kernel has killed for memory; ``None``: it does not count them."""
    found = _OOM_KILLS.search(vmstat)
    return count(found[1]) if found else None


def collect(tree: Tree) -> Iterator[Sample]:
    """Yield what there is to say of memory. Raises one of ``tree.FAILS``."""
    amounts = parse(read(f"{tree.procfs}/meminfo"))
    yield Sample(catalog.SYSTEM_MEMORY_LIMIT, {}, amounts["MemTotal"])
    for state, number in usage(amounts).items():
        yield Sample(catalog.SYSTEM_MEMORY_USAGE, {catalog.MEMORY_STATE.name: state}, number)
    for metric, name in ((catalog.SYSTEM_MEMORY_AVAILABLE, "MemAvailable"), (catalog.SYSTEM_MEMORY_SHARED, "Shmem")):
        if name in amounts:
            yield Sample(metric, {}, amounts[name])
    for state, name in zip(catalog.UNWRITTEN_STATES, ("Dirty", "Writeback"), strict=True):
        if name in amounts:
            yield Sample(catalog.HOST_MEMORY_UNWRITTEN, {catalog.UNWRITTEN_STATE.name: state}, amounts[name])
    yield from _swap(amounts)
    kills = oom_kills(read(f"{tree.procfs}/vmstat"))
    if kills is not None:
        yield Sample(catalog.HOST_OOM_KILLS, {}, kills)


def _swap(amounts: Mapping[str, int]) -> Iterator[Sample]:
    if "SwapTotal" in amounts and "SwapFree" in amounts:
        free = amounts["SwapFree"]
        for state, number in zip(catalog.PAGING_STATES, (max(0, amounts["SwapTotal"] - free), free), strict=True):
            yield Sample(catalog.SYSTEM_PAGING_USAGE, {catalog.PAGING_STATE.name: state}, number)
