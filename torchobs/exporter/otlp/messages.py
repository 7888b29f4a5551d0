"""OTLP's messages: attributes, resources, and requests of a size that receivers accept.

Built from what flight files hold, which is JSON. The messages are protobuf's: the data classes of
OpenTelemetry's SDK lack *no recorded value*, trace flags and trace state, and its encoder of log records is not stable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from torchobs._version import __version__
from torchobs.catalog import Kind
from torchobs.flight.format.layout import PROCESS_BEGUN, encodable
from torchobs.identity.launchers import LAUNCH, LAUNCHED_BY
from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.flight.format.layout import Header

SCOPE = "torchobs"
"""Instrumentation scope of torchobs' own metrics and spans."""
MOST_ITEMS = {"metrics": 5_000, "traces": 512, "logs": 512}
"""Data points, spans or log records of one request: of the latter two the SDK's default."""
MOST_BYTES = 2 * 1024**2
"""Size of one request: gRPC receivers accept 4 MiB by default."""

_INT64, _FIXED64 = 1 << 63, 1 << 64
_DEPTH = 8
_CONVENTIONS = {
    "job_name": "service.name",
    "host": "host.name",
    "python_version": "process.runtime.version",
    "torchobs_version": "telemetry.sdk.version",
}
"""Attributes that have a name in OpenTelemetry's semantic conventions."""
_NAMESPACED = (
    "run_id", "rank", "local_rank", "world_size", "local_world_size", "node_rank", "restart", "launcher", "script",
    "torch_version", "replica_group",
)  # fmt: skip
_LEFT_OUT = frozenset({"trace_id", "pid", LAUNCH, LAUNCHED_BY, PROCESS_BEGUN})
_DATA = {Kind.COUNTER: "sum", Kind.UPDOWN: "sum", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}
_DELTA, _CUMULATIVE = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where items stand in a request: a resource and an instrumentation scope. Compared by identity."""

    resource: Any
    scope: Any
    schema_url: str = ""


class MetricKey(NamedTuple):
    """A metric, whose data points stand together."""

    name: str
    kind: Kind
    unit: str
    brief: str
    delta: bool


class Item(NamedTuple):
    """A data point, span or log record as a message. ``metric``: of a data point."""

    place: Place
    message: Any
    metric: MetricKey | None = None


class Batch(NamedTuple):
    """One serialised request and the number of its items."""

    body: bytes
    items: int
    rank: str = ""
    """the rank that a part of a refused request is of, in words; empty: it is no such part"""


class _Shape(NamedTuple):
    """A signal's request and the fields of its levels."""

    request: Any
    resources: str
    scopes: str
    items: str


_SHAPES = {
    "metrics": _Shape(ExportMetricsServiceRequest, "resource_metrics", "scope_metrics", "metrics"),
    "traces": _Shape(ExportTraceServiceRequest, "resource_spans", "scope_spans", "spans"),
    "logs": _Shape(ExportLogsServiceRequest, "resource_logs", "scope_logs", "log_records"),
}


def batches(signal: str, items: Sequence[Item]) -> list[Batch]:
    """Return requests that hold the items in their order. One that is too large is halved."""
    most = MOST_ITEMS[signal]
    parts = (items[begin : begin + most] for begin in range(0, len(items), most))
    return [batch for part in parts for batch in _halved(signal, part)]


def divided(signal: str, batch: Batch) -> list[Batch]:
    """Divide a request into one for each resource, that is for each incarnation of a rank."""
    shape = _SHAPES[signal]
    parts: dict[bytes, Any] = {}
    for of_resource in getattr(shape.request.FromString(batch.body), shape.resources):
        key = of_resource.resource.SerializeToString(deterministic=True)
        getattr(parts.setdefault(key, shape.request()), shape.resources).append(of_resource)
    return [
        Batch(part.SerializeToString(), _count(shape, part), _in_words(getattr(part, shape.resources)[0].resource))
        for part in parts.values()
    ]


def _halved(signal: str, items: Sequence[Item]) -> list[Batch]:
    request = _request(_SHAPES[signal], items)
    if request.ByteSize() > MOST_BYTES and len(items) > 1:
        half = len(items) // 2
        return [*_halved(signal, items[:half]), *_halved(signal, items[half:])]
    return [Batch(request.SerializeToString(), len(items))]


def _request(shape: _Shape, items: Iterable[Item]) -> Any:
    request = shape.request()
    resources: dict[int, Any] = {}
    scopes: dict[Place, Any] = {}
    metrics: dict[tuple[Place, MetricKey | None], Any] = {}
    for place, message, metric in items:
        points = metrics.get((place, metric))
        if points is None:
            if place not in scopes:
                if id(place.resource) not in resources:
                    resources[id(place.resource)] = getattr(request, shape.resources).add(resource=place.resource)
                levels = getattr(resources[id(place.resource)], shape.scopes)
                scopes[place] = getattr(levels.add(scope=place.scope, schema_url=place.schema_url), shape.items)
            points = metrics[place, metric] = scopes[place] if metric is None else _points(scopes[place], metric)
        points.append(message)
    return request


