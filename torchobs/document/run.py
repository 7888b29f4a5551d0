"""The report on one run, as a document and as plain data: what happened first, then the data behind it. Pure.

In plain data times are Unix seconds, durations seconds, memory bytes. A non-finite number is its name (``"NaN"``), as JSON
has none.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs._version import __version__
from torchobs.catalog.findings import Finding
from torchobs.diagnosis.action import verdict
from torchobs.diagnosis.diagnosis import RunDiagnosis, diagnose_run
from torchobs.diagnosis.endings import typical_phases
from torchobs.diagnosis.hangs import stall
from torchobs.document import sections
from torchobs.document.blocks import Code, Document, Item, Items, LineChart, Section, Series, Table, Text, section
from torchobs.document.live import figures
from torchobs.document.sections import points_of
from torchobs.flight.events import Event, plain
from torchobs.flight.layout import Region
from torchobs.flight.throughput import speed
from torchobs.ranks.events import units
from torchobs.ranks.rank_view import RankView, Step, run_at_end
from torchobs.ranks.runs import Chosen
from torchobs.support import text as text_format

_MANY, _MOST_LINES = 40, 8
_LONGEST = 4000
JSON_VERSION = 1
"""Increases when a field of the plain data changes or is removed"""
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
    """How much of each rank a report shows."""

    steps: int = 10
    events: int = 200
    history: bool = False
    whole: bool = False
    """all steps and the history of the rank that the report shows in full"""


DEFAULT = Options()


def run_document(chosen: Chosen, options: Options = DEFAULT) -> Document:
    """Return the report on a run; ``chosen`` has one rank or more."""
    diagnosis = diagnose_run(chosen.ranks, chosen.launchers)
    first = chosen.ranks[diagnosis.principal]
    sections = [part for part in _sections(chosen.ranks, diagnosis, options) if part.blocks]
    names = {part.name for part in sections}
    happened = section(
        "findings",
        "What happened",
        _findings(chosen.ranks, diagnosis, names),
        *_limits(chosen),
        figures(first, run_at_end(chosen.ranks)),
    )
    unread = (f"Not read: {text_format.clean(name)}: {why}" for name, why in chosen.bad[:8])
    return Document(
        title=first.names[0],
        subtitle=_subtitle(first.names[1], chosen.ranks),
        badge=(diagnosis.verdict.severity, str(diagnosis.verdict.values["badge"])),
        headline=diagnosis.health.headline,
        sections=(happened, *sections),
        footer=(*unread, f"torchobs {__version__}; from {text_format.plural(len(chosen.ranks), 'flight file')}"),
    )


def _subtitle(run_id: str, every: Sequence[RankView]) -> str:
    begun, ended = min(report.begun_s for report in every), max(report.last_s for report in every)
    hosts = sorted({report.described("host") for report in every} - {""})
    where = f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts" if hosts else ""
    times = f"{text_format.moment(begun)} to {text_format.moment(ended)}"
    return f"{run_id} · {text_format.plural(len(every), 'rank')}{where} · {times}"


def _sections(every: Sequence[RankView], diagnosis: RunDiagnosis, options: Options) -> Iterator[Section]:
    first = every[diagnosis.principal]
    of = f" of rank {first.rank}" if len(every) > 1 else ""
    if len(every) > 1:
        yield _ranks(every)
    yield sections.last_steps(first, of, options.steps)
    yield sections.stack(first, of)
    yield sections.training(first, of)
    yield sections.anomalies(first, of)
    yield sections.time_spent(first, of)
    yield sections.memory(first, of)
    yield sections.layers(first, of)
    yield sections.compilation(first, of)
    yield section("checkpoints", f"Checkpoints and gradients{of}", sections.checkpoint_table(first))
    yield sections.events(first, of, options.events)
    yield start(every, first)


def _findings(every: Sequence[RankView], diagnosis: RunDiagnosis, names: set[str]) -> Items:
    """Return the findings on the run and on the rank shown in full, and how the others ended; endings of one kind once."""
    others: dict[tuple[object, ...], list[Finding]] = {}
    for index, report in enumerate(every):
        if index != diagnosis.principal:
            ending = diagnosis.by_rank[index][0]
            others.setdefault((report.state, report.reason, ending.values.get("exception")), []).append(ending)
    endings = [end._replace(values={**end.values, "more_ranks": len(alike) or None}) for end, *alike in others.values()]
    findings = (*diagnosis.together, *diagnosis.by_rank[diagnosis.principal], *endings)
    items = (Item(finding.severity, finding.long, finding.section if finding.section in names else "") for finding in findings)
    return Items(tuple(items))


def _limits(chosen: Chosen) -> Iterator[Text]:
    """Yield the limits of the report, with their causes."""
    for report in chosen.ranks:
        for problem in report.problems:
            yield Text(f"Rank {report.rank}: {problem}.", "warning")
    long = [report for report in chosen.ranks if report.steps and report.steps[0].step > 1]
    if long:
        room = long[0].header.regions[Region.STEPS].count
        shown = max(report.steps[0].step for report in long)
        words = f"A flight file keeps its last {room:,} records: step by step the report begins with step {shown:,}."
        yield Text(f"{words} Totals, and memory and layers over time, cover the whole run.", "note")


_RANK_HEAD = ("Rank", "State", "Exit", "Step", "Loss", "Grad norm", "Step time", *catalog.PHASES, "Last seen", "Host")


def _ranks(every: Sequence[RankView]) -> Section:
    """Return a table of the ranks, those in trouble first if there are many, and a chart each of step times and losses."""
    ordered = sorted(every, key=lambda report: report.state in {"alive", "finished"}) if len(every) > _MANY else every
    table = Table(
        "Times are medians of the last steps",
        _RANK_HEAD,
        tuple(map(_rank_row, ordered)),
        frozenset({1, 2, len(_RANK_HEAD) - 1}),
    )
    charts = (_rank_lines(every, "Step time by rank", "duration_s", timed=True), _rank_lines(every, "Loss by rank", "loss"))
    return section("ranks", "Ranks", table, *charts)


def _rank_row(report: RankView) -> tuple[str, ...]:
    phases = typical_phases(report)
    last = report.steps[-1] if report.steps else None
    return (
        report.rank, report.state, report.reason if report.reason != report.state else "", f"{report.last_step}",
        text_format.number(last.loss if last else None),
        text_format.number(next(reversed([*report.norms.values()]), None)),
        text_format.duration(sum(phases.values()) or None),
        *(text_format.duration(seconds) if (seconds := phases.get(name)) else "" for name in catalog.PHASES),
        text_format.moment(report.last_s, "%H:%M:%S"), report.described("host"),
    )  # fmt: skip


def _rank_lines(every: Sequence[RankView], name: str, field: str, *, timed: bool = False) -> LineChart | None:
    shown = sorted(every, key=lambda report: -sum(typical_phases(report).values()))[:_MOST_LINES]
    in_order = sorted(shown, key=lambda report: (len(report.rank), report.rank))
    series = [Series(f"rank {report.rank}", points) for report in in_order if (points := points_of(report.steps, field))]
    note = f"The {_MOST_LINES} slowest of {len(every):,} ranks." if len(every) > _MOST_LINES else ""
    rounded = text_format.duration if timed else text_format.number
    return LineChart(name, tuple(series), rounded, note=note) if series else None


def start(every: Sequence[RankView], first: RankView) -> Section:
    """Return command line, versions, settings and seed."""
    details = start_details(every, first)
    line = command_line(details)
    rows = tuple(facts(first.header.resource, details).items())
    return section(
        "start", "How it was started", Code(line) if line else None,
        Table("Program, environment, settings", ("What", "Value"), rows, frozenset({0, 1})) if rows else None, wide=True,
    )  # fmt: skip


def start_details(every: Sequence[RankView], first: RankView) -> Mapping[str, Any]:
    """Return how a run was started, from the first of its ranks with the most details."""
    return max((first, *every), key=lambda report: len(report.details)).details


def command_line(details: Mapping[str, Any]) -> str:
    """Return the command line for a shell, on one clean line; empty if it was not kept."""
    words = details.get("command")
    if not isinstance(words, list):
        return ""
    return text_format.clean(shlex.join(text_format.clean(word, _LONGEST) for word in words), _LONGEST)


def facts(resource: Mapping[str, Any], details: Mapping[str, Any]) -> dict[str, str]:
    """Return program, versions, devices, settings and what is relevant to repeat the run, by name."""
    names = {
        "script": "script", "host": "host", "launcher": "launcher", "ranks in all": "world_size",
        "torchobs": "torchobs_version", "Python": "python_version", "torch": "torch_version",
    }  # fmt: skip
    texts = {name: _text(resource.get(key)) for name, key in names.items()}
    texts["attempt"] = f"{restart + 1}" if isinstance(restart := resource.get("restart"), int) and restart else ""
    texts.update(_details(details))
    return {name: text for name, text in texts.items() if text}


def _details(details: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    git = _part(details, "git")
    if git.get("commit"):
        branch = f" ({_text(git['branch'])})" if git.get("branch") else ""
        yield "git commit", f"{_text(git['commit'])}{branch}"
    yield "platform", _text(details.get("platform"))
    torch = _part(details, "torch")
    names = {"version": "torch", "cuda": "CUDA", "hip": "HIP", "cudnn": "cuDNN", "threads": "CPU threads"}
    for name, value in torch.items():
        yield names.get(name, _text(name).replace("_", " ")), _text(value)
    for kind in ("settings", "environment"):
        for name, value in _part(details, kind).items():
            yield _text(name), _text(value)


def _part(details: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = details.get(name)
    return part if isinstance(part, dict) else {}


def _text(value: object) -> str:
    if value is None or value == []:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return text_format.clean(text_format.joined(value) if isinstance(value, list) else value)


def document(
    ranks: Sequence[RankView],
    launchers: Sequence[RankView],
    bad: Sequence[tuple[str, str]],
    options: Options,
    before: Mapping[str, RankView] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the report of a run of one rank or more.

    ``launchers``: processes that only started the ranks; ``bad``: files that could not be read, each with the reason;
    ``before``: the attempt before of ranks that failed, by rank.
    """
    diagnosis = diagnose_run(ranks, launchers)
    much = [options] * len(ranks)
    if options.whole:
        much[diagnosis.principal] = options._replace(steps=len(ranks[diagnosis.principal].steps), history=True)
    parts = {
        "version": JSON_VERSION,
        "health": {"level": diagnosis.health.level.name.lower(), "text": diagnosis.health.headline},
        **verdict(ranks, diagnosis.principal, before.get(ranks[diagnosis.principal].rank)).plain(),
        "findings": [_finding(finding) for finding in diagnosis.together],
        "launchers": [_process(report, options) for report in launchers],
        "principal": diagnosis.principal,
        "ranks": [_rank(*of) for of in zip(ranks, diagnosis.by_rank, much, strict=True)],
        "unreadable": [{"file": name, "reason": why} for name, why in bad],
    }
    data: dict[str, Any] = plain(parts)
    return data


