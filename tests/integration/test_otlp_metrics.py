"""Metrics over OTLP: what arrives is what the files hold, from a rank's birth to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.otlp import NO_VALUE, Fast, Pushing, Receiver, attributes, only_metrics, points, to
from tests.rank_files import BORN_WALL_NS, File
from tests.support import wait_until
from torchobs.catalog import Kind, Metric
from torchobs.exporter.config import PushConfig
from torchobs.flight.events import SpanIds, trace_id
from torchobs.flight.layout import Exit
from torchobs.flight.series import Scope

USER = Scope("my.package", "1.0", "https://example.org/1", (("a", 1),))


def user(name: str, kind: Kind = Kind.COUNTER, unit: str = "", bounds: tuple[float, ...] = ()) -> Metric:
    """A user's instrument."""
    return Metric(name, kind, unit, f"About {name}.", bounds=bounds)


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
    assert counts.sent == len([*points(receiver.taken)])
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


def test_exemplars_are_those_of_the_page(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """Of each bucket the newest step that has a span."""
    clock = Fast()
    with Pushing(flight_dir, only_metrics(receiver), clock) as pushing:
        for step, duration_s in ((1, 0.1), (2, 0.1), (3, 0.6)):
            at_s = clock.now()
            file.step(step, at_s, duration_s=duration_s)
            if step != 2:
                file.span(step, at_s, attrs={"duration_s": duration_s})
            file.save()
            pushing.look(float(step))
    of_steps = [one.point for one in points(receiver.taken) if one.metric.name == "torchobs.step.duration"]
    seen = [[attributes(one.filtered_attributes)["step"] for one in point.exemplars] for point in of_steps]
    assert seen == [[1], [1], [1, 3]]
    header, newest = file.header, of_steps[-1].exemplars[-1]
    assert (newest.trace_id.hex(), newest.span_id.hex()) == SpanIds(header).step(3)
    assert newest.as_double == 0.6
    assert of_steps[-1].start_time_unix_nano <= newest.time_unix_nano <= of_steps[-1].time_unix_nano


def test_an_application_s_instrument_takes_no_name_of_ours(flight_dir: Path, receiver: Receiver, file: File) -> None:
    """Its series would be the rank's."""
    file.set(user("torchobs.steps"), 9, USER)
    file.save()
    with Pushing(flight_dir, only_metrics(receiver)) as pushing:
        pushing.look(1.0)
    assert {one.scope for one in points(receiver.taken) if one.metric.name == "torchobs.steps"} <= {"torchobs"}


@pytest.fixture
def life(flight_dir: Path) -> Iterator[Callable[[int, float], File]]:
    """Begins one by its number, at a moment of the clock."""
    made = []

    def begin(number: int, born_s: float) -> File:
        made.append(File(flight_dir, seed=number, born_s=born_s).hold().save())
        return made[-1]

    yield begin
    for file in made:
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
    found: dict[str, list[str]] = {}
    for of in (of for request in receiver.of("/v1/traces") for of in request.traces.resource_spans):
        names = [span.name for scope in of.scope_spans for span in scope.spans]
        found.setdefault(str(attributes(of.resource.attributes)["service.instance.id"]), []).extend(names)
    return found


def steps(receiver: Receiver, file: File) -> list[int | None]:
    """An incarnation's numbers of steps as they came; None: no value any more."""
    of = file.header.incarnation.hex()
    found = (one for one in points(receiver.of("/v1/metrics")) if one.resource["service.instance.id"] == of)
    return [None if one.point.flags & NO_VALUE else one.point.as_int for one in found if one.metric.name == "torchobs.steps"]


def test_what_a_replaced_incarnation_counted_last_arrives(
    flight_dir: Path, receiver: Receiver, life: Callable[[int, float], File]
) -> None:
    """Its counters, its spans and its run, once; also where the scan that saw the change was made for somebody else."""
    with Pushing(flight_dir, both(receiver)) as pushing:
        first = life(1, 0.0)
        pushing.look(0.5, final=False)
        wait_until(lambda: receiver.of("/v1/metrics") and pushing.push._scrape is None)
        train(first, 40, 0.5)
        second = life(2, 1.0)
        pushing.clock.seconds = 1.2
        pushing.scanner.scan()  # for a scrape
        for second_s in (1.5, 2.5, 3.5):
            second.beat(second_s)
            second.save()
            pushing.look(second_s)
        pushing.scanner.scan()
    assert steps(receiver, first) == [0, 40, None]
    assert named(receiver)[first.header.incarnation.hex()] == ["epoch"]
    last = [one for one in points(receiver.of("/v1/metrics")) if one.metric.name == "torchobs.rank.exit"]
    ways = {one.attributes["reason"] for one in last if one.point.as_double == 1.0}
    assert ways == {"finished"}


def test_one_that_lived_between_two_looks_arrives(
    flight_dir: Path, receiver: Receiver, life: Callable[[int, float], File]
) -> None:
    """Nobody has ever seen it alive, nor as the newest."""
    with Pushing(flight_dir, both(receiver)) as pushing:
        first = life(1, 0.0)
        pushing.look(0.5, final=False)
        train(first, 3, 0.5)
        short = life(2, 0.6)
        train(short, 5, 0.7)
        life(3, 0.8)
        pushing.look(1.5)
        pushing.look(2.5)
    assert steps(receiver, short) == [5, None]
    assert named(receiver)[short.header.incarnation.hex()] == ["epoch"]


def test_one_that_ended_before_the_exporter_came_is_left_alone(
    flight_dir: Path, receiver: Receiver, life: Callable[[int, float], File]
) -> None:
    """The exporter before it has told of it."""
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
