"""The root spans of a rank, one after the other: the run's until training begins, then one for each segment.

A span is sent when it has ended, and backends keep and show traces by the time at which they begin. So none lasts for weeks: a
segment ends with its epoch, or after an hour; each has a trace of its own, the same on all ranks, and links to the run's span,
which is sent once training has begun. Epochs of less than a minute share a segment.

A root's start is written at once, so that an exporter can complete it for a rank that was killed, and again before the event
ring writes over it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torchobs import catalog
from torchobs.detect.speed import alike_interval
from torchobs.flight.format.event_ring import SpanIds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchobs.flight.format.event_ring import SpanId
    from torchobs.flight.writer.writer import FlightWriter
    from torchobs.probes.core.training_state import EpochStart

LONGEST_NS = 3_600_000_000_000
"""Length of a segment at most"""
_SHORT_S = 60.0
"""Epochs are put together until a segment lasts this long"""
_KEPT = 8
_ANNOUNCED_LAPS = 0.5

Link = list[object]
Status = Literal["unset", "ok", "error"]


def link(to: SpanId, flags: int, relation: str) -> Link:
    """Return a link as a frame has it; ``relation`` says what the other span is: run, segment or previous."""
    return [to.trace, to.span, flags, "", {"torchobs.link.relation": relation}, 0]


@dataclass(frozen=True, slots=True)
class Root:
    """A root span. ``begun_ns`` is on CLOCK_MONOTONIC; ``step``: the last step that had ended by then."""

    ids: SpanId
    begun_ns: int
    step: int
    frame: dict[str, object]
    attributes: dict[str, object] = field(default_factory=dict)


class RootSpans:
    """One per session. ``flags``: W3C trace flags; ``remote``: fields of the run's frame about the launcher's span."""

    def __init__(self, writer: FlightWriter, flags: int, remote: dict[str, object]) -> None:
        self.ids = SpanIds(writer.header)
        self._writer, self._flags = writer, flags
        header = writer.header
        run = self._frame(catalog.SPAN_RUN.name, self.ids.run, header.monotonic_ns) | remote
        self._roots: deque[Root] = deque([Root(self.ids.run, header.monotonic_ns, 0, run)], maxlen=_KEPT)
        self._epoch, self._epoch_ns, self._part = 0, header.monotonic_ns, 0
        self._epoch_starts: deque[int] = deque(maxlen=_KEPT)
        self._announced = 0.0

    @property
    def current(self) -> Root:
        """The root span that has begun and not ended."""
        return self._roots[-1]

    def at(self, ns: int) -> Root:
        """Return the root of what began at this moment; the oldest known for what began before it."""
        roots = list(self._roots)  # other threads ask, too
        return next((root for root in reversed(roots) if root.begun_ns <= ns), roots[0])

    def links(self, root: Root) -> list[Link]:
        """Return the links of a span in a trace of its own: to the run, and to the segment in which it began."""
        found = [link(self.ids.run, self._flags, "run")]
        return found if root.ids == self.ids.run else [*found, link(root.ids, self._flags, "segment")]

    def announce(self) -> None:
        """Write the start of the current root."""
        root = self.current
        self._announced = self._writer.events.laps
        self._writer.events.append({"k": "span_start", **root.frame, "attrs": root.attributes})

    def advance(self, epochs: Iterable[EpochStart], now_ns: int, step: int, first_ns: int) -> None:
        """End the current root if its time is over, and begin the next. ``step``: the last step that has ended.

        ``epochs``: those that have begun since the last call; ``first_ns``: end of the first step, 0 before that.
        """
        for epoch in epochs:
            self._cut_hours(epoch.begun_ns, epoch.step)
            self._epoch_starts.append(epoch.begun_ns)
            if (epoch.number - 1) % self._epochs_together() == 0 or self.current.ids == self.ids.run:
                self._cut(epoch.begun_ns, epoch.step, epoch.number, 0)
        if first_ns and self.current.ids == self.ids.run:
            self._cut(first_ns, 1, 0, 0)
        self._cut_hours(now_ns, step)
        if self._writer.events.laps - self._announced >= _ANNOUNCED_LAPS:
            self.announce()

    def end(self, now_ns: int, step: int, status: Status) -> None:
        """End the current root with the rank."""
        root = self.current
        attributes = root.attributes | ({"steps": step - root.step} if root.ids != self.ids.run else {})
        self._writer.events.append({"k": "span", **root.frame, "t1": self._wall(now_ns), "status": status, "attrs": attributes})

    def _epochs_together(self) -> int:
        starts = self._epoch_starts
        if len(starts) <= 1:
            return 1
        return alike_interval((starts[-1] - starts[0]) / 1e9 / (len(starts) - 1), _SHORT_S)

    def _cut_hours(self, now_ns: int, step: int) -> None:
        part = (now_ns - self._epoch_ns) // LONGEST_NS
        if part > self._part:
            self._cut(self._epoch_ns + part * LONGEST_NS, step, self._epoch, part)

    def _cut(self, at_ns: int, step: int, epoch: int, part: int) -> None:
        previous = self.current
        at_ns = max(at_ns, previous.begun_ns)
        self.end(at_ns, step, "unset")
        if not part:
            self._epoch_ns = at_ns
        self._epoch, self._part = epoch, part
        ids = self.ids.segment(epoch, part)
        links = [link(self.ids.run, self._flags, "run")]
        if previous.ids != self.ids.run:
            links.append(link(previous.ids, self._flags, "previous"))
        frame = self._frame(catalog.SPAN_SEGMENT.name, ids, at_ns) | {"links": links}
        attributes: dict[str, object] = {"epoch": epoch, "part": part} if epoch else {"part": part}
        self._roots.append(Root(ids, at_ns, step, frame, attributes))
        self.announce()

    def _frame(self, name: str, ids: SpanId, begun_ns: int) -> dict[str, object]:
        fields: dict[str, object] = {"name": name, "trace_id": ids.trace, "span_id": ids.span, "flags": self._flags}
        return fields | {"kind": "internal", "t0": self._wall(begun_ns), "scope": ["torchobs", None, None, {}]}

    def _wall(self, ns: int) -> int:
        header = self._writer.header
        return ns - header.monotonic_ns + header.wall_ns
