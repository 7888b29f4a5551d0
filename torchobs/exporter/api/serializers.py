"""Serialize a snapshot to JSON objects. Units are in the names; non-finite numbers are strings (``"NaN"``)."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.diagnosis.status import last_grad_norm, last_loss
from torchobs.flight.files.control import LEVELS
from torchobs.flight.reader.decode import Distribution

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.flight.format.layout import Header
    from torchobs.flight.reader.decode import SeriesValue
    from torchobs.ranks.snapshot import Rank, Snapshot

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LATEST_NS = 253_402_300_799 * 1_000_000_000  # the year 9999
_VALUES = (
    ("steps", catalog.STEPS), ("tokens", catalog.TOKENS), ("samples", catalog.SAMPLES), ("total_steps", catalog.STEPS_PLANNED),
)  # fmt: skip
_LOSS_KINDS = ("nonfinite_loss", "loss_spike")
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
    values, header, live = _plain(rank), rank.view.header, rank.view.live
    last_ns = rank.view.last_step_ns
    return {
        **named(rank),
        "state": rank.state,
        "up": rank.up,
        "level": _level(live.level),
        "phase": live.phase,
        "started": instant(header.wall_ns),
        "last_step": None if last_ns is None else instant(wall_ns(header, last_ns)),
        "progress_age_s": rank.progress_age_s,
        "learning_rate": _learning_rate(rank),
        **{name: values.get(metric.name) for name, metric in _VALUES},
        "loss": last_loss(lambda metric, *key: _value(rank, metric, key)),
        "gradient_norm": last_grad_norm(lambda metric, *key: _value(rank, metric, key)),
    }


def debug_summary(snapshot: Snapshot, evidence: int) -> dict[str, Any]:
    """Return the levels, active anomalies and failed probes of the ranks; ``evidence``: number of artifacts."""
    return {
        "levels": dict(Counter(_level(rank.view.live.level) for rank in snapshot.ranks if rank.up)),
        "anomalies_active": [{**named(rank), "kind": kind} for rank in snapshot.ranks for kind in _active(rank)],
        "probes_disabled": [
            {**named(rank), "probe": probe}
            for rank in snapshot.ranks
            for probe, value in _by(rank.view.points, catalog.PROBE_DISABLED, "probe").items()
            if value
        ],
        "evidence": evidence,
    }


def training_summary(snapshot: Snapshot) -> dict[str, Any]:
    """Return steps and anomalies, per rank and in total.

    Rates are per step, and null before the first. ``anomaly_steps`` are bounds: kinds are counted separately, and one step can
    have several.
    """
    ranks = [(rank, *_judged(rank)) for rank in snapshot.ranks]
    kinds: Counter[str] = Counter()
    for _, _, found in ranks:
        kinds.update(found)
    parts = [_verdicts(steps, found) for _, steps, found in ranks]
    total = _verdicts(sum(steps for _, steps, _ in ranks), kinds)
    for bound in ("least", "most"):
        total["anomaly_steps"][bound] = sum(part["anomaly_steps"][bound] for part in parts)
    return {**total, "ranks": [{**named(rank), **part} for (rank, _, _), part in zip(ranks, parts, strict=True)]}


def layers(rank: Rank) -> list[dict[str, Any]]:
    """Return the last value of every per-layer series, by layer; the rank selects which layers have series."""
    found: dict[str, dict[str, Any]] = {}
    for point in rank.view.points:
        layer = dict(point.series.attributes).get(_LAYER)
        if isinstance(layer, str) and not isinstance(point.value, Distribution):
            found.setdefault(layer, {})[point.series.name] = point.value
    return [{"layer": layer, "values": values} for layer, values in found.items()]


def _verdicts(steps: int, found: Counter[str]) -> dict[str, Any]:
    def rated(count: int) -> dict[str, Any]:
        return {"count": count, "per_step": count / steps if steps else None}

    return {
        "steps": steps,
        "anomalies": {kind: rated(found[kind]) for kind in catalog.ANOMALY_KINDS},
        "anomaly_steps": {"least": max(found.values(), default=0), "most": min(sum(found.values()), steps)},
        "explosions": rated(found["gradient_explosion"]),
        "vanishing": rated(found["gradient_vanishing"]),
        "loss_anomalies": rated(sum(found[kind] for kind in _LOSS_KINDS)),
    }


def _judged(rank: Rank) -> tuple[int, Counter[str]]:
    steps = _plain(rank).get(catalog.STEPS.name, 0)
    counts = _by(rank.view.points, catalog.ANOMALIES, "kind")
    return round(steps), Counter({kind: round(value) for kind, value in counts.items() if kind in catalog.ANOMALY_KINDS})


def _active(rank: Rank) -> list[str]:
    return [kind for kind, value in _by(rank.view.points, catalog.ANOMALY_ACTIVE, "kind").items() if value and rank.up]


def _plain(rank: Rank) -> dict[str, float]:
    points = (point for point in rank.view.points if not point.series.attributes)
    return {point.series.name: point.value for point in points if not isinstance(point.value, Distribution)}


def _value(rank: Rank, metric: catalog.Metric, key: tuple[str, ...]) -> float | None:
    """Return a series' value by its attributes' values, as in the file, of a dead rank as well."""
    for series, value in rank.view.points:
        if series.name == metric.name and tuple(str(of) for _, of in series.attributes) == key:
            return None if isinstance(value, Distribution) else value
    return None


def _learning_rate(rank: Rank) -> float | None:
    """Return the learning rate of the first parameter group, as on the live page."""
    rates = _by(rank.view.points, catalog.LEARNING_RATE, "group")
    return rates.get("0", next(iter(rates.values()), None))


def _by(points: Iterable[SeriesValue], metric: catalog.Metric, attribute: str) -> dict[str, float]:
    return {
        str(value): point.value
        for point in points
        if point.series.name == metric.name and not isinstance(point.value, Distribution)
        for name, value in point.series.attributes
        if name == attribute
    }


def _level(level: int) -> str:
    return LEVELS[level] if level < len(LEVELS) else "unknown"
