"""Requests and responses of the API: objects as msgspec structs, operations, and the OpenAPI document made of both.

Units are in the names; a number that is not finite is a text (``"NaN"``).
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from torchobs import catalog
from torchobs._version import __version__
from torchobs.config.settings import PROBES
from torchobs.detect.action import ACTIONS, TABLE
from torchobs.exporter.access import Problem, bad
from torchobs.flight.artifacts import KINDS
from torchobs.flight.control import LEVELS, MAX_PROFILE_STEPS
from torchobs.flight.layout import LIVE_PHASES, PHASE_NAMES

if TYPE_CHECKING:
    from starlette.requests import Request

    from torchobs.ranks import snapshot

MOST_STEPS = 4096
MOST_EVENTS = 1000
MOST_BODY = 64 * 1024
DEFAULT_LENGTH = 100
LONGEST_NAME = 256
"""Longest event name returned, in characters; an application's events may have any name."""
RANK = r"[0-9]{1,9}(-g[0-9]{1,10})?(-[0-9a-f]{8})?|[0-9a-f]{32}"
"""Pattern of a rank's label, or of an incarnation."""
_LEVELS = (*LEVELS, "unknown")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LATEST_NS = 253_402_300_799 * 1_000_000_000  # the year 9999

# -- objects -----------------------------------------------------------------------------------------------------------------


Answer = Any
"""One of the structs below, which are made from tables: a type checker does not know their fields"""


Dated = tuple[tuple[int, str, int], Answer]
"""An event, after its place among all ranks' events (Unix ns, incarnation, position in its file): a page's cursor"""


def _object(name: str, /, **fields: Any) -> Any:
    """Return a struct; ``fields``: the type of each."""
    return msgspec.defstruct(name, [*fields.items()], frozen=True, forbid_unknown_fields=True)


def _uniform(name: str, fields: tuple[str, ...], kind: Any) -> Any:
    """Return a struct with fields of one type."""
    return _object(name, **dict.fromkeys(fields, kind))


def _as(kind: Any, description: str = "", **more: Any) -> Any:
    """Return a type with a description, or with bounds (``msgspec.Meta``)."""
    return Annotated[kind, Meta(description=description or None, **more)]


def _list(items: Any) -> Any:
    return list.__class_getitem__(items)


def _map(values: Any) -> Any:
    return dict.__class_getitem__((str, values))


_enum: Any = Literal

_NUMBER: Any = float | Literal["NaN", "Infinity", "-Infinity"]
_MAYBE, _MAYBE_TEXT = _NUMBER | None, _as(str) | None
_COUNT, _TIME = _as(int, ge=0), _as(str, extra_json_schema={"format": "date-time"})
_INCARNATION, _EVIDENCE_ID = _as(str, pattern="^[0-9a-f]{32}$"), _as(str, pattern="^[0-9a-f]{16}$")
_COMMAND = _as(int, "the command's number: a Unix time in milliseconds", ge=0)
_RATE = _as(
    _as(float, ge=0) | None,
    "share of the steps, of a gradient's of those in which its norm was measured; null before the first",
)
_LEVEL, _KIND, _PROBES = _enum[LEVELS], _enum[catalog.ANOMALY_KINDS], _list(_enum[PROBES])

