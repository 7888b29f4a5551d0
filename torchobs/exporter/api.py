"""The JSON API ``/api/v1``: its handlers return the responses that ``openapi.json`` describes."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from torchobs import catalog
from torchobs._version import __version__
from torchobs.config.settings import PROBES
from torchobs.exporter import access, commands
from torchobs.exporter import api_schema as schema
from torchobs.exporter.access import LET_IN, Problem
from torchobs.exporter.api_schema import Answer, Dated, instant, named
from torchobs.exporter.commands import ArtifactStore, CommandService
from torchobs.exporter.outcomes import Outcomes, has_ended
from torchobs.flight.control import LEVELS
from torchobs.flight.events import Event, plain
from torchobs.flight.forward import undivided
from torchobs.flight.reader import Distribution
from torchobs.flight.step_record import StepFlag
from torchobs.flight.throughput import RECORDS, pace, speed
from torchobs.ranks.events import curves, units
from torchobs.ranks.rank_file import READ_ERRORS
from torchobs.ranks.rank_view import view_of, whole_steps
from torchobs.ranks.snapshot import Readings, readings_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from starlette.requests import Request

    from torchobs.exporter.access import AccessChannel
    from torchobs.exporter.api_schema import Operation
    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.snapshot_cache import SnapshotCache
    from torchobs.flight.reader import FlightFile
    from torchobs.flight.step_record import StepRecord
    from torchobs.ranks.rank_view import RunView
    from torchobs.ranks.scanner import Scanner
    from torchobs.ranks.snapshot import Rank, Snapshot


PREFIX = "/api/v1"
MOST_RINGS = 256
"""Most ranks with events read for one request: a ring takes some milliseconds."""
LATE_FACTOR = 3
"""Records read per requested step: the step's own, and those with late values from devices."""

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_LAYER = "layer"
_log = logging.getLogger(__name__)
T = TypeVar("T")


def rank_state(rank: Rank) -> Answer:
    """Return a rank's identity, state and progress."""
    readings, header, live = readings_of(rank), rank.view.header, rank.view.live
    last_ns, rates = rank.view.last_step_ns, readings.values(catalog.LEARNING_RATE)
    view = view_of(rank, readings)
    return schema.Rank(
        **named(rank),
        state=rank.state,
        up=rank.up,
        level=level_name(live.level),
        phase=live.phase,
        started=instant(header.wall_ns),
        last_step=None if last_ns is None else instant(header.wall_ns_of(last_ns)),
        progress_age_s=rank.progress_age_s,
        stall=schema.Stall(*rank.standstill) if rank.standstill else None,
        learning_rate=rates.get(("0",), next(iter(rates.values()), None)),  # of the first group, as on the live page
        steps=readings.get(catalog.STEPS),
        tokens=readings.get(catalog.TOKENS),
        samples=readings.get(catalog.SAMPLES),
        total_steps=readings.get(catalog.STEPS_PLANNED),
        loss=view.loss,
        gradient_norm=view.grad_norm,
    )


def layers(rank: Rank) -> Answer:
    """Return the last value of every per-layer series, by layer; the rank selects which layers have series."""
    by_layer: dict[str, dict[str, Any]] = {}
    for point in rank.view.points:
        layer = dict(point.series.attributes).get(_LAYER)
        if isinstance(layer, str) and not isinstance(point.value, Distribution):
            by_layer.setdefault(layer, {})[point.series.name] = point.value
    return schema.Layers(**named(rank), layers=[schema.Layer(layer, values) for layer, values in by_layer.items()])


def level_name(level: int) -> str:
    """Return the name of a debug level."""
    return LEVELS[level] if level < len(LEVELS) else "unknown"


def dated_events(file: FlightFile, rank: Rank) -> list[Dated]:
    """Return the events in the ring; spans are left out."""
    dated = []
    for record in file.events():
        if isinstance(record, Event):
            name, when_ns = record.name[: schema.LONGEST_NAME], record.time_ns
            event = schema.Event(
                **named(rank),
                time=instant(when_ns),
                name=name,
                severity=catalog.event_severity(name, record.attributes).name.lower(),
                step=record.step,
                attributes=plain(record.attributes),
                units=units(name, record.attributes),
            )
            dated.append(((when_ns, rank.incarnation, record.position), event))
    return dated