def _process(report: RankView, options: Options) -> dict[str, Any]:
    """Return the plain data of any recorded process."""
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
        "events": [_event(fact) for fact in report.events.facts[-options.events :] if options.events],
    }


def _rank(report: RankView, findings: Sequence[Finding], options: Options) -> dict[str, Any]:
    """Return the report of one rank."""
    return {
        **_process(report, options),
        "job_name": report.names[0],
        "run_id": report.names[1],
        "rank": report.rank,
        "restart": report.restart,
        "phase": report.phase,
        "last_step": report.last_step,
        "resumed_from": report.value(catalog.STEPS_RESUMED_FROM),
        "stall": standstill._asdict() if (standstill := stall(report)) else None,
        "evidence": [{"file": left.name, "kind": left.kind, "id": left.id} for left in report.left],
        "findings": [_finding(finding) for finding in findings],
        "speed": speed(report.pace if not report.up else report.speed),
        "steps": [_step(step) for step in report.steps[-options.steps :] if options.steps],
        "scalars": {name: [point._asdict() for point in points] for name, points in report.events.scalars.items()},
        "details": dict(report.details),
        "history": {
            "names": list(report.history.names),
            "rows": [[row.time_s, row.step, *row.values] for row in report.history.rows] if options.history else [],
        },
        "goodput": report.by_attribute(catalog.GOODPUT_TIME),
        "phases": report.by_attribute(catalog.STEP_PHASE_TIME),
        "device_phases": report.by_attribute(catalog.STEP_DEVICE_TIME),
        "typical_phases": typical_phases(report),
        "anomalies": report.by_attribute(catalog.ANOMALIES),
        "memory": {name: report.value(metric) for name, metric in _MEMORY.items()},
        "oom_kills": report.value(catalog.CGROUP_MEMORY_OOM_KILLS),
        "device_memory": _device_memory(report),
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


def _device_memory(report: RankView) -> dict[str, dict[str, float]]:
    """Return the last known memory use of each device, in bytes."""
    sizes: dict[str, dict[str, float]] = {}
    for name, metric in _DEVICE_MEMORY.items():
        for device, value in report.by_attribute(metric).items():
            sizes.setdefault(device, {})[name] = value
    return sizes


def _finding(finding: Finding) -> dict[str, str]:
    return {"severity": finding.severity, "kind": finding.kind, "text": finding.long}


def _step(step: Step) -> dict[str, Any]:
    fields = step._asdict()
    return {**{name: fields[name] for name in fields if name not in {"phases", "gap_s"}}, "phases": dict(step.phase_s)}


def _event(fact: Event) -> dict[str, Any]:
    attributes = dict(fact.attributes)
    return {
        "time": fact.time_s,
        "name": fact.name,
        "step": fact.step,
        "severity": catalog.event_severity(fact.name, attributes).name.lower(),
        "attributes": attributes,
        "units": units(fact.name, attributes),
    }
