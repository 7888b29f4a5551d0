"""OTLP over HTTP with protobuf, by urllib3.

urllib3 does what HTTP, TLS and proxies want. What it has no means for is here: a limit on the time that a whole request takes,
and breaking one off from another thread. Nothing is sent again by urllib3: that is the queue's to decide, which also counts.
Specification: https://opentelemetry.io/docs/specs/otlp/#otlphttp.
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
from torchobs.exporter.otlp.transport import Outcome, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from urllib3 import BaseHTTPResponse

    from torchobs.exporter.otlp.options import PushTarget

RETRYABLE = frozenset({429, 502, 503, 504})
"""The specification's; every other error means that the request itself is at fault, or its address."""

_LEVEL = 1
_LONGEST_ANSWER = 64 * 1024
_FAILURES = (OSError, HTTPError, ValueError)


class HttpTransport:
    """The way to one URL. ``partial_success`` reads how many items an answer rejects, and why."""

    def __init__(self, target: PushTarget, partial_success: Callable[[bytes], tuple[int, str]]) -> None:
        self._target, self._partial_success = target, partial_success
        encoding = {"Content-Encoding": "gzip"} if target.gzip else {}
        fixed = {"Content-Type": "application/x-protobuf", "User-Agent": f"torchobs-exporter/{__version__}"}
        self._headers = {**fixed, **encoding, **dict(target.headers)}
        self._manager: PoolManager | None = None
        self._connection: _Breakable | None = None
        self._socket: socket.socket | None = None
        self._closed = False
        self._late = Event()

    def pack(self, message: bytes) -> bytes:
        """See :class:`Transport`."""
        return gzip.compress(message, _LEVEL, mtime=0) if self._target.gzip else message

    def send(self, body: bytes) -> Outcome:
        """See :class:`Transport`."""
        late = self._late = Event()

        def give_up() -> None:
            late.set()
            self._break()

        # a socket's timeout starts again with every byte: a receiver that answers by drops would hold the thread for ever
        timer = Timer(self._target.timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            answer, said = self._post(body)
        except _FAILURES as problem:
            if late.is_set() or isinstance(problem, (TimeoutError, HTTPTimeoutError)):
                return Outcome("retry", words=f"no answer within {self._target.timeout_s:g} s")
            return Outcome("retry", words=_words(problem))
        finally:
            timer.cancel()
            if self._connection is None or self._connection.is_closed:
                self._forget()
        return self._judge(answer, said)

    def cancel(self) -> None:
        """See :class:`Transport`."""
        self._closed = True
        self._break()

    def close(self) -> None:
        """See :class:`Transport`."""
        if self._manager is not None:
            self._manager.clear()
        self._forget()

    def _post(self, body: bytes) -> tuple[BaseHTTPResponse, bytes]:
        """Return the answer and what it says. Raises what urllib3 does, or what :meth:`_check` does."""
        self._check()
        if self._manager is None:
            self._manager = self._connect()
        answer: BaseHTTPResponse = self._manager.urlopen(
            "POST", self._target.url, body=body, headers=self._headers, timeout=self._target.timeout_s,
            redirect=False, retries=False, preload_content=False, decode_content=False,
        )  # fmt: skip
        with contextlib.closing(answer):  # which ends the connection unless all of the answer was read
            said = answer.read(_LONGEST_ANSWER)
        self._check()  # an answer without a length that was broken off has ended there
        is_sent = self._connection is not None and self._connection.is_sent
        if not is_sent and (answer.status < HTTPStatus.MULTIPLE_CHOICES or answer.status == HTTPStatus.REQUEST_TIMEOUT):
            # nothing was taken, whatever it says; 408 is what a connection that was idle ends with
            raise ConnectionResetError("the receiver ended the connection before it had everything")
        return answer, said

    def _judge(self, answer: BaseHTTPResponse, said: bytes) -> Outcome:
        if HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
            try:
                rejected, words = self._partial_success(said)
            except DecodeError:
                rejected, words = 0, ""  # a proxy's page, or JSON: taken all the same
            return Outcome("sent", max(rejected, 0), words=printable(words))
        moved = answer.headers.get("Location")
        words = f"{answer.status} {answer.reason}{f', moved to {moved}' if moved else ''}: {_text(said)}"
        if answer.status in RETRYABLE:
            return Outcome("retry", after_s=_retry_after_s(answer), words=printable(words))
        return Outcome("refused", words=printable(words))

    def _connect(self) -> PoolManager:
        proxy = _proxy_of(self._target.url)
        manager = ProxyManager(proxy[0], proxy_headers=proxy[1]) if proxy else PoolManager()
        pool: Any = manager.connection_from_url(self._target.url)
        tls = partial(_BreakableTLS, partial(_context, self._target))
        pool.ConnectionCls = partial(tls if pool.scheme == "https" else _Breakable, opened=self._opened)
        return manager

    def _opened(self, connection: _Breakable, sock: socket.socket) -> None:
        """Keep a second handle of a new connection's socket: TLS takes the first one away, and so does an answer's head."""
        self._forget()
        self._connection, self._socket = connection, sock.dup()
        self._check()

    def _check(self) -> None:
        """Raise where nothing is to be waited for any more; to be asked once there is a socket.

        Whoever breaks a connection says so first and looks for its socket then: one of the two sees the other.
        """
        if self._closed:
            raise ConnectionAbortedError("the exporter ends")
        if self._late.is_set():
            raise TimeoutError

    def _break(self) -> None:
        """End the connection under another thread's hands: its read or write fails at once."""
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _forget(self) -> None:
        sock, self._connection, self._socket = self._socket, None, None
        if sock is not None:
            sock.close()


class _Breakable(HTTPConnection):
    """urllib3's connection, but that its socket is known before a handshake, and whether a request was sent to its end."""

    is_sent = False

    def __init__(self, opened: Callable[[_Breakable, socket.socket], None], **given: Any) -> None:
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
        """See :class:`HTTPConnection`. Where sending breaks off, urllib3 looks for an answer all the same: a refusal."""
        self.is_sent = False
        super().request(*args, **given)
        self.is_sent = True


class _BreakableTLS(_Breakable, HTTPSConnection):
    def __init__(self, context: Callable[[], ssl.SSLContext], **given: Any) -> None:
        super().__init__(**given)
        self._context = context

    def connect(self) -> None:
        """See :class:`HTTPSConnection`. The context is made anew, so that certificates may be renewed."""
        self.ssl_context = self._context()  # before there is a socket: it takes some 10 ms
        super().connect()


def _context(target: PushTarget) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=target.certificate)
    if target.client_certificate:
        context.load_cert_chain(target.client_certificate, target.client_key)
    return context


