"""Disks: bytes, operations, and the time they took. Source: the kernel's admin-guide/iostats.rst, /proc/diskstats."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.exporter.exporter_metrics import Sample
from torchobs.exporter.host.tree import bounded, count, is_physical, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.exporter.host.tree import Tree

_SECTOR = 512
"""Bytes, whatever the disk's own sectors are."""
_LEAST_FIELDS = 14
"""Those of Linux 2.6; later ones have more behind them. A partition had 7 before 2.6.25, and is of no interest."""


class Disk(NamedTuple):
    """One disk. The pairs are for reading and for writing; times in seconds."""

    name: str
    operations: tuple[int, int]
    io: tuple[int, int]
    operation_time_s: tuple[float, float]
    busy_s: float


def parse(diskstats: str) -> list[Disk]:
    """Return what the text of /proc/diskstats says; lines that say nothing are left out."""
    found = []
    for line in diskstats.splitlines():
        words = line.split()
        if len(words) >= _LEAST_FIELDS:
            try:
                found.append(_disk(words[2], [count(word) for word in words[3:_LEAST_FIELDS]]))
            except ValueError:
                continue
    return found


def _disk(name: str, fields: list[int]) -> Disk:
    reads, _, sectors_read, reading_ms, writes, _, sectors_written, writing_ms, _, busy_ms, _ = fields
    return Disk(
        name, (reads, writes), (sectors_read * _SECTOR, sectors_written * _SECTOR), (reading_ms / 1e3, writing_ms / 1e3),
        busy_ms / 1e3,
    )  # fmt: skip


def collect(tree: Tree) -> Iterator[Sample]:
    """Yield what there is to say of the physical disks. Raises one of ``tree.FAILS``."""
    disks = [
        # a slash in a name (cciss/c0d0) is an exclamation mark in sysfs
        disk for disk in parse(read(f"{tree.procfs}/diskstats"))
        if is_physical(f"{tree.sysfs}/block/{disk.name.replace('/', '!')}")
    ]  # fmt: skip
    for disk in bounded(disks, "disks"):
        own = {catalog.SYSTEM_DEVICE.name: disk.name}
        yield Sample(catalog.SYSTEM_DISK_IO_TIME, own, disk.busy_s)
        for index, direction in enumerate(catalog.DISK_DIRECTION.values):
            one = {**own, catalog.DISK_DIRECTION.name: direction}
            yield Sample(catalog.SYSTEM_DISK_IO, one, disk.io[index])
            yield Sample(catalog.SYSTEM_DISK_OPERATIONS, one, disk.operations[index])
            yield Sample(catalog.SYSTEM_DISK_OPERATION_TIME, one, disk.operation_time_s[index])
