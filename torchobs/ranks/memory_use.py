"""A rank's last known memory use relative to its limits, which distinguishes an OOM kill from other kills."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks.state import MemoryUse

if TYPE_CHECKING:
    from torchobs.flight.reader.reader import View


def last_memory(view: View) -> MemoryUse:
    """Return the rank's last known memory use."""
    shares, kill_age_s = {"cgroup": 0.0, "machine": 0.0}, None
    last_s = view.header.wall_s(view.live.heartbeat_ns or view.header.monotonic_ns)
    for series, value in view.points:
        if isinstance(value, Distribution):
            continue
        if series.name == catalog.MEMORY_HOST_UTILIZATION.name:
            shares.update({str(of): value for name, of in series.attributes if name == catalog.LIMIT.name})
        elif series.name == catalog.CGROUP_MEMORY_LAST_OOM_KILL.name:
            kill_age_s = last_s - value
    return MemoryUse(shares["cgroup"], shares["machine"], kill_age_s)