AnomalyCounts = _uniform("AnomalyCounts", catalog.ANOMALY_KINDS, _COUNT)
RankCounts = _uniform("RankCounts", catalog.RANK_STATES, _COUNT)
PhaseSeconds = _uniform("PhaseSeconds", PHASE_NAMES, _NUMBER)
_IDENTITY = {"rank": str, "run_id": str, "job_name": str, "incarnation": _INCARNATION}
PEAKS = ("maximum_s", "memory_peak_bytes", "gpu_memory_peak_bytes")
_GREATEST = {**dict.fromkeys(PEAKS, _MAYBE), "with_problems": _COUNT}
_STEP_COUNTS = {
    "total_steps": _COUNT,
    "anomaly_steps": _as(int, "steps with an anomaly; of recorded ones at least so many, since kinds are counted apart", ge=0),
    "anomaly_steps_most": _as(int, "and at most so many", ge=0),
    **dict.fromkeys(("gradient_explosions", "gradient_vanishing", "loss_anomalies"), _COUNT),
    **dict.fromkeys(("anomaly_rate", "gradient_explosion_rate", "gradient_vanishing_rate", "loss_anomaly_rate"), _RATE),
    "anomalies": AnomalyCounts,
    "source": _as(
        _enum["recorded", "monitored", "mixed"],
        "monitored: of the steps given to torchobs.debug; recorded: of all steps, where none was; mixed: where that differs "
        "between ranks",
    ),
}
Link = _object("Link", id=_as(_EVIDENCE_ID, "where the evidence is as soon as it is there"), href=str)
Told = _object("Told", **_IDENTITY, command=_COMMAND)
Stall = _object(
    "Stall",
    seconds=_as(_NUMBER, "since the last step of a rank that makes none"),
    usual_step=_as(_NUMBER, "the usual duration of one"),
    habitual=_as(bool, "whether it has paused so before"),
)
Rank = _object(
    "Rank",
    **_IDENTITY,
    state=_enum[catalog.RANK_STATES],
    up=bool,
    level=_enum[_LEVELS],
    phase=_enum[LIVE_PHASES] | None,
    started=_TIME,
    last_step=_TIME | None,
    **dict.fromkeys(("progress_age_s", "steps", "loss", "gradient_norm", "learning_rate"), _MAYBE),
    **dict.fromkeys(("tokens", "samples", "total_steps"), _MAYBE),
    stall=Stall | None,
)
Event = _object(
    "Event",
    **_IDENTITY,
    time=_TIME,
    name=str,
    severity=_enum[tuple({event.severity.name.lower() for event in catalog.EVENTS})],
    step=int | None,
    attributes=dict,
    units=_as(_map(str), "of the attributes that have one, in UCUM: By, s"),
)
Speed = _object(
    "Speed",
    steps_per_s=_as(_NUMBER, "of the clock, as rate() over the counters has it"),
    tokens_per_s=_MAYBE,
    samples_per_s=_MAYBE,
    steps=_as(int, "that this is the speed of", ge=0),
    window_s=_as(_NUMBER, "from the end of the first of them to the end of the last"),
)
Step = _object(
    "Step",
    step=_COUNT,
    ended=_TIME,
    duration_s=_MAYBE,
    loss=_as(_MAYBE, "sum over the step's backward passes, or what was logged"),
    losses=_as(int, "backward passes that it sums over", ge=0),
    gradient_norm=_MAYBE,
    learning_rate=_MAYBE,
    phases_s=PhaseSeconds,
    tokens=_COUNT,
    samples=_COUNT,
    loss_scale=_NUMBER,
    skipped=_as(bool, "whether the loss scaler skipped the optimizer"),
)
Evidence = _object(
    "Evidence",
    id=_EVIDENCE_ID,
    href=str,
    kind=_enum[KINDS],
    rank=str,
    job_name=_as(_MAYBE_TEXT, "null: the flight file that it belongs to cannot be read"),
    run_id=_MAYBE_TEXT,
    incarnation=_INCARNATION,
    time=_TIME,
    size_bytes=_COUNT,
    media_type=str,
)
StacksOf = _object(
    "StacksOf",
    **_IDENTITY,
    command=_COMMAND | None,
    evidence=Link | None,
    refused=_as(_MAYBE_TEXT, "why this rank cannot be asked"),
)
DebugOperation = _object("DebugOperation", **_IDENTITY, operation=str, count=_COUNT, mean_s=_NUMBER, **_GREATEST)
Point = _object("Point", step=_COUNT, value=_NUMBER)

Status = _object(
    "Status",
    version=str,
    mode=_enum["sidecar", "node"],
    ranks=RankCounts,
    files=_map(_COUNT),
    problems=_list(str),
    token=_as(bool, "whether a bearer token admits commands"),
)
Proof = _uniform("Proof", ("rank", "host", "text"), str)
EndedRun = _object(
    "EndedRun",
    job_name=str,
    run_id=str,
    action=_as(_enum[ACTIONS], "what to do about it"),
    cause=_as(_enum[tuple(row.cause for row in TABLE)], "why; docs/diagnosis.md has the table"),
    reason=_as(str, "the same in words"),
    evidence=_list(Proof),
)
Ranks = _object("Ranks", ranks=_list(Rank), ended=_as(_list(EndedRun), "runs without a living rank"))
Steps = _object("Steps", **_IDENTITY, speed=Speed | None, steps=_list(Step))
Layer = _object("Layer", layer=str, values=_map(_NUMBER))
Layers = _object("Layers", **_IDENTITY, layers=_list(Layer))
Scalar = _object("Scalar", name=str, points=_list(Point))
Scalars = _object("Scalars", **_IDENTITY, scalars=_list(Scalar))
Events = _object("Events", events=_list(Event), next=_as(_MAYBE_TEXT, "`before` of the page with older ones"))
EvidenceList = _object("EvidenceList", evidence=_list(Evidence))
ActiveAnomaly = _object("ActiveAnomaly", **_IDENTITY, kind=_KIND)
DisabledProbe = _object("DisabledProbe", **_IDENTITY, probe=str)
DebugSummary = _object(
    "DebugSummary",
    total_operations=_COUNT,
    mean_s=_as(_MAYBE, "seconds of an operation of torchobs.debug"),
    **_GREATEST,
    operations=_list(DebugOperation),
    levels=_map(_COUNT),
    anomalies_active=_list(ActiveAnomaly),
    probes_disabled=_list(DisabledProbe),
    evidence=_COUNT,
)
RankTraining = _object("RankTraining", **_IDENTITY, **_STEP_COUNTS)
TrainingSummary = _object("TrainingSummary", **_STEP_COUNTS, ranks=_list(RankTraining))
LevelSet = _object("LevelSet", level=_LEVEL, ranks=_list(Told))
ProbesSet = _object("ProbesSet", off=_PROBES, ranks=_list(Told))
ProfileAsked = _object("ProfileAsked", **_IDENTITY, command=_COMMAND, steps=_COUNT, evidence=Link)
StacksAsked = _object("StacksAsked", ranks=_list(StacksOf))
Cleared = _object("Cleared", removed=_COUNT, hidden=_as(int, "what is not this exporter's to remove", ge=0))

