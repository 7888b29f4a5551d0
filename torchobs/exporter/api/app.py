"""The API's handlers: each takes a request and returns the response described in ``openapi``."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from torchobs import catalog
from torchobs._version import __version__
from torchobs.exporter.api import artifact_errors, artifacts, authorization, history, openapi, params, problems, serializers
from torchobs.exporter.api.artifacts import ArtifactStore
from torchobs.exporter.api.commands import CommandService
from torchobs.exporter.api.problems import Problem
from torchobs.flight.format.event_ring import plain
from torchobs.ranks.rank_file import READ_ERRORS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from torchobs.exporter.api.authorization import AccessChannel
    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.snapshot_cache import Scan, SnapshotCache
    from torchobs.flight.reader.reader import FlightFile
    from torchobs.ranks.snapshot import Rank, Snapshot

PREFIX = "/api/v1"
MOST_RINGS = 256
"""Most ranks with events read for one request: a ring takes some milliseconds."""

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Api:
    """One per exporter; every listener has its own :meth:`mounts`."""

    def __init__(self, config: ExporterConfig, watch: SnapshotCache, authenticated: Callable[[], bool] = lambda: False) -> None:
        """``authenticated``: returns True if every request over TCP is authenticated by the web configuration."""
        self._config, self._watch, self._authenticated = config, watch, authenticated
        self._token = authorization.Token(config.api_token_file)
        self._shelf = ArtifactStore(config)
        self._desk = CommandService(config, self._shelf)
        self._thread = ThreadPoolExecutor(1, "api")
        self._handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "status": self._status, "ranks": self._ranks, "debugSummary": self._debug_summary,
            "trainingSummary": self._training_summary, "events": self._events, "steps": self._steps,
            "layers": self._layers, "scalars": self._scalars,
            "listEvidence": self._evidence, "getEvidence": self._download, "level": self._level, "probes": self._probes,
            "clear": self._clear, "profile": self._profile, "stacks": self._stacks, "openapi": self._openapi,
        }  # fmt: skip

    def mounts(self, door: AccessChannel | None = None) -> list[Mount]:
        """Return the API's routes for listeners of that channel; ``None``: TCP, where it is determined per request."""
        routes = []
        for path, methods in openapi.PATHS.items():
            handlers = {method.upper(): self._handlers[operation.name] for method, operation in methods.items()}
            routes.append(Route(path, _guarded(partial(self._answer, door), handlers), methods=sorted(handlers)))
        return [Mount(PREFIX, app=Starlette(routes=routes, exception_handlers={HTTPException: _http_problem}))]

    async def look(self, snapshot: Snapshot) -> None:
        """Do what the ranks' states require: ask hung ranks for their stacks, forget ended ones."""
        if self._desk.due(snapshot):
            await self._run(self._desk.look, snapshot)

    async def evidence(self) -> list[dict[str, Any]]:
        """Return descriptions of the ranks' artifacts, newest first."""
        return await self._run(self._shelf.listing)

    @property
    def failures(self) -> int:
        """Number of commands that could not be written."""
        return self._desk.failures

    def close(self) -> None:
        """Close the directories."""
        self._thread.submit(self._shelf.close)
        self._thread.shutdown(wait=False)

    async def _answer(
        self, own: AccessChannel | None, handlers: dict[str, Callable[[Request], Awaitable[Response]]], request: Request
    ) -> Response:
        method, door = request.method, own or authorization.access_channel(request.scope)
        try:
            refusal = authorization.refusal(method, request.headers, door, self._token, authenticated=self._authenticated())
            if refusal is not None:
                raise refusal
            response = await handlers["GET" if method == "HEAD" else method](request)
        except Problem as problem:
            response = _problem(problem)
        if method not in authorization.READING:
            _audit(request, door, response.status_code)
        return response

    # -- reading -----------------------------------------------------------------------------------------------------------

    async def _openapi(self, request: Request) -> Response:
        params.only(request)
        return Response(openapi.TEXT, media_type="application/json", headers=_HEADERS)

    async def _status(self, request: Request) -> Response:
        params.only(request)
        snapshot = await self._watch.fresh()
        return _json(
            {
                "version": __version__,
                "mode": self._config.mode,
                "ranks": {**dict.fromkeys(catalog.RANK_STATES, 0), **Counter(rank.state for rank in snapshot.ranks)},
                "files": dict(snapshot.files),
                "problems": list(snapshot.problems),
                "token": self._token.there,
            }
        )

    async def _ranks(self, request: Request) -> Response:
        params.only(request)
        return _json({"ranks": [serializers.rank_view(rank) for rank in (await self._watch.fresh()).ranks]})

    async def _debug_summary(self, request: Request) -> Response:
        params.only(request)
        return _json(serializers.debug_summary(await self._watch.fresh(), len(await self._run(self._shelf.listing))))

    async def _training_summary(self, request: Request) -> Response:
        params.only(request)
        return _json(serializers.training_summary(await self._watch.fresh()))

    async def _events(self, request: Request) -> Response:
        params.only(request, ("rank", "kind", "limit", "before"))
        limit, name = params.integer(request, "limit", 100, 1000), params.kind(request)
        cursor = request.query_params.get("before")
        before = None if cursor is None else history.position_of(cursor)
        ranks = params.ranks(await self._watch.fresh(), request.query_params.get("rank"))
        if len(ranks) > MOST_RINGS:
            raise problems.bad(f"There are {len(ranks)} ranks: say which one's events by the query parameter rank.")
        nothing: list[history.Dated] = []
        found = [dated for rank in ranks for dated in await self._read(rank, history.events, nothing)]
        return _json(history.page((one for one in found if name in {None, one.event["name"]}), before, limit))

    async def _steps(self, request: Request) -> Response:
        params.only(request, ("last",))
        last = params.integer(request, "last", 100, history.MOST_STEPS)
        rank = params.one_rank(await self._watch.fresh(), request.path_params["rank"])
        nothing: dict[str, Any] = {"speed": None, "steps": []}
        return _json({**serializers.named(rank), **await self._read(rank, partial(history.steps, last=last), nothing)})

    async def _layers(self, request: Request) -> Response:
        params.only(request)
        rank = params.one_rank(await self._watch.fresh(), request.path_params["rank"])
        return _json({**serializers.named(rank), "layers": serializers.layers(rank)})

    async def _scalars(self, request: Request) -> Response:
        params.only(request)
        rank = params.one_rank(await self._watch.fresh(), request.path_params["rank"])
        nothing: dict[str, Any] = {"scalars": []}
        return _json({**serializers.named(rank), **await self._read(rank, history.logged, nothing)})

    async def _evidence(self, request: Request) -> Response:
        params.only(request)
        return _json({"evidence": await self.evidence()})

    async def _download(self, request: Request) -> Response:
        params.only(request)
        identifier = params.evidence_id(request)
        try:
            found = await self._run(self._shelf.find, identifier)
        except Problem:
            await self._say_why(identifier)
            raise
        headers = {
            **_HEADERS,
            "Content-Length": str(found.size),
            "Content-Disposition": f'attachment; filename="{found.evidence.name}"',
            "Content-Security-Policy": "sandbox",
        }
        return StreamingResponse(artifacts.read(found), headers=headers, media_type=artifacts.media_type(found.evidence))

    async def _say_why(self, identifier: str) -> None:
        """Raise ``Problem`` if the rank asked for that artifact has reported that it could not write it."""
        incarnation = await self._run(self._desk.owner_of, identifier)
        for rank in (await self._watch.fresh()).ranks:
            if rank.incarnation == incarnation:
                said = artifact_errors.find(await self._read(rank, history.events, []), identifier)
                if said is not None:
                    raise artifact_errors.problem(rank.rank, said)

    # -- commands ----------------------------------------------------------------------------------------------------------

    async def _level(self, request: Request) -> Response:
        level = params.level(request)
        await params.body(request)
        return _json(await self._run(self._desk.level, await self._targets(request), level), 202)

    async def _probes(self, request: Request) -> Response:
        mask, off = params.probes(await params.body(request, ("off",)))
        return _json(await self._run(self._desk.probes_off, await self._targets(request), mask, off), 202)

    async def _profile(self, request: Request) -> Response:
        steps = params.steps(await params.body(request, ("steps",)))
        params.only(request, ("rank",))
        rank = params.one_rank(await self._watch.fresh(), request.query_params.get("rank"))
        params.living([rank])
        return _json(await self._run(self._desk.profile, rank, steps), 202)

    async def _stacks(self, request: Request) -> Response:
        await params.body(request)
        return _json(await self._run(self._desk.stacks, await self._targets(request)), 202)

    async def _clear(self, request: Request) -> Response:
        params.only(request)
        await params.body(request)
        removed, hidden = await self._run(self._desk.clear)
        return _json({"removed": removed, "hidden": hidden})

    async def _targets(self, request: Request) -> list[Rank]:
        params.only(request, ("rank",))
        return params.living(params.ranks(await self._watch.fresh(), request.query_params.get("rank")))

    # -- helpers -----------------------------------------------------------------------------------------------------------

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that accesses the file system in the API's own thread, so that it does not block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments))

    async def _read(self, rank: Rank, read: Callable[[FlightFile, Rank], T], otherwise: T) -> T:
        """Read more of a rank's file than a snapshot has; return ``otherwise`` if the file cannot be read."""

        def question(scanner: Scan) -> T:
            try:
                with scanner.flight_file(rank.incarnation) as file:
                    return read(file, rank)
            except READ_ERRORS:
                return otherwise

        return await self._watch.ask(question)