def page(events: Iterable[Dated], before: str | None, limit: int) -> Answer:
    """Return the newest ``limit`` events, newest first; ``before``: cursor of the page before, from which older ones follow."""
    older = sorted(events, key=itemgetter(0), reverse=True)
    if before is not None:
        when_ns, incarnation, at = before.rsplit("-", 2)
        older = [entry for entry in older if entry[0] < (int(when_ns), incarnation, int(at))]
    taken = older[:limit]
    more = "-".join(map(str, taken[-1][0])) if len(older) > len(taken) else None
    return schema.Events([event for _, event in taken], more)


def steps(file: FlightFile, rank: Rank, last: int) -> Answer:
    """Return the last steps, oldest first, with values delivered after their end, and their throughput while it makes steps."""
    records = file.steps(max(last * LATE_FACTOR, RECORDS))
    throughput = speed(pace(records)) if rank.trains or not rank.up else None
    whole = [_step(record, rank) for record in whole_steps(records)[-last:]]
    return schema.Steps(**named(rank), speed=None if throughput is None else schema.Speed(**throughput), steps=whole)


def logged(file: FlightFile, rank: Rank) -> Answer:
    """Return the curves of the scalars that the script logs, by name, oldest point first."""
    by_name = curves(file.events())
    scalars = [schema.Scalar(name, [schema.Point(*point) for point in points]) for name, points in by_name.items()]
    return schema.Scalars(**named(rank), scalars=scalars)


def _step(record: StepRecord, rank: Rank) -> Answer:
    flags = record.flags
    return schema.Step(
        step=record.step,
        ended=instant(rank.view.header.wall_ns_of(record.end_ns)),
        duration_s=None if flags & StepFlag.UNTIMED else record.duration_s,
        loss=record.loss if flags & StepFlag.LOSS else None,
        losses=record.losses,
        gradient_norm=record.grad_norm if flags & StepFlag.GRAD_NORM else None,
        learning_rate=record.learning_rate if flags & StepFlag.LEARNING_RATE else None,
        phases_s=schema.PhaseSeconds(*undivided(record.phase_s, record.gap_s)),
        tokens=record.tokens,
        samples=record.samples,
        loss_scale=record.norm_scale,
        skipped=bool(flags & StepFlag.SKIPPED),
    )


_LOSS_KINDS = ("nonfinite_loss", "loss_spike", "diverged")
_STEP_ANOMALIES = ("gradient_explosions", "gradient_vanishing", "loss_anomalies")
"""The API's names for ``catalog.STEP_ANOMALIES``"""


def debug_summary(snapshot: Snapshot, evidence: int) -> Answer:
    """Return levels, active anomalies, failed probes and operations of the ranks; ``evidence``: number of artifacts."""
    operations = [row for rank in snapshot.ranks for row in _operations(rank, readings_of(rank))]
    count = sum(row.count for row in operations)
    alive = [rank for rank in snapshot.ranks if rank.up]
    return schema.DebugSummary(
        total_operations=count,
        mean_s=sum(row.mean_s * row.count for row in operations) / count if count else None,
        **{name: _greatest(getattr(row, name) for row in operations) for name in schema.PEAKS},
        with_problems=sum(row.with_problems for row in operations),
        operations=operations,
        levels=dict(Counter(level_name(rank.view.live.level) for rank in alive)),
        anomalies_active=[
            schema.ActiveAnomaly(**named(rank), kind=kind) for rank in alive for kind in _raised(rank, catalog.ANOMALY_ACTIVE)
        ],
        probes_disabled=[
            schema.DisabledProbe(**named(rank), probe=probe)
            for rank in snapshot.ranks
            for probe in _raised(rank, catalog.PROBE_DISABLED)
        ],
        evidence=evidence,
    )


def training_summary(snapshot: Snapshot) -> Answer:
    """Return steps and anomalies, per rank and in total; rates are those of ``debug.training_summary``."""
    counted = [_counts(rank) for rank in snapshot.ranks]
    pairs = zip(snapshot.ranks, counted, strict=True)
    ranks = [schema.RankTraining(**named(rank), **_summary(counts)) for rank, counts in pairs]
    total: Counter[str] = sum(counted, Counter())
    return schema.TrainingSummary(**_summary(total, len(counted)), ranks=ranks)


