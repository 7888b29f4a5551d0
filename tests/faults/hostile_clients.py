"""Clients that do not mean well: what they send, and how to be one."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterable, Iterator
from itertools import repeat

HEAD = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /api/v1/stacks HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GOOD = HEAD + b"\r\n"
KIB = b"x" * 1024
SENT: dict[str, Iterable[bytes]] = {
    "10 MB of headers": [HEAD, *repeat(b"X: " + KIB + b"\r\n", 10_000)],
    "one header of 10 MB": [HEAD, b"X: ", *repeat(KIB, 10_000)],
    "a request line of 10 MB": [b"GET /", *repeat(KIB, 10_000)],
    "a body of 64 MB": [POST, b"Content-Length: 67108864\r\n\r\n", *repeat(KIB, 65_536)],
    "a body that nobody reads": [HEAD, b"Content-Length: 67108864\r\n\r\n", *repeat(KIB, 65_536)],
    "chunks without end": [POST, b"Transfer-Encoding: chunked\r\n\r\n", *repeat(b"400\r\n" + KIB + b"\r\n", 65_536)],
    "tiny chunks": [HEAD, b"Transfer-Encoding: chunked\r\n\r\n", *repeat(b"1\r\nx\r\n" * 10_000, 1_000)],
    "an endless chunk extension": [POST, b"Transfer-Encoding: chunked\r\n\r\n1;", *repeat(KIB, 65_536)],
    "endless trailers": [POST, b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *repeat(b"X: " + KIB + b"\r\n", 65_536)],
    "garbage behind a request": [GOOD, b"\0\1\2\3\r\n\r\n"],
    "HTTP/0.9": [b"GET /metrics\r\n\r\n"],
    "a length that is no number": [HEAD, b"Content-Length: ten\r\n\r\n"],
    "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600)],
}  # fmt: skip
"""By its name, what comes one after the other."""

ANSWERED = frozenset({"a body that nobody reads", "garbage behind a request", "tiny chunks"})
"""Those in which there is a request, which is answered before the rest is refused."""


def dial(address: str) -> socket.socket:
    """Connect to `host:port`."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def converse(address: str, pieces: Iterable[bytes]) -> tuple[bytes, int]:
    """Send it all, or as much as is taken; return what came back until the end, and how many bytes were sent.

    A server that neither answers nor closes the connection within 10 s is a `TimeoutError`.
    """
    sent, answer = 0, b""
    with dial(address) as connection:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
                sent += len(piece)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    return answer, sent


class Crowd:
    """Connections that stay open, and of which not much comes."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._open: list[socket.socket] = []

    def come(self, number: int, first: bytes) -> None:
        """That many more, with the same first words."""
        for _ in range(number):
            with contextlib.suppress(ConnectionError):
                connection = dial(self._address)
                self._open.append(connection)
                connection.sendall(first)

    def drip(self, byte: bytes = b"x") -> int:
        """One byte more from each; return how many could send it."""
        dripped = 0
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.sendall(byte)
                dripped += 1
        return dripped

    def leave(self) -> None:
        """Close them all."""
        for connection in self._open:
            connection.close()
        self._open.clear()


@contextlib.contextmanager
def crowd(address: str) -> Iterator[Crowd]:
    """A crowd that leaves at the end."""
    clients = Crowd(address)
    try:
        yield clients
    finally:
        clients.leave()


def over_tls(address: str, context: ssl.SSLContext) -> bytes:
    """Ask for the metrics; return the status line, nothing for who is not let in."""
    try:
        with dial(address) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            connection.sendall(GOOD)
            return connection.recv(4096).partition(b"\r\n")[0]
    except OSError:
        return b""
