"""Serialised requests: of a size that every receiver accepts, and divided by resource when one was refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
Packed = list[tuple[bytes, int]]
"""Each request with the number of its data points, spans or log records"""

MOST_ITEMS = 512
"""Spans or log records of one request: the SDK's default."""
MOST_BYTES = 2 * 1024**2
"""Size of one request: gRPC receivers accept 4 MiB by default."""


class Part(NamedTuple):
    """What a request held of one resource."""

    message: bytes
    items: int
    of: str
    """the resource, in words"""


def packed(items: Sequence[T], build: Callable[[Sequence[T]], Any]) -> Packed:
    """Return requests that hold the items; ``build`` makes the message of some of them. One that is too large is halved."""
    parts = (items[begin : begin + MOST_ITEMS] for begin in range(0, len(items), MOST_ITEMS))
    return [request for part in parts for request in _halved(part, build)]


def _halved(items: Sequence[T], build: Callable[[Sequence[T]], Any]) -> Packed:
    request = build(items)
    if request.ByteSize() > MOST_BYTES and len(items) > 1:
        half = len(items) // 2
        return [*_halved(items[:half], build), *_halved(items[half:], build)]
    return [(request.SerializeToString(), len(items))]


def by_resource(signal: str, message: bytes) -> list[Part]:
    """Divide a serialised request into one for each resource, that is for each incarnation of a rank."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    kinds: dict[str, tuple[Any, str, Callable[[Any], int]]] = {
        "metrics": (ExportMetricsServiceRequest, "resource_metrics", _count_points),
        "traces": (ExportTraceServiceRequest, "resource_spans", lambda of: sum(len(one.spans) for one in of.scope_spans)),
        "logs": (ExportLogsServiceRequest, "resource_logs", lambda of: sum(len(one.log_records) for one in of.scope_logs)),
    }
    kind, field, count = kinds[signal]
    parts: dict[bytes, tuple[Any, int]] = {}
    for of_resource in getattr(kind.FromString(message), field):
        key = of_resource.resource.SerializeToString(deterministic=True)
        part, items = parts.get(key) or (kind(), 0)
        getattr(part, field).append(of_resource)
        parts[key] = part, items + count(of_resource)
    return [
        Part(part.SerializeToString(), items, _in_words(getattr(part, field)[0].resource)) for part, items in parts.values()
    ]


def _count_points(of_resource: Any) -> int:
    metrics = (metric for of_scope in of_resource.scope_metrics for metric in of_scope.metrics)
    return sum(len(getattr(metric, metric.WhichOneof("data")).data_points) for metric in metrics)


def _in_words(resource: Any) -> str:
    values = {one.key: one.value for one in resource.attributes}
    names = ("service.name", "torchobs.run_id", "torchobs.rank")
    job, run, rank = (str(getattr(value, value.WhichOneof("value"))) if (value := values.get(name)) else "" for name in names)
    return f"job {job}, run {run}, rank {rank}" if run else job