Nothing = _object("Nothing")
StepsWanted = _object("StepsWanted", steps=_as(int, ge=1, le=MAX_PROFILE_STEPS))
ProbesOff = _object("ProbesOff", off=_PROBES)


def instant(wall_ns: int) -> str:
    """Return a Unix time in nanoseconds in RFC 3339 format, to the microsecond, clamped to the years it can express."""
    clipped_ns = min(max(wall_ns, 0), _LATEST_NS)
    return (_EPOCH + timedelta(microseconds=clipped_ns // 1000)).isoformat(timespec="microseconds").replace("+00:00", "Z")


def named(rank: snapshot.Rank) -> dict[str, Any]:
    """Return a rank's identity."""
    return {"rank": rank.rank, "run_id": rank.run_id, "job_name": rank.job_name, "incarnation": rank.incarnation}


# -- operations and their parameters -----------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """One operation: its handler's name, path, summary, responses, parameters and body."""

    name: str
    path: str
    summary: str
    returns: Any = None
    """the struct of its answer; None: another document"""
    status: int = 200
    query: tuple[str, ...] = ()
    body: Any = None
    """the struct of its body; without one it only reads"""
    refusals: tuple[int, ...] = ()

    @property
    def method(self) -> str:
        """The HTTP method; each path has one."""
        return "POST" if self.body else "GET"


_RANK_NAME = _as(str, pattern=f"^({RANK})$")
_IN_PATH = {"rank": _RANK_NAME, "id": _EVIDENCE_ID, "level": _LEVEL}
_IN_QUERY = {
    "rank": _RANK_NAME,
    "kind": _as(str, min_length=1, max_length=LONGEST_NAME),
    "limit": _as(int, ge=1, le=MOST_EVENTS, extra_json_schema={"default": DEFAULT_LENGTH}),
    "last": _as(int, ge=1, le=MOST_STEPS, extra_json_schema={"default": DEFAULT_LENGTH}),
    "before": _as(str, pattern="^-?[0-9]{1,19}-[0-9a-f]{32}-[0-9]{1,19}$"),
}


def _of_rank(name: str, summary: str, returns: Any, *query: str) -> Operation:
    """Return an operation that reads from one rank's file."""
    return Operation(name, f"/ranks/{{rank}}/{name}", summary, returns, query=query, refusals=(404, 409))


def _command(name: str, path: str, summary: str, returns: Any, body: Any = Nothing) -> Operation:
    """Return an operation that asks something of all ranks, or one."""
    return Operation(name, path, summary, returns, 202, ("rank",), body, refusals=(404, 409, 503))


_CLEAR = "Remove the evidence that there is. No metric, no event and no state changes."
_DEBUG_SUMMARY = "Operations of torchobs.debug, levels, anomalies that go on, probes that failed."
_TRAINING_SUMMARY = "Steps, anomalies and their rates, per rank and in all."
_EVENTS = "Events of all ranks, or one, newest first."

OPERATIONS = (
    Operation("openapi", "/openapi.json", "This description."),
    Operation("status", "/status", "How the exporter does.", Status),
    Operation("ranks", "/ranks", "How every rank does.", Ranks),
    _of_rank("steps", "A rank's last steps, oldest first.", Steps, "last"),
    _of_rank("layers", "A rank's values by layer.", Layers),
    _of_rank("scalars", "What a rank logs by name, as curves, oldest first.", Scalars),
    Operation("events", "/events", _EVENTS, Events, query=("rank", "kind", "limit", "before"), refusals=(404,)),
    Operation("listEvidence", "/evidence", "Stacks and traces that ranks have left, newest first.", EvidenceList),
    Operation("getEvidence", "/evidence/{id}", "One of them, as a file.", refusals=(404, 410)),
    Operation("debugSummary", "/debug/summary", _DEBUG_SUMMARY, DebugSummary),
    Operation("trainingSummary", "/debug/training/summary", _TRAINING_SUMMARY, TrainingSummary),
    _command("level", "/debug/level/{level}", "Change the debug level of all ranks, or one.", LevelSet),
    _command("probes", "/debug/probes", "Have exactly these probes off.", ProbesSet, ProbesOff),
    Operation("clear", "/debug/clear", _CLEAR, Cleared, body=Nothing),
    _command("profile", "/profile", "Profile some steps of a rank; the trace is evidence.", ProfileAsked, StepsWanted),
    _command("stacks", "/stacks", "Have all ranks, or one, write down the stacks of their threads.", StacksAsked),
)
"""All operations: routes and the valid requests come from this table."""


def query(request: Request, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the query parameters. Raises ``Problem`` for invalid, unknown and duplicate ones."""
    values: dict[str, Any] = {}
    for name, text in request.query_params.multi_items():
        if name not in names:
            raise bad(f"There is no query parameter {name[:64]!r} here; there is {', '.join(sorted(names)) or 'none'}.")
        if name in values:
            raise bad(f"The query parameter {name} is given twice.")
        kind = str if name == "rank" else _IN_QUERY[name]  # there is no rank of an invalid name, which the answer says
        try:
            values[name] = msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError as error:
            raise bad(f"The query parameter {name}: {error}.") from None
    return values


async def body(request: Request, wanted: Any) -> Any:
    """Return the body of a request as the struct ``wanted``."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MOST_BODY:
            raise Problem(413, "too-large", f"The body may have {MOST_BODY} bytes.")
    try:
        return msgspec.convert(json.loads(raw.decode(), parse_float=_number), wanted)
    except (ValueError, RecursionError) as error:
        raise bad(f"The body is a JSON object, {{}} if there is nothing to say: {str(error)[:200]}.") from None


def _number(text: str) -> float:
    """Return a number; 3.0 is an integer in JSON."""
    value = float(text)
    return int(value) if value.is_integer() else value


# -- the document ------------------------------------------------------------------------------------------------------------

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
    "JSON (RFC 9457); its detail says what to do."
)


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    problem = _object("Problem", type=str, title=str, status=int, detail=str)
    structs = [struct for operation in OPERATIONS for struct in (operation.returns, operation.body) if struct] + [problem]
    references, schemas = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    by_struct = {None: {"type": "object"}, **dict(zip(structs, references, strict=True))}
    refused = {"application/problem+json": {"schema": by_struct[problem]}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "torchobs exporter",
            "version": __version__,
            "description": _INTRODUCTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/api/v1"}],
        "security": [{}, {"token": []}],
        "paths": {operation.path: {operation.method.lower(): _operation(operation, by_struct)} for operation in OPERATIONS},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {str(status): {"description": why, "content": refused} for status, why in _WHY.items()},
        },
    }


def _operation(operation: Operation, schemas: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": schemas[operation.returns]}}
    if operation.name == "getEvidence":
        file = {"schema": {"type": "string", "contentEncoding": "binary"}}
        content = {"text/plain": file, "application/gzip": file}
    refusals = sorted({400, 401, 403, 421, *operation.refusals, *((413, 415) if operation.body else ())})
    in_path = [_parameter(name, "path", kind) for name, kind in _IN_PATH.items() if f"{{{name}}}" in operation.path]
    body = {"required": True, "content": {"application/json": {"schema": schemas[operation.body]}}}
    return {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": in_path + [_parameter(name, "query", _IN_QUERY[name]) for name in operation.query],
        **({"requestBody": body} if operation.body else {}),
        "responses": {
            str(operation.status): {"description": operation.summary, "content": content},
            **{str(status): {"$ref": f"#/components/responses/{status}"} for status in refusals},
        },
    }


def _parameter(name: str, place: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": msgspec.json.schema(kind)}


@cache
def text() -> str:
    """Return the document as served, and as in docs/openapi.json."""
    return json.dumps(document(), indent=2) + "\n"