def _points(metrics: Any, metric: MetricKey) -> Any:
    data = getattr(metrics.add(name=metric.name, unit=metric.unit, description=metric.brief), _DATA[metric.kind])
    if metric.kind is not Kind.GAUGE:
        data.aggregation_temporality = _DELTA if metric.delta else _CUMULATIVE
    if metric.kind is Kind.COUNTER:
        data.is_monotonic = True
    return data.data_points


def _count(shape: _Shape, request: Any) -> int:
    of_scopes = (scope for resource in getattr(request, shape.resources) for scope in getattr(resource, shape.scopes))
    items = [item for of_scope in of_scopes for item in getattr(of_scope, shape.items)]
    if shape.items != "metrics":
        return len(items)
    return sum(len(getattr(metric, metric.WhichOneof("data")).data_points) for metric in items)


def _in_words(resource: Any) -> str:
    values = {pair.key: pair.value for pair in resource.attributes}
    names = ("service.name", f"{SCOPE}.run_id", f"{SCOPE}.rank")
    job, run, rank = (_text(values[name]) if name in values else "" for name in names)
    return f"job {job}, run {run}, rank {rank}" if run else job


def _text(value: AnyValue) -> str:
    kind = value.WhichOneof("value")
    return str(getattr(value, kind)) if kind else ""


def any_value(value: object, depth: int = _DEPTH) -> AnyValue:
    """Return a value with a type of OTLP; other types, and values nested deeper than 8 levels, become text."""
    message = AnyValue()
    if isinstance(value, bool):
        message.bool_value = value
    elif isinstance(value, int) and -_INT64 <= value < _INT64:
        message.int_value = value
    elif isinstance(value, float) and isfinite(value):
        message.double_value = value
    elif isinstance(value, Mapping) and depth:
        message.kvlist_value.CopyFrom(KeyValueList(values=pairs(value.items(), depth - 1)))
    elif isinstance(value, Sequence) and not isinstance(value, str) and depth:
        message.array_value.CopyFrom(ArrayValue(values=[any_value(item, depth - 1) for item in value]))
    elif value is not None:
        message.string_value = str(value) if isinstance(value, float) else labels.text(value)
    return message


def pairs(attributes: Iterable[tuple[object, object]], depth: int = _DEPTH) -> list[KeyValue]:
    """Return attributes as messages; one without a name is none."""
    return [KeyValue(key=encodable(str(name)), value=any_value(value, depth)) for name, value in attributes if name != ""]


def accepted_names(attributes: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Return attributes by names that Prometheus' OTLP endpoint accepts: for one that it does not, it refuses the request.

    As on the metrics page, those that get one name share it, with their values joined by a semicolon.
    """
    accepted: dict[str, object] = {}
    for original, value in attributes:
        name = labels.pushed_name(original)
        accepted[name] = f"{labels.text(accepted[name])};{labels.text(value)}" if name in accepted else value
    return accepted


def text(value: object) -> str:
    """Return a text as OTLP accepts it; empty for anything else."""
    return encodable(value) if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, object]:
    """Return a JSON object; empty for anything else."""
    return value if isinstance(value, dict) else {}


def whole(value: object, most: int = _FIXED64 - 1) -> int:
    """Return an integer from 0 to ``most``, such as a Unix time in ns; 0 for anything else."""
    return min(max(value, 0), most) if isinstance(value, int) and not isinstance(value, bool) else 0


def identifier(value: object, length: int) -> bytes:
    """Return the bytes of an identifier in hexadecimal digits. Raises ``ValueError``."""
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{2 * length}}}", value):
        raise ValueError("no identifier")
    return bytes.fromhex(value)


def resource_of(header: Header) -> Resource:
    """Return the resource of an incarnation, with the semantic conventions' names where they exist.

    Attributes from ``OTEL_RESOURCE_ATTRIBUTES``, and Kubernetes' attributes, keep their names where Prometheus accepts them.
    """
    job_name, _, _ = labels.identity(header.resource)
    rest = {name: value for name, value in header.resource.items() if name not in _LEFT_OUT}
    namespaced = {f"{SCOPE}.{name}": rest.pop(name) for name in _NAMESPACED if name in rest}
    conventional = {convention: rest.pop(name) for name, convention in _CONVENTIONS.items() if name in rest}
    fixed = {
        "service.name": job_name,
        "service.instance.id": header.incarnation.hex(),
        "process.pid": header.pid,
        "telemetry.sdk.name": SCOPE,
        "telemetry.sdk.language": "python",
    }
    return Resource(attributes=pairs({**accepted_names(rest.items()), **namespaced, **conventional, **fixed}.items()))


def own_place(resource: Resource, version: object = __version__) -> Place:
    """Return the place of torchobs' own items; ``version``: of torchobs, which made them."""
    return Place(resource, InstrumentationScope(name=SCOPE, version=text(version)))


def place_of(resource: Resource, name: str, version: str, schema_url: str, attributes: Mapping[str, object]) -> Place:
    """Return the place of an application's items."""
    scope = InstrumentationScope(name=encodable(name), version=encodable(version), attributes=pairs(attributes.items()))
    return Place(resource, scope, encodable(schema_url))
