"""Serialize what the ranks' debugging has counted, as ``torchobs.debug`` names it, since the last ``/debug/clear``.

Counters never fall: clearing remembers them as the new zero, in this exporter alone.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.config.settings import PROBES
from torchobs.exporter.api.serializers import level_name, named
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks.metric_values import Readings, readings_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.ranks.snapshot import Rank, Snapshot

    Values = dict[str, dict[tuple[str, ...], float]]

_LOSS_KINDS = ("nonfinite_loss", "loss_spike", "diverged")
_COUNTERS = (
    catalog.STEPS, catalog.ANOMALIES, catalog.DEBUG_OPERATIONS, catalog.DEBUG_OPERATION_TIME, catalog.DEBUG_OPERATION_ANOMALIES,
    catalog.DEBUG_STEPS, catalog.DEBUG_ANOMALY_STEPS, catalog.DEBUG_STEP_ANOMALIES, catalog.GRAD_NORM_DISTRIBUTION,
    catalog.GRAD_NONFINITE_STEPS,
)  # fmt: skip
_GREATEST = (catalog.DEBUG_OPERATION_LONGEST, catalog.DEBUG_OPERATION_MEMORY)
_SOURCES = ("recorded", "monitored", "mixed")


class Summaries:
    """The summaries of one exporter."""

    def __init__(self) -> None:
        self._zero: dict[str, Values] = {}

    def clear(self, snapshot: Snapshot) -> None:
        """Let the summaries of these ranks begin anew."""
        self._zero = {rank.incarnation: _values(rank) for rank in snapshot.ranks}

    def debug(self, snapshot: Snapshot, evidence: int) -> dict[str, Any]:
        """Return levels, active anomalies, failed probes and the operations of the ranks; ``evidence``: number of artifacts."""
        ranks = [(rank, readings_of(rank)) for rank in snapshot.ranks]
        operations = [row for rank in snapshot.ranks for row in _operations(rank, self._since_clear(rank))]
        count = sum(row["count"] for row in operations)
        times = [row["average_time"] * row["count"] for row in operations]
        return {
            "total_operations": count,
            "average_time": sum(times) / count if count else None,
            **{name: _greatest(row[name] for row in operations) for name in ("longest_time", "memory_peak", "gpu_memory_peak")},
            "anomalies": sum(row["anomalies"] for row in operations),
            "operations": operations,
            "levels": dict(Counter(level_name(rank.view.live.level) for rank in snapshot.ranks if rank.up)),
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

    def training(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return steps and anomalies, per rank and in total; rates are those of ``debug.training_summary``."""
        counted = [_counts(self._since_clear(rank)) for rank in snapshot.ranks]
        total: Counter[str] = sum(counted, Counter())
        monitored = [bool(one["monitored"]) for one in counted]
        source = _SOURCES[all(monitored)] if not monitored or all(monitored) == any(monitored) else "mixed"
        parts = [_summary(one, _SOURCES[is_monitored]) for one, is_monitored in zip(counted, monitored, strict=True)]
        ranks = [{**named(rank), **part} for rank, part in zip(snapshot.ranks, parts, strict=True)]
        return {**_summary(total, source if monitored else _SOURCES[0]), "ranks": ranks}

    def _since_clear(self, rank: Rank) -> Readings:
        now, zero = _values(rank), self._zero.get(rank.incarnation, {})
        for metric in _COUNTERS:
            before = zero.get(metric.name, {})
            now[metric.name] = {key: max(value - before.get(key, 0), 0) for key, value in now[metric.name].items()}
        for metric in _GREATEST:
            before = zero.get(metric.name, {})
            now[metric.name] = {key: value for key, value in now[metric.name].items() if value != before.get(key)}
        return Readings(now)


