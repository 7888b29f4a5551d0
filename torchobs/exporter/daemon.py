"""Life cycle of the exporter: its application, listening, periodic work every second, and an orderly end.

A sidecar never exits by itself: kubelet would restart it, and while a sidecar cannot start, no training container does. It
serves what it can, retries, and reports problems on its page and in its log. It ends on SIGTERM, which comes after the
training's end: it takes a final snapshot and waits until every recent scraper has fetched that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from socket import gethostname
from typing import TYPE_CHECKING, TextIO

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from torchobs import catalog
from torchobs.config import settings
from torchobs.document import kept
from torchobs.exporter import access, file_sd, past
from torchobs.exporter.api import Api
from torchobs.exporter.exporter_metrics import NO_FAILED_WRITES, ScrapeInput, Scrapes
from torchobs.exporter.http import Listeners, allow_files
from torchobs.exporter.metrics_page import MetricsPage, PageCache, ScrapeTracker
from torchobs.exporter.notify import Notifier
from torchobs.exporter.page import LivePage
from torchobs.exporter.snapshot_cache import SnapshotCache
from torchobs.exporter.web_config import WebConfigMiddleware
from torchobs.node.lifetime import OncePerMinute, ServiceStatus
from torchobs.ranks import snapshot
from torchobs.ranks.scanner import END_S, Scanner
from torchobs.ranks.state import FADED_AFTER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from starlette.requests import Request
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.host import HostMetrics
    from torchobs.exporter.otlp.push import Push
    from torchobs.ranks.snapshot import Snapshot

TICK_S = 1.0
LEAST_DRAIN_S = 1.0
"""The shortest wait for the last scrapes: kubelet leaves a sidecar two seconds once the grace is over."""
JUST_ENDED_S = 5.0
"""A rank without a heartbeat for longer has not ended by the signal that ends the exporter."""
FLUSH_S = 10.0
"""How long a node's exporter that ends waits for the OTLP receiver."""
SETTLED_S, THOROUGH_S = 60.0, 3600.0
"""Seconds until the first garbage collection of all objects, and between two"""
YOUNG = 10_000
"""Threshold of the youngest generation: with Python's default it would be collected three times per page."""
NO_RANK_S = 120.0
"""Seconds without a rank until a log line says so: a training imports torch within the first two minutes."""

NO_RANK = (
    "no rank has appeared: does the training call torchobs.init(), and does its image have torchobs? With the label "
    "torchobs.io/inject: auto it needs neither, but a virtual environment needs the annotation torchobs.io/pythonpath as well"
)

_KEEPING_S, _LAST_KEEPING_S = 120.0, 30.0
_FAILURES = frozenset(catalog.EXIT_REASONS) - {"finished", "interrupted", "terminated"}

_PLAIN = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
_QUIET_LIBRARIES = ("uvicorn", "asyncio", "urllib3")
_log = logging.getLogger(__name__)


