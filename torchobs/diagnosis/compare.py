"""Comparison of a run's ranks: which failed first, which is slow and in which phase, which is behind. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median

from torchobs import catalog
from torchobs.detect.disagreement import drifted
from torchobs.detect.stall import PATIENT_PHASES
from torchobs.diagnosis import collective_timeout, health, text_format
from torchobs.diagnosis.health import ERROR, INFO, WARNING, Finding
from torchobs.diagnosis.rank_report import RankReport, Step
from torchobs.diagnosis.stall import Stall, stall
from torchobs.diagnosis.status import RankStatus, compared, started_here
from torchobs.ranks import labels, state

RECENT = 200
_MOST_NAMED = 8
_KILLED_WITHIN_S = 40.0
"""torchrun sends SIGKILL 30 s after SIGTERM."""
_JITTER_S = 0.1
"""What the order of two ends within it says nothing about: a process waits that long for its turn on a busy machine"""
_ABORTED = 128 + signal.SIGABRT
_AFTER_ANOTHER = {"exception": "raised in collective operations", "terminated": "were told to end"}
"""What the end of one rank does to the others, by their own reasons"""
_COLLECTIVE = (
    "torch/distributed/", "torch/nn/parallel/distributed.py", "DistBackendError", "DistNetworkError", "DistStoreError",
    "DistError",
)  # fmt: skip


def compare(ranks: Sequence[RankReport]) -> list[Finding]:
    """Return the findings on ranks together."""
    if len(ranks) < 2:  # noqa: PLR2004  # a single rank has no peers
        return []
    together, timed_out = stalled_together(ranks), list(collective_timeout.finding(ranks))
    teams = labels.teams(together)
    waited_for = [one for one in health.waited_for(together) if not timed_out or one.kind != "waited_for"]
    return [
        *(timed_out or _first_to_fail(ranks)),
        *waited_for,
        *chain.from_iterable(map(health.disagreeing, teams)),
        *chain.from_iterable(map(_drifted, labels.teams(ranks), teams)),
        *chain.from_iterable(map(health.batches_alike, teams)),
        *_missing(ranks),
        *chain.from_iterable(map(_out_of_step, labels.teams(ranks))),
        *health.slowest(compared(ranks), detailed=True),
    ]


def _drifted(ranks: Sequence[RankReport], together: Sequence[RankStatus]) -> Iterator[Finding]:
    """Yield the ranks whose weights differ, with their learning rates."""
    found = drifted({rank.rank: rank.replicas.weights for rank in together})
    for finding in health.weights_apart(together) if found else ():
        yield finding._replace(text=f"{finding.text}{_rates(ranks, found[0] if found else 0)}")


def _rates(ranks: Sequence[RankReport], since: int) -> str:
    """Return the learning rates, if they differ between ranks from some step before."""
    rates = {report.rank: {step.step: step.learning_rate for step in report.steps if step.step <= since} for report in ranks}
    common = set.intersection(*(set(own) for own in rates.values()))
    differ = sorted(step for step in common if len({own[step] for own in rates.values()}) > 1)
    if not differ:
        return ""
    told = text_format.joined(
        [f"{text_format.number(own[differ[0]])} on rank {rank}" for rank, own in rates.items()], _MOST_NAMED
    )
    return f" Their learning rates differed in step {differ[0]:,}: {told}."


def stalled_together(ranks: Sequence[RankReport]) -> list[RankStatus]:
    """Return the status of the ranks at the end; ranks of a replica group that hung and were killed together are hung still.

    A launcher kills the ranks of a hung run, or a collective's timeout raises in them, so that at the end none lives. Their
    last phases tell where they were. It need not have been so long that the exporter would call them hung.
    """
    return list(chain.from_iterable(map(_stalled_together, labels.teams(ranks))))


def _stalled_together(ranks: Sequence[RankReport]) -> list[RankStatus]:
    statuses = compared(ranks)
    found = [stall(report) for report in ranks]
    if any(report.up or report.state == "finished" for report in ranks) or not any(map(_stood_still, found)):
        return statuses
    if max(report.last_s for report in ranks) - min(report.last_s for report in ranks) > _KILLED_WITHIN_S:
        return statuses
    return [
        replace(status, state="hung" if _stood_still(one) else "alive", phase=report.phase)
        for status, one, report in zip(statuses, found, ranks, strict=True)
    ]


def _stood_still(found: Stall | None) -> bool:
    return found is not None and (found.hung or (found.long and found.phase not in PATIENT_PHASES))


def typical_phases(steps: Sequence[Step]) -> dict[str, float]:
    """Return the median seconds of the last steps in each phase."""
    recent = steps[-RECENT:]
    return {phase: median([step.phase_s.get(phase, 0.0) for step in recent]) for phase in catalog.PHASES} if recent else {}


def first_failed(ranks: Sequence[RankReport]) -> tuple[RankReport | None, str]:
    """Return the rank that likely failed first, ``None`` if none failed, and a sentence, empty if none did so by itself.

    ``ranks``: of one replica group.

    If ends are too close for the clocks to order, a rank that vanished while the others raised in a collective operation was
    likely first, for that is how they see a peer's end; one that raised in other code was likely first when the others
    vanished, for the launcher then kills them. Of ranks that raised the same at one line, a step apart or less, none was first.
    """
    failed = _failed(ranks)
    ended = sorted(((_end_s(report), report) for report in failed), key=lambda pair: pair[0])
    if not ended:
        return None, ""
    (first_s, first), *others = ended
    if all(report.reason in {"terminated", "interrupted"} for report in failed) and (others or len(ranks) == 1):
        return first, ""  # somebody ended them, and not one among others that go on
    if not others:
        return first, f"Only rank {first.rank} failed, at {text_format.moment(first_s, '%H:%M:%S')}."
    alike = _raised_alike(ended)
    if len(alike) > 1:
        soon = [report for end_s, report in ended if end_s - first_s <= state.BEAT_S]
        causes = _possible_causes(alike, soon)
        return _likely_first([*alike, *causes], state.BEAT_S) if causes else (first, _alike(alike, ranks))
    doubt_s = max(_doubt_s(report) for _, report in ended[:2])
    if others[0][0] - first_s > doubt_s:
        later = text_format.duration(others[0][0] - first_s)
        return first, f"Rank {first.rank} failed first, {later} before rank {others[0][1].rank}: look there for the cause."
    return _likely_first([report for end_s, report in ended if end_s - first_s <= doubt_s], doubt_s)


def _raised_alike(ended: Sequence[tuple[float, RankReport]]) -> list[RankReport]:
    """Return the ranks that raised what the first did, at the same line, by no more later than steps of the ranks vary."""
    first_s, first = ended[0]
    raised = _raised(first)
    margin_s = max(_JITTER_S, *(_usual_step_s(report) for _, report in ended))
    return [report for end_s, report in ended if raised and _raised(report) == raised and end_s - first_s <= margin_s]


def _possible_causes(alike: Sequence[RankReport], soon: Sequence[RankReport]) -> list[RankReport]:
    """Return the ranks among ``soon`` that ended otherwise than those that raised ``alike``, and not as a consequence of it."""
    known = {id(report) for report in alike}
    own = not _in_collective(alike[0])
    return [
        report for report in soon
        if id(report) not in known and report.reason not in {"terminated", "interrupted"}
        and not (own and report.reason == "exception" and _in_collective(report))
    ]  # fmt: skip


def _raised(report: RankReport) -> tuple[str, ...]:
    """Return class and place of the exception that ended the rank; empty if none did."""
    fact = report.main_exceptions[-1] if report.reason == "exception" and report.main_exceptions else None
    return tuple(fact.text(name) for name in ("exception.type", "location", "caller")) if fact is not None else ()


def _usual_step_s(report: RankReport) -> float:
    durations = [step.duration_s for step in report.steps[-RECENT:] if step.duration_s is not None]
    return median(durations) if durations else 0.0


def _alike(alike: Sequence[RankReport], ranks: Sequence[RankReport]) -> str:
    """Return the sentence on ranks that raised the same, the first of them first; ``ranks``: all that are here."""
    count = len(ranks)
    who = f"{len(alike):,} of the {count:,} ranks" if len(alike) < count else f"All {count:,} ranks"
    if len(alike) == count == 2:  # noqa: PLR2004  # a pair
        who = "Both ranks"
    here = " here" if max(labels.number(report.header.resource, "world_size") or 0 for report in ranks) > count else ""
    ahead = text_format.duration(_end_s(alike[1]) - _end_s(alike[0]))
    return f"{who}{here} raised {alike[0].exception}, the first by {ahead}, which says nothing."


def _likely_first(together: Sequence[RankReport], doubt_s: float) -> tuple[RankReport, str]:
    within = f"within {text_format.duration(doubt_s)}"
    # an abort may be a collective's own, which a peer's end has caused
    silent = [
        report for report in together
        if report.state == "lost" or (report.reason == "crashed" and report.exit_code != _ABORTED)
    ]  # fmt: skip
    own = [report for report in together if report.reason == "exception" and not _in_collective(report)]
    if len(own) == 1:
        text = f"Rank {own[0].rank} raised in code of its own and the others ended {within} of it: it was likely first."
        return own[0], text
    if len(silent) == 1 and not own:
        ended = "crashed" if silent[0].reason == "crashed" else "vanished"
        reasons = dict.fromkeys(_AFTER_ANOTHER.get(one.reason, "ended") for one in together if one is not silent[0])
        text = f"Rank {silent[0].rank} {ended}, and {within} the others {' or '.join(reasons)}: it was likely first."
        return silent[0], text
    names = text_format.joined([report.rank for report in together], _MOST_NAMED)
    return together[0], f"Ranks {names} failed {within}: which was first cannot be told."


def _in_collective(report: RankReport) -> bool:
    """Return True if a peer's end may have caused the exception: raised by torch.distributed, or by DDP."""
    for fact in report.main_exceptions[-1:]:
        place = fact.text("location")
        if any(sign in f"{place} {fact.text('exception.type')}" for sign in _COLLECTIVE):
            return True
        return "_engine_run_backward" in place and len(report.events_named(catalog.EVENT_DISTRIBUTED)) > 0
    return False


