"""The ranks' event rings as OTLP's spans and log records. Each frame is read once.

A restarted exporter sends the frames that are still in the ring again, with the same identifiers, which come from the file.

**Spans.** One root span is open at any time: the run's, then a segment's (:mod:`torchobs.runtime.root_spans`). An ended one is
sent with torchobs' events until then as span events. Spans that were announced and are open when their rank has ended without a
word are ended at its last heartbeat, as errors, the root span last.

**Log records.** A record is an *event* as OpenTelemetry defines it: its name is the event's, its attributes are named within
that, except those for which the semantic conventions have a name. It belongs to the span of the step in which it happened, else
to the run's or the segment's. A checkpoint that was saved is a record, too.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from uuid import UUID

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.diagnosis.event_units import with_unit
from torchobs.exporter.otlp import messages
from torchobs.exporter.otlp.messages import SCOPE, Item, any_value, identifier, mapping, pairs, text, whole
from torchobs.flight.files.create import file_name
from torchobs.flight.format.event_ring import SpanId, SpanIds, Tail, fields_of
from torchobs.flight.format.layout import Region
from torchobs.flight.reader import reader
from torchobs.ranks import labels
from torchobs.ranks.directory import Directory
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.otlp.messages import Place
    from torchobs.flight.format.layout import Header
    from torchobs.flight.reader.reader import FlightFile
    from torchobs.ranks.snapshot import Rank

Frame = dict[str, Any]

STEP = "torchobs.step.number"
"""Attribute for the number of a step. ``torchobs.step`` would be an attribute and a namespace at once, which must not be."""
MOST_EVENTS = 1024
"""Events of one root span; the oldest are dropped first."""

_CONVENTIONAL = re.compile(r"(exception|hw)\.")
"""Attributes of the catalog that are named as in the semantic conventions."""
_RENAMED = {"step": STEP, "thread": "thread.name"}
_ROOTS = (catalog.SPAN_RUN.name, catalog.SPAN_SEGMENT.name)
_SPANS = frozenset(span.name for span in catalog.SPANS)
_KINDS = {name.removeprefix("SPAN_KIND_").lower(): value for name, value in Span.SpanKind.items() if value}
_STATUSES = {"ok": Status.STATUS_CODE_OK, "error": Status.STATUS_CODE_ERROR}
_SEVERITIES = {
    Severity.INFO: ("INFO", SeverityNumber.SEVERITY_NUMBER_INFO),
    Severity.WARNING: ("WARN", SeverityNumber.SEVERITY_NUMBER_WARN),
    Severity.ERROR: ("ERROR", SeverityNumber.SEVERITY_NUMBER_ERROR),
}
_SAMPLED, _FLAGS = 0x01, 0xFF
_MOST_OPEN, _MOST_SCOPES, _MOST_BODY = 1024, 1024, 1000
_UINT32 = (1 << 32) - 1
_WARN_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class Rings:
    """Reads every rank's event ring, with its own file descriptors: the scanner's belong to its thread. For one thread."""

    def __init__(self, config: ExporterConfig, *, spans: bool, span_events: bool) -> None:
        """``spans``: they are wanted; ``span_events``: root spans hold torchobs' events."""
        self._directory = Directory(config)
        self._spans, self._span_events = spans, spans and span_events
        self._rings: dict[str, _Ring] = {}
        self._warnings = RateLimiter(_WARN_EVERY_S)

    def read(self, ranks: Iterable[Rank], wall_ns: int) -> tuple[list[Item], list[Item]]:
        """Return the spans and the log records that are new since the last call; drop what is kept of all other ranks."""
        spans: list[Item] = []
        records: list[Item] = []
        served = set()
        for rank in ranks:
            served.add(rank.incarnation)
            ring = self._rings.get(rank.incarnation)
            if ring is None:
                ring = self._rings[rank.incarnation] = _Ring(rank.view.header, spans=self._spans, span_events=self._span_events)
            try:
                for payload in self._fresh(ring, rank, wall_ns):
                    ring.add(payload, wall_ns, spans, records)
                if not rank.up:
                    spans += ring.finish(rank.reason, rank.view.live.heartbeat_ns)
            except READ_ERRORS as problem:
                ring.close()
                _log.warning("OTLP: events of rank %s cannot be read: %s", rank.rank, problem)
        self._keep(served)
        return spans, records

    def close(self) -> None:
        """Close everything. Idempotent."""
        self._keep(())
        self._directory.close()

    def _keep(self, incarnations: Collection[str]) -> None:
        for incarnation in self._rings.keys() - set(incarnations):
            self._rings.pop(incarnation).close()

    def _fresh(self, ring: _Ring, rank: Rank, wall_ns: int) -> list[bytes]:
        """Return what was written to a rank's ring since the last call, oldest first. Raises ``READ_ERRORS``."""
        if rank.view.live.event_head == ring.head:
            return []
        self._directory.names(wall_ns)
        payloads = ring.read(self._directory)
        is_first, ring.head = not ring.head, rank.view.live.event_head
        if ring.tail.missed and not is_first and self._warnings.take(time.monotonic()):  # at first, another may have read it
            _log.warning("OTLP: rank %s writes more spans and events than its ring holds between two looks", rank.rank)
        return payloads


