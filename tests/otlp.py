"""OTLP in tests: a receiver that answers as it is told and a push driven by hand."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from tests.rank_files import BORN_WALL_NS, Clock, S
from tests.support import wait_until
from torchobs.exporter.config import ExporterConfig, PushConfig, PushTarget
from torchobs.exporter.exporter_metrics import PushCounts, ScrapeInput
from torchobs.exporter.otlp.push import Clock as PushClock
from torchobs.exporter.otlp.push import Push
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from typing_extensions import Self

NO_VALUE = 1
"""The flag "no recorded value"."""


class Answer(NamedTuple):
    """What a receiver says; `hold_s`: how long it thinks before."""

    status: int = 200
    headers: Mapping[str, str] = {}
    body: bytes = b""
    hold_s: float = 0.0


@dataclass(frozen=True)
class Request:
    """What a receiver got."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    at_s: float

    @property
    def metrics(self) -> ExportMetricsServiceRequest:
        return ExportMetricsServiceRequest.FromString(self.body)  # type: ignore[no-any-return]

    @property
    def traces(self) -> ExportTraceServiceRequest:
        return ExportTraceServiceRequest.FromString(self.body)  # type: ignore[no-any-return]

    @property
    def logs(self) -> ExportLogsServiceRequest:
        return ExportLogsServiceRequest.FromString(self.body)  # type: ignore[no-any-return]


class Receiver:
    """An HTTP server on 127.0.0.1 inside a `with` block; `answer` decides what it says to each request."""

    def __init__(
        self, answer: Callable[[Request], Answer] = lambda _: Answer(), port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.answer, self._tls = answer, tls
        self.requests: list[Request] = []
        self.taken: list[Request] = []
        """those that were answered with 200"""
        self._ended = threading.Event()
        self._port = port

    def __enter__(self) -> Self:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:  # http.server's name
                receiver.handle(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a handshake that fails is a test's subject
        if self._tls is not None:
            self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self._server.server_address[1]}"

    def of(self, path: str) -> list[Request]:
        return [request for request in self.taken if request.path == path]

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        if handler.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        request = Request(handler.path, headers, body, time.monotonic())
        self.requests.append(request)
        answer = self.answer(request)
        self._ended.wait(answer.hold_s)
        with contextlib.suppress(OSError):
            handler.send_response(answer.status)
            for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                handler.send_header(name, value)
            if answer.status == 200:
                self.taken.append(request)
            handler.end_headers()
            handler.wfile.write(answer.body)


class Fast(PushClock):
    """The push's clock, `scale` times as fast as the machine's; its wall clock began when the test's files were born."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale, self._began_s = scale, time.monotonic()

    def now(self) -> float:
        return (time.monotonic() - self._began_s) * self._scale

    def wall_ns(self) -> int:
        return BORN_WALL_NS + round(self.now() * S)

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        condition.wait(seconds / self._scale)


class Pushing:
    """A scanner by a clock that a test moves, and a push of what it sees, inside a `with` block."""

    def __init__(self, directory: Path, config: PushConfig, clock: Fast | None = None, **settings: Any) -> None:
        exporter = ExporterConfig(flight_dir=str(directory), **settings)
        self.clock = Clock()
        self.scanner = Scanner(exporter, self.clock)
        self.push = Push(config, exporter, clock or Fast())

    def __enter__(self) -> Self:
        self.push.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.push.close()
        self.scanner.close()

    def look(self, seconds: float, *, final: bool = True, wait: bool = True) -> None:
        """Scan at a moment of the clock and hand the snapshot over; with `final` all of it is pushed, and waited for."""
        self.clock.seconds = seconds
        self.push.accept(ScrapeInput(self.scanner.scan()), final=final)
        if wait:
            wait_until(lambda: self.push.settled and self.push._scrape is None, interval_s=0.005)


def to(receiver: Receiver, **settings: Any) -> PushTarget:
    """The target that a receiver is, by a path that a signal would choose."""
    return PushTarget(receiver.url + settings.pop("path", "/v1/metrics"), **settings)


def only_metrics(receiver: Receiver, **settings: Any) -> PushConfig:
    """Metrics to that receiver."""
    target = {name: settings.pop(name) for name in ("path", "gzip", "headers", "timeout_s") if name in settings}
    return PushConfig(metrics=to(receiver, **target), **settings)


def recorded(counts: PushCounts) -> int:
    """Everything that was to be pushed."""
    return counts.sent + sum(counts.dropped.values()) + counts.queued


def attributes(pairs: Any) -> dict[str, Any]:
    """Attributes of a message as Python has them."""
    return {pair.key: plain(pair.value) for pair in pairs}


def plain(value: Any) -> Any:
    """An AnyValue as Python has it."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return attributes(value.kvlist_value.values)
    return None if kind is None else getattr(value, kind)


class Seen(NamedTuple):
    """A point, and where it stood."""

    resource: Mapping[str, Any]
    scope: str
    metric: Any
    attributes: Mapping[str, Any]
    point: Any


def points(requests: list[Request]) -> Iterator[Seen]:
    """Every point of requests, in order."""
    for request in requests:
        for of_resource in request.metrics.resource_metrics:
            resource = attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_metrics:
                for metric in of_scope.metrics:
                    for point in getattr(metric, metric.WhichOneof("data")).data_points:
                        yield Seen(resource, of_scope.scope.name, metric, attributes(point.attributes), point)


def spans(requests: list[Request]) -> list[Any]:
    """Every span of requests, in order."""
    return [span for post in requests for of in post.traces.resource_spans for scope in of.scope_spans for span in scope.spans]


def records(requests: list[Request]) -> list[Any]:
    """Every log record of requests, in order."""
    return [log for post in requests for of in post.logs.resource_logs for scope in of.scope_logs for log in scope.log_records]


def listens(url: str) -> bool:
    """Whether somebody listens there."""
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def pairs_of_json(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Attributes of OTLP's JSON."""
    return attributes(ParseDict({"attributes": pairs}, Resource()).attributes)
