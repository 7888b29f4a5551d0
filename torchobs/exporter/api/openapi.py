"""OpenAPI 3.1 description of the API. The routes are created from it, and ``docs/openapi.json`` is a copy."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from torchobs import catalog
from torchobs._version import __version__
from torchobs.config.settings import PROBES
from torchobs.exporter.api.history import LONGEST_NAME
from torchobs.exporter.api.params import EVIDENCE, RANK
from torchobs.flight.files.artifacts import KINDS
from torchobs.flight.files.control import LEVELS, MAX_PROFILE_STEPS
from torchobs.flight.format.step_record import LIVE_PHASES, PHASE_NAMES

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
_RATED = _object(count=_COUNT, per_step={"type": ["number", "null"], "minimum": 0})
_VERDICTS: dict[str, Schema] = {
    "steps": _COUNT,
    "anomalies": _object(**dict.fromkeys(catalog.ANOMALY_KINDS, _ref("Rated"))),
    "anomaly_steps": _object(least=_COUNT, most=_COUNT),
    "explosions": _ref("Rated"),
    "vanishing": _ref("Rated"),
    "loss_anomalies": _ref("Rated"),
}
_LINK = _object(id={"type": "string", "pattern": f"^{EVIDENCE}$"}, href=_TEXT)

SCHEMAS: dict[str, Schema] = {
    "Rated": {**_RATED, "description": "how often, and how often a step; null before the first"},
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
        progress_age_s=_MAYBE,
        steps=_MAYBE,
        loss=_MAYBE,
        gradient_norm=_MAYBE,
        learning_rate=_MAYBE,
        tokens=_MAYBE,
        samples=_MAYBE,
        total_steps=_MAYBE,
    ),
    "DebugSummary": _object(
        levels=_map(_COUNT),
        anomalies_active=_list(_object(**_NAMED, kind={"enum": list(catalog.ANOMALY_KINDS)})),
        probes_disabled=_list(_object(**_NAMED, probe=_TEXT)),
        evidence=_COUNT,
    ),
    "TrainingSummary": _object(**_VERDICTS, ranks=_list(_object(**_NAMED, **_VERDICTS))),
    "Events": _object(events=_list(_ref("Event")), next={**_MAYBE_TEXT, "description": "`before` of the page with older ones"}),
    "Event": _object(
        **_NAMED,
        time=_TIME,
        name=_TEXT,
        severity={"enum": sorted({event.severity.name.lower() for event in catalog.EVENTS})},
        step={"type": ["integer", "null"]},
        attributes={"type": "object"},
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
    """One operation: its handler's name, summary, responses, parameters and body."""

    name: str
    summary: str
    returns: str
    status: int = 200
    query: tuple[tuple[str, Schema], ...] = ()
    body: str = ""
    refusals: tuple[int, ...] = ()


def _whole(most: int, default: int) -> Schema:
    return {"type": "integer", "minimum": 1, "maximum": most, "default": default}


_RANK_QUERY = (("rank", {"type": "string", "pattern": f"^({RANK})$"}),)
_EVENT_QUERY = (
    *_RANK_QUERY,
    ("kind", {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME}),
    ("limit", _whole(1000, 100)),
    ("before", {"type": "string", "pattern": "^-?[0-9]{1,19}-[0-9a-f]{32}-[0-9]{1,19}$"}),
)
_TOLD = (404, 409, 503)

PATHS: dict[str, dict[str, Operation]] = {
    "/openapi.json": {"get": Operation("openapi", "This description.", "")},
    "/status": {"get": Operation("status", "How the exporter does.", "Status")},
    "/ranks": {"get": Operation("ranks", "How every rank does.", "Ranks")},
    "/ranks/{rank}/steps": {
        "get": Operation(
            "steps", "A rank's last steps, oldest first.", "Steps", query=(("last", _whole(4096, 100)),), refusals=(404, 409)
        )
    },
    "/ranks/{rank}/layers": {"get": Operation("layers", "A rank's values by layer.", "Layers", refusals=(404, 409))},
    "/ranks/{rank}/scalars": {
        "get": Operation("scalars", "What a rank logs by name, as curves, oldest first.", "Scalars", refusals=(404, 409))
    },
    "/events": {
        "get": Operation("events", "Events of all ranks, or one, newest first.", "Events", query=_EVENT_QUERY, refusals=(404,))
    },
    "/evidence": {"get": Operation("listEvidence", "Stacks and traces that ranks have left, newest first.", "EvidenceList")},
    "/evidence/{id}": {"get": Operation("getEvidence", "One of them, as a file.", "", refusals=(404, 410))},
    "/debug/summary": {"get": Operation("debugSummary", "Levels, anomalies that go on, probes that failed.", "DebugSummary")},
    "/debug/training/summary": {
        "get": Operation("trainingSummary", "Steps, anomalies and their rates, per rank and in all.", "TrainingSummary")
    },
    "/debug/level/{level}": {
        "post": Operation(
            "level", "Change the debug level of all ranks, or one.", "LevelSet", 202, _RANK_QUERY, "Nothing", _TOLD
        )
    },
    "/debug/probes": {
        "post": Operation("probes", "Have exactly these probes off.", "ProbesSet", 202, _RANK_QUERY, "ProbesOff", _TOLD)
    },
    "/debug/clear": {
        "post": Operation(
            "clear", "Remove the evidence that there is. No counter, no event and no state changes.", "Cleared", body="Nothing"
        )
    },
    "/profile": {
        "post": Operation(
            "profile",
            "Profile some steps of a rank; the trace is evidence.",
            "ProfileAsked",
            202,
            _RANK_QUERY,
            "StepsWanted",
            _TOLD,
        )
    },
    "/stacks": {
        "post": Operation(
            "stacks",
            "Have all ranks, or one, write down the stacks of their threads.",
            "StacksAsked",
            202,
            _RANK_QUERY,
            "Nothing",
            _TOLD,
        )
    },
}

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
        "paths": {
            path: {method: _operation(path, method, operation) for method, operation in methods.items()}
            for path, methods in PATHS.items()
        },
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "responses": {str(status): _refusal(why) for status, why in _WHY.items()},
        },
    }


_LICENSE = {"name": "Apache-2.0", "identifier": "Apache-2.0"}


def _operation(path: str, method: str, operation: Operation) -> dict[str, Any]:
    refusals = {400, 401, 403, 421, *operation.refusals, *((413, 415) if method == "post" else ())}
    responses: dict[str, Any] = {str(operation.status): _success(operation)}
    responses |= {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(refusals)}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name, schema in _IN_PATH.items()
        if f"{{{name}}}" in path
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