class _Ring:
    """The ring of one incarnation: its file, the spans that are open, and the events since the last root span."""

    def __init__(self, header: Header, *, spans: bool, span_events: bool) -> None:
        self.tail, self.head = Tail(header.regions[Region.EVENTS].length, header.seed), 0
        """``head``: the end of the ring as it was read last"""
        self._header, self._ids = header, SpanIds(header)
        self._spans, self._span_events = spans, span_events
        version = header.resource.get("torchobs_version")
        self._own_place = messages.own_place(messages.resource_of(header), version)
        self._places: dict[str, Place] = {}
        """of the application's spans, by their scopes"""
        self._file: FlightFile | None = None
        self._open: dict[str, Frame] = {}
        self._root: Frame | None = None
        """the root span that is open"""
        self._root_ids: SpanId = self._ids.run
        self._flags = _SAMPLED
        self._has_finished = False
        self._events: deque[Span.Event] = deque()
        self._dropped_events = 0

    def read(self, directory: Directory) -> list[bytes]:
        """Return the new payloads. Raises ``READ_ERRORS``."""
        name = file_name(self._header)
        if self._file is None:
            self._file = reader.open_file(directory.fd, name, directory.owner)
            if self._file.header != self._header:
                raise ValueError("another file has its name")
        else:
            self._file.follow(directory.fd, name)
        return self._file.fresh_events(self.tail, self._file.live().event_head)

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def add(self, payload: bytes, wall_ns: int, spans: list[Item], records: list[Item]) -> None:
        """Add the span or the record of a frame, as far as it has one; ``wall_ns``: when it was read, Unix ns."""
        frame = fields_of(payload) or {}
        kind, span_id = frame.get("k"), frame.get("span_id")
        is_root = frame.get("name") in _ROOTS and kind in {"span", "span_start"} and _is_ours(frame)
        if is_root:
            self._flags = whole(frame.get("flags")) & _SAMPLED
            self._root_ids = SpanId(text(frame.get("trace_id")), text(span_id))
            self._root = frame if kind == "span_start" else None
        elif kind == "span_start" and isinstance(span_id, str):
            self._open[span_id] = frame
            if len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
        if kind == "span" and isinstance(span_id, str):
            self._open.pop(span_id, None)
            spans += self._span(frame, self._events_until(whole(frame.get("t1"))) if is_root else None)
        record = self._event(frame) if kind == "event" else self._checkpoint(frame) if kind == "span" else None
        if record is not None:
            uid = UUID(bytes=blake2b(self._header.incarnation + payload, digest_size=16).digest())
            record.attributes.extend(pairs([("log.record.uid", str(uid))]))
            record.observed_time_unix_nano = whole(wall_ns)
            records.append(Item(self._own_place, record))

    def finish(self, reason: str, heartbeat_ns: int | None) -> list[Item]:
        """Return the spans that are open, as ended at the last heartbeat (CLOCK_MONOTONIC), the root span last; once."""
        if self._has_finished:
            return []
        self._has_finished = True
        last_ns = self._wall_ns(heartbeat_ns or self._header.monotonic_ns)
        ended: Frame = {"k": "span", "status": "error", "description": f"the rank ended before it: {reason}"}
        if reason == "finished":
            ended = {"k": "span", "status": "unset"}
        opened, self._open = [*self._open.values()], {}
        spans = [
            span for frame in opened for span in self._span(frame | ended | {"t1": max(last_ns, whole(frame.get("t0")))}, None)
        ]
        root, self._root = self._root, None
        if root is not None:
            attributes = mapping(root.get("attrs")) | {"reason": reason}
            root = root | ended | {"t1": max(last_ns, whole(root.get("t0"))), "attrs": attributes}
            spans += self._span(root, self._events_until(None))
        return spans

    def _wall_ns(self, monotonic_ns: object) -> int:
        return whole(whole(monotonic_ns) - self._header.monotonic_ns + self._header.wall_ns)

    def _events_until(self, until_ns: int | None) -> tuple[list[Span.Event], int]:
        """Take the events until the end of a root span (``None``: all), and the number of those that were dropped."""
        events = []
        while self._events and (until_ns is None or self._events[0].time_unix_nano <= until_ns):
            events.append(self._events.popleft())
        dropped, self._dropped_events = self._dropped_events, 0
        return events, dropped

    def _event(self, frame: Frame) -> LogRecord | None:
        """Return the record of an event, and keep it for the end of the root span."""
        name, details, step = text(frame.get("name")), mapping(frame.get("attrs")), frame.get("step")
        if not name or name == catalog.EVENT_SCALARS.name:  # points of curves, which are pushed as a metric
            return None
        event, severity = catalog.EVENT_BY_NAME.get(name), catalog.event_severity(name, details)
        attributes, ids = namespaced(name, details) if event else details, self._root_ids
        if isinstance(step, int):
            attributes, details, ids = {**attributes, STEP: step}, {**details, "step": step}, self._ids.step(step)
        at_ns = self._wall_ns(frame.get("t"))
        if self._span_events:
            self._events.append(Span.Event(name=name, attributes=pairs(attributes.items()), time_unix_nano=at_ns))
            if len(self._events) > MOST_EVENTS:
                self._events.popleft()
                self._dropped_events += 1
        sentence = event.brief.partition(". ")[0].partition(": ")[0].rstrip(".") if event else name
        record = _record(name, severity, sentence, details, attributes)
        record.time_unix_nano, record.flags = at_ns, self._flags
        record.trace_id, record.span_id = _identifier_or_none(ids.trace, 16), _identifier_or_none(ids.span, 8)
        return record

    def _checkpoint(self, frame: Frame) -> LogRecord | None:
        """Return the record of a save that succeeded; one that failed has an event."""
        name, begun_ns, ended_ns = text(frame.get("name")), whole(frame.get("t0")), whole(frame.get("t1"))
        if name != catalog.SPAN_CHECKPOINT.name or not _is_ours(frame) or frame.get("status") == "error":
            return None
        details = {"duration_s": max(ended_ns - begun_ns, 0) / 1e9, **mapping(frame.get("attrs"))}
        record = _record(name, Severity.INFO, "A checkpoint was saved", details, namespaced(name, details))
        record.time_unix_nano, record.flags = ended_ns, whole(frame.get("flags")) & _SAMPLED
        record.trace_id = _identifier_or_none(frame.get("trace_id"), 16)
        record.span_id = _identifier_or_none(frame.get("span_id"), 8)
        return record

    def _span(self, frame: Frame, events: tuple[list[Span.Event], int] | None) -> list[Item]:
        """Return the span of a frame; none if its trace is not sampled or it has no identifiers. ``events``: a root's."""
        if not self._spans or not whole(frame.get("flags")) & _SAMPLED:
            return []
        with contextlib.suppress(ValueError):
            return [Item(self._place(frame), _span(frame, *(events or ([], 0))))]
        return []

    def _place(self, frame: Frame) -> Place:
        name, version, schema_url, attributes = [*_list(frame.get("scope")), None, None, None, None][:4]
        if name == SCOPE and not version:
            return self._own_place
        key = repr((name, version, schema_url, attributes))
        if key not in self._places:
            if len(self._places) >= _MOST_SCOPES:
                self._places.clear()
            scope = text(name), text(version), text(schema_url), mapping(attributes)
            self._places[key] = messages.place_of(self._own_place.resource, *scope)
        return self._places[key]


