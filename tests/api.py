"""Asking an exporter's API, over TCP or its Unix socket."""

from __future__ import annotations

import http.client
import json
import socket
from pathlib import Path
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """What it said."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, which must be JSON."""
        return json.loads(self.body)


class _Local(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=10)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(str(self._path))


class Caller:
    """Asks; `at` is `host:port` or the path of a socket."""

    def __init__(self, at: str | Path) -> None:
        self._at = at

    def ask(self, method: str, path: str, content: object = None, prefix: str = "/api/v1", **headers: str) -> Reply:
        """Send a request; with content it is JSON. `content_type` is `Content-Type`."""
        connection = _Local(self._at) if isinstance(self._at, Path) else http.client.HTTPConnection(self._at, timeout=10)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        body = None
        if content is not None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            sent.setdefault("content-type", "application/json")
        try:
            connection.request(method, prefix + path, body, sent)
            got = connection.getresponse()
            return Reply(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Any:
        """What is read there, which must be there."""
        reply = self.ask("GET", path, **headers)
        assert reply.status == 200, reply
        return reply.json

    def post(self, path: str, content: object = None, **headers: str) -> Reply:
        """Give a command."""
        return self.ask("POST", path, {} if content is None else content, **headers)
