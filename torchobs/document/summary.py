"""A run in numbers: the line that a list of runs has of it, and the side that it is in a comparison. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from statistics import median, quantiles
from typing import NamedTuple

from torchobs import catalog
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.document.run import facts, known_details
from torchobs.ranks.rank_view import RankView, Step
from torchobs.ranks.runs import Chosen
from torchobs.support import text as text_format

WARM_UP = 5
"""First steps, whose times are those of caches and allocators"""
_WORST_FIRST = ("failed", "lost", "hung", "unresponsive", "alive", "finished")


class RunSummary(NamedTuple):
    """One run. Times in Unix seconds; ``state`` is the worst of its ranks', ``ended_by`` that rank's reason."""

    job_name: str
    run_id: str
    ranks: int
    world_size: int | None
    attempt: int
    state: str
    ended_by: str
    started: float
    last_seen: float
    steps: int
    loss: float | None
    best_loss: float | None
    """the least of those that were still there to be read"""
    commit: str = ""
    tag: str = ""

    @property
    def last_s(self) -> float:
        """As of a run's files."""
        return self.last_seen


def summary_of(ranks: Sequence[RankView], started_s: float) -> RunSummary:
    """Return the line of a run of one rank or more; its losses are the first rank's."""
    worst = min(ranks, key=lambda rank: _WORST_FIRST.index(rank.state) if rank.state in _WORST_FIRST else 0)
    world, losses = worst.header.resource.get("world_size"), [*ranks[0].losses.values()]
    known = known_details(ranks, ranks[0])
    git, given = (part if isinstance(part := known.get(name), dict) else {} for name in ("git", "settings"))
    return RunSummary(
        job_name=worst.names[0], run_id=worst.names[1], ranks=len(ranks),
        world_size=world if isinstance(world, int) else None,
        attempt=max(rank.restart for rank in ranks) + 1, state=worst.state, ended_by=worst.reason,
        started=started_s, last_seen=max(rank.last_s for rank in ranks), steps=max(rank.last_step for rank in ranks),
        loss=losses[-1] if losses else None, best_loss=min(filter(isfinite, losses), default=None),
        commit=text_format.clean(git.get("commit") or ""), tag=text_format.clean(given.get("tag") or ""),
    )  # fmt: skip


class Course(NamedTuple):
    """The steps that were still there to be read, as columns of equal length; ``None`` where a step has no such value."""

    step: tuple[float, ...] = ()
    """with the steps before it of a run that was resumed"""
    time_s: tuple[float, ...] = ()
    """its end, since the run began"""
    loss: tuple[float | None, ...] = ()
    grad_norm: tuple[float | None, ...] = ()
    duration_s: tuple[float | None, ...] = ()
    learning_rate: tuple[float | None, ...] = ()

    def points(self, field: str) -> list[tuple[float, float]]:
        """Return the values of a column by step."""
        return [(at, value) for at, value in zip(self.step, getattr(self, field), strict=True) if value is not None]


class Quantity(NamedTuple):
    """A single figure, or the median of many and the range of their middle half. ``unit``: ``s``, ``By``, or empty."""

    what: str
    unit: str
    value: float | None
    middle_half: tuple[float, float] | None = None


class Side(NamedTuple):
    """A run as a comparison sees it: by the rank that its report shows."""

    summary: RunSummary
    rank: str
    facts: Mapping[str, str]
    """what it was started with, by name"""
    is_told: bool
    """whether its file says how it was started"""
    resumed_from: float
    """steps before this process"""
    quantities: tuple[Quantity, ...]
    course: Course


def side_of(chosen: Chosen) -> Side:
    """Return what is compared of a run."""
    rank = chosen.ranks[diagnose_run(chosen.ranks, chosen.launchers).principal]
    details = known_details(chosen.ranks, rank)
    given, begun_s = details.get("arguments"), min(one.begun_s for one in chosen.ranks)
    resumed_from = rank.value(catalog.STEPS_RESUMED_FROM) or 0.0
    columns = [
        (resumed_from + one.step, one.end_s - begun_s, one.loss, one.grad_norm, one.duration_s, one.learning_rate)
        for one in rank.steps
    ]
    return Side(
        summary=summary_of(chosen.ranks, begun_s),
        rank=rank.rank,
        facts=(parsed(given) if isinstance(given, list) else {})
        | facts(rank, details)
        | {"ranks here": str(len(chosen.ranks)), "resumed from step": f"{resumed_from:,.0f}" if resumed_from else ""},
        is_told=bool(rank.details),
        resumed_from=resumed_from,
        quantities=tuple(_quantities(rank)),
        course=Course(*zip(*columns, strict=True)) if columns else Course(),
    )


def parsed(arguments: Sequence[object]) -> dict[str, str]:
    """Return a script's arguments by name: ``--lr 3e-4``, ``--lr=3e-4``, ``lr=3e-4``; others by their position."""
    words = [text_format.clean(word) for word in arguments]
    by_name: dict[str, str] = {}
    option = ""
    position = 0
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.strip("-"):
            by_name[name] = value
        elif word.startswith("-"):
            by_name[word] = "yes"
        elif option:
            by_name[option] = word
        else:
            position += 1
            by_name[f"argument {position}"] = word
        option = word if word.startswith("-") and not equals else ""
    return by_name


def _quantities(rank: RankView) -> Iterator[Quantity]:
    yield of_many("step time", "s", _durations(rank.steps))
    for phase in catalog.PHASES:
        times = [step.phase_s.get(phase, 0.0) for step in rank.steps[WARM_UP:]]
        yield of_many(f"step time, {phase}", "s", times if any(times) else [])
    yield Quantity("speed", "", rank.pace.per_s if rank.pace is not None else None)
    yield Quantity("tokens per second", "", rank.pace.tokens_per_s if rank.pace is not None else None)
    spent = rank.by_attribute(catalog.GOODPUT_TIME)
    yield Quantity("goodput", "", spent.get("productive", 0.0) / sum(spent.values()) if any(spent.values()) else None)
    seen = [value for _, value in rank.history.of(catalog.MEMORY_HOST_RSS.name).get("", [])]
    yield Quantity("host memory, greatest RSS", "By", max(seen, default=rank.value(catalog.MEMORY_HOST_RSS)))
    peaks = rank.by_attribute(catalog.MEMORY_DEVICE_PEAK).values()
    yield Quantity("device memory, peak", "By", max(peaks, default=None))
    yield Quantity("steps", "", float(rank.last_step))


def of_many(what: str, unit: str, values: Sequence[float]) -> Quantity:
    """Return the median of values, and the range of their middle half."""
    if len(values) < 2:  # noqa: PLR2004  # a range has two ends
        return Quantity(what, unit, values[0] if values else None)
    low, _, high = quantiles(values, method="inclusive")
    return Quantity(what, unit, median(values), (low, high))


def _durations(steps: Sequence[Step]) -> list[float]:
    timed = [step.duration_s for step in steps if step.duration_s is not None and step.step > WARM_UP]
    return [seconds for seconds in timed if isfinite(seconds)]