def _first_to_fail(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    """Yield which rank of each replica group failed first; of one whose only rank failed nothing, if others failed as well."""
    for team in labels.teams(ranks):
        _, text = first_failed(team)
        if text and (len(_failed(team)) > 1 or len(_failed(ranks)) == 1):
            yield Finding(ERROR, "first_failed", text)


def _failed(ranks: Sequence[RankReport]) -> list[RankReport]:
    return [report for report in ranks if report.state in {"failed", "lost"} and report.end_known]


def _end_s(report: RankReport) -> float:
    raised = report.main_exceptions
    return raised[-1].time_s if raised and report.reason == "exception" else report.last_s


def _doubt_s(report: RankReport) -> float:
    return 0.0 if report.reason == "exception" and report.main_exceptions else state.BEAT_S


def _missing(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    expected = started_here(ranks)
    if len(ranks) < expected:
        text = f"{len(ranks):,} of the {expected:,} ranks of this machine are here: the others never started to record."
        yield Finding(WARNING, "ranks_missing", text)


def _out_of_step(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    known = [report for report in ranks if not report.partial or report.last_step]
    furthest = max((report.last_step for report in known), default=0)
    behind = [report for report in known if report.last_step < furthest and not _may_lack_steps(report, known)]
    if behind and any(not report.up for report in ranks):
        least = min(behind, key=lambda report: report.last_step)
        text = f"Rank {least.rank} ended after step {least.last_step:,}, the furthest after step {furthest:,}."
        if furthest - least.last_step > 1:
            text += f" {text_format.plural(len(behind), 'rank')} behind."
        yield Finding(INFO, "out_of_step", text)


def _may_lack_steps(report: RankReport, ranks: Sequence[RankReport]) -> bool:
    """Return True if the rank may have done, without a trace, what the others did after its last step."""
    next_s = [step.end_s for other in ranks for step in other.steps if step.step == report.last_step + 1]
    return report.unwritten and all(end_s > report.last_s for end_s in next_s)
