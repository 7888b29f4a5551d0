"""Attributes and resources as OTLP has them. What is given comes from a flight file: JSON that somebody chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.flight.format.layout import Header

SCOPE = "torchobs"
"""The scope of torchobs' own instruments and spans."""

_INT64 = 1 << 63
_DEPTH = 8
_NAMED = {
    "job_name": "service.name",
    "host": "host.name",
    "python_version": "process.runtime.version",
    "torchobs_version": "telemetry.sdk.version",
}
"""What the semantic conventions have a name for."""

_OWN = (
    "run_id", "rank", "local_rank", "world_size", "local_world_size", "node_rank", "restart", "launcher", "script",
    "torch_version",
)  # fmt: skip
_LEFT_OUT = frozenset({"trace_id", "pid", "launched_by"})


def key_values(attributes: Iterable[tuple[str, object]]) -> list[KeyValue]:
    """Return attributes."""
    return [KeyValue(key=str(name), value=any_value(value)) for name, value in attributes]


def any_value(value: object, depth: int = _DEPTH) -> AnyValue:  # noqa: PLR0911  # one line for each type
    """Return a value; what OTLP has no type for, or is nested deeper than 8 levels, becomes text."""
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value) if isfinite(value) else AnyValue(string_value=str(value))
    if value is None:
        return AnyValue()
    if isinstance(value, Mapping) and depth:
        items = [KeyValue(key=str(name), value=any_value(item, depth - 1)) for name, item in value.items()]
        return AnyValue(kvlist_value=KeyValueList(values=items))
    if isinstance(value, Sequence) and not isinstance(value, str) and depth:
        return AnyValue(array_value=ArrayValue(values=[any_value(item, depth - 1) for item in value]))
    return AnyValue(string_value=value if isinstance(value, str) else labels.text(value))


def scope(name: str, version: str = "", attributes: Iterable[tuple[str, object]] = ()) -> InstrumentationScope:
    """Return an instrumentation scope."""
    return InstrumentationScope(name=name, version=version, attributes=key_values(attributes))


def version_of(resource: Resource) -> str:
    """Return the version of torchobs that a resource names."""
    found = (one.value.string_value for one in resource.attributes if one.key == "telemetry.sdk.version")
    return next(found, "")


def resource_of(header: Header) -> Resource:
    """Return the resource of an incarnation: by the semantic conventions where they have a name.

    What the user has put into ``OTEL_RESOURCE_ATTRIBUTES``, and Kubernetes' names, keep their own names.
    """
    job_name, _, _ = labels.identity(header.resource)
    given = {name: value for name, value in header.resource.items() if name not in _LEFT_OUT}
    own = {f"{SCOPE}.{name}": given.pop(name) for name in _OWN if name in given}
    named = {known: given.pop(name) for name, known in _NAMED.items() if name in given}
    fixed = {
        "service.name": job_name,
        "service.instance.id": header.incarnation.hex(),
        "process.pid": header.pid,
        "telemetry.sdk.name": SCOPE,
        "telemetry.sdk.language": "python",
    }
    return Resource(attributes=key_values({**given, **own, **named, **fixed}.items()))
