"""OTLP over HTTP with protobuf, by urllib3.

Adds what urllib3 lacks: a timeout for the whole request, and cancellation from another thread. urllib3's own retries are off;
the queue decides about them, because it also counts. Specification: https://opentelemetry.io/docs/specs/otlp/#otlphttp.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import ssl
from functools import partial
from http import HTTPStatus
from threading import Event, Timer
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from google.protobuf.message import DecodeError
from urllib3 import PoolManager, ProxyManager, Retry, make_headers
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError, ProxyError
from urllib3.exceptions import TimeoutError as HTTPTimeoutError

from torchobs._version import __version__
from torchobs.exporter.otlp.transport import Outcome, accepted, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from urllib3 import BaseHTTPResponse

    from torchobs.exporter.otlp.options import PushTarget

RETRYABLE = frozenset({429, 502, 503, 504})
"""Retryable status codes of the specification; every other error means that the request or its URL is wrong."""
OF_ADDRESS = frozenset({401, 403, 404, 405, 407, 410, 415, 501})
"""Status codes of a receiver that takes nothing at this URL or with these credentials; so does a redirect."""

_LEVEL = 1
_LONGEST_ANSWER = 64 * 1024
_FAILURES = (OSError, HTTPError, ValueError)


class HttpTransport:
    """Sends one signal to one URL."""

    def __init__(self, signal: str, target: PushTarget) -> None:
        self._signal, self._target = signal, target
        encoding = {"Content-Encoding": "gzip"} if target.gzip else {}
        fixed = {"Content-Type": "application/x-protobuf", "User-Agent": f"torchobs-exporter/{__version__}"}
        self._headers = {**fixed, **encoding, **dict(target.headers)}
        self._manager: PoolManager | None = None
        self._connection: _AbortableConnection | None = None
        self._socket: socket.socket | None = None
        self._closed = False
        self._late = Event()

    def pack(self, message: bytes) -> bytes:
        return gzip.compress(message, _LEVEL, mtime=0) if self._target.gzip else message

    def unpack(self, body: bytes) -> bytes:
        return gzip.decompress(body) if self._target.gzip else body

    def send(self, body: bytes) -> Outcome:
        late = self._late = Event()

        def give_up() -> None:
            late.set()
            self._abort()

        # a socket's timeout restarts with every byte: a receiver that answers byte by byte would block the thread for ever
        timer = Timer(self._target.timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            answer, content = self._post(body)
        except _FAILURES as problem:
            if late.is_set() or isinstance(problem, (TimeoutError, HTTPTimeoutError)):
                return Outcome("retry", words=f"no answer within {self._target.timeout_s:g} s")
            return Outcome("retry", words=_reason(problem))
        finally:
            timer.cancel()
            if self._connection is None or self._connection.is_closed:
                self._forget_connection()
        return self._outcome(answer, content)

    def cancel(self) -> None:
        self._closed = True
        self._abort()

    def close(self) -> None:
        if self._manager is not None:
            self._manager.clear()
        self._forget_connection()

    def _post(self, body: bytes) -> tuple[BaseHTTPResponse, bytes]:
        """Return the response and its body. Raises what urllib3 and :meth:`_check` raise."""
        self._check()
        if self._manager is None:
            self._manager = self._connect()
        answer: BaseHTTPResponse = self._manager.urlopen(
            "POST", self._target.url, body=body, headers=self._headers, timeout=self._target.timeout_s,
            redirect=False, retries=False, preload_content=False, decode_content=False,
        )  # fmt: skip
        with contextlib.closing(answer):  # ends the connection unless the whole response was read
            content = answer.read(_LONGEST_ANSWER)
        self._check()  # a response without a length looks complete when the connection is cut
        is_sent = self._connection is not None and self._connection.is_sent
        if not is_sent and (answer.status < HTTPStatus.MULTIPLE_CHOICES or answer.status == HTTPStatus.REQUEST_TIMEOUT):
            # the body does not matter, nothing was accepted; servers end an idle connection with 408
            raise ConnectionResetError("the receiver ended the connection before it had everything")
        return answer, content

    def _outcome(self, answer: BaseHTTPResponse, content: bytes) -> Outcome:
        if HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
            return accepted(self._signal, content)
        moved = answer.headers.get("Location")
        words = f"{answer.status} {answer.reason}{f', moved to {moved}' if moved else ''}: {_text(content)}"
        if answer.status in RETRYABLE:
            return Outcome("retry", after_s=_retry_after_s(answer), words=printable(words))
        of_address = answer.status < HTTPStatus.BAD_REQUEST or answer.status in OF_ADDRESS
        return Outcome("refused", words=printable(words), of_address=of_address)

    def _connect(self) -> PoolManager:
        proxy = _proxy_of(self._target.url)
        manager = ProxyManager(proxy[0], proxy_headers=proxy[1]) if proxy else PoolManager()
        pool: Any = manager.connection_from_url(self._target.url)
        tls = partial(_AbortableTLSConnection, partial(_context, self._target))
        pool.ConnectionCls = partial(tls if pool.scheme == "https" else _AbortableConnection, opened=self._opened)
        return manager

    def _opened(self, connection: _AbortableConnection, sock: socket.socket) -> None:
        """Keep a duplicate of a new connection's socket: TLS detaches the original, and so does reading a response."""
        self._forget_connection()
        self._connection, self._socket = connection, sock.dup()
        self._check()

    def _check(self) -> None:
        """Raise if the request was cancelled or timed out; call it once there is a socket.

        :meth:`_abort` sets its flag before it looks for the socket, so one of the two threads sees the other.
        """
        if self._closed:
            raise ConnectionAbortedError("the exporter ends")
        if self._late.is_set():
            raise TimeoutError

    def _abort(self) -> None:
        """Shut the socket down while another thread uses it: its read or write fails at once."""
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _forget_connection(self) -> None:
        sock, self._connection, self._socket = self._socket, None, None
        if sock is not None:
            sock.close()


