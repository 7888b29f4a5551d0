"""Convert the events of the ranks' event rings, and the checkpoints saved, into OTLP log records and requests.

A record is an *event* as OpenTelemetry defines it: its name is the event's, its attributes are named within that, except those
for which the semantic conventions have a name. It belongs to the span of the step in which it happened, else to the run's or
the segment's.

The messages are made here: the SDK's data model of logs is not stable, and its encoder needs it.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from uuid import UUID

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, SeverityNumber

from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.diagnosis.event_units import with_unit
from torchobs.exporter.otlp import attributes as otlp_attributes
from torchobs.exporter.otlp.attributes import mapping, text, time_ns, whole
from torchobs.exporter.otlp.root_spans import ROOTS, is_ours, is_root
from torchobs.flight.format import event_ring, span_ids
from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torchobs.flight.format.layout import Header

_MARKS = tuple(f'"{word}"'.encode() for word in ("event", catalog.SPAN_CHECKPOINT.name, *ROOTS))
"""Texts in the payloads that matter here; others are not decoded."""
_SEVERITIES = {
    Severity.INFO: SeverityNumber.SEVERITY_NUMBER_INFO,
    Severity.WARNING: SeverityNumber.SEVERITY_NUMBER_WARN,
    Severity.ERROR: SeverityNumber.SEVERITY_NUMBER_ERROR,
}
_FIELDS = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
_SAMPLED = 0x01
_MOST_BODY = 1000
_HEX = re.compile(r"(?:[0-9a-f]{2})*")


class RankLog:
    """State of one incarnation's records: resource, identifiers, and how far its ring was read."""

    def __init__(self, header: Header) -> None:
        resource = otlp_attributes.resource_of(header)
        self.resource = _pairs(resource.attributes)
        self.scope = InstrumentationScope(name=otlp_attributes.SCOPE, version=otlp_attributes.own_scope(resource).version or "")
        self._header = header
        self._ids = span_ids.SpanIds(header)
        self._root: span_ids.SpanId | None = None
        """of the last root span that began"""
        self._flags = _SAMPLED

    def records(self, payloads: Iterable[bytes], observed_ns: int) -> Iterator[LogRecord]:
        """Yield the records of a ring's new payloads; ``observed_ns``: when they were read, Unix ns."""
        for payload in payloads:
            frame = event_ring.fields_of(payload) if any(mark in payload for mark in _MARKS) else None
            if frame is None:
                continue
            if is_root(frame):
                self._flags = whole(frame.get("flags")) & _SAMPLED
                self._root = span_ids.SpanId(text(frame.get("trace_id")), text(frame.get("span_id")))
            record = self._event(frame) if frame.get("k") == "event" else _checkpoint(frame)
            if record is not None:
                uid = UUID(bytes=blake2b(self._header.incarnation + payload, digest_size=16).digest())
                record.attributes.append(_pair("log.record.uid", str(uid)))
                record.observed_time_unix_nano = time_ns(observed_ns)
                yield record

    def _event(self, frame: Mapping[str, Any]) -> LogRecord | None:
        name, given, step = text(frame.get("name")), mapping(frame.get("attrs")), frame.get("step")
        if not name or name == catalog.EVENT_SCALARS.name:  # points of curves, which are pushed as a metric
            return None
        event, severity = catalog.EVENT_BY_NAME.get(name), catalog.event_severity(name, given)
        ids = self._root or self._ids.run
        attributes = otlp_attributes.namespaced(name, given) if event else given
        if isinstance(step, int):
            ids = self._ids.step(step)
            attributes, given = {**attributes, otlp_attributes.STEP: step}, {**given, "step": step}
        return LogRecord(
            time_unix_nano=otlp_attributes.event_time_ns(self._header, frame),
            severity_number=_SEVERITIES[severity],
            severity_text=SeverityNumber.Name(_SEVERITIES[severity]).removeprefix("SEVERITY_NUMBER_"),
            body=_any(_body(_sentence(event.brief) if event else name, name, given)),
            attributes=_pairs(otlp_attributes.cleaned(attributes.items())),
            event_name=name,
            trace_id=_identifier(ids.trace, 16),
            span_id=_identifier(ids.span, 8),
            flags=self._flags,
        )


def request_of(records: Sequence[tuple[RankLog, LogRecord]]) -> ExportLogsServiceRequest:
    """Return records with the ranks that they are of as one request."""
    of_rank: dict[RankLog, list[LogRecord]] = {}
    for log, record in records:
        of_rank.setdefault(log, []).append(record)
    request = ExportLogsServiceRequest()
    for log, own in of_rank.items():
        resource = request.resource_logs.add()
        resource.resource.attributes.extend(log.resource)
        resource.scope_logs.add(scope=log.scope, log_records=own)
    return request


def _checkpoint(frame: Mapping[str, Any]) -> LogRecord | None:
    """Return a record for the span of a save that succeeded; one that failed has an event."""
    name, begun_ns, ended_ns = text(frame.get("name")), time_ns(frame.get("t0")), time_ns(frame.get("t1"))
    if frame.get("k") != "span" or name != catalog.SPAN_CHECKPOINT.name or not is_ours(frame) or frame.get("status") == "error":
        return None
    given = {"duration_s": max(ended_ns - begun_ns, 0) / 1e9, **mapping(frame.get("attrs"))}
    return LogRecord(
        time_unix_nano=ended_ns,
        severity_number=SeverityNumber.SEVERITY_NUMBER_INFO,
        severity_text="INFO",
        body=_any(_body("A checkpoint was saved", name, given)),
        attributes=_pairs(otlp_attributes.cleaned(otlp_attributes.namespaced(name, given).items())),
        event_name=name,
        trace_id=_identifier(frame.get("trace_id"), 16),
        span_id=_identifier(frame.get("span_id"), 8),
        flags=whole(frame.get("flags")) & _SAMPLED,
    )


def _sentence(brief: str) -> str:
    """Return the first sentence of a brief, without its full stop or what follows a colon."""
    return brief.partition(". ")[0].partition(": ")[0].rstrip(".")


def _body(what: str, event: str, given: Mapping[str, object]) -> str:
    """Return the sentence of a record: what happened, and the details, sizes and durations with their units."""
    values = {name: with_unit(event, name, value) or labels.text(value) for name, value in given.items()}
    details = ", ".join(f"{labels.text(name)} {value}" for name, value in values.items())
    return text(f"{what}: {details}" if details else what)[:_MOST_BODY]


def _identifier(value: object, length: int) -> bytes:
    """Return an identifier's bytes; none for one that is invalid, which OTLP takes for a record without span."""
    valid = isinstance(value, str) and len(value) == 2 * length and _HEX.fullmatch(value)
    return bytes.fromhex(str(value)) if valid else b""


def _pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    return [_pair(name, value) for name, value in attributes.items()]


def _pair(name: str, value: Any) -> KeyValue:
    return KeyValue(key=name, value=_any(value))


def _any(value: Any) -> AnyValue:
    """Return a value that :func:`attributes.clean` has returned as a message."""
    if isinstance(value, dict):
        return AnyValue(kvlist_value=KeyValueList(values=_pairs(value)))
    if isinstance(value, (list, tuple)):
        return AnyValue(array_value=ArrayValue(values=[_any(item) for item in value]))
    return AnyValue() if value is None else AnyValue(**{_FIELDS[type(value)]: value})
