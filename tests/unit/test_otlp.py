"""What the push is configured with, its queue, and the size of its requests."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from email.utils import formatdate

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from urllib3 import HTTPResponse

from tests.otlp import Fast
from torchobs.exporter import config
from torchobs.exporter.config import PushConfig, PushTarget
from torchobs.exporter.otlp import source
from torchobs.exporter.otlp.push import FIRST_S, LONGEST_RETRY_AFTER_S, MOST_S, Sender
from torchobs.exporter.otlp.send import Outcome, _retry_after_s
from torchobs.exporter.otlp.source import MOST_BYTES, MOST_ITEMS, Batch, Item, Place

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"


def parsed(environ: dict[str, str], **given: str) -> PushConfig:
    """The configuration, which must be without problems."""
    found, problems = config.parse_push({f"otlp_{name}": [text] for name, text in given.items()}, environ)
    assert problems == ()
    assert found is not None
    return found


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"},
        {BASE: "  "},
        {BASE: "http://c:4318", "OTEL_SDK_DISABLED": "TRUE"},
        {
            BASE: "http://c:4318",
            **dict.fromkeys(("OTEL_METRICS_EXPORTER", "OTEL_TRACES_EXPORTER", "OTEL_LOGS_EXPORTER"), "none"),
        },
    ],
)
def test_without_an_endpoint_nothing_is_pushed(environ: dict[str, str]) -> None:
    """Nor with the SDK disabled, nor with none for every signal."""
    assert config.parse_push({}, environ) == (None, ())


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/metrics"),
        ("http://c:4318/", "http://c:4318/v1/metrics"),
        ("https://c/otlp/", "https://c/otlp/v1/metrics"),
        ("http://[::1]:1/a/b?k=v", "http://[::1]:1/a/b/v1/metrics?k=v"),
    ],
)
def test_the_signal_s_path_is_added_to_a_base(base: str, url: str) -> None:
    """As the specification says; gRPC has no paths."""
    assert parsed({BASE: base}).metrics == PushTarget(url)
    grpc = parsed({BASE: base, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}).metrics
    assert grpc is not None
    assert grpc.url == base


def test_a_signal_s_own_value_beats_that_of_all_and_an_option_its_variable() -> None:
    """In this order: the signal's option, its variable, the option of all, their variable."""
    environ = {
        BASE: "http://all:1",
        "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://metrics:2/x",
        "OTEL_EXPORTER_OTLP_HEADERS": "a=all,b=x%2Cy",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a=traces",
        "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://logs:5/v1/logs",
        "OTEL_EXPORTER_OTLP_LOGS_TIMEOUT": "1500",
        "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
        "OTEL_EXPORTER_OTLP_METRICS_COMPRESSION": "gzip",
        "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca",
        "OTEL_METRIC_EXPORT_INTERVAL": "15000",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "DELTA",
    }
    headers = (("a", "all"), ("b", "x,y"))
    found = parsed(environ)
    assert found.metrics == PushTarget("http://metrics:2/x", headers=headers, timeout_s=2.5, gzip=True, certificate="/ca")
    assert found.traces == PushTarget("http://all:1/v1/traces", headers=(("a", "traces"),), timeout_s=2.5, certificate="/ca")
    assert found.logs == PushTarget("http://logs:5/v1/logs", "grpc", headers, timeout_s=1.5, certificate="/ca")
    assert (found.interval_s, found.span_delay_s, found.delta) == (15.0, 0.5, True)
    given = {"endpoint": "http://told:3", "metrics_endpoint": "http://m:4", "timeout": "1m", "interval": "5s"}
    told = parsed(environ, **given, temporality="cumulative")
    assert told.metrics is not None
    assert told.traces is not None
    assert (told.metrics.url, told.traces.url, told.traces.timeout_s) == ("http://m:4", "http://told:3/v1/traces", 60.0)
    assert (told.interval_s, told.delta) == (5.0, False)


@pytest.mark.parametrize(("text", "wanted"), [("no", False), ("yes", True), ("", True)])
def test_span_events_may_be_switched_off(text: str, wanted: bool) -> None:  # noqa: FBT001  # a case
    """By option or by the exporter's variable; who says nothing has them."""
    assert parsed({BASE: "http://c:1", "TORCHOBS_EXPORTER_OTLP_SPAN_EVENTS": text}).span_events is wanted
    if text:
        assert parsed({BASE: "http://c:1"}, span_events=text).span_events is wanted