def _values(rank: Rank) -> Values:
    """Return a rank's counts and greatest values; of the distribution of gradient norms their number."""
    readings = readings_of(rank)
    values = {metric.name: dict(readings.of(metric)) for metric in (*_COUNTERS, *_GREATEST)}
    norms = [value for series, value in rank.view.points if series.name == catalog.GRAD_NORM_DISTRIBUTION.name]
    number = sum(sum(value.counts) for value in norms if isinstance(value, Distribution))
    values[catalog.GRAD_NORM_DISTRIBUTION.name] = {(): float(number)}
    return values


def _greatest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _operations(rank: Rank, readings: Readings) -> list[dict[str, Any]]:
    """Return one row for each operation that was done. Greatest values are null until one exceeds that before a clear."""
    rows = []
    for (name,), count in readings.of(catalog.DEBUG_OPERATIONS).items():
        if count:
            row = {
                "operation": name,
                "count": round(count),
                "average_time": (readings.get(catalog.DEBUG_OPERATION_TIME, name) or 0.0) / count,
                "longest_time": readings.get(catalog.DEBUG_OPERATION_LONGEST, name),
                "memory_peak": readings.get(catalog.DEBUG_OPERATION_MEMORY, name, "host"),
                "gpu_memory_peak": readings.get(catalog.DEBUG_OPERATION_MEMORY, name, "device"),
                "anomalies": round(readings.get(catalog.DEBUG_OPERATION_ANOMALIES, name) or 0),
            }
            rows.append({**named(rank), **row})
    return rows


def _counts(readings: Readings) -> Counter[str]:
    """Return a rank's steps and anomalies: of the steps checked by hand, or of all where none was."""
    checked = round(readings.get(catalog.DEBUG_STEPS) or 0)
    kinds = Counter({f"kind {kind}": round(readings.get(catalog.ANOMALIES, kind) or 0) for kind in catalog.ANOMALY_KINDS})
    if checked:
        found = {kind: round(readings.get(catalog.DEBUG_STEP_ANOMALIES, kind) or 0) for kind in catalog.STEP_ANOMALIES}
        anomalous = round(readings.get(catalog.DEBUG_ANOMALY_STEPS) or 0)
        own = {"steps": checked, "measured": checked, "anomalous": anomalous, "most": anomalous, "monitored": 1}
        return kinds + Counter({**found, **own})
    steps, total = round(readings.get(catalog.STEPS) or 0), sum(kinds.values())
    loss = sum(kinds[f"kind {kind}"] for kind in _LOSS_KINDS)
    found = {"loss_anomaly": loss, **{kind: kinds[f"kind {kind}"] for kind in catalog.STEP_ANOMALIES[:2]}}
    least = max(kinds.values(), default=0)
    measured = round((readings.get(catalog.GRAD_NORM_DISTRIBUTION) or 0) + (readings.get(catalog.GRAD_NONFINITE_STEPS) or 0))
    own = {"steps": steps, "measured": measured or steps, "anomalous": least, "most": min(total, steps)}
    return kinds + Counter({**found, **own})


def _summary(counts: Counter[str], source: str) -> dict[str, Any]:
    steps = counts["steps"]
    explosions, vanishing, loss = (counts[kind] for kind in catalog.STEP_ANOMALIES)

    def rate(count: int, of: int = steps) -> float | None:
        return count / of if steps else None

    rates = rate(explosions, counts["measured"]), rate(vanishing, counts["measured"])
    return {
        "total_steps": steps,
        "anomaly_steps": counts["anomalous"],
        "anomaly_steps_most": counts["most"],
        "gradient_explosions": explosions,
        "gradient_vanishing": vanishing,
        "loss_anomalies": loss,
        "anomaly_rate": _greatest((rate(counts["anomalous"]), *rates)),
        "gradient_explosion_rate": rates[0],
        "gradient_vanishing_rate": rates[1],
        "loss_anomaly_rate": rate(loss),
        "anomalies": {kind: counts[f"kind {kind}"] for kind in catalog.ANOMALY_KINDS},
        "source": source,
    }
