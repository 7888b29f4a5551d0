"""Writes what was found about a leak: an event with the first rows, and an artifact with more."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from torchobs import catalog
from torchobs.flight.files import artifacts

if TYPE_CHECKING:
    from torchobs.probes.core.context import ProbeContext

MOST_TOLD, MOST_ROWS = 5, 30
"""Rows of a table in the event, and in the artifact"""


def tell(context: ProbeContext, attributes: dict[str, object], tables: dict[str, list[str]]) -> None:
    """Write the event, and the whole tables as an artifact."""
    writer, place = context.writer, context.writer.place
    if place is not None:
        done = artifacts.named(writer.name, artifacts.LEAK, time.time_ns() // 1_000_000)
        if artifacts.write(place, done, _text(context, attributes, tables).encode()) is None:
            attributes = {**attributes, "evidence": done.id}
    context.event(catalog.EVENT_MEMORY_LEAK, attributes)


def _text(context: ProbeContext, attributes: dict[str, object], tables: dict[str, list[str]]) -> str:
    rank, now = context.writer.header.resource.get("rank", 0), datetime.now(timezone.utc).isoformat(timespec="seconds")
    head = " ".join(f"{name} {value}" for name, value in attributes.items() if not isinstance(value, list))
    parts = [f"# rank {rank} after step {context.recorder.step}, {now}: what grew ({head})\n"]
    parts += [f"\n{name}\n" + "".join(f"  {row}\n" for row in rows) for name, rows in tables.items() if rows]
    return "".join(parts)
