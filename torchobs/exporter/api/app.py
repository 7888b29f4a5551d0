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
from torchobs.exporter.access import LET_IN
from torchobs.exporter.api import artifacts, authorization, history, openapi, params, problems, serializers
from torchobs.exporter.api.artifacts import ArtifactStore
from torchobs.exporter.api.commands import CommandService
from torchobs.exporter.api.problems import Problem
from torchobs.exporter.api.summaries import Summaries
from torchobs.flight.format.event_ring import plain
from torchobs.ranks.rank_file import READ_ERRORS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from torchobs.exporter.api.authorization import AccessChannel
    from torchobs.exporter.api.openapi import Operation
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

    def __init__(self, config: ExporterConfig, watch: SnapshotCache) -> None:
        self._config, self._watch = config, watch
        self._token = authorization.Token(config.api_token_file)
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
        routes = [Route(one.path, self._endpoint(one, channel), methods=[one.method]) for one in openapi.OPERATIONS]
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
            channel = own or authorization.access_channel(request.scope)
            try:
                response = await self._answer(operation, request, channel)
            except Problem as problem:
                response = _problem(problem)
            if request.method not in authorization.READING:
                _audit(request, channel, response.status_code)
            return response

        return endpoint

    async def _answer(self, operation: Operation, request: Request, channel: AccessChannel) -> Response:
        """Return the answer to a request that is allowed and as described. Raises ``Problem``."""
        known = bool(request.scope.get(LET_IN))
        refusal = authorization.refusal(request.method, request.headers, channel, self._token, authenticated=known)
        if refusal is not None:
            raise refusal
        params.only(request, [name for name, _ in operation.query])
        if operation.body:
            request.state.body = await params.body(request, openapi.SCHEMAS[operation.body]["required"])
        content = await self._handlers[operation.name](request)
        return content if isinstance(content, Response) else _json(content, operation.status)

    # -- reading -----------------------------------------------------------------------------------------------------------

    async def _openapi(self, _: Request) -> Response:
        return Response(openapi.TEXT, media_type="application/json", headers=_HEADERS)

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
        return {"ranks": [serializers.rank_view(rank) for rank in (await self._watch.fresh()).ranks]}

    async def _debug_summary(self, _: Request) -> object:
        return self._summaries.debug(await self._watch.fresh(), len(await self.evidence()))

    async def _training_summary(self, _: Request) -> object:
        return self._summaries.training(await self._watch.fresh())

    async def _events(self, request: Request) -> object:
        limit, kind = params.length(request, "limit", history.MOST_EVENTS), params.kind(request)
        cursor = request.query_params.get("before")
        before = None if cursor is None else history.position_of(cursor)
        ranks = params.ranks(await self._watch.fresh(), request.query_params.get("rank"))
        if len(ranks) > MOST_RINGS:
            raise problems.bad(f"There are {len(ranks)} ranks: say which one's events by the query parameter rank.")
        nothing: list[history.Dated] = []
        events = [one for rank in ranks for one in await self._read(rank, history.events, nothing)]
        return history.page((one for one in events if kind in {None, one.event["name"]}), before, limit)

    async def _steps(self, request: Request) -> object:
        last = params.length(request, "last", history.MOST_STEPS)
        return await self._history(request, partial(history.steps, last=last), {"speed": None, "steps": []})

    async def _scalars(self, request: Request) -> object:
        return await self._history(request, history.logged, {"scalars": []})

    async def _layers(self, request: Request) -> object:
        rank = await self._rank(request)
        return {**serializers.named(rank), "layers": serializers.layers(rank)}

    async def _evidence(self, _: Request) -> object:
        return {"evidence": await self.evidence()}

    async def _download(self, request: Request) -> Response:
        identifier = params.evidence_id(request)
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
        return StreamingResponse(artifacts.read(stored), headers=headers, media_type=artifacts.media_type(stored.evidence))

    async def _check_failure(self, identifier: str) -> None:
        """Raise ``Problem`` if the rank asked for that artifact has reported that it could not write it."""
        incarnation = await self._run(self.commands.owner_of, identifier)
        for rank in (await self._watch.fresh()).ranks:
            if rank.incarnation == incarnation:
                failure = artifacts.failure(await self._read(rank, history.events, []), identifier)
                if failure is not None:
                    raise artifacts.failure_problem(rank.rank, failure)

    # -- commands ----------------------------------------------------------------------------------------------------------

    async def _level(self, request: Request) -> object:
        level = params.level(request)
        return await self._run(self.commands.level, await self._targets(request), level)

    async def _probes(self, request: Request) -> object:
        mask, off = params.probes(request.state.body)
        return await self._run(self.commands.probes_off, await self._targets(request), mask, off)

    async def _profile(self, request: Request) -> object:
        steps = params.steps(request.state.body)
        rank = params.one_rank(await self._watch.fresh(), request.query_params.get("rank"))
        params.living([rank])
        return await self._run(self.commands.profile, rank, steps)

    async def _stacks(self, request: Request) -> object:
        return await self._run(self.commands.stacks, await self._targets(request))

    async def _clear(self, _: Request) -> object:
        self._summaries.clear(await self._watch.fresh())
        removed, hidden = await self._run(self.commands.clear)
        return {"removed": removed, "hidden": hidden}

    # -- helpers -----------------------------------------------------------------------------------------------------------

    async def _targets(self, request: Request) -> list[Rank]:
        return params.living(params.ranks(await self._watch.fresh(), request.query_params.get("rank")))

    async def _rank(self, request: Request) -> Rank:
        return params.one_rank(await self._watch.fresh(), request.path_params["rank"])

    async def _history(
        self, request: Request, read: Callable[[FlightFile, Rank], dict[str, Any]], otherwise: dict[str, Any]
    ) -> object:
        rank = await self._rank(request)
        return {**serializers.named(rank), **await self._read(rank, read, otherwise)}

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
    return _json(problem.content(), problem.status, problems.MEDIA_TYPE, **problem.headers)


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
