"""OpenAPI 3.1 description of the API. The routes are created from it, and ``docs/openapi.json`` is a copy."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs._version import __version__
from torchobs.config.settings import PROBES
from torchobs.exporter.api.history import LONGEST_NAME, MOST_EVENTS, MOST_STEPS
from torchobs.exporter.api.params import DEFAULT_LENGTH, EVIDENCE, RANK
from torchobs.flight.files.artifacts import KINDS
from torchobs.flight.files.control import LEVELS, MAX_PROFILE_STEPS
from torchobs.flight.format.layout import LIVE_PHASES, PHASE_NAMES

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
