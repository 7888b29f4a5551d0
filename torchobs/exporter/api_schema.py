"""What the API takes and returns: parameters, objects, and the OpenAPI document that describes both.

Counters never fall: clearing remembers them as the new zero, in this exporter alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs._version import __version__
from torchobs.config.settings import PROBES
from torchobs.diagnosis.status import last_grad_norm, last_loss
from torchobs.exporter.access import Problem, bad
from torchobs.flight.files.artifacts import KINDS
from torchobs.flight.files.control import LEVELS, MAX_PROFILE_STEPS
from torchobs.flight.format.layout import LIVE_PHASES, PHASE_NAMES
from torchobs.flight.reader.decode import Distribution
from torchobs.ranks.snapshot import Readings, readings_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from starlette.requests import Request

    from torchobs.flight.format.layout import Header
    from torchobs.ranks.snapshot import Rank, Snapshot

    Values = dict[str, dict[tuple[str, ...], float]]


RANK = r"[0-9]{1,9}(-g[0-9]{1,10})?(-[0-9a-f]{8})?|[0-9a-f]{32}"
"""Pattern of a rank's label, or of an incarnation."""

EVIDENCE = r"[0-9a-f]{16}"

DEFAULT_LENGTH = 100
MOST_BODY = 64 * 1024
MOST_STEPS = 4096
MOST_EVENTS = 1000
LONGEST_NAME = 256
"""Longest event name returned, in characters; an application's events may have any name."""
_RANK, _EVIDENCE = re.compile(RANK), re.compile(EVIDENCE)


def only(request: Request, names: Collection[str] = ()) -> None:
    """Raise ``Problem`` for unknown query parameters, and for duplicate ones."""
    for name, _ in request.query_params.multi_items():
        if name not in names:
            raise bad(f"There is no query parameter {name[:64]!r} here; there is {', '.join(sorted(names)) or 'none'}.")
        if len(request.query_params.getlist(name)) > 1:
            raise bad(f"The query parameter {name} is given twice.")


def length(request: Request, name: str, most: int) -> int:
    """Return how much of a list is wanted, from 1 to ``most``, by a query parameter."""
    text = request.query_params.get(name)
    if text is None:
        return DEFAULT_LENGTH
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or not 1 <= int(text) <= most:
        raise bad(f"{name} is a whole number from 1 to {most}.")
    return int(text)


def kind(request: Request) -> str | None:
    """Return the event name to filter by, if given."""
    text = request.query_params.get("kind")
    if text is not None and not 1 <= len(text) <= LONGEST_NAME:
        raise bad(f"kind is an event's name, such as torchobs.anomaly, of 1 to {LONGEST_NAME} characters.")
    return text


def evidence_id(request: Request) -> str:
    """Return the artifact's id from the path."""
    text = str(request.path_params["id"])
    if not _EVIDENCE.fullmatch(text):
        raise Problem(404, "no-such-evidence", "The id of evidence is 16 hexadecimal digits: GET /api/v1/evidence lists them.")
    return text


def level(request: Request) -> int:
    """Return the level from the path, as an index."""
    text = str(request.path_params["level"])
    if text not in LEVELS:
        raise Problem(404, "no-such-level", f"The levels are {', '.join(LEVELS)}.")
    return LEVELS.index(text)


def ranks(snapshot: Snapshot, text: str | None) -> list[Rank]:
    """Return the ranks with that label or incarnation; all for ``None``."""
    if text is None:
        return list(snapshot.ranks)
    named = [rank for rank in snapshot.ranks if text in {rank.rank, rank.incarnation}] if _RANK.fullmatch(text) else []
    if not named:
        raise Problem(404, "no-such-rank", "There is no such rank: GET /api/v1/ranks lists those there are.")
    return named


