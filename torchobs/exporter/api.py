"""The JSON API ``/api/v1``: its handlers return the responses that ``openapi.json`` describes."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from torchobs import catalog
from torchobs._version import __version__
from torchobs.diagnosis import scalars
from torchobs.diagnosis.event_units import units
from torchobs.diagnosis.rank_report import with_late
from torchobs.exporter import access, api_schema, commands
from torchobs.exporter.access import LET_IN, Problem, bad
from torchobs.exporter.api_schema import LONGEST_NAME, Summaries, instant, named, wall_ns
from torchobs.exporter.commands import ArtifactStore, CommandService
from torchobs.flight.format.event_ring import plain
from torchobs.flight.format.layout import PHASE_NAMES
from torchobs.flight.format.step_record import StepFlag
from torchobs.flight.metrics.throughput import RECORDS, pace, speed
from torchobs.ranks.rank_file import READ_ERRORS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from starlette.requests import Request

    from torchobs.exporter.access import AccessChannel
    from torchobs.exporter.api_schema import Operation
    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.snapshot_cache import Scan, SnapshotCache
    from torchobs.flight.format.step_record import StepRecord
    from torchobs.flight.reader.reader import FlightFile
    from torchobs.ranks.snapshot import Rank, Snapshot


LATE_FACTOR = 3
"""Records read per requested step: the step's own, and those with values that devices delivered later."""

_CURSOR = re.compile(r"(-?[0-9]{1,19})-([0-9a-f]{32})-([0-9]{1,19})")


class Position(NamedTuple):
    """Position of an event in the order of all ranks' events."""

    wall_ns: int
    incarnation: str
    at: int

    def cursor(self) -> str:
        """Return the position as a cursor, with which a client requests older events."""
        return f"{self.wall_ns}-{self.incarnation}-{self.at}"


class Dated(NamedTuple):
    """An event and its position."""

    position: Position
    event: dict[str, Any]


def position_of(cursor: str) -> Position:
    """Return the position that a cursor encodes. Raises ``Problem``."""
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise bad("cursor is none that this API gave: take it from `next` of the page before.")
    return Position(int(match[1]), match[2], int(match[3]))


def dated_events(file: FlightFile, rank: Rank) -> list[Dated]:
    """Return the events in the ring; spans are left out."""
    dated = []
    for at, fields in file.events():
        if fields.get("k") == "event":
            dated.append(_dated(at, fields, fields["name"][:LONGEST_NAME], wall_ns(rank.view.header, fields["t"]), rank))
    return dated


def page(events: Iterable[Dated], before: Position | None, limit: int) -> dict[str, Any]:
    """Return the newest ``limit`` events that are older than ``before``, newest first."""
    older = sorted(
        (one for one in events if before is None or one.position < before), key=lambda one: one.position, reverse=True
    )
    taken = older[:limit]
    more = len(older) > len(taken)
    return {"events": [one.event for one in taken], "next": taken[-1].position.cursor() if more else None}


def steps(file: FlightFile, rank: Rank, last: int) -> dict[str, Any]:
    """Return the last steps, oldest first, with values delivered after their end, and their throughput while it makes steps."""
    records = file.steps(max(last * LATE_FACTOR, RECORDS))
    found = speed(pace(records)) if rank.trains or not rank.up else None
    return {"speed": found, "steps": [_step(parts, rank) for parts in with_late(records)[-last:]]}


def logged(file: FlightFile, _: Rank) -> dict[str, Any]:
    """Return the curves of the scalars that the script logs, by name, oldest point first."""
    curves = scalars.curves(fields for _, fields in file.events())
    return {"scalars": [{"name": name, "points": [point._asdict() for point in points]} for name, points in curves.items()]}


def _dated(at: int, fields: dict[str, Any], name: str, when_ns: int, rank: Rank) -> Dated:
    attributes = fields["attrs"]
    return Dated(
        Position(when_ns, rank.incarnation, at),
        {
            **named(rank),
            "time": instant(when_ns),
            "name": name,
            "severity": catalog.event_severity(name, attributes).name.lower(),
            "step": fields.get("step"),
            "attributes": attributes,
            "units": units(name, attributes),
        },
    )


def _step(parts: Sequence[StepRecord], rank: Rank) -> dict[str, Any]:
    record, flags, loss, norm = parts[0], 0, None, None
    for part in parts:
        loss = part.loss if part.flags & StepFlag.LOSS else loss
        norm = part.grad_norm if part.flags & StepFlag.GRAD_NORM else norm
        flags |= part.flags
    return {
        "step": record.step,
        "ended": instant(wall_ns(rank.view.header, record.end_ns)),
        "duration_s": None if flags & StepFlag.UNTIMED else record.duration_s,
        "loss": loss,
        "losses": record.losses,
        "gradient_norm": norm,
        "learning_rate": record.learning_rate if flags & StepFlag.LEARNING_RATE else None,
        "phases_s": dict(zip(PHASE_NAMES, record.phase_s, strict=True)),
        "tokens": sum(part.tokens for part in parts),
        "samples": sum(part.samples for part in parts),
        "loss_scale": record.norm_scale,
        "skipped": bool(flags & StepFlag.SKIPPED),
    }


