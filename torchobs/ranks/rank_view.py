"""Contents of one flight file as a report on its rank. Pure: no file, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs.catalog import Metric
from torchobs.detect.hangs import Standstill
from torchobs.detect.learning import ZeroRate, zero_rate
from torchobs.flight.artifacts import ArtifactName
from torchobs.flight.details import History
from torchobs.flight.events import Event, Late, Span
from torchobs.flight.layout import PHASE_NAMES, Header
from torchobs.flight.reader import Distribution, Value, View
from torchobs.flight.step_record import RecordKind, StepFlag, StepRecord
from torchobs.flight.throughput import Throughput
from torchobs.ranks import labels, state
from torchobs.ranks.state import MemoryUse, trains
from torchobs.support import text as text_format

MOST_NAMES = 64
MOST_TEXT = 600
MOST_POINTS = 512
"""Most points kept per curve, the newest ones. A rank thins them out over time (``probes.core.user_scalars``)."""
_FAR = 1 << 62
_NAMES = ("NaN", "Infinity", "-Infinity")
_CLOCKS_DIFFER_S = 0.001
"""Tolerance: one time stamp is in microseconds, and both are converted between clocks."""
_OF = {one.name: one.attributes for one in catalog.EVENTS} | {one.name: one.attributes for one in catalog.SPANS}
_UNITS = {(name, one.name): one.unit for name, attributes in _OF.items() for one in attributes if one.unit}
_MOST = 1e18
"""A flight file may hold anything"""
_FORMATS = {"By": text_format.size, "s": text_format.duration}


class Point(NamedTuple):
    """A logged value, with the step after which it was logged."""

    step: int
    value: float


Curves = dict[str, tuple[Point, ...]]


def curves(ring: Iterable[Event | Span | Late], known: Mapping[str, tuple[Point, ...]] | None = None) -> Curves:
    """Return the curves by name from an event ring, oldest first; ``known``: those of what was read earlier.

    Other events are skipped.
    """
    found = dict(known or {})
    for event in ring:
        if isinstance(event, Event) and event.name == catalog.EVENT_SCALARS.name:
            with suppress(KeyError, TypeError, ValueError):  # the application may give an event of its own this name
                for name, point in [*_points(event.values)]:
                    if name in found or len(found) < MOST_NAMES:
                        found[name] = (*found.get(name, ()), point)[-MOST_POINTS:]
    return found


def _points(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Point]]:
    for name, step, value in zip(attributes["names"], attributes["steps"], attributes["values"], strict=False):
        yield name, Point(step, float(value))  # also of a text: "NaN", "Infinity"


class Step(NamedTuple):
    """One step with all its values, late ones included. Times in seconds, ``end_s`` Unix; ``None`` where unknown."""

    step: int
    end_s: float
    duration_s: float | None
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    phase_s: Mapping[str, float]
    tokens: int
    skipped: bool
    clipped: bool
    new_model: bool = False
    """the first step of a model: baselines of earlier steps do not apply"""


class Fact(NamedTuple):
    """An event. ``time_s``: Unix time, by the clock pair read at the rank's start."""

    name: str
    time_s: float
    step: int | None
    attributes: Mapping[str, Any]

    def text(self, name: str, longest: int = text_format.LONGEST) -> str:
        """Return an attribute as one sanitised line; empty if absent."""
        value = self.attributes.get(name)
        if value is None:
            return ""
        return text_format.clean(text_format.joined(value) if isinstance(value, list) and value else value, longest)

    def texts(self, name: str, most: int | None = None, longest: int = text_format.LONGEST) -> list[str]:
        """Return the first items of an attribute that is a list, sanitised; empty if it is none."""
        value = self.attributes.get(name)
        return [text_format.clean(item, longest) for item in value[:most]] if isinstance(value, list) else []

    def number(self, name: str) -> float | None:
        """Return a numeric attribute, also one spelled as text (``"NaN"``); else ``None``."""
        value = self.attributes.get(name)
        if isinstance(value, str) and value in _NAMES:
            return float(value)
        return float(value) if isinstance(value, (int, float)) and not abs(value) >= float(_FAR) ** 4 else None

    def count(self, name: str) -> int:
        """Return an attribute that is a count; 0 if absent or invalid."""
        found = self.number(name)
        return int(found) if found is not None and 0 < found < _FAR else 0