class _AbortableConnection(HTTPConnection):
    """urllib3's connection that reports its socket before the handshake, and records whether a request was sent completely."""

    is_sent = False

    def __init__(self, opened: Callable[[_AbortableConnection, socket.socket], None], **given: Any) -> None:
        super().__init__(**given)
        self._opened = opened

    def _new_conn(self) -> socket.socket:  # as urllib3.contrib.socks does it
        sock = super()._new_conn()
        try:
            self._opened(self, sock)
        except OSError:
            sock.close()
            raise
        return sock

    def request(self, *args: Any, **given: Any) -> None:
        """See :class:`HTTPConnection`. If sending fails, urllib3 still reads the response, which may be a refusal."""
        self.is_sent = False
        super().request(*args, **given)
        self.is_sent = True


class _AbortableTLSConnection(_AbortableConnection, HTTPSConnection):
    def __init__(self, context: Callable[[], ssl.SSLContext], **given: Any) -> None:
        super().__init__(**given)
        self._context = context

    def connect(self) -> None:
        """See :class:`HTTPSConnection`. Each connection gets a new context, so that renewed certificates are used."""
        self.ssl_context = self._context()  # takes some 10 ms, hence before the socket is opened
        super().connect()


def _context(target: PushTarget) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=target.certificate)
    if target.client_certificate:
        context.load_cert_chain(target.client_certificate, target.client_key)
    return context


def _proxy_of(url: str) -> tuple[str, dict[str, str]] | None:
    """Return the proxy that the environment configures for a URL, and the headers to send to it."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not proxy or proxy_bypass(f"{parts.hostname}:{port}"):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    named = urlsplit(proxy)
    secret = f"{unquote(named.username)}:{unquote(named.password or '')}" if named.username else ""
    headers = make_headers(proxy_basic_auth=secret.encode().decode("latin-1")) if secret else {}  # re-encoded so
    return named._replace(netloc=named.netloc.rpartition("@")[2]).geturl(), dict(headers)


def _retry_after_s(answer: BaseHTTPResponse) -> float | None:
    """Return ``Retry-After``, a number or a date, in seconds; ``None`` if it is neither, or absent."""
    try:
        return Retry().get_retry_after(answer)
    except (HTTPError, ValueError, OverflowError):
        return None


def _text(content: bytes) -> str:
    """Return the response's error message: that of a ``google.rpc.Status``, which begins with two tags, or text."""
    from google.rpc.status_pb2 import Status

    try:
        return str(Status.FromString(content).message) or content.decode(errors="replace")
    except DecodeError:
        return content.decode(errors="replace")


def _reason(problem: BaseException) -> str:
    """Return the operating system's error message, which urllib3 wraps."""
    wrapped = problem.__cause__ or next((one for one in problem.args if isinstance(one, Exception)), None)
    if wrapped is not None:
        by = "the proxy: " if isinstance(problem, ProxyError) else ""
        return f"{by}{_reason(wrapped)}"
    if isinstance(problem, OSError):
        return printable(problem.strerror or str(problem))
    return printable(f"{type(problem).__name__} {problem}")
