"""Limit on the number of series, derived from available memory, so that the exporter is not killed for memory.

It is computed once, at the start, from the memory limit of the container's cgroup, or ``--memory-limit``:

    (limit - RESERVED) / SERIES, with the push (limit - RESERVED - PUSH) / PUSHED_SERIES, and at most 1,000,000

A series is a line of the metrics page, as Prometheus counts them: a histogram counts its buckets plus two. Byte counts are
resident memory after scrapes in two formats, minus that of an exporter without ranks (Python 3.11, x86-64), for lines of some
100 characters. Labels of 1,000 characters take more: ``--series-limit-total`` sets another limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.flight.files.create import cgroup_limit

if TYPE_CHECKING:
    from torchobs.exporter.config import ExporterConfig

RESERVED = 48 << 20
"""Bytes for everything else: 37 MiB idle, API, live page, many connections."""

PUSH = 16 << 20
"""Additional bytes for OTLP push: its queue and libraries."""

SERIES = 2_750
"""Bytes per series: 1,850 for its line, and 900 for one and a half in the files, see :data:`FILES`.

Measured: 2,060 for a rank's own series, 2,440 for 9,600 of an application with lines of 91 characters, 2,820 with 131.
"""

PUSHED_SERIES = 3_650
"""Bytes per series with OTLP push, which needs as much again as the files."""

FILES = 1.5
"""Series allowed in the files per series on the page: the page drops single series, the files only whole ranks, when they
are opened: a rank whose series grow afterwards is served on."""

MOST = 1_000_000


def derived(config: ExporterConfig) -> int:
    """Return the number of series that fit into memory. At least a sixth of the memory is used for series."""
    limit = config.memory_limit or cgroup_limit()
    if limit is None:
        return MOST
    pushes = config.push is not None
    room = max(limit - RESERVED - PUSH * pushes, limit / 6)
    return min(MOST, int(room / (PUSHED_SERIES if pushes else SERIES)))
