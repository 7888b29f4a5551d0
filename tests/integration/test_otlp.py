"""OTLP: the metrics, spans and events that arrive are what the files hold, each once, from a rank's birth to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.otlp import NO_VALUE, Pushing, Receiver, attributes, only_metrics, points, records, spans, to
from tests.page import user
from tests.rank_files import BORN_WALL_NS, File, S
from tests.support import wait_until
from torchobs import catalog
from torchobs.catalog import Kind
from torchobs.exporter.config import PushConfig
from torchobs.flight.events import SpanIds, trace_id
from torchobs.flight.layout import Exit
from torchobs.flight.series import Scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

USER = Scope("my.package", "1.0", "https://example.org/1", (("a", 1),))


def test_points_are_what_the_file_holds(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """By OpenTelemetry's names; kinds, units, scopes, integers, bounds, least and greatest, birth: all as recorded."""
    file.step(1, 0.5, loss=3.5, norm=2.0)
    file.set(user("my.requests", unit="{request}", brief="Requests."), 7, USER, route="a", rank="mine")
    file.set(user("my.level", Kind.UPDOWN), -3, USER)
    file.set(user("my.share", Kind.GAUGE, "1"), 0.25, USER, parts=("x", "y"), flag=True, n=1)
    for value in (0.25, 0.75, 9.0):
        file.set(user("my.latency", Kind.HISTOGRAM, "s", bounds=(0.5, 1.0)), value, USER)
    file.set(user("my.balance", Kind.HISTOGRAM, bounds=(0.0,)), -2.0, USER)
    file.set(user("torchobs.steps"), 9, USER)  # which takes no name of ours
    file.save()
    with Pushing(flight_dir, only_metrics(receiver)) as pushing:
        pushing.look(1.0)
        counts = pushing.push.counts["metrics"]
    of_rank = [sent for sent in points(receiver.taken) if sent.resource["service.name"] == "gpt"]
    assert counts.sent == len([*points(receiver.taken)])
    assert all({"job_name": "gpt", "run_id": "run-1", "rank": "0"}.items() <= sent.attributes.items() for sent in of_rank)
    mine = {sent.metric.name: sent for sent in of_rank if sent.scope == USER.name}
    assert mine.keys() == {"my.requests", "my.level", "my.share", "my.latency", "my.balance"}
    requests, level, share = mine["my.requests"], mine["my.level"], mine["my.share"]
    assert requests.metric.sum.is_monotonic
    assert requests.metric.unit == "{request}"
    assert requests.metric.description == "Requests."
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
    ours = {sent.metric.name: sent for sent in of_rank if sent.scope == "torchobs"}
    assert ours["torchobs.steps"].point.as_int == 1
    assert ours["torchobs.loss"].point.as_double == 3.5
    assert ours["torchobs.rank.up"].point.as_double == 1.0


@pytest.mark.parametrize("path", ["", "/otlp/in?tenant=a%2Fb"])
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
        wait_until(lambda: pushing.push.settled)  # the answer has to come, too
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


@pytest.fixture
def life(flight_dir: Path) -> Iterator[Callable[[int, float], File]]:
    """Begins one by its number, at a moment of the clock."""
    files = []

    def begin(number: int, born_s: float) -> File:
        files.append(File(flight_dir, seed=number, born_s=born_s).hold().save())
        return files[-1]

    yield begin
    for file in files:
        file.release()


def train(file: File, steps: int, from_s: float) -> None:
    """Take that many steps, 10 ms each, and finish."""
    for number in range(1, steps + 1):
        file.step(number, from_s + number / 100)
    header = file.header
    identity = {"trace_id": trace_id(header), "span_id": "1" * 16, "flags": 1, "scope": ["torchobs", None, None, {}]}
    times = {"t0": header.wall_ns, "t1": header.wall_ns + 1}
    ended = {"kind": "internal", "status": "unset", "attrs": {}}
    file.writer.events.append({"k": "span", "name": "epoch", **times, **ended, **identity})
    file.beat(from_s + steps / 100)
    file.writer.exit(Exit.FINISHED, 0)
    file.save().release()


def both(receiver: Receiver) -> PushConfig:
    """Metrics and spans, at long intervals."""
    return PushConfig(to(receiver), to(receiver, path="/v1/traces"), interval_s=3600.0, span_delay_s=3600.0)


