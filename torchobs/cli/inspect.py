"""``torchobs inspect``: report on a run, from its flight files alone: the diagnosis first, then the data behind it."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import isfinite
from operator import itemgetter
from pathlib import Path

from torchobs import catalog
from torchobs.catalog.findings import Finding
from torchobs.cli import arguments
from torchobs.cli.arguments import tolerant
from torchobs.config import option_types
from torchobs.config.options import Option
from torchobs.diagnosis import text_format
from torchobs.diagnosis.diagnosis import RunDiagnosis, diagnose_run
from torchobs.diagnosis.endings import typical_phases
from torchobs.diagnosis.health import ERROR, WARNING
from torchobs.diagnosis.load import choose, default_directory
from torchobs.diagnosis.rank_report import Fact, Point, RankReport, attribute_text, last_known
from torchobs.diagnosis.stall import shown, stall, without_launcher
from torchobs.document.run import Options, command_line, document, facts
from torchobs.document.sections import device_memory, host_memory
from torchobs.document.text import STATE_COLOURS, Column, TerminalStyle, bullets, flow, shares, style_for, table

_COLOURS = {ERROR: "red", WARNING: "yellow"}
_MANY = 40
_MOST_ALIKE, _MOST_FRAMES = 3, 12
_MOST_RANKS = 1e7
"""A damaged file may hold any number"""
_STEP_COLUMNS = (
    Column("step"), Column("ended", dispensable=4), Column("took"), Column("loss"), Column("grad norm"),
    Column("learning rate", dispensable=3),
    *(Column(phase, dispensable=5 + index) for index, phase in enumerate(catalog.PHASES)), Column("", right=False),
)  # fmt: skip
_RANK_COLUMNS = (
    Column("rank"), Column("state", right=False), Column("exit", right=False, dispensable=2), Column("step"), Column("loss"),
    Column("grad norm", dispensable=4), Column("step time", dispensable=3), Column("most of it", right=False, dispensable=5),
    Column("last seen", dispensable=6), Column("host", right=False, dispensable=8),
)  # fmt: skip
_MOST = option_types.integer(0, 1_000_000)  # beyond any file's capacity
_STEPS_OPTION = Option("steps", _MOST, "Number of last steps to list.", "10", flag="--steps", metavar="N")
_EVENTS_OPTION = Option("events", _MOST, "Number of last events to list.", "20", flag="--events", metavar="N")


def report_lines(
    ranks: Sequence[RankReport], launchers: Sequence[RankReport], options: Options, style: TerminalStyle
) -> list[str]:
    """Return the whole report of a run; ``launchers``: processes that only started its ranks."""
    known = diagnose_run(ranks, launchers)
    lines = [*_heading(ranks, style), "", style("bold", "What happened")]
    for finding in (known.verdict, *known.together, *_shown_findings(ranks, known)):
        lines += (style(_COLOURS.get(finding.severity, ""), line) for line in bullets([finding.long], style.width))
    if len(ranks) > 1:
        lines += ["", style("bold", "Ranks"), *_ranks(ranks, style)]
    return [*lines, *_rank(ranks[known.principal], options, style, alone=len(ranks) == 1)]


def _heading(ranks: Sequence[RankReport], style: TerminalStyle) -> Iterator[str]:
    first = ranks[0]
    job_name, run_id, _ = first.identity
    begun, ended = min(report.begun_s for report in ranks), max(report.begun_s + report.lived_s for report in ranks)
    yield text_format.cut(f"{style('bold', job_name)}  {run_id}", style.width + (8 if style.colour else 0))
    hosts = sorted({report.described("host") for report in ranks} - {""})
    where = f"on {hosts[0]}" if len(hosts) == 1 else f"on {len(hosts)} hosts" if hosts else ""
    world = first.header.resource.get("world_size")
    of = f" of {world}" if isinstance(world, int) and world > len(ranks) else ""
    versions = [f"{name} {first.described(f'{name}_version')}" for name in ("torch", "python", "torchobs")]
    parts = [
        f"{text_format.plural(len(ranks), 'rank')}{of} {where}".strip(), first.described("script"),
        f"started by {first.described('launcher')}", *(text for text in versions if not text.endswith(" ")),
        f"attempt {first.restart + 1}" if first.restart else "",
    ]  # fmt: skip
    yield from flow([part for part in parts if part], style.width)
    yield text_format.cut(
        f"{text_format.moment(begun)} to {text_format.moment(ended)} ({text_format.duration(ended - begun)})", style.width
    )


def _shown_findings(ranks: Sequence[RankReport], known: RunDiagnosis) -> Iterator[Finding]:
    """Yield the findings on the rank shown in full, and how the others ended; equal endings once."""
    yield from known.by_rank[known.principal]
    rest = [(report.state, report.reason, index) for index, report in enumerate(ranks) if index != known.principal]
    for _, group in groupby(sorted(rest), key=itemgetter(0, 1)):
        first, *more = (known.by_rank[index][0] for _, _, index in group)
        also = f" The same goes for {text_format.plural(len(more), 'more rank')}." if more else ""
        yield first._replace(values={**first.values, "also": also})


def _ranks(ranks: Sequence[RankReport], style: TerminalStyle) -> list[str]:
    worst_first = sorted(ranks, key=lambda report: report.state in {"alive", "finished"}) if len(ranks) > _MANY else ranks
    lines = table(_RANK_COLUMNS, [_rank_row(report) for report in worst_first[:_MANY]], style.width)
    colours = ["dim", *(STATE_COLOURS.get(report.state, "") for report in worst_first[:_MANY])]
    shown = [style(colour if colour != "green" else "", line) for colour, line in zip(colours, lines, strict=True)]
    return [*shown, *([f"… and {len(ranks) - _MANY:,} more"] if len(ranks) > _MANY else [])]


def _rank_row(report: RankReport) -> list[str]:
    last, phases = (report.steps[-1] if report.steps else None), typical_phases(report.steps)
    most = max(phases, key=lambda name: phases[name], default="")
    return [
        report.rank,
        report.state,
        report.reason if report.reason != report.state else "",
        f"{report.last_step}",
        text_format.number(last.loss if last else None),
        text_format.number(last_known([step.grad_norm for step in report.steps])),
        text_format.duration(sum(phases.values()) or None),
        f"{most} {text_format.duration(phases[most])}" if most else "",
        text_format.moment(report.last_s, "%H:%M:%S"),
        report.described("host"),
    ]


def _rank(report: RankReport, options: Options, style: TerminalStyle, *, alone: bool) -> Iterator[str]:
    of = "" if alone else f" of rank {report.rank}"
    for problem in report.problems:
        yield style(
            "yellow", text_format.cut(f"{problem} ({report.source})", style.width)
        )  # in this order: the path may be long
    parts = (
        (f"Last steps{of}", _steps(report, options, style.width)),
        (f"Stack{of}", _stack(report, style.width)),
        (f"Speed{of}", _speed(report, style.width)),
        (f"Course{of}", _course(report, style)),
        (f"Time since {report.since}{of}", shares(report.by_attribute(catalog.GOODPUT_TIME), style.width)),
        (f"Phases of a step{of}, of its time", shares(report.by_attribute(catalog.STEP_PHASE_TIME), style.width)),
        (f"Phases on the GPU{of}, of its time in a step", shares(report.by_attribute(catalog.STEP_DEVICE_TIME), style.width)),
        (f"Memory{of}", _memory(report, style.width)),
        (f"Mixed precision{of}", _amp(report, style.width)),
        (f"torch.compile{of}", _compile(report, style.width)),
        (f"Events{of}", _events(report, options, style.width)),
        (f"Started{of}", _started(report, style.width)),
    )
    for title, lines in parts:
        if lines:
            yield ""
            yield style("bold", title)
            yield from lines


def _steps(report: RankReport, options: Options, width: int) -> list[str]:
    shown = report.steps[-options.steps :] if options.steps else ()
    rows = [
        [
            f"{step.step}", text_format.moment(step.end_s, "%H:%M:%S"), text_format.duration(step.duration_s),
            text_format.number(step.loss), text_format.number(step.grad_norm), text_format.number(step.learning_rate),
            *(text_format.duration(step.phase_s.get(phase)) for phase in catalog.PHASES),
            "skipped" if step.skipped else "clipped" if step.clipped else "",
        ]
        for step in shown
    ]  # fmt: skip
    lines = table(_STEP_COLUMNS, rows, width) if rows else []
    if lines and 1.0 < (ranks := report.value(catalog.GRAD_NORM_RANKS) or 1.0) < _MOST_RANKS:
        note = f"grad norm: of this rank's own shard; the squares of {ranks:,.0f} ranks' norms add up to that of the whole's"
        lines.append(text_format.cut(note, width))
    return lines


def _stack(report: RankReport, width: int) -> list[str]:
    """Return where the main thread was when it was last looked at, if that was in a stall at the end."""
    found = stall(report)
    frames = without_launcher(found.frames) if found is not None else ()
    more = [f"… and {len(frames) - _MOST_FRAMES} more"] if len(frames) > _MOST_FRAMES else []
    return [text_format.cut(line, width) for line in (*map(shown, frames[:_MOST_FRAMES]), *more)]


def _speed(report: RankReport, width: int) -> list[str]:
    pace = report.speed
    if pace is None or pace.per_s is None:
        return []
    rates = (("steps", pace.per_s), ("tokens", pace.tokens_per_s), ("samples", pace.samples_per_s))
    told = [text_format.rate(per_s, what) for what, per_s in rates if per_s]
    share = report.value(catalog.MFU)
    told += [f"MFU {text_format.percent(share)}"] if share is not None else []
    return flow([*told, f"over {text_format.plural(pace.steps, 'step')} ({text_format.duration(pace.window_s)})"], width)


def _course(report: RankReport, style: TerminalStyle) -> list[str]:
    """Return loss, gradient norm and step time over all steps in the file."""
    kinds = (
        ("loss", [step.loss for step in report.steps]),
        ("grad norm", [step.grad_norm for step in report.steps]),
        ("step time", [step.duration_s for step in report.steps]),
    )
    lines = [_curve(name, values, style) for name, values in kinds if any(value is not None for value in values)]
    span = f"steps {report.steps[0].step:,} to {report.steps[-1].step:,}" if report.steps else ""
    course = [*lines, f"{'':<9}  {span}"] if len(report.steps) > 1 and lines else []
    return [*course, *(_logged(name, points, style) for name, points in report.scalars.items())]


def _logged(name: str, points: Sequence[Point], style: TerminalStyle) -> str:
    """Return the curve of a logged scalar, over all its points, which may be older than the steps above."""
    line = _curve(text_format.pad(text_format.clean(name), 9), [point.value for point in points], style)
    return text_format.cut(f"{line}, last {text_format.number(points[-1].value)} in step {points[-1].step:,}", style.width)


def _curve(name: str, values: Sequence[float | None], style: TerminalStyle) -> str:
    finite = [value for value in values if value is not None and isfinite(value)]
    shown = text_format.duration if name == "step time" else text_format.number
    ends = f"{shown(min(finite))} to {shown(max(finite))}" if finite else ""
    room = min(80, style.width - 12 - len(ends))
    return f"{name:<9}  {text_format.sparkline(values, room, ascii_only=not style.unicode)} {ends}".rstrip()


def _memory(report: RankReport, width: int) -> list[str]:
    host = [f"{name.replace('_', ' ')} {text_format.size(value)}" for name, value in host_memory(report).items() if value]
    devices = [
        f"{device} " + ", ".join(f"{name} {text_format.size(value)}" for name, value in sizes.items())
        for device, sizes in device_memory(report).items()
    ]
    kills = int(report.value(catalog.CGROUP_MEMORY_OOM_KILLS) or 0)
    told = [f"{text_format.plural(kills, 'process', 'processes')} of the cgroup killed for memory"] if kills else []
    return [*flow(host, width), *flow(devices, width), *told]


def _amp(report: RankReport, width: int) -> list[str]:
    scales = report.by_attribute(catalog.AMP_SCALE)
    if not scales:
        return []
    items = [f"loss scale {text_format.number(scale)}" for scale in scales.values()]
    items += [f"{int(report.value(catalog.AMP_STEPS_SKIPPED) or 0):,} steps skipped"]
    items += [f"{int(report.value(catalog.AMP_SKIP_STREAK) or 0):,} of them in a row at the end"]
    return flow(items, width)


def _compile(report: RankReport, width: int) -> list[str]:
    times = {stage: seconds for stage, seconds in report.by_attribute(catalog.COMPILE_TIME).items() if seconds}
    if not times:
        return []
    counts = report.by_attribute(catalog.COMPILE_COMPILATIONS)
    breaks = int(sum(report.by_attribute(catalog.COMPILE_GRAPH_BREAKS).values()))
    items = [f"{stage} {text_format.duration(seconds)}" for stage, seconds in times.items()]
    items += [f"{int(count):,} compilations ({cause})" for cause, count in counts.items() if count]
    return flow([*items, text_format.plural(breaks, "graph break")], width)


def _started(report: RankReport, width: int) -> list[str]:
    """Return command line, commit and seed; the rest of how the rank was started is in the report and in the JSON."""
    line, known = command_line(report.details), facts(report, report.details)
    shown = ("git commit", "devices", "CUDA", "seed", "deterministic")
    items = [f"{name} {known[name]}" for name in shown if name in known]
    return [*([text_format.cut(line, width)] if line else []), *flow(items, width)]


def _events(report: RankReport, options: Options, width: int) -> list[str]:
    if not options.events:
        return []
    shown = list(_joined(report.events))[-options.events :]
    return [text_format.cut(f"{text_format.moment(fact.time_s, '%H:%M:%S')}  {what}", width) for fact, what in shown]


def _joined(events: Iterable[Fact]) -> Iterator[tuple[Fact, str]]:
    """Yield events, newest last; consecutive anomalies are merged, and so are repetitions of an event."""
    for name, group in groupby(events, key=lambda fact: fact.name):
        same = list(group)
        if len(same) > 1 and name == catalog.EVENT_ANOMALY.name:
            yield same[-1], _anomalies(same)
        elif len(same) > _MOST_ALIKE:
            yield same[-1], f"{_event(same[-1])}  (the last of {len(same):,} on end)"
        else:
            yield from ((fact, _event(fact)) for fact in same)


def _anomalies(events: Sequence[Fact]) -> str:
    kinds = Counter[str]()
    for fact in events:
        kinds[fact.text("kind").replace("_", " ")] += 1 + fact.count("left_out")
    told = ", ".join(f"{kind} ×{count:,}" for kind, count in kinds.items())
    steps = [fact.step for fact in events if fact.step is not None]
    first = events[0]
    value, usual = text_format.number(first.number("value")), text_format.number(first.number("baseline"))
    where = f"steps {min(steps):,} to {max(steps):,}  " if steps else ""
    return f"{where}{told}  (first: {value}, usual {usual})"


def _event(fact: Fact) -> str:
    told = [f"{name}={attribute_text(fact, name)}" for name in fact.attributes if name != "kind" and fact.text(name)]
    kind, at = fact.text("kind").replace("_", " "), f"step {fact.step:,}  " if fact.step is not None else ""
    return f"{at}{kind or text_format.clean(fact.name.removeprefix('torchobs.'))}  {' '.join(told[:8])}".rstrip()


_DESCRIPTION = """\
Report what happened to a run: how each rank ended, what went wrong first, the last steps, where the time went, memory, events.
It reads the flight files, in which the ranks record themselves and which stay however they end; nothing has to run. Without a
path it reads the directory that this user's trainings write to. Of several runs there the latest is reported; --run selects
another."""

_EXAMPLES = """\
examples:
  torchobs inspect                                  the latest run on this machine
  torchobs inspect /dev/shm/torchobs-1000 --run 4711
                                                    another run, by its run_id or the beginning of it, or by its job's name
  torchobs inspect r0-3f…9a.flight --steps 50       one rank; also from a copy (kubectl cp), or a part of one
  torchobs inspect --json | jq '.ranks[] | {rank, state, exit}'

