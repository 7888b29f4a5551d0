"""Root spans of a rank: where one ends and the next begins, what they link to, and that the newest is never lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.flights import recorded
from torchobs.flight.format import event_ring
from torchobs.flight.format.layout import Region
from torchobs.flight.writer.writer import FlightWriter
from torchobs.probes.core.training_state import EpochStart
from torchobs.runtime.root_spans import RootSpans

S = 1_000_000_000
HOUR = 3600


class Rank:
    """The root spans of a rank, at moments in seconds since its birth."""

    def __init__(self) -> None:
        self.writer, self._memory = recorded()
        self.roots = RootSpans(self.writer, 1, {})
        self.roots.announce()
        self.ids = event_ring.SpanIds(self.writer.header)
        self._first_ns = 0

    def look(self, second: float, step: int = 0, epochs: Iterable[EpochStart] = (), first: float | None = None) -> None:
        """Do what the sampler does in a round; `first`: when the first step ended."""
        self._first_ns = self._first_ns if first is None else self.ns(first)
        self.roots.advance(epochs, self.ns(second), step, self._first_ns)

    def ns(self, second: float) -> int:
        """A moment on CLOCK_MONOTONIC."""
        return self.writer.header.monotonic_ns + round(second * S)

    def epoch(self, number: int, second: float, step: int) -> EpochStart:
        """An epoch's begin."""
        return EpochStart(number, self.ns(second), step)

    def frames(self) -> list[dict[str, Any]]:
        """What stands in the ring."""
        region = self.writer.header.regions[Region.EVENTS]
        ring = bytes(self._memory.content[region.offset : region.offset + region.length])
        return [frame for _, frame in event_ring.scan(ring, self.writer.header.seed)]

    def ended(self) -> list[tuple[dict[str, Any], float, float]]:
        """Attributes, begin and end of the root spans that have ended."""
        wall_ns = self.writer.header.wall_ns
        return [
            (frame["attrs"], (frame["t0"] - wall_ns) / S, (frame["t1"] - wall_ns) / S)
            for frame in self.frames()
            if frame["k"] == "span"
        ]


def test_epochs_are_segments_and_cover_the_rank_s_life() -> None:
    """The run's span until the first begins, then one for each, the last until the rank's end; without a gap."""
    rank = Rank()
    rank.look(50.0, 1, [rank.epoch(1, 40.0, 0)], first=49.0)
    rank.look(160.0, 12, [rank.epoch(2, 150.0, 10)])
    rank.roots.end(rank.ns(300.0), 25, "ok")
    assert rank.ended() == [
        ({}, 0.0, 40.0),
        ({"epoch": 1, "part": 0, "steps": 10}, 40.0, 150.0),
        ({"epoch": 2, "part": 0, "steps": 15}, 150.0, 300.0),
    ]
    first, second = [frame for frame in rank.frames() if frame["k"] == "span"][1:]
    assert (second["trace_id"], second["span_id"]) == rank.ids.segment(2, 0)
    assert "parent" not in second
    related = [(link[4]["torchobs.link.relation"], (link[0], link[1])) for link in second["links"]]
    assert related == [("run", rank.ids.run), ("previous", rank.ids.segment(1, 0))]
    assert [link[4]["torchobs.link.relation"] for link in first["links"]] == ["run"]


def test_an_epoch_of_days_ends_every_hour() -> None:
    """Counted from its own begin, so that ranks need no common clock; also if nobody looked for hours."""
    rank = Rank()
    rank.look(10.0, 1, [rank.epoch(1, 5.0, 0)], first=9.0)
    for second in (HOUR, HOUR + 6, 2 * HOUR + 6, 5.5 * HOUR):
        rank.look(second, int(second))
    assert [(attributes.get("part"), begun, end) for attributes, begun, end in rank.ended()] == [
        (None, 0.0, 5.0),
        (0, 5.0, HOUR + 5.0),
        (1, HOUR + 5.0, 2 * HOUR + 5.0),
        (2, 2 * HOUR + 5.0, 5 * HOUR + 5.0),
    ]
    assert rank.roots.current.ids == rank.ids.segment(1, 5)


def test_without_epochs_there_are_hours_from_the_first_step_on() -> None:
    """And a rank that never trains has hours, too: no span lasts for weeks."""
    rank, idle = Rank(), Rank()
    rank.look(20.0, 3, first=15.0)
    rank.look(HOUR + 16.0, 900)
    idle.look(HOUR + 1.0)
    assert [(begun, end) for _, begun, end in rank.ended()] == [(0.0, 15.0), (15.0, HOUR + 15.0)]
    assert rank.ended()[1][0] == {"part": 0, "steps": 899}
    assert [(begun, end) for _, begun, end in idle.ended()] == [(0.0, float(HOUR))]


def test_short_epochs_share_a_segment_of_a_minute_at_least() -> None:
    """A thousand of two seconds are no thousand traces; two ranks whose epochs last a little differently still share them."""

    def begins(length_s: float) -> set[int]:
        rank = Rank()
        for number in range(1, 201):
            rank.look(number * length_s, number, [rank.epoch(number, number * length_s, number - 1)], first=length_s)
        return {attributes["epoch"] for attributes, *_ in rank.ended()[1:]}

    quick, slow = begins(1.86), begins(1.89)
    assert quick == {1, 65, 129} | {1} - {129} or quick == {1, 65}
    assert quick < slow


def test_what_began_in_a_segment_is_beneath_it() -> None:
    """Also if it ended in the next one; what is older than all that is known, beneath the oldest."""
    rank = Rank()
    rank.look(10.0, 1, [rank.epoch(1, 5.0, 0)], first=9.0)
    rank.look(100.0, 8, [rank.epoch(2, 90.0, 7)])
    assert rank.roots.at(rank.ns(1.0)).ids == rank.ids.run
    assert rank.roots.at(rank.ns(89.0)).ids == rank.ids.segment(1, 0)
    assert rank.roots.at(rank.ns(95.0)).ids == rank.ids.segment(2, 0) == rank.roots.current.ids
    for number in range(3, 40):
        rank.look(number * 100.0, number, [rank.epoch(number, number * 100.0, number)])
    assert rank.roots.at(rank.ns(1.0)).ids == rank.ids.segment(32, 0)


def test_the_open_root_is_always_in_the_ring() -> None:
    """However much is written to it: an exporter that starts late can complete it."""
    rank = Rank()
    rank.look(10.0, 1, [rank.epoch(1, 5.0, 0)], first=9.0)
    fill(rank.writer, 400)
    for look in range(20):
        fill(rank.writer, 100)
        rank.look(11.0 + look, look)
        newest = [frame for frame in rank.frames() if frame["k"] == "span_start"][-1]
        assert newest["span_id"] == rank.ids.segment(1, 0).span
        assert newest["attrs"] == {"epoch": 1, "part": 0}


def fill(writer: FlightWriter, spans: int) -> None:
    """Write so many spans of an application."""
    for number in range(spans):
        writer.events.append({"k": "span", "name": "work", "n": number, "text": "x" * 300})
