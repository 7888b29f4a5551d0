"""Receivers that refuse, hang, flap or are away: what may be sent again is, and what is lost is counted."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from threading import Event, Thread, Timer
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from tests.otlp import Answer, Fast, Pushing, Receiver, Request, balanced, only_metrics, points
from tests.rank_files import File
from tests.support import wait_until
from torchobs.catalog import Kind, Metric
from torchobs.exporter.otlp.http_transport import HttpTransport
from torchobs.exporter.otlp.options import PushConfig, PushTarget
from torchobs.flight.format.series import Scope

if TYPE_CHECKING:
    from typing_extensions import Self

USER, CALLS = Scope("my.package", "1.0"), Metric("my.c", Kind.COUNTER, "", "A user's instrument.")
SOON_S = 30.0


class Misbehaving:
    """Answers by a list, then takes everything."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = iter(answers)

    def __call__(self, _: Request) -> Answer:
        """The next answer."""
        return next(self._answers, Answer())


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_what_may_be_sent_again_is(flight_dir: Path, file: File, status: int) -> None:
    """The same request, once more; the failure is counted, nothing is dropped."""
    file.save()
    with (
        Receiver(Misbehaving(Answer(status), Answer(status))) as receiver,
        Pushing(flight_dir, only_metrics(receiver), Fast(100.0)) as pushing,
    ):
        pushing.look(1.0, wait=False)
        wait_until(lambda: pushing.push.settled, timeout_s=SOON_S)
        counts = pushing.push.counts["metrics"]
    assert counts.failures == 2
    assert counts.sent == counts.recorded > 20
    assert [request.body for request in receiver.requests] == [receiver.taken[0].body] * 3