def _greatest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _operations(rank: Rank, readings: Readings) -> Iterator[Answer]:
    """Yield a row for each operation that was done."""
    for (name,), count in readings.values(catalog.DEBUG_OPERATIONS).items():
        if count:
            yield schema.DebugOperation(
                **named(rank),
                operation=name,
                count=round(count),
                mean_s=(readings.get(catalog.DEBUG_OPERATION_TIME, name) or 0.0) / count,
                maximum_s=readings.get(catalog.DEBUG_OPERATION_LONGEST, name),
                memory_peak_bytes=readings.get(catalog.DEBUG_OPERATION_MEMORY, name, "host"),
                gpu_memory_peak_bytes=readings.get(catalog.DEBUG_OPERATION_MEMORY, name, "device"),
                with_problems=round(readings.get(catalog.DEBUG_OPERATION_ANOMALIES, name) or 0),
            )


def _raised(rank: Rank, metric: catalog.Metric) -> list[str]:
    """Return the attribute values for which a metric is not zero."""
    return [", ".join(key) for key, value in readings_of(rank).values(metric).items() if value]


def _counts(rank: Rank) -> Counter[str]:
    """Return a rank's steps and anomalies: of the steps checked by hand, or without any of all steps."""
    readings = readings_of(rank)

    def count(metric: catalog.Metric, *key: str) -> int:
        return round(readings.get(metric, *key) or 0)

    kinds = {kind: count(catalog.ANOMALIES, kind) for kind in catalog.ANOMALY_KINDS}
    if checked := count(catalog.DEBUG_STEPS):
        steps = measured = checked
        least = most = count(catalog.DEBUG_ANOMALY_STEPS)
        anomalies = [count(catalog.DEBUG_STEP_ANOMALIES, kind) for kind in catalog.STEP_ANOMALIES]
    else:
        steps = count(catalog.STEPS)
        norms = [value for series, value in rank.view.points if series.name == catalog.GRAD_NORM_DISTRIBUTION.name]
        finite = sum(sum(value.counts) for value in norms if isinstance(value, Distribution))
        measured = finite + count(catalog.GRAD_NONFINITE_STEPS) or steps
        least, most = max(kinds.values(), default=0), min(sum(kinds.values()), steps)
        anomalies = [*(kinds[kind] for kind in catalog.STEP_ANOMALIES[:2]), sum(kinds[kind] for kind in _LOSS_KINDS)]
    counted = {"total_steps": steps, "measured": measured, "anomaly_steps": least, "anomaly_steps_most": most}
    by_kind = {f"kind {kind}": number for kind, number in kinds.items()}
    return Counter({**by_kind, **counted, **dict(zip(_STEP_ANOMALIES, anomalies, strict=True)), "monitored": int(checked > 0)})


def _summary(counts: Counter[str], ranks: int = 1) -> dict[str, Any]:
    """Return the counts of so many ranks with their rates, as members of a ``StepCounts``."""
    steps, monitored = counts["total_steps"], counts["monitored"]

    def rate(name: str, of: int) -> float | None:
        return counts[name] / of if steps else None

    explosions, vanishing = (rate(name, counts["measured"]) for name in _STEP_ANOMALIES[:2])
    return {
        **{name: counts[name] for name in ("total_steps", "anomaly_steps", "anomaly_steps_most", *_STEP_ANOMALIES)},
        "anomaly_rate": _greatest((rate("anomaly_steps", steps), explosions, vanishing)),
        "gradient_explosion_rate": explosions,
        "gradient_vanishing_rate": vanishing,
        "loss_anomaly_rate": rate("loss_anomalies", steps),
        "anomalies": schema.AnomalyCounts(*(counts[f"kind {kind}"] for kind in catalog.ANOMALY_KINDS)),
        "source": "recorded" if not monitored else "monitored" if monitored == ranks else "mixed",
    }


def ranks_named(snapshot: Snapshot, text: str | None) -> list[Rank]:
    """Return the ranks with that label or incarnation; all for ``None``."""
    if text is None:
        return list(snapshot.ranks)
    matches = [rank for rank in snapshot.ranks if text in {rank.rank, rank.incarnation}]
    if not matches:
        raise Problem(404, "no-such-rank", "There is no such rank: GET /api/v1/ranks lists those there are.")
    return matches


def one_rank(snapshot: Snapshot, text: str | None) -> Rank:
    """Return the one rank with that label or incarnation; for ``None`` the only rank there is."""
    matches = ranks_named(snapshot, text)
    if not matches:
        raise Problem(404, "no-such-rank", "No rank has been seen yet.")
    if len(matches) > 1:
        detail = "There are several: name one by its incarnation, of those that GET /api/v1/ranks lists."
        raise Problem(409, "ambiguous-rank", detail)
    return matches[0]


