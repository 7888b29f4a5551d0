"""Labels and exemplars of flight files, for the metrics page: any content becomes text and cannot forge a series."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import OrderedDict
from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from torchobs import catalog
from torchobs.catalog import prometheus_label
from torchobs.config.launchers import LAUNCH, LAUNCHED_BY
from torchobs.flight.events import Event, Late, Span, SpanIds
from torchobs.flight.layout import PROCESS_BEGUN, Header

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torchobs.flight.series import Series


IDENTITY = ("job_name", "run_id", "rank")
"""The labels on every series of a rank."""

RESERVED = frozenset({*IDENTITY, "job", "instance", "le"})
"""Labels that an application's own attributes do not get: those of a rank, and those that Prometheus sets itself."""
_FACTS = (
    "local_rank",
    "local_world_size",
    "replica_group",
    "host",
    "script",
    "launcher",
    "torch_version",
    "python_version",
    "torchobs_version",
)
_NOT_LABELS = frozenset({*IDENTITY, "world_size", "restart", "pid", "trace_id", LAUNCH, LAUNCHED_BY, PROCESS_BEGUN})
"""Fields of a rank's resource that are exported otherwise or not at all; the others were set by the user."""


class _HasRank(Protocol):
    @property
    def rank(self) -> str: ...


Ranked = TypeVar("Ranked", bound=_HasRank)
_NUMBER_LIMIT = 1 << 53
_ASCII = re.compile(r"[A-Za-z0-9]")
_cached_label = lru_cache(256)(prometheus_label)


def text(value: object) -> str:
    """Return a value as label text without lone surrogates, which JSON admits and UTF-8 encoders reject."""
    plain = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return plain.encode("utf-8", "replace").decode()


def number(resource: Mapping[str, Any], name: str) -> int | None:
    """Return an integer field of the resource, from 0 to 2^53; ``None`` if missing or invalid."""
    value = resource.get(name)
    return int(value) if isinstance(value, int) and 0 <= value < _NUMBER_LIMIT else None


