"""OTLP over gRPC: what its status codes mean for what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from tests.otlp import Fast, Pushing
from tests.rank_files import File
from tests.support import wait_until
from tests.web_configs import certify
from torchobs.exporter.otlp.grpc_transport import METHODS, GrpcTransport
from torchobs.exporter.otlp.options import PushConfig, PushTarget


class Server(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Fails as the list says, then takes everything; `got` are (metadata, request)."""

    def __init__(self, *failures: tuple[grpc.StatusCode, bytes]) -> None:
        self._failures = iter(failures)
        self.answer = ExportMetricsServiceResponse()
        self.got: list[tuple[dict[str, str], bytes]] = []

    def service(self, handler_call_details: Any) -> Any:
        """See grpc."""
        assert handler_call_details.method == METHODS["metrics"]
        return grpc.unary_unary_rpc_method_handler(self._export)

    def _export(self, request: bytes, context: Any) -> bytes:
        self.got.append((dict(context.invocation_metadata()), request))
        code, details = next(self._failures, (grpc.StatusCode.OK, b""))
        if code is not grpc.StatusCode.OK:
            context.set_trailing_metadata((("grpc-status-details-bin", details),) if details else ())
            context.abort(code, "not now")
        return bytes(self.answer.SerializeToString())


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads of the server's."""
    with ThreadPoolExecutor(2) as made:
        yield made


def pushed(directory: Path, pool: ThreadPoolExecutor, server: Server) -> Any:
    """The books after one push to that server."""
    File(directory).save()
    running = grpc.server(pool, handlers=(server,))
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    target = PushTarget(f"http://127.0.0.1:{port}", "grpc", headers=(("Api-Key", "x y"),), gzip=True)
    try:
        with Pushing(directory, PushConfig(metrics=target), Fast(100.0)) as pushing:
            pushing.look(0.1, wait=False)
            wait_until(lambda: pushing.push.settled, timeout_s=30)
            return pushing.push.counts["metrics"]
    finally:
        running.stop(None).wait()


def retry_info(seconds: int) -> bytes:
    """When to come again, as a status has it."""
    detail = Packed()
    detail.Pack(RetryInfo(retry_delay=Duration(seconds=seconds)))
    return bytes(Status(code=8, details=[detail]).SerializeToString())


def serving(pool: ThreadPoolExecutor, server: Server, certificate: Path, port: int = 0) -> tuple[Any, int]:
    """A running server behind TLS, and its port."""
    running = grpc.server(pool, handlers=(server,))
    pair = certificate.with_suffix(".key").read_bytes(), certificate.read_bytes()
    port = running.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair]))
    running.start()
    return running, port


def test_a_certificate_may_be_renewed(program: Callable[[str], str], tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Whom to trust is read again after a failure; what was sent before a receiver's change is sent after it as well."""
    first, second = (certify(program("openssl"), tmp_path, name) for name in ("first", "second"))
    trusted, server = tmp_path / "trusted.pem", Server()
    trusted.write_bytes(first.read_bytes())
    running, port = serving(pool, server, first)
    rpc = GrpcTransport("metrics", PushTarget(f"https://127.0.0.1:{port}", "grpc", certificate=str(trusted)))
    try:
        assert rpc.send(b"").kind == "sent"
        running.stop(None).wait()
        running, _ = serving(pool, server, second, port)
        assert rpc.send(b"").kind == "retry"
        trusted.write_bytes(second.read_bytes())
        wait_until(lambda: rpc.send(b"").kind == "sent")
    finally:
        rpc.close()
        running.stop(None).wait()


def test_one_that_is_cancelled_makes_no_channel_any_more(
    program: Callable[[str], str], tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    """Neither if it had none, after a failure, nor if it had one."""
    server, certificate = Server((grpc.StatusCode.UNAVAILABLE, b"")), certify(program("openssl"), tmp_path, "server")
    running, port = serving(pool, server, certificate)
    try:
        for kind in ("retry", "sent"):
            rpc = GrpcTransport("metrics", PushTarget(f"https://127.0.0.1:{port}", "grpc", certificate=str(certificate)))
            assert rpc.send(b"").kind == kind
            rpc.cancel()
            outcome = rpc.send(b"")
            assert (outcome.kind, outcome.words) == ("retry", "the exporter ends")
    finally:
        running.stop(None).wait()
    assert len(server.got) == 2


@pytest.mark.parametrize("code", ["CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"])
def test_what_may_be_sent_again_is(flight_dir: Path, pool: ThreadPoolExecutor, code: str) -> None:
    """The specification's list; headers go along as metadata."""
    server = Server((grpc.StatusCode[code], b""))
    counts = pushed(flight_dir, pool, server)
    assert (counts.failures, counts.sent) == (1, counts.recorded)
    assert server.got[0][1] == server.got[1][1]
    assert server.got[0][0]["api-key"] == "x y"


def test_one_that_is_exhausted_is_asked_again_only_if_it_says_when(flight_dir: Path, pool: ThreadPoolExecutor) -> None:
    """By RetryInfo."""
    counts = pushed(flight_dir, pool, Server((grpc.StatusCode.RESOURCE_EXHAUSTED, retry_info(1))))
    assert (counts.failures, counts.sent) == (1, counts.recorded)
    counts = pushed(flight_dir, pool, Server(*[(grpc.StatusCode.RESOURCE_EXHAUSTED, b"")] * 3))
    assert (counts.failures, counts.dropped["refused"]) == (0, counts.recorded)


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "UNIMPLEMENTED"])
def test_what_is_refused_is_dropped_and_counted(flight_dir: Path, pool: ThreadPoolExecutor, code: str) -> None:
    """It would be refused the next time, too."""
    counts = pushed(flight_dir, pool, Server((grpc.StatusCode[code], b"")))
    assert (counts.failures, counts.dropped["refused"]) == (0, counts.recorded)


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED"])
def test_what_is_refused_for_its_data_goes_out_once_more_in_parts(
    flight_dir: Path, pool: ThreadPoolExecutor, code: str
) -> None:
    """One for each resource, here the rank and the exporter: what is refused again is dropped, the rest arrives."""
    refusal = grpc.StatusCode[code], b""
    server = Server(refusal, refusal)
    counts = pushed(flight_dir, pool, server)
    assert len(server.got) == 3
    assert (counts.failures, counts.queued) == (0, 0)
    assert counts.sent > 0
    assert counts.dropped["refused"] > 0


def test_what_is_rejected_in_part_is_counted(flight_dir: Path, pool: ThreadPoolExecutor) -> None:
    """And the rest is sent."""
    server = Server()
    server.answer.partial_success.rejected_data_points = 2
    counts = pushed(flight_dir, pool, server)
    assert (counts.dropped["rejected"], counts.sent) == (2, counts.recorded - 2)
