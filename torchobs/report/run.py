"""The report on one run: what happened first, then the data behind it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchobs import catalog
from torchobs._version import __version__
from torchobs.diagnosis import text_format
from torchobs.diagnosis.diagnosis import RunDiagnosis, diagnose_run
from torchobs.diagnosis.endings import typical_phases
from torchobs.diagnosis.health import ANOMALIES, BADGES, LEVELS, MISTAKES
from torchobs.diagnosis.load import Chosen
from torchobs.diagnosis.rank_report import RankReport, last_known
from torchobs.flight.format.layout import Region
from torchobs.report import events, ranks, resources, timing, training
from torchobs.report.content import Block, Document, Figure, Figures, Item, Items, Section, Text, section
from torchobs.report.details import details

SECTIONS = {
    "training": {
        *ANOMALIES, *MISTAKES, "nonfinite_parameters", "nonfinite_origin", "past_anomalies",
        "zero_learning_rate", "scheduler_misused",
        "amp_skips", "amp_scale_collapsed", "amp_unscaled", "clipped_scaled", "model_changes", "other_thread",
        "device_unread",
    },
    "layers": {"unmoved_layers", "dead_units", "activations_unread", "layer_history"},
    "time": {"data", "held_up", "slowdown", "stalled", "checkpoint_age", "no_checkpoint", "checkpoint_failed"},
    "memory": {"memory_growth", "memory_leak", "out_of_memory", "memory.out_of_memory", "memory.shared_full"},
    "compile": {"recompile_storm", "graph_breaks", "compile_failure"},
    "ranks": {
        "first_failed", "slowest_rank", "out_of_step", "ranks_missing", "ranks_disagree", "weights_differ", "same_batches",
        "collective_timeout", "collectives_differ", "waited_for",
    },
    "events": {
        "alive", "finished", "ended", "end_unknown", "interrupted", "terminated", "exception", "exit_code", "crashed", "lost",
        "hung", "unresponsive", "unrecorded", "launcher", "thread_exception", "dropped", "probes_off", "gpu_failed",
        "workers_died", "checkpoint.failed", "data.worker_died", "gpu.lost", "gpu.xid",
    },
}  # fmt: skip
"""Kinds of findings by the section that has the data behind them"""


def run_document(chosen: Chosen) -> Document:
    """Return the report on a run; ``chosen`` has one rank or more."""
    known = diagnose_run(chosen.ranks, chosen.launchers)
    first = chosen.ranks[known.principal]
    job_name, run_id, _ = first.identity
    sections = [one for one in _sections(chosen.ranks, known) if one.blocks]
    names = {one.name for one in sections}
    happened = section(
        "findings", "What happened", _findings(chosen.ranks, known, names), *_limits(chosen), _figures(first, chosen.ranks)
    )
    level = LEVELS[known.verdict.severity]
    return Document(
        title=job_name,
        subtitle=_subtitle(run_id, chosen.ranks),
        badge=(known.verdict.severity, BADGES[level]),
        headline=known.health.headline,
        sections=(happened, *sections),
        footer=(*_unread(chosen), f"torchobs {__version__}; from {text_format.plural(len(chosen.ranks), 'flight file')}"),
    )


def _subtitle(run_id: str, every: Sequence[RankReport]) -> str:
    begun, ended = min(report.begun_s for report in every), max(report.last_s for report in every)
    hosts = sorted({report.described("host") for report in every} - {""})
    where = f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts" if hosts else ""
    times = f"{text_format.moment(begun)} to {text_format.moment(ended)}"
    return f"{run_id} · {text_format.plural(len(every), 'rank')}{where} · {times}"


def _sections(every: Sequence[RankReport], known: RunDiagnosis) -> Iterator[Section]:
    first = every[known.principal]
    of = f" of rank {first.rank}" if len(every) > 1 else ""
    if len(every) > 1:
        yield ranks.section_of(every)
    yield training.section_of(first, of)
    yield training.anomalies(first, of)
    yield timing.section_of(first, of)
    yield resources.memory(first, of)
    yield training.layers(first, of)
    yield resources.compilation(first, of)
    yield events.section_of(first, of)
    yield details(every, first)


def _findings(every: Sequence[RankReport], known: RunDiagnosis, names: set[str]) -> Items:
    found = [*known.together, *known.by_rank[known.principal]]
    told = {finding.text for finding in found}
    others = [
        finding
        for index, report in enumerate(every)
        for finding in known.by_rank[index][:1]
        if index != known.principal and finding.text not in told and report.state not in {"alive", "finished"}
    ]
    return Items(tuple(Item(one.severity, one.text, _place(one.kind, names)) for one in (*found, *others)))


def _place(kind: str, names: set[str]) -> str:
    return next((name for name, kinds in SECTIONS.items() if kind in kinds and name in names), "")


def _figures(report: RankReport, every: Sequence[RankReport]) -> Block:
    loss = last_known([step.loss for step in report.steps])
    phases = sum(typical_phases(report.steps).values())
    goodput = report.by_attribute(catalog.GOODPUT_TIME)
    whole, since = sum(goodput.values()), f"of the time since {report.since}"
    peaks = [size for size in report.by_attribute(catalog.MEMORY_DEVICE_PEAK).values() if size]
    rss = [value for _, value in report.history.of(catalog.MEMORY_HOST_RSS.name).get("", [])]
    figures = [
        Figure("State", report.state, report.reason if report.reason not in {"", report.state} else ""),
        Figure("Steps", f"{report.last_step:,}", f"in {report.lifetime}"),
        Figure("Loss", text_format.number(loss), "the last one") if loss is not None else None,
        Figure("Step time", text_format.duration(phases), "typical of the last steps") if phases else None,
        *_speed(report),
        Figure("Goodput", text_format.percent(goodput.get("productive", 0.0) / whole), since) if whole else None,
        Figure("Device memory", text_format.size(max(peaks)), "peak of a device") if peaks else None,
        Figure("Host memory", text_format.size(max(rss)), "greatest RSS seen") if rss else None,
        Figure("Ranks", f"{len(every):,}", "") if len(every) > 1 else None,
    ]  # fmt: skip
    return Figures(tuple(figure for figure in figures if figure is not None))


def _speed(report: RankReport) -> Iterator[Figure]:
    pace = report.speed
    if pace is not None and pace.per_s:
        rates = ((pace.tokens_per_s, "tokens"), (pace.samples_per_s, "samples"))
        more = next((text_format.rate(per_s, what) for per_s, what in rates if per_s), "")
        yield Figure("Speed", text_format.rate(pace.per_s, "steps"), more)


def _limits(chosen: Chosen) -> Iterator[Text]:
    """Yield what the report cannot show, and why."""
    for report in chosen.ranks:
        for problem in report.problems:
            yield Text(f"Rank {report.rank}: {problem}.", "warning")
    long = [report for report in chosen.ranks if report.steps and report.steps[0].step > 1]
    if long:
        room = long[0].header.regions[Region.STEPS].count
        shown = max(report.steps[0].step for report in long)
        words = f"A flight file keeps its last {room:,} records: step by step the report begins with step {shown:,}."
        yield Text(f"{words} Totals, and memory and layers over time, cover the whole run.", "note")


def _unread(chosen: Chosen) -> tuple[str, ...]:
    return tuple(f"Not read: {text_format.clean(name)}: {why}" for name, why in chosen.bad[:8])
