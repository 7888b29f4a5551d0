"""Interface of the transports to an OTLP receiver, and the outcome of a request.

Imports protobuf only when it is used: the API needs :func:`printable`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


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
    """message of the receiver or of the operating system, printable"""
    of_address: bool = False
    """the receiver refuses whatever is sent to this address, with these credentials"""


class Transport(Protocol):
    """Sends one signal's requests to a receiver. To be used by one thread at a time."""

    def pack(self, message: bytes) -> bytes:
        """Return a serialised request as it will be sent: compressed, if the transport does that."""

    def unpack(self, body: bytes) -> bytes:
        """Return the serialised request of a packed one."""

    def send(self, body: bytes) -> Outcome:
        """Send a packed request and wait for the response, at most the timeout. Network errors are outcomes, not raised."""

    def cancel(self) -> None:
        """Make the request in progress fail, and all later ones. May be called by another thread."""

    def close(self) -> None:
        """Close the connection."""


def accepted(signal: str, response: bytes) -> Outcome:
    """Return the outcome of a request that the receiver accepted; it may have rejected a part."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    try:
        if signal == "metrics":
            metrics = ExportMetricsServiceResponse.FromString(response).partial_success
            rejected, words = metrics.rejected_data_points, metrics.error_message
        elif signal == "logs":
            logs = ExportLogsServiceResponse.FromString(response).partial_success
            rejected, words = logs.rejected_log_records, logs.error_message
        else:
            traces = ExportTraceServiceResponse.FromString(response).partial_success
            rejected, words = traces.rejected_spans, traces.error_message
    except DecodeError:
        return Outcome("sent")  # a proxy's page, or JSON: accepted all the same
    return Outcome("sent", max(rejected, 0), words=printable(words))


def printable(text: str, longest: int = 200) -> str:
    """Return a receiver's message as one printable line for the log."""
    return "".join(character if character.isprintable() else " " for character in text[:longest]).strip()