def named(receiver: Receiver) -> dict[str, list[str]]:
    """The names of the spans that came, by incarnation."""
    names_by_rank: dict[str, list[str]] = {}
    for of in (of for request in receiver.of("/v1/traces") for of in request.traces.resource_spans):
        names = [span.name for scope in of.scope_spans for span in scope.spans]
        names_by_rank.setdefault(str(attributes(of.resource.attributes)["service.instance.id"]), []).extend(names)
    return names_by_rank


def steps(receiver: Receiver, file: File) -> list[int | None]:
    """An incarnation's numbers of steps as they came; None: the value has ended."""
    of = file.header.incarnation.hex()
    sent = (one for one in points(receiver.of("/v1/metrics")) if one.resource["service.instance.id"] == of)
    return [None if one.point.flags & NO_VALUE else one.point.as_int for one in sent if one.metric.name == "torchobs.steps"]


def test_what_a_replaced_incarnation_counted_last_arrives(
    flight_dir: Path, receiver: Receiver, life: Callable[[int, float], File]
) -> None:
    """Its counters, its spans and its run, once; also where the scan that saw the change was made for somebody else.

    So do those of one that lived between two looks, which nobody has seen alive or as the newest.
    """
    with Pushing(flight_dir, both(receiver)) as pushing:
        first = life(1, 0.0)
        pushing.look(0.5, final=False)
        wait_until(lambda: receiver.of("/v1/metrics") and pushing.push._scrape is None)
        train(first, 40, 0.5)
        short = life(2, 0.95)
        train(short, 5, 0.95)
        last = life(3, 1.0)
        pushing.clock.seconds = 1.2
        pushing.scanner.scan()  # for a scrape
        for second_s in (1.5, 2.5, 3.5):
            last.beat(second_s)
            last.save()
            pushing.look(second_s)
        pushing.scanner.scan()
    assert (steps(receiver, first), steps(receiver, short)) == ([0, 40, None], [5, None])
    names = named(receiver)
    assert names[first.header.incarnation.hex()] == names[short.header.incarnation.hex()] == ["epoch"]
    ends = [sent for sent in points(receiver.of("/v1/metrics")) if sent.metric.name == "torchobs.rank.exit"]
    assert {sent.attributes["reason"] for sent in ends if sent.point.as_double == 1.0} == {"finished"}


def test_one_that_ended_before_the_exporter_came_is_left_alone(
    flight_dir: Path, receiver: Receiver, life: Callable[[int, float], File]
) -> None:
    """The exporter before it has sent it."""
    first = life(1, 0.0)
    train(first, 3, 0.5)
    second = life(2, 1.0)
    second.beat(60.0)
    second.save()
    with Pushing(flight_dir, both(receiver)) as pushing:
        pushing.look(60.0)
        pushing.look(61.0)
    assert steps(receiver, first) == []
    assert steps(receiver, second) == [0, 0]


LOGS, TRACES = "/v1/logs", "/v1/traces"
OURS: list[object] = ["torchobs", None, None, {}]
"""The scope of torchobs' own spans."""


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
    identity = {"trace_id": trace_id(header), "span_id": SpanIds(header).run.span}
    begun = {"k": "span_start", "name": "torchobs.run", "t0": BORN_WALL_NS, "attrs": {}, "scope": OURS}
    return {**identity, **begun, "flags": 1, "kind": "internal", **more}


def event(file: File, name: str, attrs: object = None, second: float = 1.0, **more: object) -> None:
    """Write an event that happened at a second of the rank's life."""
    at_ns = file.header.monotonic_ns + round(second * S)
    file.writer.events.append({"k": "event", "t": at_ns, "name": name, "attrs": attrs or {}, **more})


def everything(receiver: Receiver, **settings: Any) -> PushConfig:
    """All signals to that receiver."""
    return PushConfig(to(receiver), to(receiver, path=TRACES), to(receiver, path=LOGS), **settings)


@pytest.fixture
def pushed(flight_dir: Path, receiver: Receiver, file: File) -> Callable[[], list[Any]]:
    """Save the file, push once, and return the log records that came."""

    def push() -> list[Any]:
        file.save()
        with Pushing(flight_dir, PushConfig(logs=to(receiver, path=LOGS))) as pushing:
            pushing.look(3.5)
        return records(receiver.of(LOGS))

    return push


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
    with Pushing(flight_dir, PushConfig(traces=to(receiver, path=TRACES))) as pushing:
        pushing.look(1.0)
        pushing.look(1.1)
        file.writer.events.append(frame(4, 0.4, 0.5))
        file.save()
        pushing.look(1.2)
    received = spans(receiver.taken)
    assert [span.name for span in received] == ["work 1", "work 3", "work 4"]
    span = received[0]
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


