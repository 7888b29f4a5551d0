"""Client of this node's exporter over its Unix socket, for ``torchobs stacks``, ``level`` and ``profile``."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from torchobs.cli import arguments
from torchobs.cli.arguments import CommandError
from torchobs.config import option_types, settings
from torchobs.config.options import Option
from torchobs.exporter import access, unix_socket
from torchobs.flight.files.location import find_existing

_SOCKET = Option(
    "socket",
    option_types.PATH,
    "The exporter's Unix socket.",
    "exporter.sock beside the flight files",
    flag="--socket",
    metavar="PATH",
)
_ADVICE = {
    "no-such-rank": "there is no such rank on this machine: `torchobs top --once` shows those there are",
    "ambiguous-rank": "several ranks are meant: name one by its incarnation, the digits in the name of its flight file",
}
"""Problems of the API of which a person at a terminal is told otherwise, by their type"""
RANK = "A rank's number, or its incarnation (the id of one process)."
"""Help text of the argument."""
TIMEOUT_S = 30.0
POLL_S = 0.2


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """See :class:`http.client.HTTPConnection`."""
        self.sock: socket.socket = unix_socket.connect(self._path)
        self.sock.settimeout(TIMEOUT_S)


def add_options(parser: arguments.Parser) -> None:
    """Add the options common to these commands."""
    arguments.add(parser, arguments.DIRECTORY)
    arguments.add(parser, _SOCKET)


def socket_of(options: argparse.Namespace) -> Path:
    """Return the path of the exporter's socket. Raises ``CommandError``."""
    if options.socket:
        return Path(options.socket)
    environ = settings.environment()
    chosen, _ = settings.resolve({"flight_dir": options.flight_dir}, environ)
    directory = find_existing(str(chosen.flight_dir) if chosen.flight_dir else None, environ.get("XDG_RUNTIME_DIR"))
    if directory is None:
        raise CommandError("no training of this user has run here yet; --dir names another flight directory")
    return Path(directory) / access.SOCKET_NAME


def post(path: Path, what: str, content: object, rank: str | None) -> Any:
    """Send a command and return the answer. Raises ``CommandError``."""
    query = f"?{urlencode({'rank': rank})}" if rank is not None else ""
    status, body = _ask(path, "POST", f"/api/v1{what}{query}", json.dumps(content))
    answer = json.loads(body)
    if status >= http.client.BAD_REQUEST:
        kind = str(answer.get("type", "")).rpartition(":")[2]
        raise CommandError(_ADVICE.get(kind, answer.get("detail", str(status))))
    return answer


def evidence(path: Path, href: str, timeout_s: float) -> bytes | None:
    """Wait for an artifact and return it; ``None`` on timeout.

    Raises ``CommandError``, also when the rank reports that it could not be written.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        status, body = _ask(path, "GET", href)
        if status == http.client.OK:
            return body
        if status == http.client.GONE:
            raise CommandError(json.loads(body)["detail"])
        if time.monotonic() > deadline_s:
            return None
        time.sleep(POLL_S)


def _ask(path: Path, method: str, target: str, content: str | None = None) -> tuple[int, bytes]:
    connection = _Connection(path)
    try:
        connection.request(method, target, content, {"Content-Type": "application/json"} if content else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as problem:  # the latter: it ended in the midst of its answer
        reason = getattr(problem, "strerror", None) or problem
        hint = "`torchobs run` starts an exporter, `torchobs exporter --mode node` is one; a sidecar needs --api.socket"
        raise CommandError(f"no exporter answers at {path}: {reason}. {hint}") from None
    finally:
        connection.close()