def namespaced(owner: str, attributes: Mapping[str, object]) -> dict[str, object]:
    """Return the attributes of a span or event of the catalog by their names in OTLP.

    That is the name of the semantic conventions where there is one, else one in the namespace of the span or event.
    """
    return {
        _RENAMED.get(key) or (key if _CONVENTIONAL.match(key) else f"{owner}.{key}"): value for key, value in attributes.items()
    }


def _span(frame: Frame, own_events: list[Span.Event], own_dropped: int) -> Span:
    """Return the span of a frame. Raises ``ValueError`` if it has no valid trace and span identifier."""
    name, attributes, cut = text(frame.get("name")), mapping(frame.get("attrs")), whole(frame.get("cut"), _UINT32)
    if _is_ours(frame) and name in _SPANS:
        attributes = namespaced(name, attributes)
    if cut:
        attributes = {**attributes, "torchobs.cut": cut}
    dropped_attributes, dropped_events, dropped_links = [*_list(frame.get("dropped")), 0, 0, 0][:3]
    parent, is_error = frame.get("parent"), frame.get("status") == "error"
    flags = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | (whole(frame.get("flags")) & _FLAGS)
    if parent and frame.get("remote") is True:
        flags |= SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    return Span(
        trace_id=identifier(frame.get("trace_id"), 16),
        span_id=identifier(frame.get("span_id"), 8),
        parent_span_id=identifier(parent, 8) if parent else b"",
        trace_state=text(frame.get("state")),
        flags=flags,
        name=name,
        kind=_KINDS.get(text(frame.get("kind")), Span.SPAN_KIND_INTERNAL),
        start_time_unix_nano=whole(frame.get("t0")),
        end_time_unix_nano=whole(frame.get("t1")),
        attributes=pairs(attributes.items()),
        dropped_attributes_count=whole(dropped_attributes, _UINT32),
        events=[*own_events, *map(_span_event, _list(frame.get("events")))],
        dropped_events_count=min(whole(dropped_events, _UINT32) + own_dropped, _UINT32),
        links=[*_links(frame)],
        dropped_links_count=whole(dropped_links, _UINT32),
        status=Status(
            code=_STATUSES.get(text(frame.get("status")), Status.STATUS_CODE_UNSET),
            message=text(frame.get("description")) if is_error else "",
        ),
    )