def test_no_frame_stops_the_others(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """An application may give a span a time that is none, values that OTLP has no type for, or an event an empty name."""
    odd = {"deep": [[[[[[[[[[[[1]]]]]]]]]]]], "nan": "NaN", "huge": 1 << 100, "": 1}
    cases: tuple[dict[str, object], ...] = ({"t0": -1, "t1": 1 << 80}, {"t1": 1.5}, {"attrs": odd})
    for number, wrong in enumerate(cases, 100):
        file.writer.events.append(frame(number, 0.1, 0.2) | wrong)
    event(file, "", odd)
    event(file, "my.event", odd, step=-(1 << 70))
    file.writer.events.append(frame(1, 0.1, 0.2))
    event(file, "my.last")
    file.save()
    with Pushing(flight_dir, everything(receiver)) as pushing:
        pushing.look(1.0)
    assert [span.name for span in spans(receiver.of(TRACES))] == ["work 102", "work 1"]
    assert records(receiver.of(LOGS))[-1].event_name == "my.last"


def segment(file: File, part: int, begun_s: float, **more: object) -> dict[str, object]:
    """An hour of the first epoch, as the sampler thread announces it."""
    ids = SpanIds(file.header).segment(1, part)
    identity = {"k": "span_start", "name": "torchobs.segment", "trace_id": ids.trace, "span_id": ids.span, "flags": 1}
    times = {"t0": BORN_WALL_NS + round(begun_s * S), "attrs": {"epoch": 1, "part": part}}
    return {**identity, **times, "kind": "internal", "scope": OURS} | more


def test_segments_are_sent_as_they_end_and_the_last_is_completed(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """That of a rank that was killed ends with it, as an error."""
    done = {"k": "span", "status": "unset"}
    with Pushing(flight_dir, PushConfig(traces=to(receiver, path=TRACES))) as pushing:
        file.writer.events.append(run_span(file))
        file.writer.events.append(run_span(file, t1=BORN_WALL_NS + S, **done))
        file.writer.events.append(segment(file, 0, 1.0))
        file.beat(1.5)
        file.save()
        pushing.look(1.6)
        assert [span.name for span in spans(receiver.taken)] == ["torchobs.run"]
        file.writer.events.append(segment(file, 0, 1.0, t1=BORN_WALL_NS + 2 * S, **done))
        file.writer.events.append(segment(file, 1, 2.0))
        file.writer.events.append(segment(file, 1, 2.0))  # again, before the ring writes over it
        file.beat(2.5)
        file.save()
        pushing.look(2.6)
        file.release()
        pushing.look(6.0)
    run, first, last = spans(receiver.taken)
    assert [span.status.code for span in (run, first, last)] == [0, 0, 2]
    assert last.status.message == "the rank ended before it: lost"
    assert (run.span_id.hex(), run.trace_id.hex()) == (SpanIds(file.header).run.span, trace_id(file.header))
    assert last.end_time_unix_nano == BORN_WALL_NS + round(2.5 * S)
    assert attributes(last.attributes) == {
        "torchobs.segment.epoch": 1, "torchobs.segment.part": 1, "torchobs.segment.reason": "lost",
    }  # fmt: skip
    assert last.trace_id.hex() != first.trace_id.hex() != run.trace_id.hex()


def test_an_event_is_a_record_of_its_step(receiver: Receiver, file: File, pushed: Callable[[], list[Any]]) -> None:
    """Time, severity, sentence, name, attributes in the event's namespace, trace and the step's span, the rank's resource."""
    event(file, catalog.EVENT_ANOMALY.name, {"kind": "loss_spike", "value": 3.5, "baseline": 1.0}, step=7)
    (record,) = pushed()
    assert record.time_unix_nano == BORN_WALL_NS + S
    assert record.observed_time_unix_nano >= BORN_WALL_NS
    assert (record.severity_number, record.severity_text) == (13, "WARN")
    assert record.body.string_value == "A step was judged anomalous: kind loss_spike, value 3.5, baseline 1.0, step 7"
    assert record.event_name == "torchobs.anomaly"
    sent = attributes(record.attributes)
    assert len(sent.pop("log.record.uid")) == 36
    details = {"torchobs.anomaly.kind": "loss_spike", "torchobs.anomaly.value": 3.5, "torchobs.anomaly.baseline": 1.0}
    assert sent == {**details, "torchobs.step.number": 7}
    assert (record.trace_id.hex(), record.span_id.hex(), record.flags) == (*SpanIds(file.header).step(7), 1)
    (of_resource,) = receiver.taken[0].logs.resource_logs
    resource = attributes(of_resource.resource.attributes)
    assert (resource["service.name"], resource["torchobs.rank"], resource["torchobs.restart"]) == ("gpt", 0, 0)
    assert resource["service.instance.id"] == file.header.incarnation.hex()
    assert (of_resource.scope_logs[0].scope.name, of_resource.scope_logs[0].scope.version) == ("torchobs", "0.1.0")


NAMES: tuple[tuple[str, dict[str, object], str, dict[str, object]], ...] = (
    ("torchobs.anomaly", {"kind": "nonfinite_loss", "value": "NaN"}, "ERROR", {"torchobs.anomaly.kind": "nonfinite_loss"}),
    ("torchobs.exception", {"exception.type": "E", "thread": "t"}, "ERROR", {"exception.type": "E", "thread.name": "t"}),
    ("torchobs.exception", {"exception.type": "builtins.KeyboardInterrupt"}, "INFO", {}),
    ("torchobs.gpu.xid", {"hw.id": "GPU-1", "xid": 79}, "ERROR", {"hw.id": "GPU-1", "torchobs.gpu.xid.xid": 79}),
    ("torchobs.data.starved", {"share": 0.5}, "WARN", {"torchobs.data.starved.share": 0.5}),
    ("torchobs.run.start", {}, "INFO", {}),
    ("my.event", {"a": [1, "x"], "b": {"c": None}, "d": True}, "INFO", {"a": [1, "x"], "b": {"c": None}, "d": True}),
    (catalog.EVENT_OUT_OF_MEMORY.name, {"requested": 2 << 30}, "ERROR", {"torchobs.memory.out_of_memory.requested": 2 << 30}),
)


def test_severity_and_names_are_opentelemetry_s(file: File, pushed: Callable[[], list[Any]]) -> None:
    """The conventions' names stay, others are the event's, an application's are its own. Without a step: the run's span.

    For people the sentence has sizes with their unit.
    """
    for name, attrs, _, _ in NAMES:
        event(file, name, attrs)
    log_records = pushed()
    for record, (name, _, severity, expected) in zip(log_records, NAMES, strict=True):
        assert (record.event_name, record.severity_text) == (name, severity)
        assert record.severity_number == {"INFO": 9, "WARN": 13, "ERROR": 17}[severity]
        assert attributes(record.attributes).items() >= expected.items()
        assert (record.trace_id.hex(), record.span_id.hex()) == SpanIds(file.header).run
        assert record.body.string_value
    assert log_records[-1].body.string_value.endswith("requested 2 GiB")


def test_each_event_comes_once_and_with_the_next_look(
    flight_dir: Path, receiver: Receiver, file: File, pushed: Callable[[], list[Any]]
) -> None:
    """Also many; not when the spans' or metrics' time has come. A restarted exporter sends it again, by the same identifier."""
    config = everything(receiver, span_delay_s=3600.0, interval_s=3600.0)
    with Pushing(flight_dir, config) as pushing:
        for look in range(1, 4):
            for number in range(700):
                event(file, "my.event", {"number": number, "look": look})
            file.beat(look)
            file.save()
            pushing.look(look, final=False, wait=False)
            wait_until(lambda look=look: len(records(receiver.of(LOGS))) == 700 * look)  # type: ignore[misc]  # binds the loop's
        assert not receiver.of(TRACES)
    sent = [attributes(record.attributes) for record in records(receiver.of(LOGS))]
    assert [(one["look"], one["number"]) for one in sent] == [(look, number) for look in range(1, 4) for number in range(700)]
    assert len({one["log.record.uid"] for one in sent}) == len(sent)
    assert len(receiver.of(LOGS)) > 3
    uids = {one["log.record.uid"] for one in sent}
    again = {attributes(record.attributes)["log.record.uid"] for record in pushed()[len(sent) :]}
    assert again
    assert again <= uids