class Keeper:
    """Keeps each run once all its ranks have ended; again if some came and ended since.

    By a process of its own: reading a whole run would hold up scrapes, and take memory.
    """

    def __init__(self, config: ExporterConfig) -> None:
        chosen, _ = settings.resolve({})
        # an exporter that a person started beside trainings is not the one that they rely on, unless it has a directory
        self._is_wanted = bool(chosen.keep_runs and kept.directory() and (config.mode == "node" or chosen.keep_dir))
        directory = ("--dir", config.flight_dir) if config.flight_dir else ()
        self._argv = (sys.executable, "-m", "torchobs", "keep", "--automatic", *directory, "--")
        self._done: set[str] = set()
        """incarnations"""
        self._work: asyncio.Task[None] | None = None

    def keep_ended(self, snapshot: Snapshot) -> None:
        """Begin to keep runs that have ended, unless that is under way."""
        if not self._is_wanted or (self._work is not None and not self._work.done()):
            return
        alive = {rank.run_id for rank in snapshot.ranks if rank.up}
        new = [rank for rank in snapshot.ranks if rank.run_id not in alive and rank.incarnation not in self._done]
        if new:
            self._done |= {rank.incarnation for rank in new}
            work = asyncio.to_thread(self._keep, sorted({rank.run_id for rank in new}))
            self._work = asyncio.get_running_loop().create_task(work)

    async def finish(self, snapshot: Snapshot) -> None:
        """Keep the runs that have ended, and wait for that, but not for ever."""
        for _ in range(2):  # what was under way, and what has ended since
            self.keep_ended(snapshot)
            if self._work is not None:
                await asyncio.wait({self._work}, timeout=_LAST_KEEPING_S)

    def _keep(self, runs: list[str]) -> None:
        # torchobs is imported from where this process has it; what the command complains of stands in our log
        environ = {**settings.environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        for run_id in runs:
            try:
                subprocess.run(
                    [*self._argv, run_id], cwd="/", env=environ, timeout=_KEEPING_S, check=False,
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                )  # fmt: skip
            except (OSError, subprocess.SubprocessError) as problem:
                _log.warning("run %s is not kept: %s", run_id, problem)


class PodAdvice:
    """Advice of one pod's exporter; each piece is logged once. Times are CLOCK_MONOTONIC in seconds."""

    def __init__(self, config: ExporterConfig) -> None:
        self._grace_s = config.drain_timeout_s + END_S
        self._has_rank = False
        self._begun_s: float | None = None
        self._logged: set[str] = set()
        self.advice: tuple[str, ...] = ()

    def review(self, snapshot: Snapshot, scrapers: ScrapeTracker, now_s: float, *, ends: bool = False) -> None:
        """Review the pod's ranks and scrapers. ``ends``: the trainings have ended."""
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        self._has_rank = self._has_rank or bool(snapshot.ranks)
        advice = {}
        if not self._has_rank and (ends or now_s - self._begun_s >= NO_RANK_S):
            advice["no rank"] = NO_RANK
        interval_s = scrapers.interval_s(now_s)
        if interval_s is not None and (needed_s := interval_s + scrapers.timeout_s + END_S) > self._grace_s:
            advice["grace"] = (
                f"the pod's grace of {self._grace_s:.0f} s is too short for its scrapes, which need {math.ceil(needed_s)} s: "
                "their interval, their timeout and 5 s. The training's last steps may be lost: raise "
                "terminationGracePeriodSeconds"
            )
        for kind in advice.keys() - self._logged:
            _log.warning("%s", advice[kind])
        self._logged |= advice.keys()
        self.advice = tuple(advice.values())


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error, and counts the lines that could not be written (full disk, closed pipe)."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0

    def handleError(self, _: logging.LogRecord) -> None:  # noqa: N802  # logging's own name
        """See :class:`logging.Handler`. Only counts: there is nowhere else to report it."""
        self.lost += 1


class LogFormatter(logging.Formatter):
    """Formats lines as Prometheus does: time, level, source, message."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        fields = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": next((name for name, level in reversed(_LEVELS.items()) if record.levelno >= level), "debug"),
            "source": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        if self._json:
            return json.dumps(fields)
        return " ".join(f"{key}={value if _PLAIN.fullmatch(value) else json.dumps(value)}" for key, value in fields.items())


def configure_log(config: ExporterConfig) -> None:
    """Log to standard error, each line at most once a minute; of libraries only warnings and errors."""
    handler = LogHandler()
    handler.addFilter(OncePerMinute())
    handler.setFormatter(LogFormatter(config.log_format))
    logging.basicConfig(level=_LEVELS[config.log_level], handlers=[handler], force=True)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)


def lost_lines() -> int:
    """Return the number of lines that could not be written."""
    return sum(handler.lost for handler in logging.getLogger().handlers if isinstance(handler, LogHandler))


def serve(
    config: ExporterConfig,
    *,
    announce: Callable[[str, bool], None] | None = None,
    finished: Callable[[ServiceStatus], bool] | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, or until ``finished``, called once a second, returns True.

    ``announce`` is called with ``host:port`` once the exporter listens there, and whether with TLS; again when that changes or
    if it raises ``OSError``. Returns the exit code: 0, or 1 if a node's exporter could not listen. A sidecar goes on trying.
    """
    allow_files()
    return asyncio.run(_Service(config, announce, finished).run())


def keep_survivors() -> None:
    """Collect all garbage, and keep later collections from traversing what is left (``gc.freeze``).

    Each series has some ten objects, which live as long as the series and are in no cycles; a full collection would traverse
    the state of up to 10^5 series, 30 ms for 10,000, in the middle of a scrape.
    """
    gc.set_threshold(YOUNG)
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class _Service:
    def __init__(
        self,
        config: ExporterConfig,
        announce: Callable[[str, bool], None] | None,
        finished: Callable[[ServiceStatus], bool] | None,
    ) -> None:
        self._config, self._finished = config, finished
        for_memory = snapshot.series_limit(config)
        most = config.series_limit_total or for_memory
        self._snapshots = SnapshotCache(Scanner(config, series_limit=int(snapshot.SERIES_IN_FILES * max(most, for_memory))))
        self._pages = PageCache(config, most)
        self._scrapers = ScrapeTracker(self._has_connection)
        self._metrics = MetricsPage(self._fresh, self._pages, self._scrapers, config.pod_uid)
        self._web_config, self._api = WebConfigMiddleware(config.web_config_file), Api(config, self._snapshots)
        self._notifier = Notifier(config, self._snapshots, self._api.outcomes, self._page)
        self._pod = PodAdvice(config) if config.mode == "sidecar" and config.pod_uid else None
        links = {config.telemetry_path: "Metrics", "/api/v1/openapi.json": "API", "/-/healthy": "healthy", "/-/ready": "ready"}
        links |= {past.PATH: "Past runs"} if kept.directory() is not None else {}
        self._live = LivePage(self._snapshots, self._words, tuple(links.items()), self._api.evidence)
        commanded = self._app(self._api.mounts("socket")) if access.is_socket_wanted(config) else None
        self._listeners = Listeners(config, self._web_config, self._app(self._api.mounts()), commanded, announce)
        self._targets = file_sd.TargetFile(config.file_sd, gethostname()) if config.file_sd else None
        self._push, self._host = _optional(config)
        self._keeper = Keeper(config)
        self._failed_writes: Mapping[str, int] = NO_FAILED_WRITES
        self._scrapes = Scrapes()
        """as of the last tick, so that scrapes of one second share a page"""
        self._collected_s = time.monotonic() + SETTLED_S
        self._done, self._leave, self._hurry = False, asyncio.Event(), asyncio.Event()

    def _app(self, more: Iterable[BaseRoute]) -> ASGIApp:
        """Return the application of a listener; ``more``: its routes to the API."""
        page = (*self._live.routes(), *past.routes())
        routes = [Route("/-/healthy", self._healthy), Route("/-/ready", self._ready), *page, *more]
        path = self._config.telemetry_path
        others = Starlette(routes=[Route(path, self._metrics), *routes])

        async def front(scope: Scope, receive: Receive, send: Send) -> None:
            # bypasses the router, for speed: see ``metrics_page``
            is_metrics = scope["type"] == "http" and scope["path"] == path
            await (self._metrics if is_metrics else others)(scope, receive, send)

        return front

    async def _healthy(self, _: Request) -> Response:
        return PlainTextResponse("torchobs exporter is healthy.\n")

    async def _ready(self, _: Request) -> Response:
        # a missing directory or a taken port do not count: Kubernetes' reaction would hold up the training
        if self._snapshots.latest is snapshot.EMPTY:
            return PlainTextResponse("torchobs exporter has not looked at the flight files yet.\n", 503)
        return PlainTextResponse("torchobs exporter is ready.\n")

    async def _fresh(self, deadline_s: float) -> ScrapeInput:
        """Return the input of a metrics page within so many seconds."""
        taken = await self._snapshots.fresh(deadline_s=deadline_s)
        if self._host is not None:
            await self._host.refresh()
        return self._scrape_input(taken)

    def _scrape_input(self, taken: Snapshot) -> ScrapeInput:
        pushed = self._push.counts if self._push is not None else None
        host = self._host.latest if self._host is not None else None
        return ScrapeInput(taken, self._snapshots.timeouts, self._problems(), pushed, self._failed_writes, self._scrapes, host)

    async def run(self) -> int:
        self._watch_signals()
        if self._config.problems:
            _log.error("configuration: %s", "; ".join(self._config.problems))
        if self._push is not None:
            self._push.start()
        try:
            await self._web_config.reload()
            await self._listeners.open()
            if not self._listeners.sockets and self._config.mode == "node":
                return 1
            while not self._leave.is_set():
                await self._tick_safely()
                await _sleep_until(self._leave, FADED_AFTER_S if self._snapshots.latest.fading else TICK_S)
            await self._drain()
            if not self._hurry.is_set():
                await self._keeper.finish(self._snapshots.latest)
            return 0
        finally:
            await self._close()

    def _watch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)  # ignored under nohup
        for number in (signal.SIGTERM, signal.SIGINT, *hangup):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked by the program until this handler was installed

    def _on_signal(self, number: int) -> None:
        # Ctrl-C, or a closed terminal: a person, who does not want to wait for scrapers
        if self._leave.is_set() or number != signal.SIGTERM:
            self._hurry.set()
        self._leave.set()

    async def _tick_safely(self) -> None:
        """Do the periodic work. In a sidecar an exception is logged, not raised: it would become a loop of restarts."""
        if self._config.mode == "node":
            await self._tick()  # may raise: the node's trainings start another exporter
            return
        tick = asyncio.ensure_future(self._tick())
        await asyncio.wait({tick})
        if (problem := tick.exception()) is not None:
            _log.error("a look at the ranks failed, and is tried again: %r", problem, exc_info=problem)

    async def _tick(self) -> None:
        if time.monotonic() >= self._collected_s:
            self._collected_s += THOROUGH_S
            keep_survivors()
        await self._web_config.reload()
        await self._listeners.tick()
        if self._targets is not None:
            addresses, tls = file_sd.listened_on(self._listeners.sockets), self._web_config.context is not None
            await asyncio.to_thread(self._targets.update, addresses, self._config.telemetry_path, tls=tls)
        snapshot = await self._snapshots.fresh(max_age_s=FADED_AFTER_S / 2)
        await self._api.review(snapshot)
        self._keeper.keep_ended(snapshot)
        targets = self._targets.failures if self._targets is not None else 0
        announced, control = self._listeners.unannounced, self._api.commands.failures
        self._failed_writes = {"log": lost_lines(), "file_sd": targets, "announcement": announced, "control": control}
        self._scrapes = self._metrics.scrapes
        if self._pod is not None:
            self._pod.review(snapshot, self._scrapers, time.monotonic())
        if self._push is not None:
            if self._push.due and self._host is not None:
                await self._host.refresh()
            self._push.accept(self._scrape_input(snapshot))
        self._notifier.review(snapshot)
        is_settled = self._notifier.settled or self._hurry.is_set()
        if self._finished is not None and snapshot.number and self._finished(self._status()) and is_settled:
            self._done = True
            self._leave.set()

    def _page(self) -> tuple[str, str]:
        """Return the live page's URL, and how to reach it from another machine; empty if no TCP port is listened on."""
        addresses = file_sd.listened_on(self._listeners.sockets)
        if not addresses:
            return "", ""
        port, scheme = addresses[0].port, "http" if self._web_config.context is None else "https"
        return f"{scheme}://localhost:{port}/", f" (from elsewhere: ssh -L {port}:localhost:{port} {gethostname()})"

    def _problems(self) -> tuple[str, ...]:
        reasons = self._web_config.problem, self._targets.problem if self._targets is not None else ""
        return (*self._listeners.problems, *filter(None, reasons))

    def _has_connection(self, client: tuple[str, int]) -> bool:
        return self._listeners.has_connection(client)

    def _words(self) -> tuple[str, ...]:
        """Return the lines that the live page adds: problems and advice."""
        return (*self._problems(), *(self._pod.advice if self._pod is not None else ()))

    def _status(self) -> ServiceStatus:
        ranks, last_s = self._snapshots.latest.ranks, self._scrapers.last_s
        ended = [rank.ended_in for rank in ranks if rank.ended_in is not None]
        return ServiceStatus(
            alive=sum(rank.up for rank in ranks),
            last_scrape_age_s=None if last_s is None else time.monotonic() - last_s,
            unscraped_final=sum(not self._scrapers.got(number) for number in ended),
            viewers=self._live.feed.viewers,
        )

    async def _drain(self) -> None:
        """Wait until every scraper and the OTLP receiver have the final state, including ranks that end during the wait.

        Where no scraper has come yet and nothing is pushed, a rank that failed waits for the first scraper: no one would ever
        hear of it otherwise. The pod's grace began with the SIGTERM of its trainings: time that one of them survived is used
        up.
        """
        if self._done and self._push is None:
            return
        begun_s = time.monotonic()
        final = await self._final() if not self._hurry.is_set() else 0
        ages_s = [rank.terminated_age_s or 0.0 for rank in self._snapshots.latest.ranks if rank.beat_age_s <= JUST_ENDED_S]
        left_s = max(LEAST_DRAIN_S, self._config.drain_timeout_s - max(ages_s, default=0.0))
        deadline_s = begun_s + min(left_s, FLUSH_S if self._done else math.inf)
        if self._pod is not None:
            self._pod.review(self._snapshots.latest, self._scrapers, time.monotonic(), ends=True)
        while not self._hurry.is_set():
            goal = max([final, *(rank.ended_in or 0 for rank in self._snapshots.latest.ranks)])
            waiting = [] if self._done else self._scrapers.waiting(goal, time.monotonic())
            is_alone = self._push is None and self._scrapers.last_s is None
            has_failed = any(rank.reason in _FAILURES for rank in self._snapshots.latest.ranks if not rank.up)
            if self._config.mode == "sidecar" and is_alone and has_failed:
                waiting.append("the first scraper")
            if self._push is not None and not self._push.settled:
                waiting.append("OTLP")
            if not self._notifier.settled:
                waiting.append("messages")
            if not waiting:
                break
            if time.monotonic() > deadline_s:
                _log.warning("leaving, though the final state was not fetched by: %s", ", ".join(waiting))
                break
            _log.info("waiting for the final state to be fetched by: %s", ", ".join(waiting))
            await _sleep_until(self._hurry, 0.2)
            await self._tick_safely()

    async def _final(self) -> int:
        """Take the final snapshot, push it, and return its number.

        When a pod is deleted, SIGTERM comes within milliseconds of the training's end, but a rank that fell silent is known to
        be dead only after ``FADED_AFTER_S``. A rank that only lost its file lock is not waited for any longer.
        """
        snapshot = await self._snapshots.after_now()
        for _ in range(3):
            if not snapshot.fading or self._hurry.is_set():
                break
            await _sleep_until(self._hurry, FADED_AFTER_S / 2)
            snapshot = await self._snapshots.after_now()
        self._notifier.review(snapshot)
        if self._push is not None:
            self._push.accept(self._scrape_input(snapshot), final=True)
        return snapshot.number

    async def _close(self) -> None:
        if self._targets is not None:
            self._targets.remove()
        self._notifier.close()
        self._live.feed.close(done=self._done and {rank.up for rank in self._snapshots.latest.ranks} == {False})
        if self._push is not None:
            self._push.close()
        await self._listeners.close()
        self._api.close()
        self._snapshots.close()
        self._pages.close()


def _optional(config: ExporterConfig) -> tuple[Push | None, HostMetrics | None]:
    """Return the OTLP push and the machine's metrics, if configured; only then are they imported."""
    push, host = None, None
    if config.push is not None:
        from torchobs.exporter.otlp.push import Push

        push = Push(config.push, config)
    if config.collect_host:
        from torchobs.exporter.host import HostMetrics

        host = HostMetrics(config)
    return push, host


async def _sleep_until(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
