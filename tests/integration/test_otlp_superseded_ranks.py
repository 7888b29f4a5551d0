"""Incarnations that another one replaces between two looks: a program that trains several times, one run after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.otlp import NO_VALUE, Pushing, Receiver, attributes, balanced, points, to
from tests.rank_files import File
from tests.support import wait_until
from torchobs.exporter.otlp.options import PushConfig
from torchobs.flight.format import span_ids as identifiers
from torchobs.flight.format.layout import Exit


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
    identity = {"trace_id": identifiers.trace_id(header), "span_id": "1" * 16, "flags": 1, "scope": ["torchobs"]}
    file.writer.events.append({"k": "span", "name": "epoch", "t0": header.wall_ns, "t1": header.wall_ns + 1, **identity})
    file.beat(from_s + steps / 100)
    file.writer.exit(Exit.FINISHED, 0)
    file.save().release()


def both(receiver: Receiver, *, delta: bool = False) -> PushConfig:
    """Metrics and spans, at long intervals."""
    return PushConfig(to(receiver), to(receiver, path="/v1/traces"), interval_s=3600.0, span_delay_s=3600.0, delta=delta)


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


@pytest.mark.parametrize(("delta", "expected"), [(False, [0, 40, None]), (True, [40])])
def test_what_a_replaced_incarnation_counted_last_arrives(
    flight_dir: Path, receiver: Receiver, life: Callable[[int, float], File], *, delta: bool, expected: list[int | None]
) -> None:
    """Its counters, its spans and its run, once; also where the scan that saw the change was made for somebody else."""
    with Pushing(flight_dir, both(receiver, delta=delta)) as pushing:
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
        assert balanced(pushing.push.counts["metrics"])
    assert [value for value in steps(receiver, first) if value != 0 or not delta] == expected
    assert named(receiver)[first.header.incarnation.hex()] == ["epoch", "torchobs.run"]
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
    assert named(receiver)[short.header.incarnation.hex()] == ["epoch", "torchobs.run"]


def test_what_waits_is_taken_though_the_push_comes_late(
    flight_dir: Path, receiver: Receiver, life: Callable[[int, float], File]
) -> None:
    """Of the snapshots that a busy push does not get to, the ends stay."""
    with Pushing(flight_dir, both(receiver)) as pushing:
        first = life(1, 0.0)
        pushing.look(0.5)
        train(first, 40, 0.5)
        second = life(2, 1.0)
        with pushing.push._changed:  # it has no turn meanwhile
            for second_s in (1.5, 30.0):
                second.beat(second_s)
                second.save()
                pushing.look(second_s, final=False, wait=False)
        pushing.look(31.0)
    assert 40 in steps(receiver, first)


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