Exit status: 0 if every rank is alive or finished, 1 if one failed, was lost or hangs, 2 if there was nothing to read."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("inspect", "torchobs inspect [options] [FILE|DIR …]", _DESCRIPTION, _EXAMPLES)
    made.add_argument("paths", nargs="*", metavar="FILE|DIR", type=Path, help="Flight files, or directories of them.")
    made.add_argument(
        "--run", metavar="RUN", help="The run to report: its run_id or its beginning, or a job's name. [default: the latest]"
    )
    arguments.add(made, _STEPS_OPTION, default=10)
    arguments.add(made, _EVENTS_OPTION, default=20)
    made.add_argument("--json", action="store_true", help="Print JSON for programs; docs/terminal.md describes its fields.")
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs inspect`` with these arguments and return its exit status."""
    options = parser().parse_args(list(given))
    out, wanted = tolerant(sys.stdout), Options(options.steps, options.events)
    chosen = arguments.found(lambda: choose(options.paths or [default_directory()], options.run))
    if options.json:
        out.write(json.dumps(document(chosen.ranks, chosen.launchers, chosen.bad, wanted), indent=2, allow_nan=False) + "\n")
    else:
        style = style_for(out)
        unread = [text_format.cut(f"not read: {text_format.clean(name)}: {why}", style.width) for name, why in chosen.bad[:5]]
        lines = report_lines(chosen.ranks, chosen.launchers, wanted, style)
        if unread or chosen.notes:
            lines += ["", *unread, *chosen.notes]
        out.write("".join(f"{line}\n" for line in lines))
    return int(any(report.state not in {"alive", "finished"} for report in (*chosen.ranks, *chosen.launchers)))
