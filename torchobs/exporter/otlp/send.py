"""One request to an OTLP receiver, by HTTP with protobuf or by gRPC: accepted, refused, or to be sent again later.

Retries are the queue's, which also counts. gRPC, with the extra ``otlp-grpc``, is imported only if an endpoint has that
protocol: it takes some 9 MiB of memory (measured). Specification: https://opentelemetry.io/docs/specs/otlp/.
"""

from __future__ import annotations

import contextlib
import gzip
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from urllib3 import PoolManager, ProxyManager, Retry, Timeout, make_headers
from urllib3.exceptions import HTTPError

from torchobs._version import __version__
from torchobs.support.text import clean

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

    from torchobs.exporter.config import PushTarget

HTTP_RETRYABLE = frozenset({408, 429, 502, 503, 504})
"""The specification's, and 408 of a server that ends an idle connection; others blame the request or its URL."""
HTTP_OF_ADDRESS = frozenset({401, 403, 404, 405, 407, 410, 415, 501})
"""Status codes of a receiver that takes nothing at this URL or with these credentials; so does a redirect."""
GRPC_RETRYABLE = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"})
"""The specification's; also RESOURCE_EXHAUSTED if the receiver sends ``RetryInfo``."""
GRPC_OF_ADDRESS = frozenset({"NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED", "UNIMPLEMENTED"})
GRPC_METHODS = {
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}

_ANSWERS: dict[str, tuple[Any, str]] = {
    "metrics": (ExportMetricsServiceResponse, "rejected_data_points"),
    "traces": (ExportTraceServiceResponse, "rejected_spans"),
    "logs": (ExportLogsServiceResponse, "rejected_log_records"),
}
_AGENT = f"torchobs-exporter/{__version__}"
_GRPC_PORT = 4317
_GZIP_LEVEL = 1
_LONGEST_ANSWER = 64 * 1024
_LONGEST_WORDS = 200


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a request.

    ``retry``: it may be sent again, after ``after_s`` if the receiver set that. ``refused``: it will never be accepted.
    """

    kind: Literal["sent", "retry", "refused"]
    rejected: int = 0
    """data points, spans or log records that the receiver rejected of a request that it accepted (partial success)"""
    after_s: float | None = None
    words: str = ""
    """message of the receiver or of the operating system, one printable line"""
    of_address: bool = False
    """the receiver refuses every request to this address with these credentials"""


class Transport(Protocol):
    """Sends one signal's requests to a receiver."""

    def send(self, body: bytes) -> Outcome:
        """Send a serialised request and wait for the response. Network errors are outcomes, not raised."""

    def close(self) -> None:
        """Close idle connections."""


def transport(signal: str, target: PushTarget) -> Transport:
    """Return the transport of a signal. Raises ``ModuleNotFoundError`` for gRPC without its extra."""
    return Grpc(signal, target) if target.protocol == "grpc" else Http(signal, target)


class Http:
    """Sends one signal to one URL."""

    def __init__(self, signal: str, target: PushTarget) -> None:
        self._signal, self._target = signal, target
        encoding = {"Content-Encoding": "gzip"} if target.gzip else {}
        fixed = {"Content-Type": "application/x-protobuf", "User-Agent": _AGENT}
        self._headers = {**fixed, **encoding, **dict(target.headers)}
        # urllib3 reads certificates for each connection, so that renewed ones are used
        tls: dict[str, Any] = {
            "ca_certs": target.certificate,
            "cert_file": target.client_certificate,
            "key_file": target.client_key,
        }
        proxy = _proxy_of(target.url)
        self._pool = ProxyManager(proxy[0], proxy_headers=proxy[1], **tls) if proxy else PoolManager(**tls)

    def send(self, body: bytes) -> Outcome:
        """See :class:`Transport`."""
        packed = gzip.compress(body, _GZIP_LEVEL, mtime=0) if self._target.gzip else body
        try:
            answer = self._pool.urlopen(
                "POST", self._target.url, body=packed, headers=self._headers, timeout=Timeout(self._target.timeout_s),
                redirect=False, retries=False, preload_content=False, decode_content=False,
            )  # fmt: skip
            with contextlib.closing(answer):  # ends the connection unless the whole response was read
                content = answer.read(_LONGEST_ANSWER)
        except (OSError, HTTPError, ValueError) as problem:
            return Outcome("retry", words=_line(str(problem)))
        if HTTPStatus.OK <= answer.status < HTTPStatus.MULTIPLE_CHOICES:
            return _accepted(self._signal, content)
        moved = answer.headers.get("Location")
        words = _line(f"{answer.status} {answer.reason}{f', moved to {moved}' if moved else ''}: {_message(content)}")
        if answer.status in HTTP_RETRYABLE:
            return Outcome("retry", after_s=_retry_after_s(answer), words=words)
        of_address = answer.status < HTTPStatus.BAD_REQUEST or answer.status in HTTP_OF_ADDRESS
        return Outcome("refused", words=words, of_address=of_address)

    def close(self) -> None:
        """See :class:`Transport`."""
        self._pool.clear()


