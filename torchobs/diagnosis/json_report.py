"""The report as JSON (``torchobs inspect --json``). Pure; ``VERSION`` increases when a field changes or is removed.

Times are Unix seconds, durations seconds, memory bytes. A non-finite number is its name (``"NaN"``), as JSON has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs.diagnosis.compare import typical_phases
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.diagnosis.health import Finding
from torchobs.diagnosis.rank_report import Fact, RankReport, Step
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
        "launchers": [_process(facts, options) for facts in launchers],
        "ranks": [_rank(facts, found, options) for facts, found in zip(ranks, known.by_rank, strict=True)],
        "unreadable": [{"file": name, "reason": why} for name, why in bad],
    }
    found: dict[str, Any] = plain(made)
    return found


def _process(facts: RankReport, options: Options) -> dict[str, Any]:
    """Return what is known of any recorded process."""
    return {
        "file": facts.source,
        "problems": list(facts.problems),
        "partial": facts.partial,
        "incarnation": facts.header.incarnation.hex(),
        "resource": dict(facts.header.resource),
        "state": facts.state,
        "up": facts.up,
        "exit": {"reason": facts.reason or None, "code": None if facts.up else facts.exit_code},
        "started": facts.start_s,
        "last_seen": facts.last_s,
        "events": [_event(fact) for fact in facts.events[-options.events :] if options.events],
    }


def _rank(facts: RankReport, findings: Sequence[Finding], options: Options) -> dict[str, Any]:
    """Return the report of one rank."""
    job_name, run_id, rank = facts.identity
    return {
        **_process(facts, options),
        "job_name": job_name,
        "run_id": run_id,
        "rank": rank,
        "restart": facts.restart,
        "phase": facts.phase,
        "last_step": facts.last_step,
        "stall": found._asdict() if (found := stall(facts)) else None,
        "evidence": [{"file": left.name, "kind": left.kind, "id": left.id} for left in facts.left],
        "findings": [_finding(finding) for finding in findings],
        "speed": speed(facts.pace),
        "steps": [_step(step) for step in facts.steps[-options.steps :] if options.steps],
        "scalars": {name: [point._asdict() for point in points] for name, points in facts.scalars.items()},
        "goodput": facts.by_attribute(catalog.GOODPUT_TIME),
        "phases": facts.by_attribute(catalog.STEP_PHASE_TIME),
        "typical_phases": typical_phases(facts.steps),
        "anomalies": facts.by_attribute(catalog.ANOMALIES),
        "memory": memory(facts),
        "oom_kills": facts.value(catalog.CGROUP_MEMORY_OOM_KILLS),
        "device_memory": device_memory(facts),
        "checkpoint": {name: facts.value(metric) for name, metric in _CHECKPOINT.items()},
        "amp": {
            "scale": facts.by_attribute(catalog.AMP_SCALE),
            "steps_skipped": facts.value(catalog.AMP_STEPS_SKIPPED),
            "skip_streak": facts.value(catalog.AMP_SKIP_STREAK),
        },
        "compile": {
            "time": facts.by_attribute(catalog.COMPILE_TIME),
            "compilations": facts.by_attribute(catalog.COMPILE_COMPILATIONS),
            "recompiles": facts.by_attribute(catalog.COMPILE_RECOMPILES),
            "failures": facts.by_attribute(catalog.COMPILE_FAILURES),
            "graph_breaks": facts.by_attribute(catalog.COMPILE_GRAPH_BREAKS),
        },
    }


def memory(facts: RankReport) -> dict[str, float | None]:
    """Return the last known use of host memory, in bytes."""
    return {name: facts.value(metric) for name, metric in _MEMORY.items()}


def device_memory(facts: RankReport) -> dict[str, dict[str, float]]:
    """Return the last known memory use of each device, in bytes."""
    found: dict[str, dict[str, float]] = {}
    for name, metric in _DEVICE_MEMORY.items():
        for device, value in facts.by_attribute(metric).items():
            found.setdefault(device, {})[name] = value
    return found


def _finding(finding: Finding) -> dict[str, str]:
    return {"severity": finding.severity, "kind": finding.kind, "text": finding.text}


def _step(step: Step) -> dict[str, Any]:
    made = step._asdict()
    return {**{name: made[name] for name in made if name != "phase_s"}, "phases": dict(step.phase_s)}


def _event(fact: Fact) -> dict[str, Any]:
    return {"time": fact.time_s, "name": fact.name, "step": fact.step, "attributes": dict(fact.attributes)}