def living(ranks: list[Rank]) -> list[Rank]:
    """Return the ranks that are alive."""
    up = [rank for rank in ranks if rank.up]
    if not up:
        raise Problem(409, "rank-ended", "The rank has ended, or no rank has been seen yet: no process can be commanded.")
    return up


class Api:
    """One per exporter; every listener has its own :meth:`mounts`."""

    def __init__(self, config: ExporterConfig, watch: SnapshotCache) -> None:
        self._config, self._watch = config, watch
        self._token = access.Token(config.api_token_file)
        self._artifacts = ArtifactStore(config)
        self.commands, self.outcomes = CommandService(config, self._artifacts), Outcomes()
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
        routes = [Route(call.path, self._endpoint(call, channel), methods=[call.method]) for call in schema.OPERATIONS]
        return [Mount(PREFIX, app=Starlette(routes=routes, exception_handlers={HTTPException: _http_problem}))]

    async def review(self, snapshot: Snapshot) -> None:
        """Follow the ranks' states: ask hung ranks for their stacks, drop ended ones."""
        if self.commands.due(snapshot):
            await self._run(self.commands.review, snapshot)

    async def evidence(self) -> list[Answer]:
        """Return descriptions of the ranks' artifacts, newest first."""
        return await self._run(self._artifacts.listing)

    def close(self) -> None:
        """Close the directories."""
        self._thread.submit(self._artifacts.close)
        self._thread.shutdown(wait=False)

    def _endpoint(self, operation: Operation, default: AccessChannel | None) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            channel = default or access.access_channel(request.scope)
            try:
                response = await self._answer(operation, request, channel)
            except Problem as problem:
                response = _problem(problem)
            if request.method not in access.READING:
                _audit(request, channel, response.status_code)
            return response

        return endpoint

    async def _answer(self, operation: Operation, request: Request, channel: AccessChannel) -> Response:
        """Return the answer to an allowed and valid request. Raises ``Problem``."""
        authenticated = bool(request.scope.get(LET_IN))
        refusal = access.refusal(request.method, request.headers, channel, self._token, authenticated=authenticated)
        if refusal is not None:
            raise refusal
        request.state.query = schema.query(request, operation.query)
        if operation.body:
            request.state.body = await schema.body(request, operation.body)
        content = await self._handlers[operation.name](request)
        return content if isinstance(content, Response) else _json(content, operation.status)

    # -- reading -----------------------------------------------------------------------------------------------------------

    async def _openapi(self, _: Request) -> Response:
        return Response(schema.text(), media_type="application/json", headers=_HEADERS)

    async def _status(self, _: Request) -> object:
        snapshot = await self._watch.fresh()
        count = Counter(rank.state for rank in snapshot.ranks)
        return schema.Status(
            version=__version__,
            mode=self._config.mode,
            ranks=schema.RankCounts(*(count[state] for state in catalog.RANK_STATES)),
            files=dict(snapshot.files),
            problems=list(snapshot.problems),
            token=self._token.is_configured,
        )

    async def _ranks(self, _: Request) -> object:
        snapshot = await self._watch.fresh()
        runs: tuple[RunView, ...] = ()
        if not all(rank.up for rank in snapshot.ranks):
            runs = await self._watch.ask(lambda scan: self.outcomes.read(scan, snapshot))
        ended = await self._run(lambda: [self._ended(run) for run in runs if has_ended(run)])
        return schema.Ranks([rank_state(rank) for rank in snapshot.ranks], ended)

    def _ended(self, run: RunView) -> Answer:
        verdict = self.outcomes.verdict(run)
        evidence = [schema.Proof(*proof) for proof in verdict.evidence]
        return schema.EndedRun(run.job_name, run.run_id, verdict.action, verdict.cause, verdict.reason, evidence)

    async def _debug_summary(self, _: Request) -> object:
        return debug_summary(await self._watch.fresh(), len(await self.evidence()))

    async def _training_summary(self, _: Request) -> object:
        return training_summary(await self._watch.fresh())

    async def _events(self, request: Request) -> object:
        query = request.state.query
        ranks = ranks_named(await self._watch.fresh(), query.get("rank"))
        if len(ranks) > MOST_RINGS:
            raise access.bad(f"There are {len(ranks)} ranks: say which one's events by the query parameter rank.")
        nothing: list[Dated] = []
        events = [entry for rank in ranks for entry in await self._read(rank, dated_events, nothing)]
        chosen = (entry for entry in events if query.get("kind") in {None, entry[1].name})
        return page(chosen, query.get("before"), query.get("limit", schema.DEFAULT_LENGTH))

    async def _steps(self, request: Request) -> object:
        last = request.state.query.get("last", schema.DEFAULT_LENGTH)
        return await self._history(request, partial(steps, last=last), partial(schema.Steps, speed=None, steps=[]))

    async def _scalars(self, request: Request) -> object:
        return await self._history(request, logged, partial(schema.Scalars, scalars=[]))

    async def _layers(self, request: Request) -> object:
        return layers(await self._rank(request))

    async def _evidence(self, _: Request) -> object:
        return schema.EvidenceList(await self.evidence())

    async def _download(self, request: Request) -> Response:
        identifier = request.path_params["id"]
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
        media_type = commands.media_type(stored.evidence)
        if request.method == "HEAD":
            stored.file.close()
            return Response(headers=headers, media_type=media_type)
        return StreamingResponse(commands.read(stored), headers=headers, media_type=media_type)

    async def _check_failure(self, identifier: str) -> None:
        """Raise ``Problem`` if the rank has reported that it could not write that artifact."""
        rank = await self._run(self.commands.asked, (await self._watch.fresh()).ranks, identifier)
        if rank is None:
            return
        events: list[Dated] = await self._read(rank, dated_events, [])
        for _, event in events:
            if event.name in commands.FAILURES and event.attributes.get("evidence") == identifier:
                raise commands.failure_problem(rank.rank, event.attributes)

    # -- commands ----------------------------------------------------------------------------------------------------------

    async def _level(self, request: Request) -> object:
        level = str(request.path_params["level"])
        if level not in LEVELS:
            raise Problem(404, "no-such-level", f"The levels are {', '.join(LEVELS)}.")
        return await self._run(self.commands.level, await self._targets(request), LEVELS.index(level))

    async def _probes(self, request: Request) -> object:
        off = [name for name in PROBES if name in request.state.body.off]
        return await self._run(self.commands.probes_off, await self._targets(request), off)

    async def _profile(self, request: Request) -> object:
        (rank,) = living([one_rank(await self._watch.after_now(), request.state.query.get("rank"))])
        return await self._run(self.commands.profile, rank, request.state.body.steps)

    async def _stacks(self, request: Request) -> object:
        return await self._run(self.commands.stacks, await self._targets(request))

    async def _clear(self, _: Request) -> object:
        removed, hidden = await self._run(self.commands.clear)
        return schema.Cleared(removed, hidden)

    # -- helpers -----------------------------------------------------------------------------------------------------------

    async def _targets(self, request: Request) -> list[Rank]:
        """Return the ranks to command, with the commands that they have read so far."""
        return living(ranks_named(await self._watch.after_now(), request.state.query.get("rank")))

    async def _rank(self, request: Request) -> Rank:
        return one_rank(await self._watch.fresh(), request.path_params["rank"])

    async def _history(
        self, request: Request, read: Callable[[FlightFile, Rank], Answer], empty: Callable[..., Answer]
    ) -> object:
        rank = await self._rank(request)
        return await self._read(rank, read, empty(**named(rank)))

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that accesses the file system in the API's own thread, so that it does not block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments))

    async def _read(self, rank: Rank, read: Callable[[FlightFile, Rank], T], otherwise: T) -> T:
        """Read more of a rank's file than a snapshot has; return ``otherwise`` if the file cannot be read."""

        def ask(scanner: Scanner) -> T:
            try:
                with scanner.flight_file(rank.incarnation) as file:
                    return read(file, rank)
            except READ_ERRORS:
                return otherwise

        return await self._watch.ask(ask)


def _json(content: object, status: int, media_type: str = "application/json", **more: str) -> Response:
    data = msgspec.to_builtins(content, str_keys=True)
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:  # some number is not finite: looking for it takes as long as all else
        text = json.dumps(plain(data), allow_nan=False, separators=(",", ":"))
    return Response(text.encode(), status, media_type=media_type, headers={**_HEADERS, **more})


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
