"""The daemon's life: listen, look every second, leave in order.

A sidecar never leaves by itself: kubelet restarts one that exits, and while one cannot start no training container does. It
serves what it can, tries again, and says what is wrong on its page and its log. It leaves on SIGTERM, which comes after the
training has ended: it takes the final state and waits until every scraper seen lately has fetched it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import threading
import time
from dataclasses import dataclass
from socket import gethostname
from typing import TYPE_CHECKING, cast

from torchobs import settings
from torchobs.exporter import filesd
from torchobs.exporter.api.app import Api
from torchobs.exporter.api.unix import SocketFile
from torchobs.exporter.app import Site
from torchobs.exporter.listener import Connections, bind, bind_near, serve_on
from torchobs.exporter.pages import Pages
from torchobs.exporter.scan import Scanner
from torchobs.exporter.scrapers import Scrapers
from torchobs.exporter.states import FADED_AFTER_S
from torchobs.exporter.unixsocket import UnixAddress, UnixSocket, bind_unix, inherited
from torchobs.exporter.watch import Watch
from torchobs.exporter.web.gate import Gate
from torchobs.values import Address

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    import uvicorn

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.listener import Connection
    from torchobs.exporter.otlp.push import Push

TICK_S = 1.0
RETRY_BIND_S = 5.0
FLUSH_S = 10.0
"""How long a node's exporter that has done its duty waits for the receiver of the push."""

