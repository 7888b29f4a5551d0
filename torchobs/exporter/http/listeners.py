"""The exporter's listeners: on its addresses, and on the API's own Unix socket.

What cannot be opened is tried again, a Unix socket whose file is gone is opened anew, and new certificates get new servers.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchobs.config.option_types import Address
from torchobs.exporter.http.server import UnixSocketWatch, bind, bind_near, retire, serve_on
from torchobs.exporter.http.unix_socket import UnixAddress, UnixSocket, bind_unix

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    import uvicorn
    from starlette.types import ASGIApp

    from torchobs.exporter.config import ExporterConfig
    from torchobs.exporter.web_config import WebConfigMiddleware

RETRY_S = 5.0
"""Pause before listening is tried again."""

_log = logging.getLogger(__name__)
_GOOD_NEWS = {"good_news": True}


class ApiSocket(NamedTuple):
    """The API's own Unix socket, over which commands are allowed."""

    app: ASGIApp
    address: Callable[[], UnixAddress | None]
    """returns ``None`` while its directory does not exist; raises ``OSError``"""


class _Listener(NamedTuple):
    """A server on a socket. ``address``: as configured; ``None`` for the API's own socket."""

    server: uvicorn.Server
    bound: socket.socket
    address: Address | UnixAddress | None
    is_api: bool
    context: ssl.SSLContext | None


class Listeners:
    """Listens as configured. To be used in one event loop.

    ``announce`` is called with the first address, ``host:port``, and whether it has TLS; again when that changes.
    """

    def __init__(
        self,
        config: ExporterConfig,
        web_config: WebConfigMiddleware,
        app: ASGIApp,
        api: ApiSocket | None,
        announce: Callable[[str, bool], None] | None,
    ) -> None:
        """``app``: the application without authentication, which ``web_config`` adds where it is reached by the network."""
        self.unannounced = 0
        self._config, self._web_config = config, web_config
        self._app, self._guarded, self._api, self._announce = app, web_config.guard(app), api, announce
        self._listeners: list[_Listener] = []
        self._unbound, self._wants_api = list(config.addresses), api is not None
        self._bind_problems: list[str] = []
        self._renewal_problems: list[str] = []
        self._unix_sockets = UnixSocketWatch()
        self._address, self._next_bind_s = "", 0.0
        self._announced: tuple[str, bool] | None = None

    @property
    def sockets(self) -> list[socket.socket]:
        """The listening sockets."""
        return [listener.bound for listener in self._listeners]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it does not listen as configured."""
        return (*self._bind_problems, *self._renewal_problems)

    async def open(self) -> None:
        """Listen as far as possible, by the web configuration that was loaded meanwhile."""
        await self._bind()

    async def tick(self) -> None:
        """Do the periodic work, once a second."""
        await self._renew()
        await self._reopen_unnamed()
        if (self._unbound or self._wants_api) and time.monotonic() >= self._next_bind_s:
            await self._bind()
        self._announce_address()
        for listener in self._listeners:
            await listener.server.on_tick(0)

    async def close(self) -> None:
        """Remove the sockets' files, and stop."""
        for listener in self._listeners:
            if isinstance(listener.bound, UnixSocket):
                listener.bound.remove()  # while it still listens
            await listener.server.shutdown(sockets=[listener.bound])

    async def _renew(self) -> None:
        """Start new servers if the TLS context has changed; their sockets stay open, so that no connection is refused.

        What cannot be renewed serves as before, and is tried again.
        """
        self._renewal_problems = []
        reached = [listener for listener in self._listeners if not isinstance(listener.bound, UnixSocket)]
        for listener in [listener for listener in reached if listener.context is not self._web_config.context]:
            bound = self._open("no other TLS settings yet", listener.bound.dup, self._renewal_problems)
            if bound is None:
                continue
            await self._serve(bound, listener.address)
            self._listeners.remove(listener)
            await retire(listener.server)
            listener.bound.close()

    async def _reopen_unnamed(self) -> None:
        """Listen again where a Unix socket's file was removed or replaced."""
        lost = self._unix_sockets.lost(bound for bound in self.sockets if isinstance(bound, UnixSocket))
        for listener in [listener for listener in self._listeners if listener.bound in lost]:
            self._listeners.remove(listener)
            self._wants_api = self._wants_api or listener.is_api
            if listener.address is not None:
                self._unbound.append(listener.address)
            await listener.server.shutdown(sockets=[listener.bound])

    async def _bind(self) -> None:
        self._next_bind_s = time.monotonic() + RETRY_S
        self._bind_problems = []
        for address in list(self._unbound):
            bound = self._open(f"cannot listen on {address}", partial(self._bound_to, address), self._bind_problems)
            if bound is not None:
                self._unbound.remove(address)
                await self._serve(bound, address)
                self._log_address(bound, address)
        if self._wants_api and (self._listeners or self._config.mode == "sidecar"):  # a node's exporter without a port gives up
            bound = self._open("no Unix socket for the API", self._api_bound, self._bind_problems)
            if bound is not None:
                self._wants_api = False
                await self._serve(bound, is_api=True)

    def _open(self, failure: str, bind: Callable[[], socket.socket | None], problems: list[str]) -> socket.socket | None:
        """Return a listening socket, or ``None`` after reporting why there is none."""
        try:
            return bind()
        except OSError as problem:
            problems.append(f"{failure}: {problem.strerror or problem}")
            _log.error("%s: %s", failure, problem.strerror or problem)
            return None

    def _bound_to(self, address: Address | UnixAddress) -> socket.socket:
        if isinstance(address, UnixAddress):
            return bind_unix(Path(address.path))
        return bind(address) if self._config.mode == "sidecar" or self._config.listen else bind_near(address)

    def _api_bound(self) -> socket.socket | None:
        address = self._api.address() if self._api is not None else None
        return bind_unix(Path(address.path)) if address is not None else None

    async def _serve(self, bound: socket.socket, address: Address | UnixAddress | None = None, *, is_api: bool = False) -> None:
        app, context = self._guarded, self._web_config.context
        if isinstance(bound, UnixSocket):  # no TLS and no passwords: the file's mode controls access
            app, context = self._api.app if is_api and self._api is not None else self._app, None
        self._listeners.append(_Listener(await serve_on(bound, app, context), bound, address, is_api, context))

    def _log_address(self, bound: socket.socket, address: Address | UnixAddress) -> None:
        if isinstance(address, UnixAddress):
            _log.info("listening on %s", address, extra=_GOOD_NEWS)
            return
        actual = Address(address.host, bound.getsockname()[1])
        if address.port not in {0, actual.port}:
            _log.warning("%s is taken by another program: listening on %s", address, actual)
        _log.info("listening on %s", actual, extra=_GOOD_NEWS)
        self._address = self._address or str(actual)
        self._announce_address()

    def _announce_address(self) -> None:
        """Announce the first address; retried until that succeeds."""
        announced = self._address, any(listener.context is not None for listener in self._listeners)
        if self._announce is None or not self._address or announced == self._announced:
            return
        try:
            self._announce(*announced)
            self._announced = announced
        except OSError as problem:
            self.unannounced += 1
            _log.error("the address could not be announced: %s", problem.strerror or problem)
