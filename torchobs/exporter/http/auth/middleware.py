"""Middleware that enforces the web configuration file, which is checked for changes every second.

If a changed file is invalid, the previous configuration stays in force. If the file is invalid from the start, everything but
health is answered with 503, because it is unknown what was to be protected. Either way ``torchobs_exporter_config_ok`` is 0
until the file is valid.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse

from torchobs.exporter.http.auth import tls, web_config
from torchobs.exporter.http.auth.web_config import WebConfig, WebConfigError
from torchobs.exporter.http.client_scope import LET_IN

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from torchobs.exporter.http.auth.basic import Passwords

HEALTH = ("/-/healthy", "/-/ready")
"""Paths without authentication: kubelet's probes have no password, and the responses reveal nothing."""

_Version = tuple[int, int, int, int, int] | None
_log = logging.getLogger(__name__)


class ActiveConfig(NamedTuple):
    """The configuration in force."""

    config: WebConfig
    context: ssl.SSLContext | None
    """``None``: no TLS"""


class WebConfigMiddleware:
    """Enforces a web configuration file, if there is one. To be used in one event loop."""

    def __init__(self, path: str | None) -> None:
        self.problem = ""
        """the file's error; empty if there is none"""
        self._path = Path(path) if path is not None else None
        self._active: ActiveConfig | None = None if path is not None else ActiveConfig(WebConfig(), None)
        self._versions: dict[Path, _Version] = {}
        self._passwords: Passwords | None = None

    @property
    def context(self) -> ssl.SSLContext | None:
        """The TLS context for new connections: another object after every change."""
        return self._active.context if self._active is not None else None

    async def reload(self) -> None:
        """Reload the file if it, or a certificate file that it names, has changed."""
        if self._path is not None and await asyncio.to_thread(self._changed):
            await asyncio.to_thread(self._load, self._path)

    def guard(self, app: ASGIApp) -> ASGIApp:
        """Return the application with authentication and the configured headers."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            active = self._active
            if active is None:
                refused = "the web configuration is broken, and nothing is served until it is mended: see the log\n"
                answer = None if scope["path"] in HEALTH else PlainTextResponse(refused, 503)
            else:
                send = _with_headers(active.config, send)
                answer = None if scope["path"] in HEALTH else await self._refusal(active.config, scope)
                scope[LET_IN] = answer is None and active.config.authenticates
            await (answer or app)(scope, receive, send)

        return guarded

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        if self._passwords is not None:
            self._passwords.close()

    async def _refusal(self, config: WebConfig, scope: Scope) -> PlainTextResponse | None:
        if not config.users:
            return None
        from torchobs.exporter.http.auth.basic import BusyError, Passwords

        self._passwords = self._passwords or Passwords()
        try:
            if await self._passwords.allowed(Headers(scope=scope).get("authorization"), config.users):
                return None
        except BusyError:
            return PlainTextResponse("Too many passwords to look at.\n", 503, {"Retry-After": "1"})
        return PlainTextResponse("Unauthorized\n", 401, {"WWW-Authenticate": 'Basic realm="torchobs", charset="UTF-8"'})

    def _changed(self) -> bool:
        return not self._versions or self._versions != _versions(self._versions)

    def _load(self, path: Path) -> None:
        watched = {path}
        self._versions = _versions(watched)  # before they are read, so that a change meanwhile is noticed
        try:
            config = web_config.parse(path.read_text("utf-8"))
            if config.tls is not None:
                watched.update(tls.files(config.tls, path.parent))
                self._versions |= _versions(watched - {path})
            context = tls.context(config.tls, path.parent) if config.tls is not None else None
        except (OSError, ValueError) as problem:
            self._report(path, problem)
            return
        self._active, self.problem = ActiveConfig(config, context), ""
        notes = tls.notes(config.tls) if config.tls is not None else ()
        _log.info("web configuration in force: %s", "; ".join((str(path), *notes)), extra={"good_news": True})

    def _report(self, path: Path, problem: OSError | ValueError) -> None:
        words = f"{problem}" if isinstance(problem, WebConfigError) else getattr(problem, "strerror", None) or "it is no UTF-8"
        kept = "the one before stays in force" if self._active is not None else "nothing is served"
        self.problem = f"--web.config.file {path}: {words}; {kept}"
        _log.error("%s", self.problem)


def _versions(paths: Iterable[Path]) -> dict[Path, _Version]:
    return {path: _version(path) for path in paths}


def _version(path: Path) -> _Version:
    try:
        status = os.stat(path)  # noqa: PTH116  # follows symbolic links: Kubernetes replaces one
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _with_headers(config: WebConfig, send: Send) -> Send:
    if not config.headers:
        return send

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in config.headers.items():
                headers.setdefault(name, value)  # a policy that our own pages set is stricter
        await send(message)

    return sending
