"""Receivers that refuse, hang, flap or are away, over HTTP and gRPC: what may be sent again is, and what is lost is counted."""

from __future__ import annotations

import math
import signal
import ssl
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from tests.exporters import Service, start_program
from tests.otlp import Answer, Fast, Pushing, Receiver, Request, only_metrics, points, recorded, to
from tests.rank_files import File, live_rank, live_span, train
from tests.support import free_port, wait_until
from tests.web_configs import certify
from torchobs.catalog import Kind, Metric
from torchobs.exporter.config import ExporterConfig, PushConfig, PushTarget
from torchobs.exporter.otlp.push import FIRST_S, LONGEST_RETRY_AFTER_S, MOST_S, Sender
from torchobs.exporter.otlp.send import GRPC_METHODS, Grpc, Http, Outcome
from torchobs.exporter.otlp.source import Batch
from torchobs.flight.series import Scope

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from pathlib import Path

USER, CALLS = Scope("my.package", "1.0"), Metric("my.c", Kind.COUNTER, "", "A user's instrument.")
SOON_S = 30.0


OF_ADDRESS = (301, 401, 403, 404, 405, 407, 410, 415, 501)
STATUSES = {
    **dict.fromkeys((200, 202), "sent"), **dict.fromkeys((408, 429, 502, 503, 504), "retry"),
    **dict.fromkeys((*OF_ADDRESS, 400, 413, 500), "refused"),
}  # fmt: skip


def test_what_the_statuses_of_http_mean() -> None:
    """By the specification; of some the address or the credentials are the cause, whatever is sent."""
    statuses = iter(STATUSES)
    with Receiver(lambda _: Answer(next(statuses))) as receiver:
        web = Http("metrics", to(receiver))
        outcomes = {status: web.send(b"x") for status in STATUSES}
        web.close()
    assert {status: outcome.kind for status, outcome in outcomes.items()} == STATUSES
    assert tuple(status for status, outcome in outcomes.items() if outcome.of_address) == OF_ADDRESS


def test_a_rank_that_is_refused_costs_the_others_nothing(
    flight_dir: Path, file: File, caplog: pytest.LogCaptureFixture
) -> None:
    """Each rank's data is a request; what is refused is dropped, and its cause logged once."""
    file.save()
    File(flight_dir, seed=2, rank=1).save()

    def answer(request: Request) -> Answer:
        has_rank_1 = any(sent.attributes.get("rank") == "1" for sent in points([request]))
        return Answer(400, {}, f"out of bounds at {request.at_s}".encode()) if has_rank_1 else Answer()

    with Receiver(answer) as receiver, Pushing(flight_dir, only_metrics(receiver, gzip=True)) as pushing:
        for second in range(1, 4):
            pushing.look(second)
        counts = pushing.push.counts["metrics"]
        wait_until(lambda: "out of bounds" in caplog.text)
    assert {sent.attributes.get("rank") for sent in points(receiver.taken)} == {"0", None}
    refused = [request for request in receiver.requests if request not in receiver.taken]
    assert (len(refused), {sent.attributes.get("rank") for sent in points(refused)}) == (3, {"1"})
    assert counts.dropped["refused"] == len([*points(refused)])
    assert counts.sent == recorded(counts) - counts.dropped["refused"] == len([*points(receiver.taken)])
    (line,) = (record.message for record in caplog.records if "refuses" in record.message)
    assert line.startswith("OTLP metrics: the receiver refuses those of job gpt, run run-1, rank 1: 400 ")


def test_a_receiver_that_hangs_is_left_after_the_timeout(flight_dir: Path, file: File) -> None:
    """Then the same request is sent again."""
    answers = iter([Answer(hold_s=60.0)])
    file.save()
    with (
        Receiver(lambda _: next(answers, Answer())) as receiver,
        Pushing(flight_dir, only_metrics(receiver, timeout_s=0.3), Fast(50.0)) as pushing,
    ):
        pushing.look(1.0, wait=False)
        wait_until(lambda: pushing.push.settled, timeout_s=SOON_S)
        counts = pushing.push.counts["metrics"]
    assert counts.failures >= 1
    assert counts.sent == recorded(counts) > 20
    assert receiver.requests[0].body == receiver.requests[1].body


def test_five_minutes_without_a_receiver(flight_dir: Path, file: File) -> None:
    """Nobody listens for five minutes (scaled): what was recorded is sent when it is back, or counted as dropped."""
    clock, port = Fast(120.0), free_port()
    file.set(CALLS, 0, USER)
    file.save()
    target = PushTarget(f"http://127.0.0.1:{port}/v1/metrics")
    config = PushConfig(metrics=target, interval_s=10.0, queue_bytes=20_000)
    with Pushing(flight_dir, config, clock) as pushing:
        added = 0
        while clock.now() < 300.0:
            file.set(CALLS, 1, USER)
            added += 1
            file.save()
            pushing.look(1.0, final=False, wait=False)
            assert pushing.push.counts["metrics"].queued * 20 < 20_000
            wait_until(lambda: pushing.push._scrape is None)
        down = pushing.push.counts["metrics"]
        with Receiver(port=port) as receiver:
            pushing.look(1.0, wait=False)
            wait_until(lambda: pushing.push.settled, timeout_s=SOON_S)
            counts = pushing.push.counts["metrics"]
    assert down.sent == 0
    assert down.failures > 5
    assert down.dropped["overflow"] > 0
    assert counts.queued == 0
    assert counts.sent == len([*points(receiver.taken)])
    last = [sent.point.as_int for sent in points(receiver.taken) if sent.metric.name == "my.c"]
    assert last[-1] == added
    assert last == sorted(last)


