"""The report as JSON (``torchobs inspect --json``). Pure; ``VERSION`` increases when a field changes or is removed.

Times are Unix seconds, durations seconds, memory bytes. A non-finite number is its name (``"NaN"``), as JSON has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.diagnosis.endings import typical_phases
from torchobs.diagnosis.health import Finding
from torchobs.diagnosis.rank_report import Fact, RankReport, Step, units
from torchobs.diagnosis.stall import stall
from torchobs.flight.format.event_ring import plain
from torchobs.flight.metrics.throughput import speed

VERSION = 1
_MEMORY = {
    "rss": catalog.MEMORY_HOST_RSS,
    "children_rss": catalog.MEMORY_HOST_CHILDREN_RSS,
    "machine_available": catalog.MEMORY_HOST_AVAILABLE,
    "cgroup_working_set": catalog.CGROUP_MEMORY_WORKING_SET,
    "cgroup_peak": catalog.CGROUP_MEMORY_PEAK,
    "cgroup_limit": catalog.CGROUP_MEMORY_LIMIT,
    "shared_used": catalog.MEMORY_SHARED_USED,
    "shared_size": catalog.MEMORY_SHARED_SIZE,
}
_DEVICE_MEMORY = {
    "allocated": catalog.MEMORY_DEVICE_ALLOCATED,
    "reserved": catalog.MEMORY_DEVICE_RESERVED,
    "peak": catalog.MEMORY_DEVICE_PEAK,
    "limit": catalog.MEMORY_DEVICE_LIMIT,
}
_CHECKPOINT = {
    "timestamp": catalog.CHECKPOINT_TIMESTAMP,
    "duration": catalog.CHECKPOINT_DURATION,
    "size": catalog.CHECKPOINT_SIZE,
}


class Options(NamedTuple):
    """How much of each rank is shown."""

    steps: int = 10
    events: int = 20
    history: bool = False


def document(
    ranks: Sequence[RankReport], launchers: Sequence[RankReport], bad: Sequence[tuple[str, str]], options: Options
) -> dict[str, Any]:
    """Return the report of a run of one rank or more.

    ``launchers``: processes that only started the ranks; ``bad``: files that could not be read, each with the reason.
    """
    known = diagnose_run(ranks, launchers)
    made = {
        "version": VERSION,
        "health": {"level": known.health.level.name.lower(), "text": known.health.headline},
        "findings": [_finding(finding) for finding in known.together],
        "launchers": [_process(report, options) for report in launchers],
        "ranks": [_rank(report, found, options) for report, found in zip(ranks, known.by_rank, strict=True)],
        "unreadable": [{"file": name, "reason": why} for name, why in bad],
    }
    found: dict[str, Any] = plain(made)
    return found


def _process(report: RankReport, options: Options) -> dict[str, Any]:
    """Return what is known of any recorded process."""
    return {
        "file": report.source,
        "problems": list(report.problems),
        "partial": report.partial,
        "incarnation": report.header.incarnation.hex(),
        "resource": dict(report.header.resource),
        "state": report.state,
        "up": report.up,
        "exit": {"reason": report.reason or None, "code": None if report.up else report.exit_code},
        "started": report.begun_s,
        "last_seen": report.last_s,
        "events": [_event(fact) for fact in report.events[-options.events :] if options.events],
    }


def _rank(report: RankReport, findings: Sequence[Finding], options: Options) -> dict[str, Any]:
    """Return the report of one rank."""
    job_name, run_id, rank = report.identity
    return {
        **_process(report, options),
        "job_name": job_name,
        "run_id": run_id,
        "rank": rank,
        "restart": report.restart,
        "phase": report.phase,
        "last_step": report.last_step,
        "stall": found._asdict() if (found := stall(report)) else None,
        "evidence": [{"file": left.name, "kind": left.kind, "id": left.id} for left in report.left],
        "findings": [_finding(finding) for finding in findings],
        "speed": speed(report.speed),
        "steps": [_step(step) for step in report.steps[-options.steps :] if options.steps],
        "scalars": {name: [point._asdict() for point in points] for name, points in report.scalars.items()},
        "details": dict(report.details),
        "history": {
            "names": list(report.history.names),
            "rows": [[row.time_s, row.step, *row.values] for row in report.history.rows] if options.history else [],
        },
        "goodput": report.by_attribute(catalog.GOODPUT_TIME),
        "phases": report.by_attribute(catalog.STEP_PHASE_TIME),
        "device_phases": report.by_attribute(catalog.STEP_DEVICE_TIME),
        "typical_phases": typical_phases(report.steps),
        "anomalies": report.by_attribute(catalog.ANOMALIES),
        "memory": memory(report),
        "oom_kills": report.value(catalog.CGROUP_MEMORY_OOM_KILLS),
        "device_memory": device_memory(report),
        "checkpoint": {name: report.value(metric) for name, metric in _CHECKPOINT.items()},
        "amp": {
            "scale": report.by_attribute(catalog.AMP_SCALE),
            "steps_skipped": report.value(catalog.AMP_STEPS_SKIPPED),
            "skip_streak": report.value(catalog.AMP_SKIP_STREAK),
        },
        "compile": {
            "time": report.by_attribute(catalog.COMPILE_TIME),
            "compilations": report.by_attribute(catalog.COMPILE_COMPILATIONS),
            "recompiles": report.by_attribute(catalog.COMPILE_RECOMPILES),
            "failures": report.by_attribute(catalog.COMPILE_FAILURES),
            "graph_breaks": report.by_attribute(catalog.COMPILE_GRAPH_BREAKS),
        },
    }


def memory(report: RankReport) -> dict[str, float | None]:
    """Return the last known use of host memory, in bytes."""
    return {name: report.value(metric) for name, metric in _MEMORY.items()}


def device_memory(report: RankReport) -> dict[str, dict[str, float]]:
    """Return the last known memory use of each device, in bytes."""
    found: dict[str, dict[str, float]] = {}
    for name, metric in _DEVICE_MEMORY.items():
        for device, value in report.by_attribute(metric).items():
            found.setdefault(device, {})[name] = value
    return found


def _finding(finding: Finding) -> dict[str, str]:
    return {"severity": finding.severity, "kind": finding.kind, "text": finding.text}


def _step(step: Step) -> dict[str, Any]:
    made = step._asdict()
    return {**{name: made[name] for name in made if name != "phase_s"}, "phases": dict(step.phase_s)}


def _event(fact: Fact) -> dict[str, Any]:
    attributes = dict(fact.attributes)
    return {
        "time": fact.time_s,
        "name": fact.name,
        "step": fact.step,
        "severity": catalog.event_severity(fact.name, attributes).name.lower(),
        "attributes": attributes,
        "units": units(fact.name, attributes),
    }
