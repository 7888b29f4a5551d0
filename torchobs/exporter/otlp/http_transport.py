"""OTLP over HTTP with protobuf, by the standard library: what the exporter has loaded anyway.

``requests``, which OpenTelemetry's own exporter uses, takes 6.6 MiB more (measured); of it the push would use one POST.
Specification: https://opentelemetry.io/docs/specs/otlp/#otlphttp.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import socket
import ssl
from base64 import b64encode
from email.utils import parsedate_to_datetime
from threading import Timer
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from google.protobuf.message import DecodeError

from torchobs._version import __version__
from torchobs.exporter.otlp.transport import Outcome, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchobs.exporter.otlp.options import PushTarget

RETRYABLE = frozenset({429, 502, 503, 504})
"""The specification's; every other error means that the request itself is at fault, or its address."""

_LEVEL = 1
_LONGEST_ANSWER = 64 * 1024
_FAILURES = (OSError, http.client.HTTPException, ValueError)


class HttpTransport:
    """The way to one URL. ``partial`` reads how many items an answer rejects, and why; ``wall_s`` is Unix time."""

    def __init__(self, target: PushTarget, partial: Callable[[bytes], tuple[int, str]], wall_s: Callable[[], float]) -> None:
        self._target, self._partial, self._wall_s = target, partial, wall_s
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        parts = urlsplit(target.url)
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        encoding = {"Content-Encoding": "gzip"} if target.gzip else {}
        fixed = {"Content-Type": "application/x-protobuf", "User-Agent": f"torchobs-exporter/{__version__}"}
        self._headers = {**fixed, **encoding, **dict(target.headers)}
        self._closed = False
        self._late: list[bool] = []

    def pack(self, message: bytes) -> bytes:
        """See :class:`Transport`."""
        return gzip.compress(message, _LEVEL, mtime=0) if self._target.gzip else message

    def send(self, body: bytes) -> Outcome:
        """See :class:`Transport`."""
        used_before = self._connection is not None
        try:
            return self._post(body)
        except TimeoutError:
            self._drop_connection()
            return self._not_in_time()
        except _FAILURES as problem:
            self._drop_connection()
            if not used_before:
                return Outcome("retry", words=_words(problem))
        return self._again(body)

    def cancel(self) -> None:
        """See :class:`Transport`."""
        self._closed = True
        self._break()

    def close(self) -> None:
        """See :class:`Transport`."""
        self._drop_connection()

    def _again(self, body: bytes) -> Outcome:
        """Send on a new connection: the receiver may end one that was idle, which is no failure."""
        try:
            return self._post(body)
        except TimeoutError:
            self._drop_connection()
            return self._not_in_time()
        except _FAILURES as problem:
            self._drop_connection()
            return Outcome("retry", words=_words(problem))

    def _not_in_time(self) -> Outcome:
        return Outcome("retry", words=f"no answer within {self._target.timeout_s:g} s")

    def _post(self, body: bytes) -> Outcome:
        late = self._late = list[bool]()

        def give_up() -> None:
            late.append(True)
            self._break()

        # a socket's timeout starts again with every byte: a receiver that answers by drops would hold the thread for ever
        timer = Timer(self._target.timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            connection = self._connected()
            path, more = self._via()
            broken_off = self._request(connection, path, body, {**self._headers, **more})
            answer, said = self._answer(connection, broken_off)
        except _FAILURES:
            if late:
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()
        if late:
            raise TimeoutError  # broken amid an answer that has no length: it ended there
        if connection.sock is None or not answer.isclosed() or broken_off is not None:
            self._drop_connection()
        return self._judge(answer, said)

    def _request(
        self, connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str]
    ) -> OSError | None:
        """Send; return what broke off the sending: a refusal by the headers alone may come before the end."""
        try:
            connection.request("POST", path, body, headers)
        except (BrokenPipeError, ConnectionResetError) as problem:
            return problem.with_traceback(None)  # its frames would keep the socket from closing
        return None

    def _answer(
        self, connection: http.client.HTTPConnection, broken_off: OSError | None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Return the answer and what it says. Raises ``broken_off`` unless it is a refusal of what was not sent to its end."""
        try:
            answer = connection.getresponse()
            said = answer.read(_LONGEST_ANSWER)
        except _FAILURES:
            if broken_off is not None:
                raise broken_off from None
            raise
        if broken_off is not None and (answer.status < 300 or answer.status == http.HTTPStatus.REQUEST_TIMEOUT):  # noqa: PLR2004  # success, in HTTP
            answer.close()
            raise broken_off  # nothing was taken; 408 is what a connection that was idle ends with
        return answer, said

    def _judge(self, answer: http.client.HTTPResponse, said: bytes) -> Outcome:
        if 200 <= answer.status < 300:  # noqa: PLR2004  # success, in HTTP
            try:
                rejected, words = self._partial(said)
            except DecodeError:
                rejected, words = 0, ""  # a proxy's page, or JSON: taken all the same
            return Outcome("sent", max(rejected, 0), words=printable(words))
        moved = answer.getheader("Location")
        words = f"{answer.status} {answer.reason}{f', moved to {moved}' if moved else ''}: {_text(said)}"
        if answer.status in RETRYABLE:
            after_s = _retry_after_s(answer.getheader("Retry-After"), self._wall_s())
            return Outcome("retry", after_s=after_s, words=printable(words))
        return Outcome("refused", words=printable(words))

    def _connected(self) -> http.client.HTTPConnection:
        """Return the connection, made if there is none; it is known before anything is waited for, so that it can be broken."""
        if self._connection is None:
            timeout_s, proxy = self._target.timeout_s, self._proxy()
            host, port = (proxy[0], proxy[1]) if proxy else (self._host, self._port)
            if not self._tls:
                self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
            else:
                self._connection = _Secure(host, port, timeout_s, _context(self._target), self._host, self._check)
                if proxy:
                    self._connection.set_tunnel(self._host, self._port, dict(proxy[2]))
            self._check()
            self._connection.connect()
            self._socket = self._connection.sock
        self._check()
        return self._connection

    def _check(self) -> None:
        """Raise where nothing is to be waited for any more; to be asked once there is a socket.

        Whoever breaks a connection says so first and looks for its socket then: one of the two sees the other.
        """
        if self._closed:
            raise ConnectionAbortedError("the exporter ends")
        if self._late:
            raise TimeoutError

    def _break(self) -> None:
        """End the connection under another thread's hands: its read or write fails at once.

        http.client lets go of the socket when the head of an answer without a length is there, and goes on reading.
        """
        connection = self._connection
        sock = self._socket or (connection.sock if connection is not None else None)
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # a TLS socket's own would take its state from under the reader

    def _via(self) -> tuple[str, Mapping[str, str]]:
        """Return what to ask for, and the headers for a proxy: it sees a plain request, and only the tunnel of TLS."""
        proxy = None if self._tls else self._proxy()
        return (self._target.url, proxy[2]) if proxy else (self._path, {})

    def _proxy(self) -> tuple[str, int, Mapping[str, str]] | None:
        """Return host, port and headers of the proxy that the environment names for this URL."""
        url = getproxies().get("https" if self._tls else "http")
        if not url or proxy_bypass(f"{self._host}:{self._port}"):
            return None
        parts = urlsplit(url if "://" in url else f"http://{url}")
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
        headers = {"Proxy-Authorization": f"Basic {b64encode(secret.encode()).decode()}"} if secret else {}
        return parts.hostname or "", parts.port or 80, headers

    def _drop_connection(self) -> None:
        connection, self._connection, self._socket = self._connection, None, None
        if connection is not None:
            connection.close()


class _Secure(http.client.HTTPConnection):
    """As http.client's own for TLS, but that ``sock`` can be shut down by another thread in the handshake, too."""

    default_port = 443

    def __init__(  # http.client's, and what it needs for TLS
        self, host: str, port: int, timeout_s: float, context: ssl.SSLContext, name: str, check: Callable[[], None]
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self._context, self._name, self._check = context, name, check

    def connect(self) -> None:
        """Connect, through the tunnel if there is one, and shake hands."""
        super().connect()
        self.sock = self._context.wrap_socket(self.sock, server_hostname=self._name, do_handshake_on_connect=False)
        self._check()
        self.sock.do_handshake()


def _context(target: PushTarget) -> ssl.SSLContext:
    """Return a TLS context; made for every connection, so that certificates may be renewed while the exporter runs."""
    context = ssl.create_default_context(cafile=target.certificate)
    if target.client_certificate:
        context.load_cert_chain(target.client_certificate, target.client_key)
    return context


def _retry_after_s(header: str | None, wall_s: float) -> float | None:
    """Return the seconds that ``Retry-After`` asks for, as a number or as a date (RFC 9110, section 10.2.3)."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - wall_s)
    except (ValueError, TypeError, OverflowError):
        return None


def _text(said: bytes) -> str:
    """Return what the receiver said: the message of a ``google.rpc.Status``, which begins with two tags, or text."""
    from google.rpc.status_pb2 import Status

    try:
        return str(Status.FromString(said).message) or said.decode(errors="replace")
    except DecodeError:
        return said.decode(errors="replace")


def _words(problem: BaseException) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        return printable(problem.strerror)
    return printable(f"{type(problem).__name__} {problem}")