def one_rank(snapshot: Snapshot, text: str | None) -> Rank:
    """Return the one rank with that label or incarnation; for ``None`` the only rank there is."""
    named = ranks(snapshot, text)
    if not named:
        raise Problem(404, "no-such-rank", "No rank has been seen yet.")
    if len(named) > 1:
        detail = "There are several: name one by its incarnation, of those that GET /api/v1/ranks lists."
        raise Problem(409, "ambiguous-rank", detail)
    return named[0]


def living(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks that are alive."""
    up = [rank for rank in ranks if rank.up]
    if not up:
        raise Problem(409, "rank-ended", "The rank has ended, or no rank has been seen yet: there is nobody to tell.")
    return up


async def body(request: Request, required: Collection[str] = ()) -> dict[str, Any]:
    """Return the body, a JSON object with the ``required`` members and no others."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MOST_BODY:
            raise Problem(413, "too-large", f"The body may have {MOST_BODY} bytes.")
    try:
        content = json.loads(raw.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise bad("The body is no JSON; where nothing is to be said it is {}.") from None
    if not isinstance(content, dict) or content.keys() != set(required):
        raise bad(f"The body is a JSON object with {', '.join(sorted(required)) or 'nothing in it'}.")
    return content


def steps(content: dict[str, Any]) -> int:
    """Return the number of steps to profile; 3.0 is an integer in JSON."""
    value = content["steps"]
    if type(value) not in {int, float} or not 1 <= value <= MAX_PROFILE_STEPS or value != int(value):
        raise bad(f"steps is a whole number from 1 to {MAX_PROFILE_STEPS}.")
    return int(value)


def _refuse(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON


def probes(content: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the probes to switch off, as a bit mask and by name."""
    names = content["off"]
    if not isinstance(names, list) or any(not isinstance(name, str) or name not in PROBES for name in names):
        raise bad(f"off is a list of probes, which are {', '.join(PROBES)}.")
    off = [name for name in PROBES if name in names]
    return sum(1 << PROBES.index(name) for name in off), off


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LATEST_NS = 253_402_300_799 * 1_000_000_000  # the year 9999
_LAYER = "layer"


def instant(wall_ns: int) -> str:
    """Return a Unix time in nanoseconds in RFC 3339 format, to the microsecond, clamped to the years it can express."""
    clipped_ns = min(max(wall_ns, 0), _LATEST_NS)
    return (_EPOCH + timedelta(microseconds=clipped_ns // 1000)).isoformat(timespec="microseconds").replace("+00:00", "Z")


def wall_ns(header: Header, monotonic_ns: int) -> int:
    """Convert a time on the rank's CLOCK_MONOTONIC to Unix time, both in nanoseconds."""
    return header.wall_ns + monotonic_ns - header.monotonic_ns


def named(rank: Rank) -> dict[str, Any]:
    """Return a rank's identity."""
    return {"rank": rank.rank, "run_id": rank.run_id, "job_name": rank.job_name, "incarnation": rank.incarnation}


def rank_view(rank: Rank) -> dict[str, Any]:
    """Return a rank's identity, state and progress."""
    readings, header, live = readings_of(rank), rank.view.header, rank.view.live
    last_ns, rates = rank.view.last_step_ns, readings.of(catalog.LEARNING_RATE)
    return {
        **named(rank),
        "state": rank.state,
        "up": rank.up,
        "level": level_name(live.level),
        "phase": live.phase,
        "started": instant(header.wall_ns),
        "last_step": None if last_ns is None else instant(wall_ns(header, last_ns)),
        "progress_age_s": rank.progress_age_s,
        "stall": rank.standstill._asdict() if rank.standstill else None,
        "learning_rate": rates.get(("0",), next(iter(rates.values()), None)),  # of the first group, as on the live page
        "steps": readings.get(catalog.STEPS),
        "tokens": readings.get(catalog.TOKENS),
        "samples": readings.get(catalog.SAMPLES),
        "total_steps": readings.get(catalog.STEPS_PLANNED),
        "loss": last_loss(readings.get),
        "gradient_norm": last_grad_norm(readings.get),
    }


def layers(rank: Rank) -> list[dict[str, Any]]:
    """Return the last value of every per-layer series, by layer; the rank selects which layers have series."""
    by_layer: dict[str, dict[str, Any]] = {}
    for point in rank.view.points:
        layer = dict(point.series.attributes).get(_LAYER)
        if isinstance(layer, str) and not isinstance(point.value, Distribution):
            by_layer.setdefault(layer, {})[point.series.name] = point.value
    return [{"layer": layer, "values": values} for layer, values in by_layer.items()]


def level_name(level: int) -> str:
    """Return the name of a debug level."""
    return LEVELS[level] if level < len(LEVELS) else "unknown"


_LOSS_KINDS = ("nonfinite_loss", "loss_spike", "diverged")
_COUNTERS = (
    catalog.STEPS, catalog.ANOMALIES, catalog.DEBUG_OPERATIONS, catalog.DEBUG_OPERATION_TIME, catalog.DEBUG_OPERATION_ANOMALIES,
    catalog.DEBUG_STEPS, catalog.DEBUG_ANOMALY_STEPS, catalog.DEBUG_STEP_ANOMALIES, catalog.GRAD_NORM_DISTRIBUTION,
    catalog.GRAD_NONFINITE_STEPS,
)  # fmt: skip
_GREATEST = (catalog.DEBUG_OPERATION_LONGEST, catalog.DEBUG_OPERATION_MEMORY)
_SOURCES = ("recorded", "monitored", "mixed")


class Summaries:
    """The summaries of one exporter."""

    def __init__(self) -> None:
        self._zero: dict[str, Values] = {}

    def clear(self, snapshot: Snapshot) -> None:
        """Let the summaries of these ranks begin anew."""
        self._zero = {rank.incarnation: _values(rank) for rank in snapshot.ranks}

    def debug(self, snapshot: Snapshot, evidence: int) -> dict[str, Any]:
        """Return levels, active anomalies, failed probes and the operations of the ranks; ``evidence``: number of artifacts."""
        ranks = [(rank, readings_of(rank)) for rank in snapshot.ranks]
        operations = [row for rank in snapshot.ranks for row in _operations(rank, self._since_clear(rank))]
        count = sum(row["count"] for row in operations)
        times = [row["average_time"] * row["count"] for row in operations]
        return {
            "total_operations": count,
            "average_time": sum(times) / count if count else None,
            **{name: _greatest(row[name] for row in operations) for name in ("longest_time", "memory_peak", "gpu_memory_peak")},
            "anomalies": sum(row["anomalies"] for row in operations),
            "operations": operations,
            "levels": dict(Counter(level_name(rank.view.live.level) for rank in snapshot.ranks if rank.up)),
            "anomalies_active": [
                {**named(rank), "kind": kind}
                for rank, readings in ranks
                for kind in catalog.ANOMALY_KINDS
                if rank.up and readings.get(catalog.ANOMALY_ACTIVE, kind)
            ],
            "probes_disabled": [
                {**named(rank), "probe": probe}
                for rank, readings in ranks
                for probe in PROBES
                if readings.get(catalog.PROBE_DISABLED, probe)
            ],
            "evidence": evidence,
        }

    def training(self, snapshot: Snapshot) -> dict[str, Any]:
        """Return steps and anomalies, per rank and in total; rates are those of ``debug.training_summary``."""
        counted = [_counts(self._since_clear(rank)) for rank in snapshot.ranks]
        total: Counter[str] = sum(counted, Counter())
        monitored = [bool(one["monitored"]) for one in counted]
        source = _SOURCES[all(monitored)] if not monitored or all(monitored) == any(monitored) else "mixed"
        parts = [_summary(one, _SOURCES[is_monitored]) for one, is_monitored in zip(counted, monitored, strict=True)]
        ranks = [{**named(rank), **part} for rank, part in zip(snapshot.ranks, parts, strict=True)]
        return {**_summary(total, source if monitored else _SOURCES[0]), "ranks": ranks}

    def _since_clear(self, rank: Rank) -> Readings:
        now, zero = _values(rank), self._zero.get(rank.incarnation, {})
        for metric in _COUNTERS:
            before = zero.get(metric.name, {})
            now[metric.name] = {key: max(value - before.get(key, 0), 0) for key, value in now[metric.name].items()}
        for metric in _GREATEST:
            before = zero.get(metric.name, {})
            now[metric.name] = {key: value for key, value in now[metric.name].items() if value != before.get(key)}
        return Readings(now)


def _values(rank: Rank) -> Values:
    """Return a rank's counts and greatest values; of the distribution of gradient norms their number."""
    readings = readings_of(rank)
    values = {metric.name: dict(readings.of(metric)) for metric in (*_COUNTERS, *_GREATEST)}
    norms = [value for series, value in rank.view.points if series.name == catalog.GRAD_NORM_DISTRIBUTION.name]
    number = sum(sum(value.counts) for value in norms if isinstance(value, Distribution))
    values[catalog.GRAD_NORM_DISTRIBUTION.name] = {(): float(number)}
    return values


def _greatest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _operations(rank: Rank, readings: Readings) -> list[dict[str, Any]]:
    """Return one row for each operation that was done. Greatest values are null until one exceeds that before a clear."""
    rows = []
    for (name,), count in readings.of(catalog.DEBUG_OPERATIONS).items():
        if count:
            row = {
                "operation": name,
                "count": round(count),
                "average_time": (readings.get(catalog.DEBUG_OPERATION_TIME, name) or 0.0) / count,
                "longest_time": readings.get(catalog.DEBUG_OPERATION_LONGEST, name),
                "memory_peak": readings.get(catalog.DEBUG_OPERATION_MEMORY, name, "host"),
                "gpu_memory_peak": readings.get(catalog.DEBUG_OPERATION_MEMORY, name, "device"),
                "anomalies": round(readings.get(catalog.DEBUG_OPERATION_ANOMALIES, name) or 0),
            }
            rows.append({**named(rank), **row})
    return rows


def _counts(readings: Readings) -> Counter[str]:
    """Return a rank's steps and anomalies: of the steps checked by hand, or of all where none was."""
    checked = round(readings.get(catalog.DEBUG_STEPS) or 0)
    kinds = Counter({f"kind {kind}": round(readings.get(catalog.ANOMALIES, kind) or 0) for kind in catalog.ANOMALY_KINDS})
    if checked:
        found = {kind: round(readings.get(catalog.DEBUG_STEP_ANOMALIES, kind) or 0) for kind in catalog.STEP_ANOMALIES}
        anomalous = round(readings.get(catalog.DEBUG_ANOMALY_STEPS) or 0)
        own = {"steps": checked, "measured": checked, "anomalous": anomalous, "most": anomalous, "monitored": 1}
        return kinds + Counter({**found, **own})
    steps, total = round(readings.get(catalog.STEPS) or 0), sum(kinds.values())
    loss = sum(kinds[f"kind {kind}"] for kind in _LOSS_KINDS)
    found = {"loss_anomaly": loss, **{kind: kinds[f"kind {kind}"] for kind in catalog.STEP_ANOMALIES[:2]}}
    least = max(kinds.values(), default=0)
    measured = round((readings.get(catalog.GRAD_NORM_DISTRIBUTION) or 0) + (readings.get(catalog.GRAD_NONFINITE_STEPS) or 0))
    own = {"steps": steps, "measured": measured or steps, "anomalous": least, "most": min(total, steps)}
    return kinds + Counter({**found, **own})


def _summary(counts: Counter[str], source: str) -> dict[str, Any]:
    steps = counts["steps"]
    explosions, vanishing, loss = (counts[kind] for kind in catalog.STEP_ANOMALIES)

    def rate(count: int, of: int = steps) -> float | None:
        return count / of if steps else None

    rates = rate(explosions, counts["measured"]), rate(vanishing, counts["measured"])
    return {
        "total_steps": steps,
        "anomaly_steps": counts["anomalous"],
        "anomaly_steps_most": counts["most"],
        "gradient_explosions": explosions,
        "gradient_vanishing": vanishing,
        "loss_anomalies": loss,
        "anomaly_rate": _greatest((rate(counts["anomalous"]), *rates)),
        "gradient_explosion_rate": rates[0],
        "gradient_vanishing_rate": rates[1],
        "loss_anomaly_rate": rate(loss),
        "anomalies": {kind: counts[f"kind {kind}"] for kind in catalog.ANOMALY_KINDS},
        "source": source,
    }


Schema = dict[str, Any]

_SPECIAL: Schema = {"enum": ["NaN", "Infinity", "-Infinity"]}
_NUMBER: Schema = {"oneOf": [{"type": "number"}, _SPECIAL]}
_MAYBE: Schema = {"oneOf": [{"type": "number"}, {"type": "null"}, _SPECIAL]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_TIME: Schema = {"type": "string", "format": "date-time"}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_INCARNATION: Schema = {"type": "string", "pattern": "^[0-9a-f]{32}$"}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": sorted(properties), "properties": properties, "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_NAMED: dict[str, Schema] = {"rank": _TEXT, "run_id": _TEXT, "job_name": _TEXT, "incarnation": _INCARNATION}
_COMMAND: Schema = {"type": "integer", "minimum": 0, "description": "the command's number: a Unix time in milliseconds"}
_RATE: Schema = {
    "type": ["number", "null"],
    "minimum": 0,
    "description": "share of the steps, of a gradient's of those in which its norm was measured; null before the first",
}
_STEPS: dict[str, Schema] = {
    "total_steps": _COUNT,
    "anomaly_steps": {
        **_COUNT,
        "description": "steps with an anomaly; of recorded ones at least so many, since kinds are counted apart",
    },
    "anomaly_steps_most": {**_COUNT, "description": "and at most so many"},
    **dict.fromkeys(("gradient_explosions", "gradient_vanishing", "loss_anomalies"), _COUNT),
    **dict.fromkeys(("anomaly_rate", "gradient_explosion_rate", "gradient_vanishing_rate", "loss_anomaly_rate"), _RATE),
    "anomalies": _object(**dict.fromkeys(catalog.ANOMALY_KINDS, _COUNT)),
    "source": {
        "enum": ["recorded", "monitored", "mixed"],
        "description": "monitored: of the steps given to torchobs.debug; recorded: of all steps, where none was; mixed: where "
        "that differs between ranks",
    },
}
_OPERATIONS: dict[str, Schema] = {
    **dict.fromkeys(("longest_time", "memory_peak", "gpu_memory_peak"), _MAYBE),
    "anomalies": _COUNT,
}
_LINK = _object(id={"type": "string", "pattern": f"^{EVIDENCE}$"}, href=_TEXT)

SCHEMAS: dict[str, Schema] = {
    "Link": {**_LINK, "description": "where the evidence is as soon as it is there"},
    "Status": _object(
        version=_TEXT,
        mode={"enum": ["sidecar", "node"]},
        ranks=_object(**dict.fromkeys(catalog.RANK_STATES, _COUNT)),
        files=_map(_COUNT),
        problems=_list(_TEXT),
        token={"type": "boolean", "description": "whether a bearer token admits commands"},
    ),
    "Ranks": _object(ranks=_list(_ref("Rank"))),
    "Rank": _object(
        **_NAMED,
        state={"enum": list(catalog.RANK_STATES)},
        up={"type": "boolean"},
        level={"enum": [*LEVELS, "unknown"]},
        phase={"enum": [*LIVE_PHASES, None]},
        started=_TIME,
        last_step={"oneOf": [_TIME, {"type": "null"}]},
        **dict.fromkeys(("progress_age_s", "steps", "loss", "gradient_norm", "learning_rate"), _MAYBE),
        **dict.fromkeys(("tokens", "samples", "total_steps"), _MAYBE),
        stall={"oneOf": [_ref("Stall"), {"type": "null"}]},
    ),
    "Stall": {
        **_object(seconds=_NUMBER, usual_step=_NUMBER, habitual={"type": "boolean"}),
        "description": "that the rank makes no step: seconds since the last, the usual duration of one, and whether it has "
        "paused so before",
    },
    "DebugSummary": _object(
        total_operations=_COUNT,
        average_time={**_MAYBE, "description": "seconds of an operation of torchobs.debug, as the other times"},
        **_OPERATIONS,
        operations=_list(_object(**_NAMED, operation=_TEXT, count=_COUNT, average_time=_NUMBER, **_OPERATIONS)),
        levels=_map(_COUNT),
        anomalies_active=_list(_object(**_NAMED, kind={"enum": list(catalog.ANOMALY_KINDS)})),
        probes_disabled=_list(_object(**_NAMED, probe=_TEXT)),
        evidence=_COUNT,
    ),
    "TrainingSummary": _object(**_STEPS, ranks=_list(_object(**_NAMED, **_STEPS))),
    "Events": _object(events=_list(_ref("Event")), next={**_MAYBE_TEXT, "description": "`before` of the page with older ones"}),
    "Event": _object(
        **_NAMED,
        time=_TIME,
        name=_TEXT,
        severity={"enum": sorted({event.severity.name.lower() for event in catalog.EVENTS})},
        step={"type": ["integer", "null"]},
        attributes={"type": "object"},
        units={**_map(_TEXT), "description": "of the attributes that have one, in UCUM: By, s"},
    ),
    "Steps": _object(**_NAMED, speed={"oneOf": [_ref("Speed"), {"type": "null"}]}, steps=_list(_ref("Step"))),
    "Speed": _object(
        steps_per_s={**_NUMBER, "description": "of the clock, as rate() over the counters has it"},
        tokens_per_s=_MAYBE,
        samples_per_s=_MAYBE,
        steps={**_COUNT, "description": "that this is the speed of"},
        window_s={**_NUMBER, "description": "from the end of the first of them to the end of the last"},
    ),
    "Step": _object(
        step=_COUNT,
        ended=_TIME,
        duration_s=_MAYBE,
        loss={**_MAYBE, "description": "sum over the step's backward passes, or what was logged"},
        losses={**_COUNT, "description": "backward passes that it sums over"},
        gradient_norm=_MAYBE,
        learning_rate=_MAYBE,
        phases_s=_object(**dict.fromkeys(PHASE_NAMES, _NUMBER)),
        tokens=_COUNT,
        samples=_COUNT,
        loss_scale=_NUMBER,
        skipped={"type": "boolean", "description": "whether the loss scaler skipped the optimizer"},
    ),
    "Layers": _object(**_NAMED, layers=_list(_object(layer=_TEXT, values=_map(_NUMBER)))),
    "Scalars": _object(**_NAMED, scalars=_list(_ref("Scalar"))),
    "Scalar": _object(name=_TEXT, points=_list(_object(step=_COUNT, value=_NUMBER))),
    "EvidenceList": _object(evidence=_list(_ref("Evidence"))),
    "Evidence": _object(
        id=_LINK["properties"]["id"],
        href=_TEXT,
        kind={"enum": list(KINDS)},
        rank=_TEXT,
        job_name={**_MAYBE_TEXT, "description": "null: the flight file that it belongs to cannot be read"},
        run_id=_MAYBE_TEXT,
        incarnation=_INCARNATION,
        time=_TIME,
        size_bytes=_COUNT,
        media_type=_TEXT,
    ),
    "LevelSet": _object(level={"enum": list(LEVELS)}, ranks=_list(_ref("Told"))),
    "ProbesSet": _object(off=_list({"enum": list(PROBES)}), ranks=_list(_ref("Told"))),
    "Told": _object(**_NAMED, command=_COMMAND),
    "ProfileAsked": _object(**_NAMED, command=_COMMAND, steps=_COUNT, evidence=_ref("Link")),
    "StacksAsked": _object(ranks=_list(_ref("StacksOf"))),
    "StacksOf": _object(
        **_NAMED,
        command={"oneOf": [_COMMAND, {"type": "null"}]},
        evidence={"oneOf": [_ref("Link"), {"type": "null"}]},
        refused={**_MAYBE_TEXT, "description": "why this rank cannot be asked"},
    ),
    "Cleared": _object(removed=_COUNT, hidden={**_COUNT, "description": "what is not this exporter's to remove"}),
    "Nothing": _object(),
    "StepsWanted": _object(steps={"type": "integer", "minimum": 1, "maximum": MAX_PROFILE_STEPS}),
    "ProbesOff": _object(off=_list({"enum": list(PROBES)})),
    "Problem": _object(type=_TEXT, title=_TEXT, status={"type": "integer"}, detail=_TEXT),
}


class Operation(NamedTuple):
    """One operation: its handler's name, path, summary, responses, parameters and body."""

    name: str
    path: str
    summary: str
    returns: str = ""
    """the schema of its answer; empty: another document"""
    status: int = 200
    query: tuple[tuple[str, Schema], ...] = ()
    body: str = ""
    """the schema of its body; without one it only reads"""
    refusals: tuple[int, ...] = ()

    @property
    def method(self) -> str:
        """The HTTP method; each path has one."""
        return "POST" if self.body else "GET"


def _length(most: int) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": most, "default": DEFAULT_LENGTH}


_RANK_QUERY = (("rank", {"type": "string", "pattern": f"^({RANK})$"}),)
_EVENT_QUERY = (
    *_RANK_QUERY,
    ("kind", {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME}),
    ("limit", _length(MOST_EVENTS)),
    ("before", {"type": "string", "pattern": "^-?[0-9]{1,19}-[0-9a-f]{32}-[0-9]{1,19}$"}),
)


def _of_rank(name: str, summary: str, returns: str, query: tuple[tuple[str, Schema], ...] = ()) -> Operation:
    """Return an operation that reads from one rank's file."""
    return Operation(name, f"/ranks/{{rank}}/{name}", summary, returns, query=query, refusals=(404, 409))


def _command(name: str, path: str, summary: str, returns: str, body: str = "Nothing") -> Operation:
    """Return an operation that asks something of all ranks, or one."""
    return Operation(name, path, summary, returns, 202, _RANK_QUERY, body, refusals=(404, 409, 503))


_CLEAR = "Remove the evidence that there is, and begin both summaries anew. No metric, no event and no state changes."
_DEBUG_SUMMARY = "Operations of torchobs.debug, levels, anomalies that go on, probes that failed."
_TRAINING_SUMMARY = "Steps, anomalies and their rates, per rank and in all."

OPERATIONS = (
    Operation("openapi", "/openapi.json", "This description."),
    Operation("status", "/status", "How the exporter does.", "Status"),
    Operation("ranks", "/ranks", "How every rank does.", "Ranks"),
    _of_rank("steps", "A rank's last steps, oldest first.", "Steps", (("last", _length(MOST_STEPS)),)),
    _of_rank("layers", "A rank's values by layer.", "Layers"),
    _of_rank("scalars", "What a rank logs by name, as curves, oldest first.", "Scalars"),
    Operation("events", "/events", "Events of all ranks, or one, newest first.", "Events", query=_EVENT_QUERY, refusals=(404,)),
    Operation("listEvidence", "/evidence", "Stacks and traces that ranks have left, newest first.", "EvidenceList"),
    Operation("getEvidence", "/evidence/{id}", "One of them, as a file.", refusals=(404, 410)),
    Operation("debugSummary", "/debug/summary", _DEBUG_SUMMARY, "DebugSummary"),
    Operation("trainingSummary", "/debug/training/summary", _TRAINING_SUMMARY, "TrainingSummary"),
    _command("level", "/debug/level/{level}", "Change the debug level of all ranks, or one.", "LevelSet"),
    _command("probes", "/debug/probes", "Have exactly these probes off.", "ProbesSet", "ProbesOff"),
    Operation("clear", "/debug/clear", _CLEAR, "Cleared", body="Nothing"),
    _command("profile", "/profile", "Profile some steps of a rank; the trace is evidence.", "ProfileAsked", "StepsWanted"),
    _command("stacks", "/stacks", "Have all ranks, or one, write down the stacks of their threads.", "StacksAsked"),
)
"""The routes are created from it, and what a request may contain."""

_IN_PATH: dict[str, Schema] = {
    "rank": {"type": "string", "pattern": f"^({RANK})$"},
    "id": {"type": "string", "pattern": f"^{EVIDENCE}$"},
    "level": {"enum": list(LEVELS)},
}
_WHY = {
    400: "A parameter or the body is not allowed.",
    401: "A bearer token is needed.",
    403: "Commands are off here, or the request comes from another site's page.",
    404: "There is no such thing.",
    409: "The rank cannot do that now, or the name fits several.",
    410: "The rank could not write it.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    421: "The Host header names another machine.",
    503: "The control directory cannot be written.",
}
_INTRODUCTION = (
    "What the ranks of one node do, and what they are to do. Reading needs nothing on loopback and on the exporter's Unix "
    "socket; commands are taken over the socket, or with the bearer token of --api.token-file. Times are RFC 3339, other units "
    "stand in the names; a number that is not finite is the text NaN, Infinity or -Infinity. Whatever is refused is problem "
    "JSON (RFC 9457) whose detail says what to do."
)


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "torchobs exporter", "version": __version__, "description": _INTRODUCTION, "license": _LICENSE},
        "servers": [{"url": "/api/v1"}],
        "security": [{}, {"token": []}],
        "paths": {operation.path: {operation.method.lower(): _operation(operation)} for operation in OPERATIONS},
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {str(status): _refusal(why) for status, why in _WHY.items()},
        },
    }


_LICENSE = {"name": "Apache-2.0", "identifier": "Apache-2.0"}


def _operation(operation: Operation) -> dict[str, Any]:
    refusals = {400, 401, 403, 421, *operation.refusals, *((413, 415) if operation.body else ())}
    responses: dict[str, Any] = {str(operation.status): _success(operation)}
    responses |= {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(refusals)}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in _IN_PATH.items()
        if f"{{{name}}}" in operation.path
    ]
    parameters += [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in operation.query]
    body = {"requestBody": {"required": True, "content": _content(_ref(operation.body))}}
    return {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": parameters,
        **(body if operation.body else {}),
        "responses": responses,
    }


def _success(operation: Operation) -> dict[str, Any]:
    if operation.returns:
        return {"description": operation.summary, "content": _content(_ref(operation.returns))}
    if operation.name == "openapi":
        return {"description": operation.summary, "content": _content({"type": "object"})}
    file = {"schema": {"type": "string", "contentEncoding": "binary"}}
    return {"description": operation.summary, "content": {"text/plain": file, "application/gzip": file}}


def _content(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _refusal(why: str) -> dict[str, Any]:
    return {"description": why, "content": {"application/problem+json": {"schema": _ref("Problem")}}}


TEXT = json.dumps(document(), indent=2) + "\n"
"""The document as served, and as in docs/openapi.json."""