@pytest.mark.parametrize("signal", config.SIGNALS)
def test_one_signal_may_be_pushed_alone(signal: str) -> None:
    """By the others' exporters being none or prometheus, or by having the only endpoint."""
    others = (f"OTEL_{other.upper()}_EXPORTER" for other in config.SIGNALS if other != signal)
    for environ in (
        {BASE: "http://c:1", **dict.fromkeys(others, "prometheus,console")},
        {f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT": "http://c:1"},
    ):
        assert [name for name, _ in parsed(environ).targets()] == [signal]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (BASE, "collector:4318"),
        (BASE, "ftp://c"),
        (BASE, "http://"),
        (BASE, "http://c:99999"),
        (BASE, "http://c/a b"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "-1"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "sometimes"),
    ],
)
def test_what_is_not_allowed_is_told_and_left_out(name: str, text: str) -> None:
    """The push goes on with the rest."""
    found, (problem, *_) = config.parse_push({}, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1", name: text})
    assert found is not None
    assert problem.startswith(f"{name}='{text}': expected ")


@pytest.mark.parametrize("text", ["secret", "a b=secret", "a=secret\n", "a=secret%0d%0aHost: x", "=secret"])
def test_a_header_s_value_is_never_repeated(text: str) -> None:
    """It may be a key; and none can forge another."""
    found, problems = config.parse_push({}, {BASE: "http://c:1", "OTEL_EXPORTER_OTLP_HEADERS": text})
    if text.endswith("\n"):  # what stands around it is taken off
        assert problems == ()
        return
    assert found is not None
    assert found.metrics == PushTarget("http://c:1/v1/metrics")
    assert problems
    assert not any("secret" in problem for problem in problems)


@pytest.mark.parametrize("user", ["user:secret", ":secret"])
def test_a_password_in_the_address_is_refused(user: str) -> None:
    """It would be on the log; one without a user was taken, and never sent."""
    found, (problem,) = config.parse_push({"otlp_endpoint": [f"http://{user}@c:1"]}, {})
    assert found is None
    assert "secret" not in problem


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None), ("", None), ("5", 5.0), (" 120 ", 120.0), ("-1", None), ("1.5", None), ("soon", None), ("٣", None),
        ("9" * 9000, None), (formatdate(10, usegmt=True), 0.0), ("Fri, 99 Foo 2000 00:00:00 GMT", None),
    ],
)  # fmt: skip
def test_retry_after_is_a_number_or_a_date(header: str | None, seconds: float | None) -> None:
    """RFC 9110; what is neither says nothing."""
    assert _retry_after_s(HTTPResponse(headers={} if header is None else {"Retry-After": header})) == seconds


def texts(batches: Sequence[Batch]) -> list[str]:
    """The names of the records that are in requests, in their order."""
    found = []
    for batch in batches:
        (resource,) = ExportLogsServiceRequest.FromString(batch.body).resource_logs
        records = [record.event_name for scope in resource.scope_logs for record in scope.log_records]
        assert len(records) == batch.items
        found += records
    return found