PREFIX = "/api/v1"
MOST_RINGS = 256
"""Most ranks with events read for one request: a ring takes some milliseconds."""

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Api:
    """One per exporter; every listener has its own :meth:`mounts`."""

    def __init__(self, config: ExporterConfig, watch: SnapshotCache) -> None:
        self._config, self._watch = config, watch
        self._token = access.Token(config.api_token_file)
        self._artifacts = ArtifactStore(config)
        self.commands = CommandService(config, self._artifacts)
        self._summaries = Summaries()
        self._thread = ThreadPoolExecutor(1, "api")
        self._handlers: dict[str, Callable[[Request], Awaitable[object]]] = {
            "status": self._status, "ranks": self._ranks, "debugSummary": self._debug_summary,
            "trainingSummary": self._training_summary, "events": self._events, "steps": self._steps,
            "layers": self._layers, "scalars": self._scalars,
            "listEvidence": self._evidence, "getEvidence": self._download, "level": self._level, "probes": self._probes,
            "clear": self._clear, "profile": self._profile, "stacks": self._stacks, "openapi": self._openapi,
        }  # fmt: skip

    def mounts(self, channel: AccessChannel | None = None) -> list[Mount]:
        """Return the API's routes for listeners of that channel; ``None``: TCP, where it is determined per request."""
        routes = [Route(one.path, self._endpoint(one, channel), methods=[one.method]) for one in api_schema.OPERATIONS]
        return [Mount(PREFIX, app=Starlette(routes=routes, exception_handlers={HTTPException: _http_problem}))]

    async def look(self, snapshot: Snapshot) -> None:
        """Do what the ranks' states require: ask hung ranks for their stacks, forget ended ones."""
        if self.commands.due(snapshot):
            await self._run(self.commands.look, snapshot)

    async def evidence(self) -> list[dict[str, Any]]:
        """Return descriptions of the ranks' artifacts, newest first."""
        return await self._run(self._artifacts.listing)

    def close(self) -> None:
        """Close the directories."""
        self._thread.submit(self._artifacts.close)
        self._thread.shutdown(wait=False)

    def _endpoint(self, operation: Operation, own: AccessChannel | None) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            channel = own or access.access_channel(request.scope)
            try:
                response = await self._answer(operation, request, channel)
            except Problem as problem:
                response = _problem(problem)
            if request.method not in access.READING:
                _audit(request, channel, response.status_code)
            return response

        return endpoint

    async def _answer(self, operation: Operation, request: Request, channel: AccessChannel) -> Response:
        """Return the answer to a request that is allowed and as described. Raises ``Problem``."""
        known = bool(request.scope.get(LET_IN))
        refusal = access.refusal(request.method, request.headers, channel, self._token, authenticated=known)
        if refusal is not None:
            raise refusal
        api_schema.only(request, [name for name, _ in operation.query])
        if operation.body:
            request.state.body = await api_schema.body(request, api_schema.SCHEMAS[operation.body]["required"])
        content = await self._handlers[operation.name](request)
        return content if isinstance(content, Response) else _json(content, operation.status)

    # -- reading -----------------------------------------------------------------------------------------------------------

    async def _openapi(self, _: Request) -> Response:
        return Response(api_schema.TEXT, media_type="application/json", headers=_HEADERS)

    async def _status(self, _: Request) -> object:
        snapshot = await self._watch.fresh()
        return {
            "version": __version__,
            "mode": self._config.mode,
            "ranks": {**dict.fromkeys(catalog.RANK_STATES, 0), **Counter(rank.state for rank in snapshot.ranks)},
            "files": dict(snapshot.files),
            "problems": list(snapshot.problems),
            "token": self._token.is_configured,
        }

    async def _ranks(self, _: Request) -> object:
        return {"ranks": [api_schema.rank_view(rank) for rank in (await self._watch.fresh()).ranks]}

    async def _debug_summary(self, _: Request) -> object:
        return self._summaries.debug(await self._watch.fresh(), len(await self.evidence()))

    async def _training_summary(self, _: Request) -> object:
        return self._summaries.training(await self._watch.fresh())

    async def _events(self, request: Request) -> object:
        limit, kind = api_schema.length(request, "limit", api_schema.MOST_EVENTS), api_schema.kind(request)
        cursor = request.query_params.get("before")
        before = None if cursor is None else position_of(cursor)
        ranks = api_schema.ranks(await self._watch.fresh(), request.query_params.get("rank"))
        if len(ranks) > MOST_RINGS:
            raise access.bad(f"There are {len(ranks)} ranks: say which one's events by the query parameter rank.")
        nothing: list[Dated] = []
        events = [one for rank in ranks for one in await self._read(rank, dated_events, nothing)]
        return page((one for one in events if kind in {None, one.event["name"]}), before, limit)

    async def _steps(self, request: Request) -> object:
        last = api_schema.length(request, "last", api_schema.MOST_STEPS)
        return await self._history(request, partial(steps, last=last), {"speed": None, "steps": []})

    async def _scalars(self, request: Request) -> object:
        return await self._history(request, logged, {"scalars": []})

    async def _layers(self, request: Request) -> object:
        rank = await self._rank(request)
        return {**api_schema.named(rank), "layers": api_schema.layers(rank)}

    async def _evidence(self, _: Request) -> object:
        return {"evidence": await self.evidence()}

    async def _download(self, request: Request) -> Response:
        identifier = api_schema.evidence_id(request)
        try:
            stored = await self._run(self._artifacts.find, identifier)
        except Problem:
            await self._check_failure(identifier)
            raise
        headers = {
            **_HEADERS,
            "Content-Length": str(stored.size),
            "Content-Disposition": f'attachment; filename="{stored.evidence.name}"',
            "Content-Security-Policy": "sandbox",
        }
        return StreamingResponse(commands.read(stored), headers=headers, media_type=commands.media_type(stored.evidence))

    async def _check_failure(self, identifier: str) -> None:
        """Raise ``Problem`` if the rank asked for that artifact has reported that it could not write it."""
        incarnation = await self._run(self.commands.owner_of, identifier)
        for rank in (await self._watch.fresh()).ranks:
            if rank.incarnation == incarnation:
                failure = commands.failure(await self._read(rank, dated_events, []), identifier)
                if failure is not None:
                    raise commands.failure_problem(rank.rank, failure)

    # -- commands ----------------------------------------------------------------------------------------------------------

    async def _level(self, request: Request) -> object:
        level = api_schema.level(request)
        return await self._run(self.commands.level, await self._targets(request), level)

    async def _probes(self, request: Request) -> object:
        mask, off = api_schema.probes(request.state.body)
        return await self._run(self.commands.probes_off, await self._targets(request), mask, off)

    async def _profile(self, request: Request) -> object:
        steps = api_schema.steps(request.state.body)
        rank = api_schema.one_rank(await self._watch.fresh(), request.query_params.get("rank"))
        api_schema.living([rank])
        return await self._run(self.commands.profile, rank, steps)

    async def _stacks(self, request: Request) -> object:
        return await self._run(self.commands.stacks, await self._targets(request))

    async def _clear(self, _: Request) -> object:
        self._summaries.clear(await self._watch.fresh())
        removed, hidden = await self._run(self.commands.clear)
        return {"removed": removed, "hidden": hidden}

    # -- helpers -----------------------------------------------------------------------------------------------------------

    async def _targets(self, request: Request) -> list[Rank]:
        return api_schema.living(api_schema.ranks(await self._watch.fresh(), request.query_params.get("rank")))

    async def _rank(self, request: Request) -> Rank:
        return api_schema.one_rank(await self._watch.fresh(), request.path_params["rank"])

    async def _history(
        self, request: Request, read: Callable[[FlightFile, Rank], dict[str, Any]], otherwise: dict[str, Any]
    ) -> object:
        rank = await self._rank(request)
        return {**api_schema.named(rank), **await self._read(rank, read, otherwise)}

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that accesses the file system in the API's own thread, so that it does not block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments))

    async def _read(self, rank: Rank, read: Callable[[FlightFile, Rank], T], otherwise: T) -> T:
        """Read more of a rank's file than a snapshot has; return ``otherwise`` if the file cannot be read."""

        def ask(scanner: Scan) -> T:
            try:
                with scanner.flight_file(rank.incarnation) as file:
                    return read(file, rank)
            except READ_ERRORS:
                return otherwise

        return await self._watch.ask(ask)