def _span_event(item: object) -> Span.Event:
    at_ns, name, attributes, dropped = [*_list(item), None, None, None, None][:4]
    return Span.Event(
        time_unix_nano=whole(at_ns),
        name=text(name),
        attributes=pairs(mapping(attributes).items()),
        dropped_attributes_count=whole(dropped, _UINT32),
    )


def _links(frame: Frame) -> Iterator[Span.Link]:
    """Yield a frame's links that have valid identifiers."""
    for item in _list(frame.get("links")):
        trace_id, span_id, flags, state, attributes, dropped = [*_list(item), *[None] * 6][:6]
        with contextlib.suppress(ValueError):
            yield Span.Link(
                trace_id=identifier(trace_id, 16),
                span_id=identifier(span_id, 8),
                trace_state=text(state),
                flags=whole(flags) & _FLAGS,
                attributes=pairs(mapping(attributes).items()),
                dropped_attributes_count=whole(dropped, _UINT32),
            )


def _is_ours(frame: Frame) -> bool:
    """Return whether a span is torchobs' own, so that the catalog describes its attributes."""
    return _list(frame.get("scope"))[:1] == [SCOPE]


def _record(
    name: str, severity: Severity, sentence: str, details: Mapping[str, object], attributes: Mapping[str, object]
) -> LogRecord:
    """Return a record whose body is a sentence: what happened, and the details, sizes and durations with their units."""
    values = {key: with_unit(name, key, value) or labels.text(value) for key, value in details.items()}
    words = ", ".join(f"{labels.text(key)} {value}" for key, value in values.items())
    word, number = _SEVERITIES[severity]
    return LogRecord(
        event_name=name,
        severity_text=word,
        severity_number=number,
        body=any_value((f"{sentence}: {words}" if words else sentence)[:_MOST_BODY]),
        attributes=pairs(attributes.items()),
    )


def _identifier_or_none(value: object, length: int) -> bytes:
    """Return an identifier's bytes; none for one that is invalid, which OTLP takes for a record without span."""
    with contextlib.suppress(ValueError):
        return identifier(value, length)
    return b""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
