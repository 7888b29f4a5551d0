"""The root spans of one rank as an exporter follows them: which is open, and what happened in it.

One is open at any time: the run's, then a segment's (:mod:`torchobs.runtime.root_spans`). An ended one is sent at once, with
torchobs' events until then as span events. If the rank recorded no end, the open one is ended at the rank's last heartbeat.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.exporter.otlp import attributes as otlp_attributes
from torchobs.exporter.otlp.attributes import time_ns
from torchobs.flight.format.span_ids import SpanIds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.trace import Event

    from torchobs.flight.format.layout import Header

Frame = dict[str, Any]
ROOTS = (catalog.SPAN_RUN.name, catalog.SPAN_SEGMENT.name)
MOST_EVENTS = 1024
"""of one root span; the oldest are dropped first"""
_LONGEST_NS = 3_600_000_000_000
_SAMPLED = 0x01


def is_ours(frame: Mapping[str, Any]) -> bool:
    """Return True for a span of torchobs' own, whose attributes the catalog describes."""
    scope = frame.get("scope")
    return isinstance(scope, list) and scope[:1] == [otlp_attributes.SCOPE]


def is_root(frame: Mapping[str, Any]) -> bool:
    """Return True for the begin or end of a root span."""
    return frame.get("name") in ROOTS and frame.get("k") in {"span", "span_start"} and is_ours(frame)


class OpenRoot:
    """State of one incarnation's root spans."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._known = False
        self._open: Frame | None = None
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._seen = 0
        self._told: tuple[Frame, list[Event], int] | None = None

    def add_event(self, event: Event) -> None:
        """Add an event; it is told with the end of the open root span."""
        self._events.append(event)
        self._seen += 1

    def begin(self, frame: Frame) -> None:
        """Note the start of a root span; it may be announced several times."""
        self._known, self._open = True, frame

    def end(self, frame: Frame) -> Frame:
        """Note the end of a root span, and give it the events until then. Return its frame."""
        self._known, self._open = True, None
        return self._with_events(frame, time_ns(frame.get("t1")))

    def finish(self, ended: Frame, reason: str) -> Frame | None:
        """Return the root span that the rank left open, ended; ``None`` if there is none, or its start is lost."""
        frame = self._open if self._known else self._run_frame(time_ns(ended["t1"]))
        self._open = None
        if frame is None:
            return None
        attributes = otlp_attributes.mapping(frame.get("attrs")) | {"reason": reason}
        times = {"t1": max(time_ns(ended["t1"]), time_ns(frame.get("t0")))}
        return self._with_events(frame | ended | times | {"attrs": attributes}, None)

    def events_of(self, frame: Frame) -> tuple[list[Event], int]:
        """Return the events of a frame that was returned last, and the number of those dropped; nothing for other spans."""
        told = self._told
        return told[1:] if told is not None and told[0] is frame else ([], 0)

    def _with_events(self, frame: Frame, until_ns: int | None) -> Frame:
        events: list[Event] = []
        while self._events and (until_ns is None or self._events[0].timestamp <= until_ns):
            events.append(self._events.popleft())
        self._told = frame, events, self._seen - len(events) - len(self._events)
        self._seen = len(self._events)
        return frame

    def _run_frame(self, end_ns: int) -> Frame | None:
        """Return a replacement for the run's start if it was overwritten: all but its parent is in the header.

        A rank that lived longer than a root span has ended the run's, and which segment was open is not known.
        """
        header, ids = self._header, SpanIds(self._header).run
        if end_ns - header.wall_ns > _LONGEST_NS:
            return None
        identity = {"trace_id": ids.trace, "span_id": ids.span, "flags": _SAMPLED, "kind": "internal"}
        return {
            "name": catalog.SPAN_RUN.name,
            **identity,
            "t0": header.wall_ns,
            "scope": [otlp_attributes.SCOPE, None, None, {}],
        }