def _json(content: object, status: int, media_type: str = "application/json", **more: str) -> Response:
    raw = json.dumps(plain(content), allow_nan=False, separators=(",", ":")).encode()
    return Response(raw, status, media_type=media_type, headers={**_HEADERS, **more})


def _problem(problem: Problem) -> Response:
    return _json(problem.content(), problem.status, access.MEDIA_TYPE, **problem.headers)


async def _http_problem(_: Request, error: Exception) -> Response:
    """Return the router's error, an unknown path or method, as a problem."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"This path takes {headers.get('Allow', headers.get('allow', 'other methods'))}."
        return _problem(Problem(405, "no-such-method", detail, **headers))
    return _problem(Problem(status, "no-such-path", f"See {PREFIX}/openapi.json for what there is."))


def _audit(request: Request, channel: AccessChannel, status: int) -> None:
    """Log who changed what. A timestamp makes each line unique; equal lines, such as refusals, are logged once a minute."""
    who = request.client.host if request.client else "a local process"
    rank, path = request.query_params.get("rank", "all")[:40], request.url.path[:100]
    line = f"command {path!r} for rank {rank!r} by {who} over {channel}: {status}"
    _log.info(line if status >= HTTPStatus.BAD_REQUEST else f"{line}, at {time.time():.3f}")