class SpanFact(NamedTuple):
    """A finished span. Times in Unix seconds."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Any]


def last_phase(phase: str | None, begun_s: float | None, steps: Sequence[Step]) -> tuple[str | None, float | None]:
    """Return the rank's last phase and its begin; ``None`` twice if the phase was written before the last step ended.

    The sampler thread writes the phase ten times a second, the training thread the step's end: code that holds the GIL
    right after a step leaves the phase of an earlier one.
    """
    stale = begun_s is not None and bool(steps) and begun_s < steps[-1].end_s - _CLOCKS_DIFFER_S
    return (None, None) if stale else (phase, begun_s)


@dataclass(frozen=True, slots=True)
class RankView:
    """Report on one rank from its flight file. Times are Unix seconds."""

    source: str
    """the file's name"""
    problems: tuple[str, ...]
    """what could not be read, or is not trustworthy"""
    header: Header
    up: bool
    state: str
    """one of ``catalog.RANK_STATES``"""
    reason: str
    """one of ``catalog.EXIT_REASONS``, empty while it runs"""
    exit_code: int
    same_boot: bool
    memory: MemoryUse
    last_s: float
    """time of the last sign of life"""
    phase: str | None
    phase_begun_s: float | None
    steps: tuple[Step, ...]
    """the newest ones, oldest first"""
    events: tuple[Fact, ...]
    """oldest first; without spans"""
    values: Mapping[tuple[str, ...], Value]
    """by series name and attribute values"""
    pace: Throughput | None = None
    """over the latest steps"""
    recorded: bool = True
    """False if the rank lives and recording of steps was switched off"""
    standstill: Standstill | None = None
    """that the living rank makes no step"""
    scalars: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    """scalars that the script logged, by name"""
    details: Mapping[str, Any] = field(default_factory=dict)
    """how the run was started (``flight.format.documents``); empty if that is turned off"""
    history: History = field(default_factory=History)
    """gauges over time, since the start"""
    spans: tuple[SpanFact, ...] = ()
    """spans still in the ring, oldest first"""
    left: tuple[ArtifactName, ...] = ()
    """non-empty artifacts of the rank"""
    frames: tuple[str, ...] = ()
    """frames of the training thread in the stacks written after its last step, the innermost first; empty: none are here"""
    crash: tuple[str, ...] = ()
    """frames of the thread that crashed, the innermost first; empty: none did, or it ran no Python code"""
    copied: bool = False
    """a copy or a part of a file, which does not show whether its process still runs"""
    partial: bool = False
    """some data is missing or damaged (see ``problems``): its absence proves nothing"""
    end_known: bool = True
    """True if the exit word is readable"""
    suffix: str = ""
    """what is appended to the rank, if another living process has that"""
    unwritten: bool = False
    """it ended without a word, and not in memory: what it did in its last moments, 100 ms by intent, is missing"""

    @property
    def identity(self) -> tuple[str, str, str]:
        """job_name, run_id and rank."""
        job_name, run_id, rank = labels.identity(self.header.resource)
        return text_format.clean(job_name), text_format.clean(run_id), rank + self.suffix

    @property
    def rank(self) -> str:
        """The rank, as on the metrics page."""
        return self.identity[2]

    @property
    def restart(self) -> int:
        """Number of the attempt, from 0."""
        return labels.number(self.header.resource, "restart") or 0

    @property
    def trains(self) -> bool:
        """True while it makes steps."""
        return trains(self.state, self.phase, self.standstill, recorded=self.recorded)

    @property
    def speed(self) -> Throughput | None:
        """Its throughput over the latest steps; ``None`` while it lives and makes none."""
        return self.pace if self.trains or not self.up else None

    @property
    def start_s(self) -> float:
        """When recording began."""
        return self.header.wall_ns / 1e9

    @property
    def progress_s(self) -> float:
        """When its last step ended, else when recording began."""
        return self.steps[-1].end_s if self.steps else self.start_s

    @property
    def begun_s(self) -> float:
        """The moment since which all times of a report are: when the process began, else when recording did."""
        return self.header.begun_s

    @property
    def since(self) -> str:
        """That moment, in words."""
        return "the process began" if self.begun_s < self.start_s else "init()"

    @property
    def lived_s(self) -> float:
        """How long it has lived since then: to its last sign of life, or the sum of its times, which go on to its end."""
        return max(self.last_s - self.begun_s, sum(self.by_attribute(catalog.GOODPUT_TIME).values()))

    @property
    def lifetime(self) -> str:
        """How long it has lived, and since when, in words."""
        return f"{text_format.duration(self.lived_s)} since {self.since}"

    @property
    def last_step(self) -> int:
        """The number of the newest step; 0 before the first, and if unknown.

        In a partial file only the counter may know it.
        """
        newest = self.steps[-1].step if self.steps else 0
        return max(newest, self._counted) if self.partial else newest

    @property
    def newest_is_here(self) -> bool:
        """True if ``steps`` includes the rank's last step."""
        counted = self.value(catalog.STEPS) is not None
        return not self.partial or (counted and bool(self.steps) and self.steps[-1].step >= self._counted)

    @property
    def _counted(self) -> int:
        return _count(self.values, catalog.STEPS.name)

    def described(self, name: str) -> str:
        """Return a fact of the process (``catalog.RANK_INFO``); empty if unknown."""
        value = self.header.resource.get(name)
        return "" if value is None else text_format.clean(value)

    def value(self, metric: Metric, *attributes: str) -> float | None:
        """Return the value of a series; ``None`` if absent."""
        found = self.values.get((metric.name, *attributes))
        return None if isinstance(found, Distribution) else found

    @property
    def norms(self) -> int:
        """Steps in which the gradient norm was measured, of the whole run."""
        finite = self.values.get((catalog.GRAD_NORM_DISTRIBUTION.name,))
        return sum(finite.counts if isinstance(finite, Distribution) else ()) + int(
            self.value(catalog.GRAD_NONFINITE_STEPS) or 0
        )

    def by_attribute(self, metric: Metric) -> dict[str, float]:
        """Return the values of a metric's series by their single attribute."""
        return {
            text_format.clean(key[1]): value
            for key, value in self.values.items()
            if key[0] == metric.name and len(key[1:]) == 1 and not isinstance(value, Distribution)
        }

    def of(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """Return the values of a metric's series by those of all its attributes, which are sorted by name."""
        return by_attributes(self.values, metric)

    @property
    def main_exceptions(self) -> list[Fact]:
        """The exceptions that can have ended the rank: those of its main thread."""
        return [fact for fact in self.events_named(catalog.EVENT_EXCEPTION) if not fact.text("thread")]

    @property
    def exception(self) -> str:
        """The exception that ended the rank, in words; empty if none did, or it is not in the file."""
        raised = self.main_exceptions if self.reason == "exception" else []
        return text_format.clean(state.exception_in_words(state.exception_attributes(raised[-1].attributes))) if raised else ""

    def events_named(self, event: catalog.Event) -> list[Fact]:
        """Return the events of that name, oldest first."""
        return [fact for fact in self.events if fact.name == event.name]


def values_of(view: View) -> dict[tuple[str, ...], Value]:
    """Return the values of a view by name and attribute values."""
    points = chain.from_iterable(block.points() for block in view.blocks)
    return {(series.name, *(str(text) for _, text in series.attributes)): value for series, value in points}


def by_attributes(values: Mapping[tuple[str, ...], Value], metric: Metric) -> dict[tuple[str, ...], float]:
    """Return the values of a metric's series by those of all its attributes, which are sorted by name."""
    return {key[1:]: value for key, value in values.items() if key[0] == metric.name and not isinstance(value, Distribution)}


def events_of(ring: Iterable[Event | Span | Late], header: Header) -> tuple[Fact, ...]:
    """Return the events of a ring, oldest first."""
    found = (event for event in ring if isinstance(event, Event))
    return tuple(Fact(event.name, header.wall_s(event.time_ns), event.step, event.values) for event in found)


def spans_of(ring: Iterable[Event | Span | Late]) -> tuple[SpanFact, ...]:
    """Return the finished spans of a ring, oldest first."""
    finished = (span for span in ring if isinstance(span, Span) and span.ended_ns is not None)
    return tuple(SpanFact(span.name, span.begun_ns / 1e9, (span.ended_ns or 0) / 1e9, span.values) for span in finished)


def with_late(records: Sequence[StepRecord]) -> list[list[StepRecord]]:
    """Return the records of the steps, oldest first, each with those of values that devices delivered later."""
    late: dict[int, list[StepRecord]] = {}
    for record in records:
        if record.kind == RecordKind.LATE:
            late.setdefault(record.step, []).append(record)
    return [[record, *late.get(record.step, ())] for record in records if record.kind == RecordKind.STEP]


def steps_of(records: Sequence[StepRecord], header: Header) -> tuple[Step, ...]:
    """Merge late records into their steps; oldest first."""
    return tuple(_step(parts, header) for parts in with_late(records))


def missing_records(records: Sequence[StepRecord], room: int, values: Mapping[tuple[str, ...], Value]) -> int:
    """Return how many step records of a dead rank are missing from a ring with ``room`` for so many.

    Numbers are consecutive, except those counted as lost by the fold; the newest step is known from the counter. The oldest
    record may just have been overwritten.
    """
    first, newest = (records[0].seq, records[-1].seq) if records else (1, 0)
    oldest = max(1, newest - room + 1)
    if 1 < oldest == first - 1:
        oldest = first
    gaps = newest - oldest + 1 - len(records) - _count(values, catalog.FLIGHT_DROPPED.name, "record")
    last = max((record.step for record in records if record.kind == RecordKind.STEP), default=0)
    untold = _count(values, catalog.STEPS.name) - last
    return min(max(0, gaps) + max(0, untold), room)


def model_begins(steps: Sequence[Step], end: int) -> int:
    """Return the index of the first available step of the model that was trained in ``steps[end]``."""
    return next((index for index in range(min(end, len(steps) - 1), 0, -1) if steps[index].new_model), 0)


def _step(parts: Sequence[StepRecord], header: Header) -> Step:
    first, flags = parts[0], 0
    for part in parts:
        flags |= part.flags
    phases = {name: seconds for name, seconds in zip(PHASE_NAMES, first.phase_s, strict=True) if isfinite(seconds)}
    timed = not first.flags & StepFlag.UNTIMED and isfinite(first.duration_s)
    return Step(
        step=first.step,
        end_s=header.wall_s(first.end_ns),
        duration_s=first.duration_s if timed else None,
        loss=_last([part.loss for part in parts if part.flags & StepFlag.LOSS]),
        grad_norm=_last([part.grad_norm for part in parts if part.flags & StepFlag.GRAD_NORM]),
        learning_rate=_last([part.learning_rate for part in parts if part.flags & StepFlag.LEARNING_RATE]),
        phase_s=phases,
        tokens=sum(part.tokens for part in parts),
        skipped=bool(flags & StepFlag.SKIPPED),
        clipped=bool(flags & StepFlag.CLIPPED),
        new_model=bool(flags & StepFlag.NEW_MODEL),
    )


def zero_rate_of(report: RankView) -> ZeroRate | None:
    """Return since when the learning rate of the first parameter group is zero, or next to it."""
    began = next((step.step for step in reversed(report.steps) if step.new_model), 0)
    return zero_rate([(step.step, step.learning_rate) for step in report.steps], began)


def last_known(values: Sequence[float | None]) -> float | None:
    """Return the last value that is not ``None``, if there is one."""
    return next((value for value in reversed(values) if value is not None), None)


def _count(values: Mapping[tuple[str, ...], Value], *key: str) -> int:
    found = values.get(key)
    return int(found) if found is not None and not isinstance(found, Distribution) else 0


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def with_unit(event: str, attribute: str, value: object) -> str | None:
    """Return the value of an attribute of that event or span with its unit; ``None`` if it has none, or is no likely number."""
    unit = _UNITS.get((event, attribute))
    if unit is None or isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST:
        return None
    return _FORMATS[unit](value)


def units(event: str, attributes: Iterable[str]) -> dict[str, str]:
    """Return the units (UCUM: ``By``, ``s``) of those attributes of an event that have one, for programs."""
    return {name: unit for name in attributes if (unit := _UNITS.get((event, name)))}


def attribute_text(fact: Fact, name: str, longest: int = text_format.LONGEST) -> str:
    """Return an attribute of an event for people; empty if absent."""
    value = fact.attributes.get(name)
    if (sized := with_unit(fact.name, name, value)) is not None:
        return sized
    number = fact.number(name) if isinstance(value, float) else None
    if number is not None:
        return text_format.number(number)
    return text_format.clean(text_format.source_location(fact.text(name, longest)), longest)


def title_of(name: str) -> str:
    """Return the name of an event or span in words."""
    return text_format.clean(catalog.event_title(name), 80)


def words_of(fact: Fact) -> str:
    """Return the attributes of an event as one line, without its kind."""
    words = ((name, attribute_text(fact, name)) for name in list(fact.attributes)[:10] if name != "kind")
    named = [f"{text_format.clean(name, 40).removesuffix('_s').replace('_', ' ')} {text}" for name, text in words if text]
    return text_format.clean(" · ".join(named), MOST_TEXT)