_FILES = 65_536
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The ranks as the exporter sees them, for whoever decides when it has done its duty."""

    ranks: int
    """that are served"""
    alive: int
    """whose process is there"""
    last_scrape_age_s: float | None
    """None: nobody has scraped yet"""
    unscraped_final: int
    """ranks that have ended and whose last state was in no scrape yet"""


def serve(
    config: ExporterConfig,
    *,
    announce: Callable[[str], None] | None = None,
    finished: Callable[[Fleet], bool] | None = None,
) -> int:
    """Serve until SIGTERM, SIGINT or ``finished``; return the process's exit code.

    Args:
        config: what to serve, and where.
        announce: called once with ``host:port``, as soon as that is listened on.
        finished: asked once a second; True ends the service.

    Returns:
        0, or 1 when a node's exporter found nowhere to listen. A sidecar goes on trying.
    """
    _allow_files()
    return asyncio.run(_Service(config, announce, finished).run())


class _Service:
    def __init__(
        self, config: ExporterConfig, announce: Callable[[str], None] | None, finished: Callable[[Fleet], bool] | None
    ) -> None:
        self._config, self._announce, self._finished = config, announce, finished
        self._watch = Watch(Scanner(config))
        self._pages = Pages(config)
        self._scrapers = Scrapers()
        self._site = Site(self._watch, self._pages, self._scrapers, config.telemetry_path)
        self._gate = Gate(config.web_config_file)
        self._api, self._socket = Api(config, self._watch, lambda: self._gate.authenticates), SocketFile(config)
        self._site.live.evidence = self._api.evidence
        self._open = self._site.app(self._api.mounts())
        self._app = self._gate.guard(self._open)
        self._servers: list[tuple[uvicorn.Server, socket.socket]] = []
        self._local: list[tuple[uvicorn.Server, socket.socket]] = []
        self._context = self._gate.context
        self._bind_problems: tuple[str, ...] = ()
        self._targets = filesd.TargetFile(config.file_sd, gethostname(), filesd.reachable) if config.file_sd else None
        self._inherit_problems: tuple[str, ...] = ()
        self._unbound = list(config.addresses)
        self._next_bind_s = 0.0
        self._connections = Connections()
        self._push = _push_of(config)
        self._done = False
        self._leave = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        self._watch_signals()
        if self._config.problems:
            _log.error("configuration: %s", "; ".join(self._config.problems))
        if self._push is not None:
            self._push.start()
        try:
            await self._look_at_web_config()
            self._inherit_problems = await self._take_over()
            await self._bind()
            if not self._servers and self._config.mode == "node":
                return 1
            while not self._leave.is_set():
                await self._tick()
                await _sleep_until(self._leave, FADED_AFTER_S if self._watch.latest.fading else TICK_S)
            await self._drain()
            return 0
        finally:
            await self._close()

    def _watch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, signal.SIGTERM)
        loop.add_signal_handler(signal.SIGINT, self._on_signal, signal.SIGINT)

    def _on_signal(self, number: int) -> None:
        # Ctrl-C is a person, who does not want to wait for scrapers
        if self._leave.is_set() or number == signal.SIGINT:
            self._hurry.set()
        self._leave.set()

    async def _tick(self) -> None:
        await self._look_at_web_config()
        if (self._unbound or self._socket.wanted) and time.monotonic() >= self._next_bind_s:
            await self._bind()
        await self._tell_targets()
        snapshot = await self._watch.fresh(max_age_s=FADED_AFTER_S / 2)
        servers = [server for server, _ in (*self._servers, *self._local)]
        for server in servers:
            await server.on_tick(0)
        connections = {connection for server in servers for connection in server.server_state.connections}
        self._connections.sweep(cast("set[Connection]", connections), time.monotonic())
        await self._api.look(snapshot)
        if self._push is not None:
            self._site.pushed = self._push.counts
            self._push.look(self._site.facts(snapshot))
        if self._finished is not None and snapshot.number and self._finished(self._fleet()):
            self._done = True
            self._leave.set()

    async def _look_at_web_config(self) -> None:
        await self._gate.look()
        self._tell_problems()
        if self._gate.context is not self._context:
            self._context = self._gate.context
            # another context for new connections is another server; the socket stays, so that nobody is refused meanwhile
            old = [one for one in self._servers if not isinstance(one[1], UnixSocket)]
            self._servers = [one for one in self._servers if one not in old]
            for _, bound in old:
                again = bound.dup()
                self._servers.append((await serve_on(again, self._app, self._context), again))
            for server, bound in old:
                await server.shutdown(sockets=[bound])

    async def _tell_targets(self) -> None:
        if self._targets is not None:
            addresses = filesd.listened_on(bound for _, bound in self._servers)
            target = filesd.Target(addresses, self._config.telemetry_path, tls=self._context is not None)
            await asyncio.to_thread(self._targets.tell, target)
            self._tell_problems()

    def _tell_problems(self) -> None:
        self._site.problems = (
            *self._inherit_problems,
            *self._bind_problems,
            *filter(None, (self._gate.problem, self._targets.problem if self._targets is not None else "")),
        )

    async def _bind(self) -> None:
        self._next_bind_s = time.monotonic() + RETRY_BIND_S
        problems = []
        for address in list(self._unbound):
            try:
                bound = self._listener(address)
            except OSError as problem:
                problems.append(f"cannot listen on {address}: {problem.strerror or problem}")
                _log.error("cannot listen on %s: %s", address, problem.strerror or problem)
                continue
            self._unbound.remove(address)
            await self._serve(bound, address)
        if self._servers or self._config.mode == "sidecar":  # a node's exporter without a port gives up
            await self._bind_socket(problems)
        self._bind_problems = tuple(problems)
        self._tell_problems()

    async def _bind_socket(self, problems: list[str]) -> None:
        try:
            bound = self._socket.bind() if self._socket.wanted else None
        except OSError as problem:
            problems.append(f"no Unix socket for the API: {problem.strerror or problem}")
            _log.error("no Unix socket for the API: %s", problem.strerror or problem)
            return
        if bound is not None:
            # no TLS and no passwords: the file's mode says who comes in
            self._local.append((await serve_on(bound, self._site.app(self._api.mounts("socket"))), bound))

    def _listener(self, address: Address | UnixAddress) -> socket.socket:
        if isinstance(address, UnixAddress):
            return bind_unix(address)
        return bind(address) if self._config.mode == "sidecar" else bind_near(address)

    async def _serve(self, bound: socket.socket, address: Address | UnixAddress | None = None) -> None:
        own = isinstance(bound, UnixSocket)  # its mode is its guard
        app, context = (self._open, None) if own else (self._app, self._context)
        self._servers.append((await serve_on(bound, app, context), bound))
        if isinstance(address, Address):
            self._listening(Address(address.host, bound.getsockname()[1]))
        else:
            _log.info("listening on %s", address or bound.getsockname())

    async def _take_over(self) -> tuple[str, ...]:
        try:
            for bound in inherited(settings.environment(), os.getpid()) if self._config.systemd_socket else ():
                await self._serve(bound)
        except OSError as problem:
            _log.error("--web.systemd-socket: %s", problem.strerror)
            return (f"--web.systemd-socket: {problem.strerror}",)
        return ()

    def _listening(self, address: Address) -> None:
        _log.info("listening on %s", address)
        announce, self._announce = self._announce, None
        if announce is not None:
            announce(str(address))

    def _fleet(self) -> Fleet:
        ranks, last_s = self._watch.latest.ranks, self._scrapers.last_s
        ended = [rank.ended_in for rank in ranks if rank.ended_in is not None]
        return Fleet(
            ranks=len(ranks),
            alive=sum(rank.up for rank in ranks),
            last_scrape_age_s=None if last_s is None else time.monotonic() - last_s,
            unscraped_final=sum(not self._scrapers.got(number) for number in ended),
        )

    async def _drain(self) -> None:
        """Wait until every scraper and the receiver of the push have what is final; what ends while we wait is final then."""
        if self._done and self._push is None:
            return
        deadline_s = time.monotonic() + min(self._config.drain_timeout_s, FLUSH_S if self._done else math.inf)
        final = await self._final() if not self._hurry.is_set() else 0
        while not self._hurry.is_set():
            goal = max([final, *(rank.ended_in or 0 for rank in self._watch.latest.ranks)])
            waiting = [] if self._done else self._scrapers.waiting(goal, time.monotonic())
            if self._push is not None and not self._push.settled:
                waiting.append("OTLP")
            if not waiting:
                break
            if time.monotonic() > deadline_s:
                _log.warning("leaving, though the final state was not fetched by: %s", ", ".join(waiting))
                break
            _log.info("waiting for the final state to be fetched by: %s", ", ".join(waiting))
            await _sleep_until(self._hurry, 0.2)
            await self._tick()

    async def _final(self) -> int:
        """Take the final state, and push it; return its number."""
        snapshot = await self._watch.after_now()
        if self._push is not None:
            self._push.look(self._site.facts(snapshot), final=True)
        return snapshot.number

    async def _close(self) -> None:
        if self._targets is not None:
            self._targets.remove()
        self._site.live.close()
        if self._push is not None:
            self._push.close()
        for server, bound in (*self._servers, *self._local):
            await server.shutdown(sockets=[bound])
            if isinstance(bound, UnixSocket):
                bound.remove()
        self._socket.close()
        self._api.close()
        self._watch.close()
        self._pages.close()
        self._gate.close()


def _push_of(config: ExporterConfig) -> Push | None:
    """Return what pushes over OTLP, which takes 3 MiB more; nothing of it is imported unless an endpoint is given."""
    if config.push is None:
        return None
    from torchobs.exporter.otlp.push import Push

    return Push(config.push, config)


async def _sleep_until(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)


def _allow_files() -> None:
    """Raise the limit of open files: a flight file is one, and so is every connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