@pytest.mark.parametrize(("status", "requests"), [(301, 1), (401, 1), (404, 1), (400, 3), (413, 3), (500, 3)])
def test_what_is_refused_is_dropped_and_counted(
    flight_dir: Path, file: File, status: int, requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Any other error would be the same the next time; what the receiver says of it is on the log, as one line.

    Where the data may be the cause, the rank's and the exporter's own are sent once more, each by itself.
    """
    file.save()
    answer = Answer(status, {"Location": "http://example.org"}, b"no\nsuch tenant")
    with Receiver(lambda _: answer) as receiver, Pushing(flight_dir, only_metrics(receiver)) as pushing:
        pushing.look(1.0)
        counts = pushing.push.counts["metrics"]
    assert len(receiver.requests) == requests
    assert counts.dropped["refused"] == counts.recorded > 20
    assert balanced(counts)
    wait_until(lambda: "no such tenant" in caplog.text)  # said after the books
    assert caplog.text.count("the receiver refuses") == 1
    assert f"{status}" in caplog.text


@pytest.mark.parametrize("gzip", [False, True])
def test_a_rank_that_is_refused_costs_the_others_nothing(
    flight_dir: Path,
    file: File,
    gzip: bool,  # noqa: FBT001  # a case
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A refused request goes out once more, a rank at a time; what is refused again is dropped, and its cause logged once."""
    file.save()
    File(flight_dir, seed=2, rank=1).save()

    def answer(request: Request) -> Answer:
        has_rank_1 = any(one.attributes.get("rank") == "1" for one in points([request]))
        return Answer(400, {}, f"out of bounds at {request.at_s}".encode()) if has_rank_1 else Answer()

    with Receiver(answer) as receiver, Pushing(flight_dir, only_metrics(receiver, gzip=gzip)) as pushing:
        for second in range(1, 4):
            pushing.look(second)
        counts = pushing.push.counts["metrics"]
        wait_until(lambda: "out of bounds" in caplog.text)
    assert len(receiver.requests) == 3 * 4
    assert {one.attributes.get("rank") for one in points(receiver.taken)} == {"0", None}
    refused = [request for request in receiver.requests if request not in receiver.taken]
    again = [
        len([*points([request])]) for request in refused if {one.attributes.get("rank") for one in points([request])} == {"1"}
    ]
    assert len(again) == 3
    assert counts.dropped["refused"] == sum(again)
    assert counts.sent == counts.recorded - sum(again)
    (line,) = (record.message for record in caplog.records if "refuses" in record.message)
    assert line.startswith("OTLP metrics: the receiver refuses those of job gpt, run run-1, rank 1: 400 ")


@pytest.mark.parametrize("as_date", [False, True])
def test_a_receiver_may_say_when_to_come_again(flight_dir: Path, file: File, as_date: bool) -> None:  # noqa: FBT001  # a case
    """In seconds or as a date; no attempt is made before."""
    file.save()
    clock = Fast(20.0)

    first: list[Request] = []

    def later(request: Request) -> Answer:
        if first:
            return Answer()
        first.append(request)
        after = formatdate(time.time() + 12, usegmt=True) if as_date else "12"
        return Answer(503, {"Retry-After": after})

    with Receiver(later) as receiver, Pushing(flight_dir, only_metrics(receiver), clock) as pushing:
        pushing.look(1.0, final=False)
        wait_until(lambda: receiver.taken, timeout_s=SOON_S)
    assert (receiver.taken[0].at_s - first[0].at_s) * 20.0 >= 9.0


def test_what_a_receiver_rejects_in_part_is_counted(flight_dir: Path, file: File) -> None:
    """Partial success is success, and is not sent again."""
    file.save()
    answer = ExportMetricsServiceResponse()
    answer.partial_success.rejected_data_points = 3
    answer.partial_success.error_message = "too old"
    said = Answer(200, {"Content-Type": "application/x-protobuf"}, answer.SerializeToString())
    with Receiver(lambda _: said) as receiver, Pushing(flight_dir, only_metrics(receiver)) as pushing:
        pushing.look(1.0)
        counts = pushing.push.counts["metrics"]
    assert counts.dropped["rejected"] == 3
    assert counts.sent == counts.recorded - 3
    assert len(receiver.requests) == 1


@pytest.mark.parametrize(
    "answer",
    [
        Answer(hold_s=60.0),
        Answer(drip=b""),
        Answer(drip=b"HTTP/1.1 200 OK\r\n\r\n"),
        Answer(200, {"Content-Length": "no number"}),
    ],
    ids=["silent", "by single bytes", "without a length by single bytes", "without an end"],
)
def test_a_receiver_that_hangs_is_left_after_the_timeout(flight_dir: Path, file: File, answer: Answer) -> None:
    """Also one that keeps the connection busy; then the request is sent again."""
    file.save()
    with (
        Receiver(Misbehaving(answer)) as receiver,
        Pushing(flight_dir, only_metrics(receiver, timeout_s=0.3), Fast(50.0)) as pushing,
    ):
        pushing.look(1.0, wait=False)
        wait_until(lambda: pushing.push.settled, timeout_s=SOON_S)
        counts = pushing.push.counts["metrics"]
    assert counts.failures >= 1
    assert counts.sent == counts.recorded > 20


class NeverDone:
    """A server whose handshake of TLS goes on by single bytes, for ever, inside a `with` block."""

    def __enter__(self) -> Self:
        self.begun, self._ended = Event(), Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.target = f"https://127.0.0.1:{self._server.getsockname()[1]}/v1/metrics"
        self._thread = Thread(target=self._drip)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # should nobody have come
        self._thread.join()
        self._server.close()

    def _drip(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            with connection:
                connection.sendall(b"\x16\x03\x03\x40\x00")  # the head of a record of 16 KiB
                self.begun.set()
                while not self._ended.wait(0.05):
                    connection.sendall(b"\x02")


def test_a_handshake_that_never_ends_is_left_after_the_timeout() -> None:
    """Each byte in time, and never the last."""
    with NeverDone() as server:
        web = HttpTransport("metrics", PushTarget(server.target, timeout_s=0.3))
        assert web.send(b"").words == "no answer within 0.3 s"
        web.close()


def test_a_handshake_that_never_ends_can_be_cancelled() -> None:
    """An exporter that must go does not wait for it."""
    with NeverDone() as server, ThreadPoolExecutor(1) as pool:
        web = HttpTransport("metrics", PushTarget(server.target, timeout_s=500.0))
        sent = pool.submit(web.send, b"")
        assert server.begun.wait(30)
        web.cancel()
        assert sent.result(30).kind == "retry"
        web.close()


class Early:
    """A server that answers each connection as soon as it is there and reads no body, inside a `with` block."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = answers

    def __enter__(self) -> Self:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.target = f"http://127.0.0.1:{self._server.getsockname()[1]}/v1/metrics"
        self._thread = Thread(target=self._answer)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._server.close()

    def _answer(self) -> None:
        for answer in self._answers:
            connection, _ = self._server.accept()
            with connection:
                connection.recv(1)
                connection.sendall(answer)  # and closes with the rest unread, which resets the connection


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 11\r\n\r\nno such key", "refused", "401 Unauthorized: no such key"),
        (b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\n\r\nno", "refused", "403 Forbidden: no"),
        (b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n", "refused", "413 Too Large:"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: 7\r\n\r\n", "retry", "503 Busy:"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "retry", ""),
        (b"HTTP/1.1 408 Timeout\r\nContent-Length: 0\r\n\r\n", "retry", ""),
        (b"", "retry", ""),
    ],
    ids=["401", "403", "413", "503", "200", "408", "nothing"],
)
def test_a_refusal_before_the_body_was_read_is_one(answer: bytes, kind: str, words: str) -> None:
    """The answer that is there counts, not the connection that broke; one that took nothing has not succeeded."""
    with Early(answer) as server:
        web = HttpTransport("metrics", PushTarget(server.target))
        outcome = web.send(b"x" * 32 * 1024**2)
        web.close()
    assert outcome.kind == kind
    assert outcome.words == words if words else "connection" in outcome.words.lower()
    assert outcome.after_s == (7.0 if b"Retry-After" in answer else None)


def test_the_connection_of_an_early_refusal_is_not_used_again() -> None:
    """The next request has its own."""
    refused = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
    with Early(refused, refused) as server:
        web = HttpTransport("metrics", PushTarget(server.target))
        kinds = [web.send(b"x" * 32 * 1024**2).kind for _ in range(2)]
        web.close()
    assert kinds == ["refused", "refused"]


def partly(rejected: int) -> Answer:
    """A success that is not one for so many points."""
    answer = ExportMetricsServiceResponse()
    answer.partial_success.rejected_data_points = rejected
    return Answer(200, {"Content-Type": "application/x-protobuf"}, answer.SerializeToString())


FLAPPING = (
    Answer(503), Answer(200, {}, b"<html>Welcome</html>"), Answer(429, {"Retry-After": "soon"}), partly(3), Answer(401),
    Answer(200, {"Content-Encoding": "gzip"}, b"\x1f\x8bno gzip"), Answer(503, {"Retry-After": "31536000"}),
    Answer(200, {"Content-Length": "1000"}, b"the connection stays open"), partly(10**9), Answer(hold_s=60.0), partly(-5),
    Answer(200, {"Content-Length": "no number", "Connection": "close"}), Answer(502, {}, b"\xff" * 100_000), Answer(404),
)  # fmt: skip


def test_a_receiver_that_flaps_loses_nothing_uncounted(flight_dir: Path, file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it answers, in turn: each batch is sent, rejected in part, or refused, and is none of them twice."""
    timeouts, answers = list[Timer](), Misbehaving(*FLAPPING)

    def timeout(*given: Any) -> Timer:
        timeouts.append(Timer(*given))
        return timeouts[-1]

    def answer(request: Request) -> Answer:
        said = answers(request)
        if said.hold_s or said.headers.get("Content-Length") == "1000":  # nothing else times out, however slow the machine is
            Timer(0.3, timeouts[-1].function).start()
        return said

    monkeypatch.setattr("torchobs.exporter.otlp.http_transport.Timer", timeout)
    with (
        Receiver(answer) as receiver,
        Pushing(flight_dir, only_metrics(receiver, timeout_s=60.0), Fast(1000.0)) as pushing,
    ):
        for second in range(1, 12):
            file.set(CALLS, 1, USER)
            file.beat(second)
            file.save()
            pushing.look(second, wait=False)
            wait_until(lambda: pushing.push.settled and pushing.push._scrape is None, timeout_s=SOON_S)
            assert balanced(pushing.push.counts["metrics"])
        counts = pushing.push.counts["metrics"]
    assert len(receiver.requests) > len(FLAPPING)
    of_batch = {request.body: len([*points([request])]) for request in receiver.requests}
    assert counts.recorded == sum(of_batch.values())
    assert counts.dropped == {"overflow": 0, "shutdown": 0, **refused_and_rejected(receiver.requests, of_batch)}
    came = [one.point.as_int for one in points(receiver.requests) if one.metric.name == "my.c"]
    assert (came, came[-1]) == (sorted(came), 11)


def refused_and_rejected(requests: list[Request], of_batch: dict[bytes, int]) -> dict[str, int]:
    """What those answers make of these requests: of one that is sent again, the last one says."""
    said: dict[bytes, Answer] = {}
    for number, request in enumerate(requests):
        said[request.body] = FLAPPING[number] if number < len(FLAPPING) else Answer()
    refused = [of_batch[body] for body, answer in said.items() if answer.status in {401, 404}]
    rejected = [of_batch[body] for body, answer in said.items() if answer == partly(10**9)]
    assert refused
    assert rejected
    return {"refused": sum(refused), "rejected": 3 + sum(rejected)}


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that nobody else gets and nobody listens on, until a receiver does."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_ten_minutes_without_a_receiver(flight_dir: Path, file: File, silent_port: int) -> None:
    """Nobody listens for ten minutes (scaled): what was recorded is sent when it is back, or counted as dropped."""
    clock = Fast(120.0)
    file.set(CALLS, 0, USER)
    file.save()
    target = PushTarget(f"http://127.0.0.1:{silent_port}/v1/metrics")
    config = PushConfig(metrics=target, interval_s=10.0, queue_bytes=40_000)
    with Pushing(flight_dir, config, clock) as pushing:
        added = 0
        while clock.now() < 600.0:
            file.set(CALLS, 1, USER)
            added += 1
            file.save()
            pushing.look(1.0, final=False, wait=False)
            assert pushing.push.counts["metrics"].queued * 20 < 40_000
            wait_until(lambda: pushing.push._scrape is None)
        down = pushing.push.counts["metrics"]
        with Receiver(port=silent_port) as receiver:
            pushing.look(1.0, wait=False)
            wait_until(lambda: pushing.push.settled, timeout_s=SOON_S)
            counts = pushing.push.counts["metrics"]
    assert down.sent == 0
    assert down.failures > 5
    assert down.dropped["overflow"] > 0
    assert counts.queued == 0
    assert counts.sent + sum(counts.dropped.values()) == counts.recorded
    assert counts.sent == len([*points(receiver.taken)])
    last = [one.point.as_int for one in points(receiver.taken) if one.metric.name == "my.c"]
    assert last[-1] == added
    assert last == sorted(last)


def test_what_is_left_at_the_end_is_counted(flight_dir: Path, file: File) -> None:
    """An exporter that must go drops what it could not send, and says so."""
    file.save()
    with Receiver(lambda _: Answer(503)) as receiver, Pushing(flight_dir, only_metrics(receiver)) as pushing:
        pushing.look(1.0, wait=False)
        wait_until(lambda: receiver.requests)
        pushing.push.close()
        counts = pushing.push.counts["metrics"]
    assert counts.dropped["shutdown"] == counts.recorded > 20
    assert balanced(counts)