class Grpc:
    """Sends one signal to one receiver."""

    def __init__(self, signal: str, target: PushTarget) -> None:
        import grpc

        self._grpc: Any = grpc
        self._signal, self._target = signal, target
        self._metadata = tuple((name.lower(), value) for name, value in target.headers)
        self._compression = grpc.Compression.Gzip if target.gzip else grpc.Compression.NoCompression
        self._channel: Any = None

    def send(self, body: bytes) -> Outcome:
        """See :class:`Transport`."""
        try:
            channel = self._channel = self._channel or self._connected()
            # no serializers: bytes in, bytes out
            export = channel.unary_unary(GRPC_METHODS[self._signal], None, None)
            response = export(body, timeout=self._target.timeout_s, metadata=self._metadata, compression=self._compression)
        except self._grpc.RpcError as error:
            outcome = _failed(error)
            if outcome.kind == "retry":
                self.close()  # a channel keeps its credentials; the next channel reads renewed certificates
            return outcome
        except (OSError, ValueError) as problem:  # a missing certificate; a closed channel
            return Outcome("retry", words=_line(str(problem)))
        return _accepted(self._signal, response)

    def close(self) -> None:
        """See :class:`Transport`. A request in progress fails."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _connected(self) -> Any:
        parts = urlsplit(self._target.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        address, options = f"{host}:{parts.port or _GRPC_PORT}", (("grpc.primary_user_agent", _AGENT),)
        if parts.scheme == "http":
            return self._grpc.insecure_channel(address, options)
        files = (self._target.certificate, self._target.client_key, self._target.client_certificate)
        credentials = self._grpc.ssl_channel_credentials(*(Path(file).read_bytes() if file else None for file in files))
        return self._grpc.secure_channel(address, credentials, options)


def _accepted(signal: str, response: bytes) -> Outcome:
    """Return the outcome of a request that the receiver accepted; it may have rejected a part."""
    kind, field = _ANSWERS[signal]
    try:
        partial = kind.FromString(response).partial_success
    except DecodeError:
        return Outcome("sent")  # a proxy's page, or JSON: accepted all the same
    return Outcome("sent", max(getattr(partial, field), 0), words=_line(partial.error_message))


def _failed(error: Any) -> Outcome:
    """Return the outcome of a request that gRPC could not complete."""
    code, after_s = error.code().name, None
    with contextlib.suppress(DecodeError):
        details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
        for detail in Status.FromString(details).details if details else ():
            info = RetryInfo()
            if detail.Unpack(info):
                after_s = max(0.0, info.retry_delay.seconds + info.retry_delay.nanos / 1e9)
    words = _line(f"{code} {error.details() or ''}")
    if code in GRPC_RETRYABLE or (code == "RESOURCE_EXHAUSTED" and after_s is not None):
        return Outcome("retry", after_s=after_s, words=words)
    return Outcome("refused", words=words, of_address=code in GRPC_OF_ADDRESS)


def _proxy_of(url: str) -> tuple[str, dict[str, str]] | None:
    """Return the proxy that the environment configures for a URL, and the headers to send to it."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not proxy or proxy_bypass(f"{parts.hostname}:{port}"):
        return None
    address = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    secret = f"{unquote(address.username)}:{unquote(address.password or '')}" if address.username else ""
    headers = make_headers(proxy_basic_auth=secret.encode().decode("latin-1")) if secret else {}  # re-encoded so
    return address._replace(netloc=address.netloc.rpartition("@")[2]).geturl(), dict(headers)


def _retry_after_s(answer: BaseHTTPResponse) -> float | None:
    """Return ``Retry-After``, a number or a date, in seconds; ``None`` if it is neither, or absent."""
    try:
        return Retry().get_retry_after(answer)
    except (HTTPError, ValueError, OverflowError):
        return None


def _message(content: bytes) -> str:
    """Return the response's error message: that of a ``google.rpc.Status``, or the text itself."""
    with contextlib.suppress(DecodeError):
        if message := Status.FromString(content).message:
            return str(message)
    return content.decode(errors="replace")


def _line(words: str) -> str:
    return clean(" ".join(words.split()), _LONGEST_WORDS)