def test_requests_have_a_size_that_receivers_accept() -> None:
    """Many small records are in few; large ones are in several; one that is too large by itself is sent alone."""
    place = Place(Resource(), InstrumentationScope(name="torchobs"))

    def of(names: Sequence[str]) -> list[Batch]:
        return source.batches("logs", [Item(place, LogRecord(event_name=name)) for name in names])

    small = [f"{number}" for number in range(2 * MOST_ITEMS["logs"] + 1)]
    assert [batch.items for batch in of(small)] == [MOST_ITEMS["logs"], MOST_ITEMS["logs"], 1]
    assert texts(of(small)) == small
    assert of([]) == []
    large = [letter * (MOST_BYTES // 3) for letter in "abcdefg"] + ["z" * (MOST_BYTES + 1), "small"]
    requests = of(large)
    assert texts(requests) == large
    assert all(len(batch.body) <= MOST_BYTES for batch in requests if batch.items > 1)
    assert len(requests) < len(large)


class Waits(Fast):
    """A clock that notes what was waited for, and goes on at once."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def now(self) -> float:
        """The sum of what was waited for."""
        return math.fsum(self.waits)

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """See :class:`Fast`."""
        condition.wait(0)
        self.waits.append(seconds)


class Receiver:
    """A transport that answers by what it is given, and then closes the sender."""

    def __init__(self, *steps: Outcome | Callable[[], Outcome]) -> None:
        self._steps = iter(steps)
        self.sender: Sender
        self.bodies: list[bytes] = []

    def send(self, body: bytes) -> Outcome:
        """See Transport."""
        self.bodies.append(body)
        step = next(self._steps, None)
        if step is None:
            self.sender.close(0.0)
            return Outcome("sent")
        return step if isinstance(step, Outcome) else step()

    def close(self) -> None:
        """See Transport."""


def sender(receiver: Receiver, clock: Fast | None = None, limit_bytes: int = 100) -> Sender:
    """A sender to that receiver, whose thread is the test's."""
    receiver.sender = Sender("metrics", receiver, limit_bytes, clock or Waits())
    return receiver.sender


def test_the_oldest_makes_room_and_is_sent_first() -> None:
    """The newest is worth most; and cumulative points never arrive backwards, also after a failure."""
    receiver = Receiver(Outcome("retry"), Outcome("sent"), Outcome("sent"))
    queue = sender(receiver)
    for number in range(5):
        queue.put(Batch(bytes([number]) * 40, number))
    assert (queue.counts.dropped["overflow"], queue.counts.queued) == (0 + 1 + 2, 3 + 4)
    queue.put(Batch(b"e", 1))
    queue._run()
    assert [body[0] for body in receiver.bodies] == [3, 3, 4, b"e"[0]]
    assert (queue.counts.sent, queue.counts.failures, queue.counts.queued) == (7, 1, 0)
    assert queue.counts.dropped["shutdown"] == 1
    queue.put(Batch(b"late", 5))
    assert queue.counts.dropped["shutdown"] == 6


@pytest.mark.parametrize(("after_s", "expected"), [(None, None), (30.0, 30.0), (31_536_000.0, LONGEST_RETRY_AFTER_S)])
def test_pauses_double_with_chance_up_to_a_minute(after_s: float | None, expected: float | None) -> None:
    """They begin anew after a success. A receiver is not asked before it wants to be; a year is a mistake."""
    clock, again = Waits(), Outcome("retry", after_s=after_s)
    queue = sender(Receiver(*[again] * 12, Outcome("sent"), again), clock)
    queue.put(Batch(b"x", 1))
    queue.put(Batch(b"y", 1))
    queue._run()
    for number, waited_s in enumerate([*clock.waits[:12], clock.waits[12]]):
        longest_s = min(FIRST_S * 2 ** (number % 12), MOST_S)
        assert max(longest_s / 2, expected or 0.0) <= waited_s <= max(longest_s, expected or 0.0)


def test_an_outage_of_days_is_an_outage() -> None:
    """Promise: whatever comes back is sent to, also after thousands of attempts."""
    queue = sender(Receiver(*[Outcome("retry")] * 3000, Outcome("sent")))
    for body in (b"x", b"the last"):
        queue.put(Batch(body, 1))
    queue._run()
    assert (queue.counts.sent, queue.counts.failures) == (1, 3000)


def test_a_request_that_cannot_be_sent_costs_no_other() -> None:
    """Promise: whatever is raised is a refusal of that request, and the signal's thread goes on."""

    def fails() -> Outcome:
        raise TypeError("getattr(): attribute name must be string")

    queue = sender(Receiver(fails, Outcome("sent")))
    for number in (1, 2, 3):
        queue.put(Batch(bytes([number]), number))
    queue._run()
    assert (queue.counts.dropped["refused"], queue.counts.sent) == (1, 2)


@pytest.mark.parametrize(("after_s", "expected"), [(None, [2.0] * 5), (1.0, [2.0] * 5), (120.0, [120.0] * 5)])
def test_after_an_outage_an_exporter_that_ends_tries_again_and_again(after_s: float | None, expected: list[float]) -> None:
    """Soon, not after the minute that the outage has taught it; never before the receiver wants it."""
    clock, again = Waits(), Outcome("retry", after_s=after_s)

    def hurried() -> Outcome:
        queue.hurry()
        return again

    queue = sender(Receiver(*[again] * 9, hurried, *[again] * 4), clock)
    queue.put(Batch(b"x", 1))
    queue._run()
    assert clock.waits[8] >= MOST_S / 2
    assert clock.waits[9:] == pytest.approx(expected)


def test_a_refusal_is_logged_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever numbers are in it: one at each push would fill the log."""
    outcomes = [Outcome("refused", words=f"404: not found at {number}", of_address=True) for number in range(20)]
    queue = sender(Receiver(*outcomes))
    for number in range(21):
        queue.put(Batch(b"x", number))
    queue._run()
    assert caplog.text.count("the receiver refuses them: 404") == 1
    assert queue.counts.dropped["refused"] == sum(range(20))
