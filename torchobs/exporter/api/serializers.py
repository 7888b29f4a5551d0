"""Serialize a snapshot to JSON objects. Units are in the names; non-finite numbers are strings (``"NaN"``)."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.config.settings import PROBES
from torchobs.diagnosis.status import last_grad_norm, last_loss
from torchobs.flight.files.control import LEVELS
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks.metric_values import Readings

if TYPE_CHECKING:
    from torchobs.flight.format.layout import Header
    from torchobs.ranks.snapshot import Rank, Snapshot

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LATEST_NS = 253_402_300_799 * 1_000_000_000  # the year 9999
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
    readings, header, live = _readings(rank), rank.view.header, rank.view.live
    last_ns, rates = rank.view.last_step_ns, readings.of(catalog.LEARNING_RATE)
    return {
        **named(rank),
        "state": rank.state,
        "up": rank.up,
        "level": _level(live.level),
        "phase": live.phase,
        "started": instant(header.wall_ns),
        "last_step": None if last_ns is None else instant(wall_ns(header, last_ns)),
        "progress_age_s": rank.progress_age_s,
        "learning_rate": rates.get(("0",), next(iter(rates.values()), None)),  # of the first group, as on the live page
        "steps": readings.get(catalog.STEPS),
        "tokens": readings.get(catalog.TOKENS),
        "samples": readings.get(catalog.SAMPLES),
        "total_steps": readings.get(catalog.STEPS_PLANNED),
        "loss": last_loss(readings.get),
        "gradient_norm": last_grad_norm(readings.get),
    }


def debug_summary(snapshot: Snapshot, evidence: int) -> dict[str, Any]:
    """Return the levels, active anomalies and failed probes of the ranks; ``evidence``: number of artifacts."""
    ranks = [(rank, _readings(rank)) for rank in snapshot.ranks]
    return {
        "levels": dict(Counter(_level(rank.view.live.level) for rank in snapshot.ranks if rank.up)),
        "anomalies_active": [
            {**named(rank), "kind": kind}
            for rank, readings in ranks
            for kind in catalog.ANOMALY_KINDS
            if rank.up and readings.get(catalog.ANOMALY_ACTIVE, kind)
        ],
        "probes_disabled": [
            {**named(rank), "probe": probe}
            for rank, readings in ranks
            for probe in PROBES
            if readings.get(catalog.PROBE_DISABLED, probe)
        ],
        "evidence": evidence,
    }


def training_summary(snapshot: Snapshot) -> dict[str, Any]:
    """Return steps and anomalies, per rank and in total.

    Rates are per step, and null before the first. ``anomaly_steps`` are bounds: kinds are counted separately, and one step can
    have several.
    """
    counted = [_counts(_readings(rank)) for rank in snapshot.ranks]
    parts = [_verdicts(steps, anomalies) for steps, anomalies in counted]
    total = _verdicts(sum(steps for steps, _ in counted), sum((anomalies for _, anomalies in counted), Counter()))
    for bound in ("least", "most"):
        total["anomaly_steps"][bound] = sum(part["anomaly_steps"][bound] for part in parts)
    return {**total, "ranks": [{**named(rank), **part} for rank, part in zip(snapshot.ranks, parts, strict=True)]}


def layers(rank: Rank) -> list[dict[str, Any]]:
    """Return the last value of every per-layer series, by layer; the rank selects which layers have series."""
    by_layer: dict[str, dict[str, Any]] = {}
    for point in rank.view.points:
        layer = dict(point.series.attributes).get(_LAYER)
        if isinstance(layer, str) and not isinstance(point.value, Distribution):
            by_layer.setdefault(layer, {})[point.series.name] = point.value
    return [{"layer": layer, "values": values} for layer, values in by_layer.items()]


def _verdicts(steps: int, anomalies: Counter[str]) -> dict[str, Any]:
    def rated(count: int) -> dict[str, Any]:
        return {"count": count, "per_step": count / steps if steps else None}

    return {
        "steps": steps,
        "anomalies": {kind: rated(anomalies[kind]) for kind in catalog.ANOMALY_KINDS},
        "anomaly_steps": {"least": max(anomalies.values(), default=0), "most": min(anomalies.total(), steps)},
        "explosions": rated(anomalies["gradient_explosion"]),
        "vanishing": rated(anomalies["gradient_vanishing"]),
        "loss_anomalies": rated(sum(anomalies[kind] for kind in _LOSS_KINDS)),
    }


def _counts(readings: Readings) -> tuple[int, Counter[str]]:
    """Return the number of a rank's steps, and of its anomalies by kind."""
    anomalies = Counter({kind: round(readings.get(catalog.ANOMALIES, kind) or 0) for kind in catalog.ANOMALY_KINDS})
    return round(readings.get(catalog.STEPS) or 0), anomalies


def _readings(rank: Rank) -> Readings:
    """Return a rank's values as in its file: of a dead rank all, and not only those that stay on the metrics page."""
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for series, value in rank.view.points:
        if series.scope is None and not isinstance(value, Distribution):
            values.setdefault(series.name, {})[tuple(str(text) for _, text in series.attributes)] = value
    return Readings(values)


def _level(level: int) -> str:
    return LEVELS[level] if level < len(LEVELS) else "unknown"
