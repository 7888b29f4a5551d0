"""How many series an exporter may hold: a sidecar that the kernel ends tells nobody anything.

The number is derived once, at the start, from the limit of its memory cgroup, which is the container's, or ``--memory-limit``:

    (limit - RESERVED) / SERIES, with the push (limit - RESERVED - PUSH) / PUSHED_SERIES, and at most 1,000,000

A series is a line of the page here, as Prometheus counts them: a histogram is as many as it has buckets, and two more. Bytes
are resident memory after scrapes in two formats, less that of an exporter without ranks (Python 3.11, x86-64), and are for
lines of some 100 characters. Labels of 1,000 characters take more: ``--series-limit-total`` sets another number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.flight.files.headroom import cgroup_limit

if TYPE_CHECKING:
    from torchobs.exporter.config import ExporterConfig

RESERVED = 48 << 20
"""Bytes for everything else: 37 MiB at rest, a file of 16 MiB being read, the API, the live page, a crowd of connections."""

PUSH = 16 << 20
"""Bytes that the push takes beside that: its queue, the libraries."""

SERIES = 2_750
"""Bytes for a series: 1,850 for its line, and 900 for one and a half in the files, see :data:`FILES`.

Measured are 2,060 for a rank's own, 2,440 for 9,600 of an application with lines of 91 characters, and 2,820 with 131.
"""

PUSHED_SERIES = 3_650
"""Bytes for a series that is pushed as well, which takes as much again as in the files."""

FILES = 1.5
"""How many series the files may have for each on the page: what is left out there is not left out with its whole rank."""

RANK = 50
"""Series in whose stead a rank without any stands: 27 KiB for its file, 92 KiB for what the exporter says of it."""

TABLE, LEAST_TABLE = 180, 512 << 10
"""Bytes that one file's table of series may have for each series of all files, since it is read at once, but at least so many:
one that torchobs makes has 450 KiB at most."""

MOST = 1_000_000


def derived(config: ExporterConfig) -> int:
    """Return the number of series that there is memory for. However little it is, a sixth of it is given out."""
    limit = config.memory_limit or cgroup_limit()
    if limit is None:
        return MOST
    pushes = config.push is not None
    room = max(limit - RESERVED - PUSH * pushes, limit / 6)
    return min(MOST, int(room / (PUSHED_SERIES if pushes else SERIES)))
