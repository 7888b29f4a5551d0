"""What to do after a run has ended, by views of its ranks: the facts for ``detect.action``, and its verdict in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs.detect import action
from torchobs.detect.action import End, Ends
from torchobs.diagnosis import endings
from torchobs.diagnosis.endings import SHORTLY_S
from torchobs.diagnosis.hangs import without_launcher
from torchobs.flight.events import Event
from torchobs.ranks import labels, state
from torchobs.ranks.rank_view import RankView


class Proof(NamedTuple):
    """An end that proves a verdict."""

    rank: str
    host: str
    text: str


class Verdict(NamedTuple):
    """What to do after a run has ended."""

    action: str
    """one of ``detect.action.ACTIONS``"""
    cause: str
    """a row of ``detect.action.TABLE``; stable, for programs"""
    reason: str
    evidence: tuple[Proof, ...]

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**self._asdict(), "evidence": [proof._asdict() for proof in self.evidence]}


def verdict(ranks: Sequence[RankView], principal: int, before: RankView | End | None = None) -> Verdict:
    """Return the verdict; ``principal``: index of the first to fail, ``before``: how that rank ended in the attempt before."""
    ends = [end_of(report) for report in ranks]
    world = max(labels.number(report.header.resource, "world_size") or 0 for report in ranks)
    earlier = end_of(before) if isinstance(before, RankView) else before
    row, proof = action.decide(Ends(tuple(ends), ends[principal], earlier, world <= len(ranks)))
    return Verdict(row.action, row.cause, row.reason, tuple(_proof(ranks[ends.index(end)], row.cause) for end in proof))


def end_of(report: RankView) -> End:
    """Return how a rank ended."""
    raised = report.main_exceptions[-1] if report.reason == "exception" and report.main_exceptions else None
    crash = without_launcher(report.crash)
    kill_age_s = report.memory_use.kill_age_s
    elsewhere = not report.same_boot and not report.rebooted  # a rank that says nothing may live there
    return End(
        rank=report.rank,
        reason="" if report.reason == "lost" and (elsewhere or report.copied) else report.reason,
        up=report.up,
        step=report.last_step + int(report.value(catalog.STEPS_RESUMED_FROM) or 0),
        errors=tuple(filter(lambda pair: pair[0], _errors(raised))) if raised else (),
        place=(raised.text("caller") or raised.text("location")) if raised else crash[0] if crash else "",
        of_program=raised is not None and not raised.text("caller"),
        in_collective=raised is not None and (bool(raised.text("timeout")) or endings.in_collective(report)),
        signal=str(endings.how_ended(report).values.get("signal") or "") if report.reason else "",
        xids=tuple(int(xid) for fact in _late(report, catalog.EVENT_GPU_XID) if (xid := fact.number("xid")) is not None),
        gpu_lost=bool(_late(report, catalog.EVENT_GPU_LOST)),
        rebooted=report.rebooted,
        killed_beside=kill_age_s is not None and kill_age_s <= state.OOM_KILL_LATELY_S,
    )


def _errors(raised: Event) -> list[tuple[str, str]]:
    return [(raised.text(f"{error}.type"), raised.text(f"{error}.message")) for error in ("exception", "cause")]


def _late(report: RankView, event: catalog.Event) -> list[Event]:
    """Return the events of that name shortly before the end."""
    return [fact for fact in report.events_named(event) if report.last_s - fact.time_s <= SHORTLY_S]


def _proof(report: RankView, cause: str) -> Proof:
    """Return in words how a rank ended; for hardware with the driver's errors."""
    end, *others = endings.ending(report)
    errors = [finding.long for finding in others if cause == "hardware" and finding.kind in {"gpu_xid", "gpu_lost"}]
    return Proof(report.rank, report.described("host"), " ".join([end.long, *errors]))
