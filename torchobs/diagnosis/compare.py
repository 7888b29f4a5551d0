"""Several ranks of one run side by side: who failed first, who is slow and in what, who fell behind. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.detect import stragglers
from torchobs.diagnosis import text_format
from torchobs.diagnosis.exit_cause import main_exceptions
from torchobs.diagnosis.finding import ERROR, INFO, WARNING, Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchobs.diagnosis.rank_report import RankReport, Step

SLOW = 1.2
"""The factor from which on a rank is called slow."""

RECENT = 200
_BEAT_S = 0.5
"""A rank that vanished gave its last sign of life up to that long before."""
_COLLECTIVE = ("torch/distributed/", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
_LEAST_EXCESS_S = 0.005


class Slowest(NamedTuple):
    """The rank whose own part of a step takes longest, as far beyond the others' that they wait for it. Seconds."""

    rank: str
    phase: str
    own_s: float
    others_s: float
    """the median of the others in that phase"""


def compare(ranks: Sequence[RankReport]) -> list[Finding]:
    """Return what can be said of ranks together; nothing of a single one."""
    if len(ranks) < 2:  # noqa: PLR2004  # one has nobody to be compared with
        return []
    return [*_first_to_fail(ranks), *_missing(ranks), *_out_of_step(ranks), *_slowest(ranks)]


def slowest(typical: Mapping[str, Mapping[str, float]]) -> Slowest | None:
    """Return the rank that the others wait for, given each rank's usual seconds by phase; ``None`` if there is none.

    By :mod:`torchobs.detect.stragglers`, as the live page has it: from 1.2 times the others' step on, and 5 ms, which is noise
    where threads take turns.
    """
    found = stragglers.compare({rank: in_order(phases) for rank, phases in typical.items()})
    if not found:
        return None
    rank = max(found, key=lambda name: found[name].factor)
    phase = catalog.PHASES[found[rank].phase]
    own_s = typical[rank].get(phase, 0.0)
    others_s = median([phases.get(phase, 0.0) for name, phases in typical.items() if name != rank])
    slow = found[rank].factor >= SLOW and own_s - others_s >= _LEAST_EXCESS_S
    return Slowest(rank, phase, own_s, others_s) if slow else None


def in_order(phases: Mapping[str, float]) -> list[float]:
    """Return the seconds of ``catalog.PHASES``, in their order."""
    return [phases.get(phase, 0.0) for phase in catalog.PHASES]


def typical_phases(steps: Sequence[Step]) -> dict[str, float]:
    """Return the median seconds of the last steps in each phase."""
    recent = steps[-RECENT:]
    return {phase: median([step.phase_s.get(phase, 0.0) for step in recent]) for phase in catalog.PHASES} if recent else {}


def first_failed(ranks: Sequence[RankReport]) -> tuple[RankReport | None, str]:
    """Return the rank that failed first, as far as that can be told, and a sentence about it; none if none failed.

    Of ranks closer together than the clocks tell, one that vanished while the others raised in a collective operation was
    likely first, for that is what a peer's end looks like from there; one that raised in code of its own was likely first when
    the others vanished, for a launcher ends them then.
    """
    failed = [facts for facts in ranks if facts.state in {"failed", "lost"} and facts.end_known]
    ended = sorted(((_end_s(facts), facts) for facts in failed), key=lambda pair: pair[0])
    if not ended:
        return None, ""
    (first_s, first), *others = ended
    if not others:
        return first, f"Only rank {first.rank} failed, at {text_format.moment(first_s, '%H:%M:%S')}."
    doubt_s = max(_doubt_s(facts) for _, facts in ended[:2])
    if others[0][0] - first_s > doubt_s:
        later = text_format.duration(others[0][0] - first_s)
        return first, f"Rank {first.rank} failed first, {later} before rank {others[0][1].rank}: look there for the cause."
    return _likely_first([facts for end_s, facts in ended if end_s - first_s <= doubt_s], doubt_s)


def _likely_first(together: Sequence[RankReport], doubt_s: float) -> tuple[RankReport, str]:
    within = f"within {text_format.duration(doubt_s)}"
    silent = [facts for facts in together if facts.state == "lost"]
    own = [facts for facts in together if facts.reason == "exception" and not _in_collective(facts)]
    if len(own) == 1:
        text = f"Rank {own[0].rank} raised in code of its own and the others ended {within} of it: it was likely first."
        return own[0], text
    if len(silent) == 1 and not own:
        text = f"Rank {silent[0].rank} vanished, and {within} the others raised in collective operations: it was likely first."
        return silent[0], text
    names = text_format.either(_few([facts.rank for facts in together]))
    return together[0], f"Ranks {names} failed {within}: which was first cannot be told."


def _in_collective(facts: RankReport) -> bool:
    """Return True if the exception is one that a peer's end makes: raised by torch.distributed, or by DDP within backward."""
    for fact in main_exceptions(facts)[-1:]:
        place = fact.text("location")
        if any(sign in f"{place} {fact.text('exception.type')}" for sign in _COLLECTIVE):
            return True
        return "_engine_run_backward" in place and len(facts.told(catalog.EVENT_DISTRIBUTED)) > 0
    return False


def _first_to_fail(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    _, text = first_failed(ranks)
    if text:
        yield Finding(ERROR, "first_failed", text)


def _end_s(facts: RankReport) -> float:
    raised = main_exceptions(facts)
    return raised[-1].time_s if raised and facts.reason == "exception" else facts.last_s


def _doubt_s(facts: RankReport) -> float:
    return 0.0 if facts.reason == "exception" and main_exceptions(facts) else _BEAT_S


def _missing(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    local = {facts.header.resource.get("local_world_size") for facts in ranks}
    hosts = {facts.described("host") for facts in ranks}
    expected = local.pop() if len(local) == 1 else None
    if isinstance(expected, int) and len(hosts) == 1 and len(ranks) < expected:
        text = f"{len(ranks):,} of the {expected:,} ranks of this machine are here: the others never started to record."
        yield Finding(WARNING, "ranks_missing", text)


def _out_of_step(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    known = [facts for facts in ranks if not facts.partial or facts.last_step]
    furthest = max((facts.last_step for facts in known), default=0)
    behind = [facts for facts in known if facts.last_step < furthest]
    if behind and any(not facts.up for facts in ranks):
        least = min(behind, key=lambda facts: facts.last_step)
        text = f"Rank {least.rank} ended after step {least.last_step:,}, the furthest after step {furthest:,}."
        if furthest - least.last_step > 1:
            text += f" {text_format.several(len(behind), 'rank')} behind."
        yield Finding(INFO, "out_of_step", text)


def _slowest(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    found = slowest({facts.rank: typical_phases(facts.steps) for facts in ranks if facts.steps})
    if found is not None:
        own, others = text_format.duration(found.own_s), text_format.duration(found.others_s)
        text = f"Rank {found.rank} was the slowest: {found.phase} took it {own} a step, and the others {others}, who waited."
        yield Finding(WARNING, "slowest_rank", text)


def _few(names: Sequence[str], most: int = 8) -> list[str]:
    return [*names[:most], f"{len(names) - most:,} more"] if len(names) > most else list(names)