def _proxy_of(url: str) -> tuple[str, dict[str, str]] | None:
    """Return the proxy that the environment names for a URL, and what it has to be told with it."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not proxy or proxy_bypass(f"{parts.hostname}:{port}"):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    named = urlsplit(proxy)
    secret = f"{unquote(named.username)}:{unquote(named.password or '')}" if named.username else ""
    headers = make_headers(proxy_basic_auth=secret.encode().decode("latin-1")) if secret else {}  # which it will encode so
    return named._replace(netloc=named.netloc.rpartition("@")[2]).geturl(), dict(headers)


def _retry_after_s(answer: BaseHTTPResponse) -> float | None:
    """Return the seconds that ``Retry-After`` asks for, as a number or as a date; ``None`` where it is neither, or absent."""
    try:
        return Retry().get_retry_after(answer)
    except (HTTPError, ValueError, OverflowError):
        return None


def _text(said: bytes) -> str:
    """Return what the receiver said: the message of a ``google.rpc.Status``, which begins with two tags, or text."""
    from google.rpc.status_pb2 import Status

    try:
        return str(Status.FromString(said).message) or said.decode(errors="replace")
    except DecodeError:
        return said.decode(errors="replace")


def _words(problem: BaseException) -> str:
    """Return what went wrong in the words of the operating system, which urllib3 wraps."""
    wrapped = problem.__cause__ or next((one for one in problem.args if isinstance(one, Exception)), None)
    if wrapped is not None:
        by = "the proxy: " if isinstance(problem, ProxyError) else ""
        return f"{by}{_words(wrapped)}"
    if isinstance(problem, OSError):
        return printable(problem.strerror or str(problem))
    return printable(f"{type(problem).__name__} {problem}")
