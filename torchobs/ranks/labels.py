"""Labels and their values, made safe for the page: whatever a flight file says, it becomes text and forges no series."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torchobs.catalog import prometheus_label

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

IDENTITY = ("job_name", "run_id", "rank")
"""The labels on every series of a rank."""

_RESERVED = frozenset({*IDENTITY, "le"})
_DESCRIBED = (
    "local_rank",
    "local_world_size",
    "host",
    "script",
    "launcher",
    "torch_version",
    "python_version",
    "torchobs_version",
)
_SAID = frozenset({*IDENTITY, "world_size", "restart", "pid", "trace_id", "launched_by"})
"""Fields of a rank's resource that are labels or series already, or nobody's business; the rest is what the user gave."""

_NUMBER_LIMIT = 1 << 53
_legacy = lru_cache(256)(prometheus_label)


def text(value: object) -> str:
    """Return a value as the text of a label, which UTF-8 can hold: JSON admits lone surrogates, an encoder raises for them."""
    plain = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return plain.encode("utf-8", "replace").decode()


def number(resource: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of the resource, from 0 to 2^53; ``None`` if it has no such."""
    value = resource.get(name)
    return int(value) if isinstance(value, int) and 0 <= value < _NUMBER_LIMIT else None


def identity(resource: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return job_name, run_id and rank. A label without a value is none, so a missing one is ``unknown``."""
    job_name, run_id = (text(resource.get(name, "")) or "unknown" for name in ("job_name", "run_id"))
    rank = number(resource, "rank")
    return job_name, run_id, "unknown" if rank is None else str(rank)


def of_attributes(attributes: Iterable[tuple[str, Any]], taken: Collection[str] = _RESERVED) -> dict[str, str]:
    """Translate attributes as Prometheus' OTLP endpoint does; a name that is ours, or Prometheus' own, gets ``exported_``.

    Names that become the same label share it, their values joined by a semicolon.
    """
    labels: dict[str, str] = {}
    for name, value in attributes:
        label = prometheus_label(name)
        if label in taken:
            label = f"exported_{label}"
        elif label.startswith("__"):  # these Prometheus takes for its own and drops
            label = f"key{label}"
        labels[label] = f"{labels[label]};{text(value)}" if label in labels else text(value)
    return {label: value for label, value in labels.items() if value}


def of_catalog(attributes: Mapping[str, str]) -> dict[str, str]:
    """Translate attributes that the catalog describes, which need no more than that."""
    return {_legacy(name): value for name, value in attributes.items() if value}


def of_info(resource: Mapping[str, Any]) -> dict[str, str]:
    """Return what describes a rank: the facts of its process, Kubernetes' names, and the resource attributes the user gave."""
    facts = of_attributes((name, value) for name, value in resource.items() if name in _DESCRIBED)
    given = [(name, value) for name, value in resource.items() if name not in _DESCRIBED and name not in _SAID]
    return {**of_attributes(given, _RESERVED | facts.keys()), **facts}