def identity(resource: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return job_name, run_id and rank. A missing one is ``unknown``, for a label with an empty value does not exist.

    A replica group counts its ranks from 0, and is part of the rank: ``0-g1``.
    """
    job_name, run_id = (text(resource.get(name, "")) or "unknown" for name in ("job_name", "run_id"))
    rank, group = number(resource, "rank"), number(resource, "replica_group")
    return job_name, run_id, "unknown" if rank is None else str(rank) if group is None else f"{rank}-g{group}"


def team(rank: str) -> str:
    """Return the part after a rank's number: its replica group, or the digits of a second process that claims the rank."""
    return rank.partition("-")[2]


def teams(ranks: Iterable[Ranked]) -> list[list[Ranked]]:
    """Return the ranks in groups that train one model and step together, by the part after their numbers.

    These are the replica groups; a second process that claims a rank belongs to another training, and is a group by itself.
    """
    groups: dict[str, list[Ranked]] = {}
    for rank in ranks:
        groups.setdefault(team(rank.rank), []).append(rank)
    return [*groups.values()]


def of_attributes(attributes: Iterable[tuple[str, Any]], taken: Collection[str] = RESERVED) -> dict[str, str]:
    """Translate attributes as Prometheus' OTLP endpoint does; reserved names get the prefix ``exported_``.

    Attributes that map to the same label share it, with their values joined by a semicolon.
    """
    labels: dict[str, str] = {}
    for name, value in attributes:
        label = _label(name, taken)
        labels[label] = f"{labels[label]};{text(value)}" if label in labels else text(value)
    return {label: value for label, value in labels.items() if value}


def pushed_name(name: str) -> str:
    """Return the name under which an attribute is pushed over OTLP: its own, unless Prometheus would refuse or drop that.

    Else it is the label that the attribute has on the metrics page: ``key____`` for a name of four letters that are not ASCII.
    """
    label = _label(name, RESERVED)
    is_same = label in {prometheus_label(name), name} and label != "key__name__"
    return name if is_same and _ASCII.search(name) else label


def _label(name: str, taken: Collection[str]) -> str:
    label = prometheus_label(name)
    if label in taken:
        return f"exported_{label}"
    return f"key{label}" if label.startswith("__") else label  # reserved by Prometheus, which drops them


def of_catalog(attributes: Mapping[str, str]) -> dict[str, str]:
    """Translate attributes of the catalog's metrics, which need no sanitising."""
    return {_cached_label(name): value for name, value in attributes.items() if value}


def of_info(resource: Mapping[str, Any]) -> dict[str, str]:
    """Return a rank's descriptive labels: facts of its process, Kubernetes names, and the user's resource attributes."""
    facts = of_attributes((name, value) for name, value in resource.items() if name in _FACTS)
    described = [(name, value) for name, value in resource.items() if name not in _FACTS and name not in _NOT_LABELS]
    return {**of_attributes(described, RESERVED | facts.keys()), **facts}


_HISTOGRAMS = {"duration_s": catalog.STEP_DURATION, "grad_norm": catalog.GRAD_NORM_DISTRIBUTION}
"""Histogram by the span attribute that holds the step's observation."""
_BY_NAME = {metric.name: metric for metric in _HISTOGRAMS.values()}
_SAMPLED = 1
_RECENT = 128
"""Most step spans kept for a late value (``runtime.spans`` keeps as many)."""


class Exemplar(NamedTuple):
    """One step's observation. ``at_ns``: the step's end, Unix ns."""

    trace_id: str
    span_id: str
    step: int
    value: float
    at_ns: int

    @property
    def labels(self) -> Mapping[str, str]:
        """The exemplar's labels in OpenMetrics."""
        return {"trace_id": self.trace_id, "span_id": self.span_id, "step": str(self.step)}


Shown = dict[str, dict[int, Exemplar]]
"""Exemplars by metric name and bucket index. Replaced instead of modified, so that renderers can cache by identity."""
NO_EXEMPLARS: Shown = {}


class Exemplars:
    """Collects the exemplars of one rank, for each bucket of a histogram the newest step that has a span.

    Only steps with a span in the rank's event ring qualify, for a link must lead to a span that the tracing backend receives:
    about one step in ten seconds, and some slow and anomalous ones, which are the interesting ones. The step's trace holds the
    spans of the other ranks, too. Like its bucket, an exemplar stays after the ring has been overwritten.
    ``shown`` is valid at any time.
    """

    def __init__(self, header: Header) -> None:
        self.shown = NO_EXEMPLARS
        self._ids = SpanIds(header)
        self._ends: OrderedDict[int, int] = OrderedDict()

    def add(self, fresh: Sequence[Event | Span | Late]) -> None:
        """Process the new contents of the ring, oldest first."""
        observations = [observation for item in fresh for observation in self._observations(item)]
        if observations:
            shown = {name: dict(buckets) for name, buckets in self.shown.items()}
            for metric, step, value, at_ns in reversed(observations):  # newest first: only a few of a whole ring are needed
                buckets, index = shown.setdefault(metric.name, {}), bisect_left(metric.bounds, value)
                if index not in buckets or buckets[index].at_ns < at_ns:  # Prometheus also rejects one older than the last
                    buckets[index] = Exemplar(*self._ids.step(step), step, value, at_ns)
            self.shown = shown

    def _observations(self, item: Event | Span | Late) -> list[tuple[catalog.Metric, int, float, int]]:
        """Return a step's histogram values, of its span or late ones: metric, step, value, the step's end in Unix ns."""
        values: Mapping[str, Any] = item._asdict() if isinstance(item, Late) else {}
        if isinstance(item, Span) and item.ended_ns is not None:
            values = self._step(item, item.ended_ns)
        step = values.get("step")
        if step is None or step not in self._ends:
            return []
        amounts = ((metric, values.get(key)) for key, metric in _HISTOGRAMS.items())
        numbers = ((metric, value) for metric, value in amounts if isinstance(value, (int, float)) and isfinite(value))
        return [(metric, step, float(value), self._ends[step]) for metric, value in numbers]

    def _step(self, span: Span, ended_ns: int) -> Mapping[str, Any]:
        """Record the end of a step's span, and return its attributes; empty for another span, or one that is not sampled."""
        values, fields = span.attributes, span.fields
        step = values.get("step")
        is_sampled = bool(fields.get("flags", 0) & _SAMPLED)
        if step is None or not is_sampled or (fields.get("trace_id"), fields.get("span_id")) != self._ids.step(step):
            return {}
        self._ends[step] = ended_ns
        if len(self._ends) > _RECENT:
            self._ends.popitem(last=False)
        return values


def exemplars_of(series: Series, shown: Shown) -> Mapping[int, Exemplar]:
    """Return a histogram's exemplars by bucket; empty unless the fold made it, with the known bounds."""
    metric = _BY_NAME.get(series.name)
    ours = metric is not None and series.block == 0 and series.scope is None and series.bounds == metric.bounds
    return shown.get(series.name, {}) if ours else {}