class Server(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Fails as the list says, then takes everything; `got` are (metadata, request)."""

    def __init__(self, *failures: tuple[grpc.StatusCode, bytes]) -> None:
        self._failures = iter(failures)
        self.answer = ExportMetricsServiceResponse()
        self.got: list[tuple[dict[str, str], bytes]] = []

    def service(self, handler_call_details: Any) -> Any:
        assert handler_call_details.method == GRPC_METHODS["metrics"]
        return grpc.unary_unary_rpc_method_handler(self._export)

    def _export(self, request: bytes, context: Any) -> bytes:
        self.got.append((dict(context.invocation_metadata()), request))
        code, details = next(self._failures, (grpc.StatusCode.OK, b""))
        if code is not grpc.StatusCode.OK:
            context.set_trailing_metadata((("grpc-status-details-bin", details),) if details else ())
            context.abort(code, "not now")
        return bytes(self.answer.SerializeToString())


def retry_info(seconds: int) -> bytes:
    """When to come again, as a status has it."""
    detail = Packed()
    detail.Pack(RetryInfo(retry_delay=Duration(seconds=seconds)))
    return bytes(Status(code=8, details=[detail]).SerializeToString())


CODES = {
    **dict.fromkeys(("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"), "retry"),
    **dict.fromkeys(("UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "UNIMPLEMENTED"), "of address"),
    **dict.fromkeys(("INVALID_ARGUMENT", "INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED"), "refused"),
}


def test_what_the_codes_of_grpc_mean() -> None:
    """By the specification: one that is exhausted is asked again only if it says when, by RetryInfo.

    Headers go along as metadata; of the next request, what is rejected in part is counted.
    """
    for code, kind, after_s in (*((code, kind, None) for code, kind in CODES.items()), ("RESOURCE_EXHAUSTED", "retry", 7)):
        server = Server((grpc.StatusCode[code], retry_info(after_s) if after_s else b""))
        server.answer.partial_success.rejected_data_points = 2
        with ThreadPoolExecutor(2) as pool:
            running = grpc.server(pool, handlers=(server,))
            url = f"http://127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
            running.start()
            rpc = Grpc("metrics", PushTarget(url, "grpc", headers=(("Api-Key", "x y"),), gzip=True))
            outcome, then = rpc.send(b"metrics"), rpc.send(b"metrics")
            rpc.close()
            running.stop(None).wait()
        assert ("of address" if outcome.of_address else outcome.kind) == kind, code
        assert (outcome.words, outcome.after_s) == (f"{code} not now", after_s)
        assert [(got[0]["api-key"], got[1]) for got in server.got] == [("x y", b"metrics")] * 2
        assert (then.kind, then.rejected) == ("sent", 2)


@pytest.mark.serial
def test_a_receiver_that_hangs_holds_up_no_scrape_and_no_end(flight_dir: Path) -> None:
    """While requests hang, the page comes as ever; an exporter that has done its duty leaves in its time."""
    for seed in range(1, 9):
        File(flight_dir, seed=seed, rank=seed).save()
    with Receiver(lambda _: Answer(hold_s=120.0)) as receiver:
        push = PushConfig(metrics=to(receiver), traces=to(receiver, path="/v1/traces"), interval_s=0.5)
        config = ExporterConfig(flight_dir=str(flight_dir), push=push, drain_timeout_s=1.0, grace_s=1e9)
        with Service(config) as service:
            wait_until(lambda: receiver.requests)
            times_s = []
            for _ in range(20):
                began_s = time.perf_counter()
                service.page()
                times_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
        assert time.perf_counter() - began_s < 5.0
    assert statistics.median(times_s) < 0.1


def test_sigterm_waits_for_the_final_state_to_be_pushed(
    start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path
) -> None:
    """A sidecar's last word: what the rank counted last, and how it ended; sent within the drain, after a first failure."""
    writer = live_rank(flight_dir)
    train(writer, range(1, 3))
    live_span(writer, 2)
    with Receiver() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret%20key"}
        exporter = start_program(start, tmp_path / "log", free_port(), "--flight-dir", str(flight_dir), **environ)
        wait_until(lambda: receiver.of("/v1/metrics"))
        failures = iter([Answer(503)] * 2)
        receiver.answer = lambda _: next(failures, Answer())
        train(writer, range(3, 8))
        writer.exit(1, 0)
        writer.close()
        exporter.process.send_signal(signal.SIGTERM)
        assert exporter.process.wait(timeout=30) == 0
        last = {sent.metric.name: sent.point for sent in points(receiver.of("/v1/metrics"))}
        states = [sent for sent in points(receiver.of("/v1/metrics")) if sent.attributes.get("state") == "finished"]
        assert last["torchobs.steps"].as_int == 7
        assert states[-1].point.as_double == 1
        assert receiver.of("/v1/traces")
        assert {request.headers["api-key"] for request in receiver.requests} == {"secret key"}
    assert "secret" not in exporter.log


def test_tls_trusts_whom_it_is_told_to_and_shows_its_own_certificate(
    program: Callable[[str], str], flight_dir: Path, tmp_path: Path
) -> None:
    """A receiver that wants a certificate gets it; one that nobody vouches for gets nothing.

    The files are read for each connection: a certificate may be renewed, and nothing has to be started again.
    """
    server, client = (certify(program("openssl"), tmp_path, name) for name in ("server", "client"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server, tmp_path / "server.key")
    context.load_verify_locations(client)
    context.verify_mode = ssl.CERT_REQUIRED
    file = File(flight_dir)
    file.span(1, 0.5)
    file.save()
    client_files = {"client_certificate": str(client), "client_key": str(tmp_path / "client.key")}
    with Receiver(tls=context) as receiver:
        trusting, doubting = to(receiver, certificate=str(server), **client_files), to(receiver, **client_files)
        push = PushConfig(metrics=trusting, traces=doubting)
        with Pushing(flight_dir, push) as pushing:
            pushing.look(1.0, wait=False)
            wait_until(lambda: pushing.push.counts["metrics"].sent and pushing.push.counts["traces"].failures)
            assert pushing.push.counts["traces"].sent == 0
        counts = pushing.push.counts["traces"]
        assert recorded(counts) == counts.dropped["shutdown"] > 0
        assert [*points(receiver.taken)]
        anonymous = PushConfig(metrics=to(receiver, certificate=str(server)))
        with Pushing(flight_dir, anonymous) as pushing:
            pushing.look(1.0, wait=False)
            wait_until(lambda: pushing.push.counts["metrics"].failures)
            assert pushing.push.counts["metrics"].sent == 0
        trusted = tmp_path / "trusted.pem"
        trusted.write_bytes(client.read_bytes())
        web = Http("metrics", to(receiver, certificate=str(trusted), **client_files))
        before = web.send(b"x")
        trusted.write_bytes(server.read_bytes())
        assert (before.kind, web.send(b"x").kind) == ("retry", "sent")
        web.close()
        assert "CERTIFICATE_VERIFY_FAILED" in before.words


def test_a_proxy_of_the_environment_is_used(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for the whole address, with its own user; NO_PROXY goes around it."""
    file = File(flight_dir)
    file.span(1, 0.5)
    file.save()
    with Receiver() as proxy, Receiver() as direct:
        monkeypatch.setenv("http_proxy", proxy.url.replace("//", "//user:pass%20word@"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        push = PushConfig(metrics=PushTarget("http://collector.example:4318/v1/metrics"), traces=to(direct, path="/v1/traces"))
        with Service(ExporterConfig(flight_dir=str(flight_dir), push=push, grace_s=1e9)):
            wait_until(lambda: proxy.taken and direct.taken)
    (request, *_) = proxy.taken
    assert request.path == "http://collector.example:4318/v1/metrics"
    assert request.headers["host"] == "collector.example:4318"
    assert request.headers["proxy-authorization"] == "Basic dXNlcjpwYXNzIHdvcmQ="
    assert "proxy-authorization" not in direct.taken[0].headers


class Waits(Fast):
    """A clock that notes what was waited for, and goes on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def now(self) -> float:
        return math.fsum(self.waits)

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        condition.wait(0)
        self.waits.append(seconds)


class Steps:
    """A transport that answers by what it is given, and then closes the sender."""

    def __init__(self, *steps: Outcome) -> None:
        self._steps = iter(steps)
        self.sender: Sender

    def send(self, _: bytes) -> Outcome:
        step = next(self._steps, None)
        if step is None:
            self.sender.close(0.0)
        return step or Outcome("sent")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("after_s", "expected"), [(None, None), (30.0, 30.0), (31_536_000.0, LONGEST_RETRY_AFTER_S)])
def test_pauses_double_with_chance_up_to_a_minute(after_s: float | None, expected: float | None) -> None:
    """They begin anew after a success. A receiver is not asked before it wants to be; a year is a mistake."""
    clock, again = Waits(), Outcome("retry", after_s=after_s)
    receiver = Steps(*[again] * 12, Outcome("sent"), again)
    queue = receiver.sender = Sender("metrics", receiver, 100, clock)  # whose thread is the test's
    queue.put(Batch(b"x", 1))
    queue.put(Batch(b"y", 1))
    queue._run()
    for number, waited_s in enumerate(clock.waits[:13]):
        longest_s = min(FIRST_S * 2 ** (number % 12), MOST_S)
        assert max(longest_s / 2, expected or 0.0) <= waited_s <= max(longest_s, expected or 0.0)
