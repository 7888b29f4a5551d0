"""Events of one rank, as its event ring holds them: oldest first, counted, and in words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import NamedTuple

from torchobs import catalog
from torchobs.detect.spikes import HEALTHY, LastAnomaly
from torchobs.flight.events import Event, Late, Span
from torchobs.support import text as text_format

MOST_NAMES = 64
MOST_TEXT = 600
MOST_POINTS = 512
"""Most points kept per curve, the newest ones. A rank thins them out over time (``probes.scalars``)."""
LATELY_S = 600.0
"""Window of recent anomalies, equal to that of the alerts on them"""
WORKER_DIED = catalog.EVENT_WORKER_DIED.name
_ATTRIBUTES = {item.name: item.attributes for item in catalog.EVENTS} | {item.name: item.attributes for item in catalog.SPANS}
_UNITS = {(name, item.name): item.unit for name, items in _ATTRIBUTES.items() for item in items if item.unit}
_UNITS |= {
    (catalog.SPAN_CHECKPOINT.name, item.name): item.unit for item in catalog.EVENT_CHECKPOINT_FAILED.attributes if item.unit
}
_MOST = 1e18
"""A flight file may hold anything"""
_FORMATS = {"By": text_format.size, "s": text_format.duration}


class Point(NamedTuple):
    """A logged value, with the step after which it was logged."""

    step: int
    value: float


@dataclass(frozen=True, eq=False)
class Events:
    """The contents of a rank's event ring, oldest first."""

    facts: tuple[Event, ...] = ()
    """without logged scalars"""
    spans: tuple[Span, ...] = ()
    """the finished ones"""
    logged: tuple[Event, ...] = ()
    """logged scalars"""

    def __iter__(self) -> Iterator[Event]:
        """Return an iterator over the events."""
        return iter(self.facts)

    def select(self, event: catalog.Event) -> list[Event]:
        """Return the events of that name."""
        return [fact for fact in self.facts if fact.name == event.name]

    @cached_property
    def scalars(self) -> Mapping[str, tuple[Point, ...]]:
        """The curves that the script logs, by name."""
        return curves(self.logged)

    @cached_property
    def anomalies(self) -> Mapping[str, LastAnomaly]:
        """The last anomaly of each kind."""
        last: dict[str, LastAnomaly] = {}
        for event in self.select(catalog.EVENT_ANOMALY):
            kind = event.text("kind")
            if kind in catalog.ANOMALY_KINDS and event.step is not None:
                before = last.get(kind)
                reported = (before.reported if before else 0) + 1 + event.count("left_out")
                # of anomalies with too few steps between them to recover, the first alone has a baseline that none has raised
                usual = before.usual if before and event.step - before.step < HEALTHY else event.number("baseline")
                last[kind] = LastAnomaly(max(event.step, before.step if before else 0), usual, reported)
        return last

    @cached_property
    def between(self) -> tuple[str, str]:
        """Function and line of the script at which the training thread most often is between the phases of a step."""
        lines = self.select(catalog.EVENT_STEP_BETWEEN)
        return (lines[-1].text("function", 60), lines[-1].text("location").rpartition("/")[2]) if lines else ("", "")

    def lately(self, now_s: float) -> Mapping[str, int]:
        """Return how many anomalies of each kind, and workers that died, there were in the last :data:`LATELY_S`.

        ``now_s``: Unix time. A clock set meanwhile counts either way.
        """
        counts = Counter[str]()
        for event in self.facts:
            if abs(now_s - event.time_s) <= LATELY_S:
                if event.name == catalog.EVENT_ANOMALY.name and (kind := event.text("kind")):
                    counts[kind] += 1 + event.count("left_out")
                counts[WORKER_DIED] += event.name == WORKER_DIED
        return counts

    def replicas(self, event: catalog.Event) -> Mapping[int, tuple[float, ...]]:
        """Return the values to compare with other ranks, from events of that name, by step."""
        values = {fact.step: tuple(map(float, fact.attributes.get("values", ()))) for fact in self.select(event)}
        return {step: row for step, row in values.items() if row and step is not None and all(map(isfinite, row))}


NO_EVENTS = Events()


def events_of(ring: Iterable[Event | Span | Late]) -> Events:
    """Return the contents of a ring, oldest first."""
    return extended(NO_EVENTS, ring, 0)


def extended(before: Events, fresh: Iterable[Event | Span | Late], oldest: int) -> Events:
    """Return the earlier events and the fresh ones, as far as they are still in the ring: from position ``oldest`` on."""
    facts = [event for event in before.facts if event.position >= oldest]
    spans = [span for span in before.spans if span.position >= oldest]
    logged = [event for event in before.logged if event.position >= oldest]
    for item in fresh:
        if isinstance(item, Event):
            (logged if item.name == catalog.EVENT_SCALARS.name else facts).append(item)
        elif isinstance(item, Span) and item.ended_ns is not None:
            spans.append(item._replace(fields={}))  # which take more memory than all else
    return Events(tuple(facts), tuple(spans), tuple(logged))


def curves(ring: Iterable[Event | Span | Late]) -> dict[str, tuple[Point, ...]]:
    """Return the curves of logged scalars by name, from an event ring, oldest first."""
    by_name: dict[str, list[Point]] = {}
    for event in ring:
        if isinstance(event, Event) and event.name == catalog.EVENT_SCALARS.name:
            with suppress(KeyError, TypeError, ValueError):  # the application may give an event of its own this name
                names, steps, values = (event.attributes[key] for key in ("names", "steps", "values"))
                for name, step, value in [*zip(names, steps, map(float, values), strict=False)]:  # also "NaN"
                    if name in by_name or len(by_name) < MOST_NAMES:
                        by_name.setdefault(name, []).append(Point(step, value))
    return {name: tuple(points[-MOST_POINTS:]) for name, points in by_name.items()}


def with_unit(event: str, attribute: str, value: object) -> str | None:
    """Return the value of an attribute of that event or span with its unit; ``None`` if it has none, or is no likely number."""
    unit = _UNITS.get((event, attribute))
    if unit is None or isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST:
        return None
    return _FORMATS[unit](value)


def units(event: str, attributes: Iterable[str]) -> dict[str, str]:
    """Return the units (UCUM: ``By``, ``s``) of those attributes of an event that have one, for programs."""
    return {name: unit for name in attributes if (unit := _UNITS.get((event, name)))}


def attribute_text(fact: Event, name: str, longest: int = text_format.LONGEST) -> str:
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


def words_of(fact: Event) -> str:
    """Return the attributes of an event as one line, without its kind."""
    words = ((name, attribute_text(fact, name)) for name in list(fact.attributes)[:10] if name != "kind")
    plain = ((name.removeprefix("exception.").removesuffix("_s").replace("_", " "), value) for name, value in words if value)
    named = [f"{text_format.clean(name, 40)} {value}" for name, value in plain]
    return text_format.clean(" · ".join(named), MOST_TEXT)
