"""Who may see and command what: authorization of API requests, and the path of the API's own Unix socket.

There are three channels. A Unix socket, protected by its file's mode, allows everything. Loopback allows reading; changes need
the token. Every other address needs the token for everything; for reading, authentication by the web configuration (a password,
a certificate) suffices. Web pages of other sites, open in a browser on this machine, reach loopback as well: they are detected
by their ``Origin``, and with DNS rebinding, where a site resolves its own name to 127.0.0.1, by their ``Host``.
"""

from __future__ import annotations

import hmac
import ipaddress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchobs.exporter.config import UnixAddress
from torchobs.flight.directory import find_existing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope

    from torchobs.exporter.config import ExporterConfig


TYPES = "urn:torchobs:problem:"
MEDIA_TYPE = "application/problem+json"


class Problem(Exception):  # noqa: N818  # RFC 9457's word
    """A refused request: the HTTP status, the kind of problem, and what to do about it."""

    def __init__(self, status: int, kind: str, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status, self.kind, self.detail = status, kind, detail
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def content(self) -> dict[str, Any]:
        """Return the members of the problem object."""
        title = HTTPStatus(self.status).phrase
        return {"type": TYPES + self.kind, "title": title, "status": self.status, "detail": self.detail}


def bad(detail: str) -> Problem:
    """Return the problem for an invalid parameter or body."""
    return Problem(400, "bad-request", detail)


OFF = "off"
SOCKET_NAME = "exporter.sock"
"""File name in a node's flight directory, where the command-line tools look for it."""


def is_socket_wanted(config: ExporterConfig) -> bool:
    """Return whether there is a socket: as configured (``off``: no); by default only in a node's exporter."""
    return config.api_socket != OFF and (config.api_socket is not None or config.mode == "node")


def socket_address(config: ExporterConfig) -> UnixAddress | None:
    """Return the socket's address; ``None`` while the flight directory does not exist."""
    if config.api_socket is not None:
        return UnixAddress(str(Path(config.api_socket).absolute()))
    directory = find_existing(config.flight_dir, config.runtime_dir)
    return None if directory is None else UnixAddress(str(Path(directory) / SOCKET_NAME))


REFUSAL = (
    "This address serves /metrics and health only. The page is shown on the machine itself, and elsewhere to whoever has a"
    " password or a certificate (--web.config.file). Open it there as"
    " http://localhost:PORT/, or by `kubectl port-forward POD PORT`, or by `ssh -L PORT:localhost:PORT HOST`.\n"
)


LET_IN = "torchobs.let_in"
"""Key in the ASGI scope of a request that was authenticated"""


def is_unix(scope: Scope) -> bool:
    """Return whether a request came over a Unix socket."""
    server = scope.get("server")
    return server is None or server[1] is None


def is_local(scope: Scope) -> bool:
    """Return whether a request came over a loopback address or a Unix socket.

    The connection's local address counts, not the listener's: a listener on all interfaces is reached by 127.0.0.1 from this
    machine, also through a port-forward, but from no other machine.
    """
    if is_unix(scope):
        return True  # file permissions control access to it
    server = scope["server"]
    try:
        address = ipaddress.ip_address(server[0].partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


AccessChannel = Literal["socket", "loopback", "open"]
READING = frozenset({"GET", "HEAD"})
TOKEN_HEADERS = frozenset({"authorization", "torchobs-token"})
"""Headers that may carry the token, in lower case"""

LEAST_TOKEN = 16
"""Shortest token accepted, in characters; generated ones are longer."""

_NO_CONTROL = (
    "Commands are taken over the exporter's Unix socket (--api.socket), or with the bearer token of --api.token-file; this "
    "exporter has no such file."
)


def access_channel(scope: Scope) -> AccessChannel:
    """Return the access channel of a request to a TCP listener."""
    return "loopback" if is_local(scope) else "open"


class Token:
    """The bearer token, read from its file for each use: a mounted secret is rotated by replacing the file."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    @property
    def is_configured(self) -> bool:
        """Whether a token file is configured, readable or not."""
        return self._path is not None

    def admits(self, text: str) -> bool:
        """Return whether a text is the token; always False without a usable file."""
        try:
            return hmac.compare_digest(text.encode(), self.read().encode())
        except (OSError, ValueError):
            return False

    def read(self) -> str:
        """Return the token. Raises ``OSError`` or ``ValueError`` if there is no usable one."""
        if self._path is None:
            raise ValueError("no token file")
        token = Path(self._path).read_text(encoding="utf-8").strip()
        if len(token) < LEAST_TOKEN:
            msg = f"the token has fewer than {LEAST_TOKEN} characters"
            raise ValueError(msg)
        return token


def refusal(
    method: str, headers: Mapping[str, str], channel: AccessChannel, token: Token, *, authenticated: bool = False
) -> Problem | None:
    """Return the reason to refuse a request, or ``None`` to allow it. ``headers``: by lower-case name.

    ``authenticated``: True if the web configuration has authenticated the request, which is enough for reading.
    """
    changes = method not in READING
    if channel == "socket":
        return _not_json(headers) if changes else None
    # the token may come beside a password, which `Authorization` holds then
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    bearer = credentials.strip() if scheme.lower() == "bearer" else headers.get("torchobs-token")
    if bearer is not None:
        admitted = token.admits(bearer)
        return _foreign_origin(headers) or (_not_json(headers) if changes else None) if admitted else _no_token(token)
    if changes:
        return _no_token(token)
    if authenticated:
        return _foreign_origin(headers)
    if channel == "loopback":
        detail = "The Host header names another machine: use localhost, 127.0.0.1 or [::1]."
        is_local = _is_local_host(headers.get("host", ""))
        return _foreign_origin(headers) if is_local else Problem(421, "foreign-host", detail)
    return _no_token(token) if token.is_configured else Problem(403, "not-here", REFUSAL.strip())


def _no_token(token: Token) -> Problem:
    if not token.is_configured:
        return Problem(403, "control-off", _NO_CONTROL)
    detail = (
        "Send the header `Authorization: Bearer TOKEN` (or `Torchobs-Token: TOKEN`) with what is in the exporter's "
        "--api.token-file."
    )
    return Problem(401, "no-token", detail, WWW_Authenticate="Bearer")


def _foreign_origin(headers: Mapping[str, str]) -> Problem | None:
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None and origin not in {f"http://{host}", f"https://{host}"}:
        return Problem(403, "foreign-origin", "The request comes from a page of another site, which this API is not for.")
    return None


def _not_json(headers: Mapping[str, str]) -> Problem | None:
    """Return the problem of a content type that HTML forms can send."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    detail = "Send the header `Content-Type: application/json`; the body is a JSON object, {} if there is nothing to say."
    return None if kind == "application/json" else Problem(415, "not-json", detail)


def _is_local_host(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
