"""OTLP attributes, scopes and resources. Their input is JSON from a flight file and is not trusted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from torchobs.catalog import UNNAMED, prometheus_name
from torchobs.flight.format.layout import PROCESS_BEGUN, encodable
from torchobs.identity.launchers import LAUNCH, LAUNCHED_BY
from torchobs.ranks import labels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.catalog import Kind
    from torchobs.flight.format.layout import Header

SCOPE = "torchobs"
"""Instrumentation scope of torchobs' own metrics and spans."""

STEP = "torchobs.step.number"
"""Attribute for the number of a step. ``torchobs.step`` would be an attribute and a namespace at once, which must not be."""
_CONVENTIONAL = re.compile(r"(exception|hw)\.")
"""Attributes of the catalog that are named as in the semantic conventions."""
_RENAMED = {"step": STEP, "thread": "thread.name"}
_INT64, _FIXED64 = 1 << 63, 1 << 64
_DEPTH = 8
_NAMED = {
    "job_name": "service.name",
    "host": "host.name",
    "python_version": "process.runtime.version",
    "torchobs_version": "telemetry.sdk.version",
}
"""Attributes that have a name in OpenTelemetry's semantic conventions."""

_OWN = (
    "run_id", "rank", "local_rank", "world_size", "local_world_size", "node_rank", "restart", "launcher", "script",
    "torch_version", "replica_group",
)  # fmt: skip
_LEFT_OUT = frozenset({"trace_id", "pid", LAUNCH, LAUNCHED_BY, PROCESS_BEGUN})


def named(attributes: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Return attributes by names that Prometheus' OTLP endpoint accepts: for one that it does not, it refuses the request.

    As on the metrics page, those that get one name share it, with their values joined by a semicolon.
    """
    found: dict[str, object] = {}
    for name, value in attributes:
        accepted = labels.pushed_name(name)
        found[accepted] = f"{labels.text(found[accepted])};{labels.text(value)}" if accepted in found else value
    return found


def metric_name(name: str, unit: str, kind: Kind) -> str:
    """Return the name under which a metric is pushed: its own, if anything is left of it in Prometheus."""
    return UNNAMED if prometheus_name(name, unit, kind) == UNNAMED else name


def cleaned(attributes: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """Return the attributes with values that OpenTelemetry's encoder accepts."""
    return {encodable(name): clean(value) for name, value in attributes}


def namespaced(owner: str, attributes: Mapping[str, object]) -> dict[str, object]:
    """Return the attributes of a span or event of the catalog by their names in OTLP.

    That is the name of the semantic conventions where there is one, else one in the namespace of the span or event.
    """
    return {
        _RENAMED.get(key) or (key if _CONVENTIONAL.match(key) else f"{owner}.{key}"): value for key, value in attributes.items()
    }


def clean(value: object, depth: int = _DEPTH) -> Any:
    """Return a value with a type of OTLP; other types, and values nested deeper than 8 levels, become text."""
    if isinstance(value, str):
        return encodable(value)
    if value is None or isinstance(value, bool) or (isinstance(value, int) and -_INT64 <= value < _INT64):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, Mapping) and depth:
        return {encodable(str(name)): clean(item, depth - 1) for name, item in value.items()}
    if isinstance(value, Sequence) and depth:
        return [clean(item, depth - 1) for item in value]
    return labels.text(value)


def text(value: object) -> str:
    """Return a text as OTLP accepts it; empty for anything else."""
    return encodable(value) if isinstance(value, str) else ""


def mapping(value: object) -> dict[str, object]:
    """Return a JSON object; empty for anything else."""
    return value if isinstance(value, dict) else {}


def whole(value: object) -> int:
    """Return an integer; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def time_ns(value: object) -> int:
    """Return a Unix time in ns within the range of OTLP; 0 for what is none."""
    return min(max(whole(value), 0), _FIXED64 - 1)


def event_time_ns(header: Header, frame: Mapping[str, object]) -> int:
    """Return when an event of a ring happened, Unix ns."""
    return time_ns(whole(frame.get("t")) - header.monotonic_ns + header.wall_ns)


def scope(name: str, version: str, schema_url: str, attributes: Iterable[tuple[str, object]]) -> InstrumentationScope:
    """Return an instrumentation scope."""
    return InstrumentationScope(name, version, schema_url, cleaned(attributes))


def own_scope(resource: Resource) -> InstrumentationScope:
    """Return torchobs' own scope with the version that the resource states."""
    return InstrumentationScope(SCOPE, str(resource.attributes.get("telemetry.sdk.version", "")))


def resource_of(header: Header) -> Resource:
    """Return the resource of an incarnation, with the semantic conventions' names where they exist.

    Attributes from ``OTEL_RESOURCE_ATTRIBUTES``, and Kubernetes' attributes, keep their names where Prometheus accepts them.
    """
    job_name, _, _ = labels.identity(header.resource)
    given = {name: value for name, value in header.resource.items() if name not in _LEFT_OUT}
    own = {f"{SCOPE}.{name}": given.pop(name) for name in _OWN if name in given}
    conventional = {known: given.pop(name) for name, known in _NAMED.items() if name in given}
    fixed = {
        "service.name": job_name,
        "service.instance.id": header.incarnation.hex(),
        "process.pid": header.pid,
        "telemetry.sdk.name": SCOPE,
        "telemetry.sdk.language": "python",
    }
    return Resource(cleaned({**named(given.items()), **own, **conventional, **fixed}.items()))
