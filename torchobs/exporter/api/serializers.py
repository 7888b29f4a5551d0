"""Serialize a snapshot to JSON objects. Units are in the names; non-finite numbers are strings (``"NaN"``)."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.diagnosis.status import last_grad_norm, last_loss
from torchobs.flight.files.control import LEVELS
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks.metric_values import readings_of

if TYPE_CHECKING:
    from torchobs.flight.format.layout import Header
    from torchobs.ranks.snapshot import Rank

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LATEST_NS = 253_402_300_799 * 1_000_000_000  # the year 9999
_LAYER = "layer"


def instant(wall_ns: int) -> str:
    """Return a Unix time in nanoseconds in RFC 3339 format, to the microsecond, clamped to the years it can express."""
    clipped_ns = min(max(wall_ns, 0), _LATEST_NS)
    return (_EPOCH + timedelta(microseconds=clipped_ns // 1000)).isoformat(timespec="microseconds").replace("+00:00", "Z")


def wall_ns(header: Header, monotonic_ns: int) -> int:
    """Convert a time on the rank's CLOCK_MONOTONIC to Unix time, both in nanoseconds."""
    return header.wall_ns + monotonic_ns - header.monotonic_ns


def named(rank: Rank) -> dict[str, Any]:
    """Return a rank's identity."""
    return {"rank": rank.rank, "run_id": rank.run_id, "job_name": rank.job_name, "incarnation": rank.incarnation}


def rank_view(rank: Rank) -> dict[str, Any]:
    """Return a rank's identity, state and progress."""
    readings, header, live = readings_of(rank), rank.view.header, rank.view.live
    last_ns, rates = rank.view.last_step_ns, readings.of(catalog.LEARNING_RATE)
    return {
        **named(rank),
        "state": rank.state,
        "up": rank.up,
        "level": level_name(live.level),
        "phase": live.phase,
        "started": instant(header.wall_ns),
        "last_step": None if last_ns is None else instant(wall_ns(header, last_ns)),
        "progress_age_s": rank.progress_age_s,
        "stall": rank.standstill._asdict() if rank.standstill else None,
        "learning_rate": rates.get(("0",), next(iter(rates.values()), None)),  # of the first group, as on the live page
        "steps": readings.get(catalog.STEPS),
        "tokens": readings.get(catalog.TOKENS),
        "samples": readings.get(catalog.SAMPLES),
        "total_steps": readings.get(catalog.STEPS_PLANNED),
        "loss": last_loss(readings.get),
        "gradient_norm": last_grad_norm(readings.get),
    }


def layers(rank: Rank) -> list[dict[str, Any]]:
    """Return the last value of every per-layer series, by layer; the rank selects which layers have series."""
    by_layer: dict[str, dict[str, Any]] = {}
    for point in rank.view.points:
        layer = dict(point.series.attributes).get(_LAYER)
        if isinstance(layer, str) and not isinstance(point.value, Distribution):
            by_layer.setdefault(layer, {})[point.series.name] = point.value
    return [{"layer": layer, "values": values} for layer, values in by_layer.items()]


def level_name(level: int) -> str:
    """Return the name of a debug level."""
    return LEVELS[level] if level < len(LEVELS) else "unknown"
