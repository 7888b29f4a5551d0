"""The event ring: the newest are there, in order; what is no event is none."""

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from tests import flights
from torchobs.flight.format import event_ring

SEED = flights.header().seed


class Ring:
    """An event ring in memory."""

    def __init__(self, size: int = 1024) -> None:
        self.memory = flights.RecordingMemory(4096 + size)
        self.ring = event_ring.EventRing(self.memory, 4096, size, SEED, 0)

    @property
    def head(self) -> int:
        """Where the newest frame ends."""
        return self.ring._position

    def content(self) -> bytes:
        """The ring's bytes."""
        return self.memory.snapshot()[4096:]

    def seen(self) -> list[Any]:
        """The numbers of the events in it."""
        return [fields["n"] for _, fields in event_ring.scan(self.content(), SEED)]


def test_the_newest_events_are_there_in_order_however_often_the_ring_wrapped() -> None:
    """Frames of many lengths over many laps: always the last ones, a run without a hole."""
    ring = Ring()
    for number in range(500):
        ring.ring.append({"n": number, "text": "x" * (number * 7 % 150)})
        seen = ring.seen()
        assert seen[-1] == number
        tail = [one for one in seen if one > number - 4]
        assert tail == list(range(max(number - 3, 0), number + 1))
        assert seen == sorted(seen)
    assert ring.ring.dropped == 0


def test_an_event_that_is_too_long_is_dropped_and_counted() -> None:
    """A quarter of the ring at most."""
    ring = Ring()
    ring.ring.append({"n": "x" * 300})
    ring.ring.append({"n": 1})
    assert (ring.seen(), ring.ring.dropped) == ([1], 1)


class Reading:
    """Reads parts of a ring, and counts the bytes."""

    def __init__(self, ring: bytes) -> None:
        self.bytes = 0
        self._ring = ring

    def __call__(self, at: int, length: int) -> bytes:
        self.bytes += length
        return self._ring[at : at + length]


def numbers(payloads: list[bytes]) -> list[Any]:
    """The numbers of the events in payloads."""
    return [json.loads(payload)["n"] for payload in payloads]


@pytest.mark.parametrize("pause", [1, 3, 5, 40])
def test_a_tail_gives_each_event_once_and_reads_what_is_new(pause: int) -> None:
    """Over many laps, whoever looks often enough misses none; who looks too seldom gets what is left, in order."""
    ring, tail = Ring(), event_ring.Tail(1024, SEED)
    taken: list[int] = []
    for number in range(200):
        ring.ring.append({"n": number, "text": "x" * (number * 7 % 150)})
        if number % pause == pause - 1:
            reading = Reading(ring.content())
            taken += numbers(tail.take(ring.head, reading))
            assert taken[-1] == number
            assert tail.take(ring.head, lambda *_: pytest.fail("nothing is new")) == []
            assert reading.bytes <= min(1024, (pause + 1) * 256)
    assert taken == sorted(set(taken))
    if pause <= 3:
        assert taken == list(range(200 // pause * pause))


def test_a_tail_knows_what_was_overwritten() -> None:
    """In bytes, of the call before which it happened: from the first event on, and not the room that a lap's end leaves."""
    size = 64 * 1024
    ring, tail = Ring(size), event_ring.Tail(size, SEED)
    missed, given = [], 0
    for count in (1000, 10, 0, 2000):
        for number in range(count):
            ring.ring.append({"n": number, "text": "x" * 100})
        given += len(tail.take(ring.head, Reading(ring.content())))
        missed.append(tail.missed)
    assert [bool(one) for one in missed] == [True, False, False, True]
    assert abs(sum(missed) - (3010 - given) * ring.head / 3010) < size / 16


def test_a_tail_waits_for_a_frame_whose_head_came_first() -> None:
    """Where stores are reordered, the head can be there before the frame: it is given with the next one."""
    ring, tail = Ring(), event_ring.Tail(1024, SEED)
    ring.ring.append({"n": 0})
    assert numbers(tail.take(ring.head, Reading(ring.content()))) == [0]
    before = ring.content()
    ring.ring.append({"n": 1})
    assert tail.take(ring.head, Reading(before)) == []
    ring.ring.append({"n": 2})
    assert numbers(tail.take(ring.head, Reading(ring.content()))) == [1, 2]


@pytest.mark.parametrize("head", [1, 64, 1 << 40, (1 << 64) - 1])
def test_a_head_that_is_not_true_hides_nothing(head: int) -> None:
    """It is a hint: the whole ring is looked at, once."""
    ring, tail = Ring(), event_ring.Tail(1024, SEED)
    ring.ring.append({"n": 0, "text": "x" * 100})
    ring.ring.append({"n": 1})
    for at in (ring.head, head):
        taken = numbers(tail.take(at, Reading(ring.content())))
        assert taken == ([0, 1] if at == ring.head else [])
    ring.ring.append({"n": 2})
    assert numbers(tail.take(ring.head, Reading(ring.content()))) == [2]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (nan, "NaN"),
        (inf, "Infinity"),
        (-inf, "-Infinity"),
        pytest.param(10**5000, hex(10**5000), id="large"),
        ((1, 2.5, None, True), [1, 2.5, None, True]),
        ({1: {"a": nan}}, {"1": {"a": "NaN"}}),
        ("\ud800", "?"),
        (Path("x"), "x"),
    ],
)
def test_every_value_can_be_told(value: object, expected: object) -> None:
    """A NaN is data; what JSON does not have becomes a text."""
    ring = Ring(64 * 1024)
    ring.ring.append({"n": value})
    assert ring.seen() == [expected]


def test_a_value_that_contains_itself_ends_somewhere() -> None:
    """As text, 32 levels down."""
    endless: list[Any] = []
    endless.append(endless)
    ring = Ring(64 * 1024)
    ring.ring.append({"n": endless})
    assert str(ring.seen()[0]).count("[") >= 30


@pytest.mark.parametrize(
    "payload",
    [b"[]", b"7", b"{", b"\xff"],
)
def test_a_payload_that_is_no_object_is_no_event(payload: bytes) -> None:
    """It is passed over."""
    ring = Ring(64 * 1024)
    ring.ring.put(payload)
    assert [json.dumps(fields).encode() for _, fields in event_ring.scan(ring.content(), SEED)] == []
