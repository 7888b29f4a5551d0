"""The push against a receiver that answers as receivers do: what arrives, and that nothing is lost without being counted."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from tests.otlp import NO_VALUE, Answer, Fast, Pushing, Receiver, Request, attributes, points, spans, to
from tests.rank_files import BORN_WALL_NS, File, S
from tests.support import free_port, wait_until
from torchobs import catalog
from torchobs.catalog import Kind, Metric
from torchobs.exporter.otlp.ledger import Counts
from torchobs.exporter.otlp.options import PushConfig, Target
from torchobs.flight import spans as identifiers
from torchobs.flight.layout import Exit
from torchobs.flight.series import Scope

USER = Scope("my.package", "1.0", "https://example.org/1", (("a", 1),))
SOON_S = 30.0


def user(name: str, kind: Kind = Kind.COUNTER, unit: str = "", bounds: tuple[float, ...] = ()) -> Metric:
    """A user's instrument."""
    return Metric(name, kind, unit, f"About {name}.", bounds=bounds)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """One that takes everything."""
    with Receiver() as made:
        yield made


def balanced(counts: Counts) -> bool:
    """Whether nothing is missing from the books."""
    return counts.recorded == counts.sent + sum(counts.dropped.values()) and counts.queued == 0


def only_metrics(receiver: Receiver, **given: Any) -> PushConfig:
    """Metrics to that receiver."""
    target = {name: given.pop(name) for name in ("path", "gzip", "headers", "timeout_s") if name in given}
    return PushConfig(metrics=to(receiver, **target), **given)


