"""Pressure stall information: time that tasks lost for want of a resource. Source: the kernel's accounting/psi.rst."""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.exporter.exporter_metrics import Sample
from torchobs.exporter.host.tree import count, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchobs.exporter.host.tree import Tree

_LINE = re.compile(r"^(some|full) .*\btotal=(\d+)$", re.ASCII | re.MULTILINE)
_OFF = frozenset({errno.ENOENT, errno.EOPNOTSUPP})
"""Linux before 4.20 has no such file; one that is built or booted without it (``psi=0``) has none, or one that is not read."""


def parse(pressure: str) -> dict[str, float]:
    """Return seconds, by how many of the tasks waited (``catalog.WAITING``)."""
    return {waiting: count(total_us) / 1e6 for waiting, total_us in _LINE.findall(pressure)}


def collect(tree: Tree) -> Iterator[Sample]:
    """Yield the time lost by resource; nothing where the kernel does not count it. Raises one of ``tree.FAILS``."""
    for resource in catalog.RESOURCE.values:
        try:
            text = read(f"{tree.procfs}/pressure/{resource}")
        except OSError as problem:
            if problem.errno in _OFF:
                continue
            raise
        for waiting, seconds in parse(text).items():
            own = {catalog.RESOURCE.name: resource, catalog.WAITING.name: waiting}
            yield Sample(catalog.HOST_PRESSURE_TIME, own, seconds)