def _guarded(
    answer: Callable[..., Awaitable[Response]], handlers: dict[str, Callable[[Request], Awaitable[Response]]]
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await answer(handlers, request)

    return endpoint


def _json(content: object, status: int = 200) -> Response:
    raw = json.dumps(plain(content), allow_nan=False, separators=(",", ":")).encode()
    return Response(raw, status, media_type="application/json", headers=_HEADERS)


def _problem(problem: Problem) -> Response:
    raw = json.dumps(problem.content(), separators=(",", ":")).encode()
    return Response(raw, problem.status, media_type=problems.MEDIA_TYPE, headers={**_HEADERS, **problem.headers})


async def _http_problem(_: Request, error: Exception) -> Response:
    """Return the router's error, an unknown path or method, as a problem."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(getattr(error, "headers", None) or {})
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"This path takes {headers.get('Allow', headers.get('allow', 'other methods'))}."
        return _problem(Problem(405, "no-such-method", detail, **headers))
    return _problem(Problem(status, "no-such-path", f"See {PREFIX}/openapi.json for what there is."))


def _audit(request: Request, door: AccessChannel, status: int) -> None:
    """Log who changed what. A timestamp makes each line unique; equal lines, such as refusals, are logged once a minute."""
    who = request.client.host if request.client else "a local process"
    rank, path = request.query_params.get("rank", "all")[:40], request.url.path[:100]
    line = f"command {path!r} for rank {rank!r} by {who} over {door}: {status}"
    _log.info(line if status >= HTTPStatus.BAD_REQUEST else f"{line}, at {time.time():.3f}")