def test_points_are_what_the_file_holds(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """By OpenTelemetry's names; kinds, units, scopes, integers, bounds, least and greatest, birth: all as recorded."""
    file.step(1, 0.5, loss=3.5, norm=2.0)
    file.set(user("my.requests", unit="{request}"), 7, USER, route="a", rank="mine")
    file.set(user("my.level", Kind.UPDOWN), -3, USER)
    file.set(user("my.share", Kind.GAUGE, "1"), 0.25, USER, parts=("x", "y"), flag=True, n=1)
    for value in (0.25, 0.75, 9.0):
        file.set(user("my.latency", Kind.HISTOGRAM, "s", (0.5, 1.0)), value, USER)
    file.set(user("my.balance", Kind.HISTOGRAM, "", (0.0,)), -2.0, USER)
    file.save()
    with Pushing(flight_dir, only_metrics(receiver)) as pushing:
        pushing.look(1.0)
        counts = pushing.push.counts["metrics"]
    of_rank = [one for one in points(receiver.taken) if one.resource["service.name"] == "gpt"]
    assert counts.recorded == counts.sent == len([*points(receiver.taken)])
    assert all({"job_name": "gpt", "run_id": "run-1", "rank": "0"}.items() <= one.attributes.items() for one in of_rank)
    mine = {one.metric.name: one for one in of_rank if one.scope == USER.name}
    requests, level, share = mine["my.requests"], mine["my.level"], mine["my.share"]
    assert requests.metric.sum.is_monotonic
    assert requests.metric.unit == "{request}"
    assert requests.metric.description == "About my.requests."
    assert (requests.point.as_int, requests.attributes["route"], requests.attributes["exported_rank"]) == (7, "a", "mine")
    assert requests.point.start_time_unix_nano == BORN_WALL_NS
    assert not level.metric.sum.is_monotonic
    assert level.point.as_int == -3
    assert share.metric.WhichOneof("data") == "gauge"
    assert share.point.as_double == 0.25
    assert {"parts": ["x", "y"], "flag": True, "n": 1}.items() <= share.attributes.items()
    latency, balance = mine["my.latency"].point, mine["my.balance"].point
    assert (list(latency.bucket_counts), list(latency.explicit_bounds)) == ([1, 1, 1], [0.5, 1.0])
    assert (latency.count, latency.sum, latency.min, latency.max) == (3, 10.0, 0.25, 9.0)
    assert not balance.HasField("sum")  # of negative values a sum is no counter
    ours = {one.metric.name: one for one in of_rank if one.scope == "torchobs"}
    assert ours["torchobs.steps"].point.as_int == 1
    assert ours["torchobs.loss"].point.as_double == 3.5
    assert ours["torchobs.rank.up"].point.as_double == 1.0


def test_a_resource_is_an_incarnation(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """Named by the semantic conventions; what the user and Kubernetes said of it keeps its name."""
    given: dict[str, Any] = {"k8s.pod.name": "pod-1", "team": "vision", "service.version": "7"}
    restarted = File(flight_dir, seed=2, rank=1, **given).save()
    file.save()
    with Pushing(flight_dir, only_metrics(receiver)) as pushing:
        pushing.look(1.0)
    found = {one.resource["service.instance.id"]: one.resource for one in points(receiver.taken)}
    of_rank = found[restarted.header.incarnation.hex()]
    expected = {"service.name": "gpt", "host.name": "node-1", "process.pid": 4321, "process.runtime.version": "3.11.7"}
    own = {"torchobs.run_id": "run-1", "torchobs.rank": 1, "torchobs.torch_version": "2.13.0"}
    assert {**expected, **own, **given}.items() <= of_rank.items()
    assert file.header.incarnation.hex() in found
    assert len(found) == 3  # the exporter is the third
    assert "torchobs-exporter" in {resource["service.name"] for resource in found.values()}


@pytest.mark.parametrize("path", ["/v1/metrics", "", "/otlp/in?tenant=a%2Fb"])
def test_a_signal_s_own_endpoint_is_used_as_it_is(flight_dir: Path, receiver: Receiver, file: File, path: str) -> None:
    """Its path, none, or one with a query; headers and compression go with it."""
    file.save()
    config = only_metrics(receiver, path=path, gzip=True, headers=(("X-Scope", "tenant 1"),))
    with Pushing(flight_dir, config) as pushing:
        pushing.look(1.0)
    (request, *_) = receiver.taken
    assert request.path == (path or "/")
    assert request.headers["content-encoding"] == "gzip"
    assert request.headers["content-type"] == "application/x-protobuf"
    assert request.headers["x-scope"] == "tenant 1"
    assert [*points(receiver.taken)]


def test_an_end_is_pushed_at_once_and_ends_the_gauges(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """The state and the exit of a rank that was killed; its loss stays, its ages end; at the end of its grace all ends."""
    file.step(1, 0.5)
    file.set(user("my.share", Kind.GAUGE), 0.5, USER)
    file.save()
    with Pushing(flight_dir, only_metrics(receiver), grace_s=10.0) as pushing:
        pushing.look(1.0, final=False)
        wait_until(lambda: receiver.taken)
        file.set(user("my.share", Kind.GAUGE), 0.75, USER)
        file.save().release()
        pushing.look(3.0, final=False)  # no interval has passed
        wait_until(lambda: len(receiver.taken) == 2)
        pushing.look(4.0, final=False)
        pushing.look(20.0, final=False)
        wait_until(lambda: len(receiver.taken) == 3)
        assert balanced(pushing.push.counts["metrics"])
    before, at_end, gone = (
        {(one.metric.name, one.attributes.get("state", one.attributes.get("reason"))): one.point for one in points([request])}
        for request in receiver.taken
    )
    assert before["torchobs.rank.state", "alive"].as_double == 1
    assert at_end["torchobs.rank.state", "lost"].as_double == at_end["torchobs.rank.exit", "lost"].as_double == 1
    assert at_end["torchobs.loss", None].as_double == 2.0
    ended = {name for (name, _), point in at_end.items() if point.flags & NO_VALUE}
    assert ended >= {"my.share", "torchobs.rank.progress.age"}
    assert "torchobs.steps" not in ended
    last, end = (one.point for one in points([receiver.taken[1]]) if one.metric.name == "my.share")
    assert last.as_double == 0.75
    assert last.time_unix_nano < end.time_unix_nano
    assert all(point.flags & NO_VALUE for point in gone.values())
    assert {("torchobs.steps", None), ("torchobs.rank.up", None)} <= gone.keys()
    assert ("my.share", None) not in gone  # it has ended before


def test_deltas_sum_to_the_cumulative_value(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """Counters and every bucket; intervals follow each other without a gap; up-down counters stay what they are."""
    counter, histogram, level = user("my.c"), user("my.h", Kind.HISTOGRAM, "", (1.0, 2.0)), user("my.u", Kind.UPDOWN)
    dice, observed, total = random.Random(1), [], 0
    with Pushing(flight_dir, only_metrics(receiver, delta=True)) as pushing:
        for second in range(1, 8):
            for value in (dice.uniform(0, 3) for _ in range(second % 3)):
                file.set(histogram, value, USER)
                observed.append(value)
            file.set(counter, second, USER)
            file.set(level, -1, USER)
            total += second
            file.beat(second)
            file.save()
            pushing.look(second)
    by_name: dict[str, list[Any]] = defaultdict(list)
    for one in points(receiver.taken):
        by_name[one.metric.name].append(one)
    counted = [one.point for one in by_name["my.c"]]
    assert sum(point.as_int for point in counted) == total
    assert counted[0].start_time_unix_nano == BORN_WALL_NS
    assert all(late.start_time_unix_nano == early.time_unix_nano for early, late in itertools.pairwise(counted))
    assert by_name["my.c"][0].metric.sum.aggregation_temporality == 1
    heard = [one.point for one in by_name["my.h"]]
    assert sum(point.count for point in heard) == len(observed)
    assert math.isclose(sum(point.sum for point in heard), sum(observed))
    assert [sum(counts) for counts in zip(*(point.bucket_counts for point in heard), strict=True)] == [
        sum(value <= 1 for value in observed), sum(1 < value <= 2 for value in observed), sum(value > 2 for value in observed)
    ]  # fmt: skip
    assert min(point.min for point in heard if point.HasField("min")) == min(observed)
    assert [one.point.as_int for one in by_name["my.u"]] == [-1, -2, -3, -4, -5, -6, -7]
    assert by_name["my.u"][0].metric.sum.aggregation_temporality == 2


@pytest.mark.parametrize(("delta", "expected"), [(False, [[1], [1], [1, 3]]), (True, [[1], [3]])])
def test_exemplars_are_those_of_the_time_that_a_point_is_of(
    flight_dir: Path, receiver: Receiver, file: File, *, delta: bool, expected: list[list[int]]
) -> None:
    """The whole life where it is cumulative; else what came since the last point."""
    clock = Fast()
    with Pushing(flight_dir, only_metrics(receiver, delta=delta), clock) as pushing:
        for step, duration_s in ((1, 0.1), (2, 0.1), (3, 0.6)):
            at_s = clock.now()
            if step != 2 or not delta:
                file.step(step, at_s, duration_s=duration_s)
            if step != 2:
                file.span(step, at_s, attrs={"duration_s": duration_s})
            file.save()
            pushing.look(float(step))
    of_steps = [one.point for one in points(receiver.taken) if one.metric.name == "torchobs.step.duration"]
    assert [[attributes(one.filtered_attributes)["step"] for one in point.exemplars] for point in of_steps] == expected
    header, newest = file.header, of_steps[-1].exemplars[-1]
    assert newest.trace_id.hex() == identifiers.trace_id(header)
    assert newest.span_id.hex() == identifiers.step_span_id(identifiers.run_span_id(header), 3)
    assert newest.as_double == 0.6
    assert of_steps[-1].start_time_unix_nano <= newest.time_unix_nano <= of_steps[-1].time_unix_nano


def test_of_an_older_rank_a_delta_exporter_sends_what_comes(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """What was before, the exporter before it may have sent."""
    file.set(user("my.c"), 100, USER)
    file.save()
    clock = Fast(scale=1.0)
    clock._began_s -= 60.0  # it is a minute after the rank's birth
    with Pushing(flight_dir, only_metrics(receiver, delta=True), clock) as pushing:
        pushing.look(1.0)
        file.set(user("my.c"), 5, USER)
        file.set(user("my.new"), 3, USER)
        file.save()
        pushing.look(1.5)
    sent = [(one.metric.name, one.point.as_int) for one in points(receiver.taken) if one.scope == USER.name]
    assert sent == [("my.c", 5), ("my.new", 3)]


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


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 500])
def test_what_is_refused_is_dropped_and_counted(
    flight_dir: Path, file: File, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Any other error would be the same the next time; what the receiver says of it is on the log, as one line."""
    file.save()
    answer = Answer(status, {"Location": "http://example.org"}, b"no\nsuch tenant")
    with Receiver(lambda _: answer) as receiver, Pushing(flight_dir, only_metrics(receiver)) as pushing:
        pushing.look(1.0)
        counts = pushing.push.counts["metrics"]
    assert len(receiver.requests) == 1
    assert counts.dropped["refused"] == counts.recorded > 20
    assert balanced(counts)
    assert f"{status}" in caplog.text
    assert "no such tenant" in caplog.text


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
        after = formatdate(clock.wall_ns() / S + 12, usegmt=True) if as_date else "12"
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


@pytest.mark.parametrize("answer", [Answer(hold_s=60.0), Answer(drip=True)], ids=["silent", "by single bytes"])
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


def partly(rejected: int) -> Answer:
    """A success that is not one for so many points."""
    answer = ExportMetricsServiceResponse()
    answer.partial_success.rejected_data_points = rejected
    return Answer(200, {"Content-Type": "application/x-protobuf"}, answer.SerializeToString())


FLAPPING = (
    Answer(503), Answer(200, {}, b"<html>Welcome</html>"), Answer(429, {"Retry-After": "soon"}), partly(3), Answer(400),
    Answer(200, {"Content-Encoding": "gzip"}, b"\x1f\x8bno gzip"), Answer(503, {"Retry-After": "31536000"}),
    Answer(200, {"Content-Length": "1000"}, b"the connection stays open"), partly(10**9), Answer(hold_s=60.0), partly(-5),
    Answer(200, {"Content-Length": "no number"}), Answer(502, {}, b"\xff" * 100_000), Answer(413),
)  # fmt: skip


def test_a_receiver_that_flaps_loses_nothing_uncounted(flight_dir: Path, file: File) -> None:
    """Whatever it answers, in turn: each batch is sent, rejected in part, or refused, and is none of them twice."""
    with (
        Receiver(Misbehaving(*FLAPPING)) as receiver,
        Pushing(flight_dir, only_metrics(receiver, timeout_s=0.3), Fast(1000.0)) as pushing,
    ):
        for second in range(1, 12):
            file.set(user("my.c"), 1, USER)
            file.beat(second)
            file.save()
            pushing.look(second, wait=False)
            wait_until(lambda: pushing.push.settled and pushing.push._facts is None, timeout_s=SOON_S)
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
    refused = [of_batch[body] for body, answer in said.items() if answer.status in {400, 413}]
    rejected = [of_batch[body] for body, answer in said.items() if answer == partly(10**9)]
    assert refused
    assert rejected
    return {"refused": sum(refused), "rejected": 3 + sum(rejected)}


def test_ten_minutes_without_a_receiver(flight_dir: Path, file: File) -> None:
    """Nobody listens for ten minutes (scaled): what was recorded is sent when it is back, or counted as dropped."""
    port, clock = free_port(), Fast(120.0)
    file.set(user("my.c"), 0, USER)
    file.save()
    target = Target(f"http://127.0.0.1:{port}/v1/metrics")
    config = PushConfig(metrics=target, interval_s=10.0, queue_bytes=40_000)
    with Pushing(flight_dir, config, clock) as pushing:
        added = 0
        while clock.now() < 600.0:
            file.set(user("my.c"), 1, USER)
            added += 1
            file.save()
            pushing.look(1.0, final=False, wait=False)
            assert pushing.push.counts["metrics"].queued * 20 < 40_000
            wait_until(lambda: pushing.push._facts is None)
        down = pushing.push.counts["metrics"]
        with Receiver(port=port) as receiver:
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


# --- spans --------------------------------------------------------------------------------------------------------------------


def frame(number: int, begun_s: float, ended_s: float, **more: object) -> dict[str, object]:
    """A user's span, as the tracer writes it."""
    return {
        "k": "span", "name": f"work {number}", "trace_id": "a" * 32, "span_id": f"{number:016x}", "flags": 1, "kind": "client",
        "t0": BORN_WALL_NS + round(begun_s * S), "t1": BORN_WALL_NS + round(ended_s * S), "status": "unset",
        "attrs": {}, "events": [], "links": [], "scope": ["my.package", "1.0", "", {"x": [1]}],
    } | more  # fmt: skip


def run_span(file: File, **more: object) -> dict[str, object]:
    """The span of the run."""
    header = file.header
    identity = {"trace_id": identifiers.trace_id(header), "span_id": identifiers.run_span_id(header)}
    more = {"k": "span_start", "name": "torchobs.run", "t0": BORN_WALL_NS, "scope": ["torchobs", None, None, {}]} | more
    return {**identity, "flags": 1, "kind": "internal", **more}


def only_traces(receiver: Receiver) -> PushConfig:
    """Spans to that receiver."""
    return PushConfig(traces=to(receiver, path="/v1/traces"))


def test_spans_are_what_the_ring_holds_each_of_them_once(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """Identifiers, times, attributes, events, links, status, scope; unsampled ones stay where they are."""
    full = frame(
        1, 0.1, 0.2, parent="b" * 16, remote=True, state="v=1", status="error", description="broken",
        attrs={"a": 1, "b": [1, "x"], "c": {"d": None}}, dropped=[1, 2, 3], cut=4,
        events=[[BORN_WALL_NS, "e", {"k": True}, 5]], links=[["c" * 32, "d" * 16, 1, "w=2", {"l": 2.5}, 6]],
    )  # fmt: skip
    for fields in (run_span(file), full, frame(2, 0.2, 0.3, flags=0), frame(3, 0.3, 0.4)):
        file.writer.events.append(fields)
    file.save()
    with Pushing(flight_dir, only_traces(receiver)) as pushing:
        pushing.look(1.0)
        pushing.look(1.1)
        file.writer.events.append(frame(4, 0.4, 0.5))
        file.save()
        pushing.look(1.2)
        assert balanced(pushing.push.counts["traces"])
    found = spans(receiver.taken)
    assert [span.name for span in found] == ["work 1", "work 3", "work 4"]
    span = found[0]
    assert (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()) == ("a" * 32, f"{1:016x}", "b" * 16)
    assert (span.kind, span.trace_state, span.flags) == (3, "v=1", 0x301)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (BORN_WALL_NS + S // 10, BORN_WALL_NS + S // 5)
    assert attributes(span.attributes) == {"a": 1, "b": [1, "x"], "c": {"d": None}, "torchobs.cut": 4}
    assert (span.dropped_attributes_count, span.dropped_events_count, span.dropped_links_count) == (1, 2, 3)
    assert (span.status.code, span.status.message) == (2, "broken")
    (event,), (link,) = span.events, span.links
    assert (event.name, event.time_unix_nano, attributes(event.attributes)) == ("e", BORN_WALL_NS, {"k": True})
    assert (link.trace_id.hex(), link.span_id.hex(), link.trace_state) == ("c" * 32, "d" * 16, "w=2")
    assert (attributes(link.attributes), link.dropped_attributes_count) == ({"l": 2.5}, 6)
    (scope,) = {(of.scope.name, of.scope.version) for of in receiver.taken[0].traces.resource_spans[0].scope_spans}
    assert scope == ("my.package", "1.0")


def test_the_run_s_span_comes_with_its_events(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """When the rank has ended: as it says itself, with all that happened in it as events."""
    file.writer.events.append(run_span(file, parent="e" * 16))
    event = {"k": "event", "t": file.header.monotonic_ns + S, "name": "torchobs.anomaly", "attrs": {"kind": "x"}, "step": 3}
    file.writer.events.append(event)
    file.save()
    with Pushing(flight_dir, only_traces(receiver)) as pushing:
        pushing.look(1.0)
        ended = {"k": "span", "t1": BORN_WALL_NS + 2 * S, "status": "ok", "attrs": {}, "parent": "e" * 16}
        file.writer.events.append(run_span(file, **ended))
        file.writer.exit(Exit.FINISHED, 0)
        file.save().release()
        assert not receiver.taken
        pushing.look(4.0)
        pushing.look(5.0)
    (run,) = spans(receiver.taken)
    assert (run.name, run.parent_span_id.hex(), run.status.code) == ("torchobs.run", "e" * 16, 1)
    assert run.end_time_unix_nano == BORN_WALL_NS + 2 * S
    (seen,) = run.events
    assert (seen.name, seen.time_unix_nano) == ("torchobs.anomaly", BORN_WALL_NS + S)
    assert attributes(seen.attributes) == {"kind": "x", "step": 3}


@pytest.mark.parametrize("announced", [True, False])
def test_a_killed_run_has_a_span(flight_dir: Path, receiver: Receiver, file: File, announced: bool) -> None:  # noqa: FBT001  # a case
    """Its end is its last heartbeat, and an error; also where the ring has written over its beginning."""
    if announced:
        file.writer.events.append(run_span(file))
        file.writer.events.append(frame(9, 0.5, 0.0) | {"k": "span_start"})
    file.beat(1.5)
    file.save()
    with Pushing(flight_dir, only_traces(receiver)) as pushing:
        pushing.look(1.6)
        file.release()
        pushing.look(4.0)
    *others, run = spans(receiver.taken)
    assert [span.name for span in others] == (["work 9"] if announced else [])
    for span in (*others, run):
        assert span.end_time_unix_nano == BORN_WALL_NS + round(1.5 * S)
        assert (span.status.code, span.status.message) == (2, "the rank ended before it: lost")
    assert run.span_id.hex() == identifiers.run_span_id(file.header)
    assert run.trace_id.hex() == identifiers.trace_id(file.header)


def test_an_exporter_that_starts_again_sends_the_same_spans(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """What is still in the ring comes twice, as what it is: no identifier is new."""
    for number in range(1, 6):
        file.writer.events.append(frame(number, 0.1, 0.2))
    file.save()
    for _ in range(2):
        with Pushing(flight_dir, only_traces(receiver)) as pushing:
            pushing.look(1.0)
    first, second = ([span.span_id for span in spans([request])] for request in receiver.taken)
    assert first == second


HOSTILE: tuple[dict[str, object], ...] = (
    {"trace_id": "zz"}, {"span_id": 5}, {"trace_id": "A" * 32}, {"t0": -1, "t1": 1 << 80}, {"attrs": [1]},
    {"events": [7, [None]]},
    {"links": [[], "x", ["a" * 32]]}, {"scope": "x"}, {"dropped": ["a", -1, 1 << 40]}, {"name": None}, {"flags": "x"},
    {"parent": "short"}, {"status": {}}, {"attrs": {"deep": [[[[[[[[[[[[1]]]]]]]]]]]], "nan": "NaN", "huge": 1 << 100}},
)  # fmt: skip


def test_no_frame_stops_the_others(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """Whatever a file says: what can be sent is."""
    for number, wrong in enumerate(HOSTILE, 100):
        file.writer.events.append(frame(number, 0.1, 0.2) | wrong)
    file.writer.events.append(frame(1, 0.1, 0.2))
    file.save()
    with Pushing(flight_dir, only_traces(receiver)) as pushing:
        pushing.look(1.0)
        assert balanced(pushing.push.counts["traces"])
    assert "work 1" in [span.name for span in spans(receiver.taken)]


def test_a_ring_that_fills_is_read_before_its_time(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """No span is written over unread, though the next reading is far."""
    file.save()
    config = PushConfig(traces=to(receiver, path="/v1/traces"), span_delay_s=3600.0)
    with Pushing(flight_dir, config) as pushing:
        pushing.look(1.0, final=False)
        for number in range(1, 2001):
            file.writer.events.append(frame(number, 0.1, 0.2, attrs={"text": "x" * 100}))
            if number % 100 == 0:
                file.save()
                pushing.look(1.0 + number / 1000, final=False)
                wait_until(lambda: pushing.push._facts is None)
        wait_until(lambda: len(spans(receiver.taken)) > 1800)
    numbers = [int(span.name.split()[1]) for span in spans(receiver.taken)]
    assert numbers == [*range(1, len(numbers) + 1)]


def test_requests_are_cut_to_what_receivers_take(
    flight_dir: Path, receiver: Receiver, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most so many points each; nothing is lost between two of them, nor where a rank's points are cut."""
    monkeypatch.setattr("torchobs.exporter.otlp.points.MOST_POINTS", 100)
    for number in range(400):
        file.set(user("my.c"), 1, USER, number=number)
    file.save()
    for seed in range(2, 20):
        File(flight_dir, seed=seed, rank=seed).save()
    with Pushing(flight_dir, only_metrics(receiver)) as pushing:
        pushing.look(1.0)
        counts = pushing.push.counts["metrics"]
    sizes = [len([*points([request])]) for request in receiver.taken]
    assert max(sizes) == 100
    assert sum(sizes) == counts.recorded
    numbers = [one.attributes["number"] for one in points(receiver.taken) if one.metric.name == "my.c"]
    assert sorted(numbers) == [*range(400)]


def test_the_catalog_s_own_names_cannot_be_forged(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """What the exporter says of a rank, the file cannot; and an application's instrument takes no name of ours."""
    file.set(catalog.RANK_UP, 7.0)
    file.set(user("torchobs.steps"), 9, USER)
    file.save()
    with Pushing(flight_dir, only_metrics(receiver)) as pushing:
        pushing.look(1.0)
    found = [(one.metric.name, one.scope, one.point) for one in points(receiver.taken)]
    assert [point.as_double for name, _, point in found if name == "torchobs.rank.up"] == [1.0]
    assert {scope for name, scope, _ in found if name == "torchobs.steps"} <= {"torchobs"}
