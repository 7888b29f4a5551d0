"""OTLP over gRPC, with the extra ``otlp-grpc``: imported only if an endpoint has the protocol ``grpc``.

grpcio takes some 9 MiB of memory (measured). Specification: https://opentelemetry.io/docs/specs/otlp/#otlpgrpc.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from torchobs._version import __version__
from torchobs.exporter.otlp.transport import Outcome, accepted, printable

if TYPE_CHECKING:
    from torchobs.exporter.otlp.options import PushTarget

METHODS = {
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}
RETRYABLE = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Retryable codes of the specification; RESOURCE_EXHAUSTED is one, too, if the receiver sends ``RetryInfo``."""
OF_ADDRESS = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""Codes of a receiver that takes nothing of this signal, or with these credentials."""
_PORT = 4317


class GrpcTransport:
    """Sends one signal to one receiver."""

    def __init__(self, signal: str, target: PushTarget) -> None:
        self._signal, self._target = signal, target
        self._metadata = tuple((name.lower(), value) for name, value in target.headers)
        self._compression = grpc.Compression.Gzip if target.gzip else grpc.Compression.NoCompression
        self._tls = urlsplit(target.url).scheme == "https"
        self._channel: Any = None
        self._lock, self._closed = Lock(), False

    def pack(self, message: bytes) -> bytes:
        """See :class:`Transport`; gRPC compresses the message itself."""
        return message

    def unpack(self, body: bytes) -> bytes:
        return body

    def send(self, body: bytes) -> Outcome:
        outcome = self._send(body)
        if outcome.kind == "retry" and self._tls:
            self.close()  # a channel keeps its credentials; the next channel reads renewed certificates
        return outcome

    def cancel(self) -> None:
        self._closed = True
        self.close()

    def close(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _send(self, body: bytes) -> Outcome:
        try:
            # no serializers: bytes in, bytes out
            export = self._connected().unary_unary(METHODS[self._signal], request_serializer=None, response_deserializer=None)
            response = export(body, timeout=self._target.timeout_s, metadata=self._metadata, compression=self._compression)
        except grpc.RpcError as error:
            return _failed(error)
        except (OSError, ValueError) as problem:  # a missing certificate; a closed channel
            return Outcome("retry", words=printable(str(problem)))
        return accepted(self._signal, response)

    def _connected(self) -> Any:
        """Return the channel, created if there is none. Raises ``OSError`` after :meth:`cancel`."""
        channel = self._channel or _channel(self._target)
        with self._lock:
            if not self._closed:  # cancel() sets the flag before it closes the channel, so one of the two closes it
                self._channel = channel
                return channel
        channel.close()
        raise ConnectionAbortedError("the exporter ends")


def _channel(target: PushTarget) -> Any:
    parts = urlsplit(target.url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    address = f"{host}:{parts.port or _PORT}"
    options = (("grpc.primary_user_agent", f"torchobs-exporter/{__version__}"),)
    if parts.scheme == "http":
        return grpc.insecure_channel(address, options)
    files = (target.certificate, target.client_key, target.client_certificate)
    roots, key, chain = (Path(file).read_bytes() if file else None for file in files)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(roots, key, chain), options)


def _failed(error: Any) -> Outcome:
    code, after_s = error.code(), _retry_after_s(error)
    words = printable(f"{code.name} {error.details() or ''}")
    again = code in RETRYABLE or (code is grpc.StatusCode.RESOURCE_EXHAUSTED and after_s is not None)
    if again:
        return Outcome("retry", after_s=after_s, words=words)
    return Outcome("refused", words=words, of_address=code in OF_ADDRESS)


def _retry_after_s(error: Any) -> float | None:
    """Return the delay in the receiver's ``RetryInfo`` in seconds."""
    details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    try:
        for detail in Status.FromString(details).details if details else ():
            info = RetryInfo()
            if detail.Unpack(info):
                return max(0.0, float(info.retry_delay.seconds + info.retry_delay.nanos / 1e9))
    except DecodeError:
        return None
    return None
