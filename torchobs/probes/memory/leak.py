"""Names what grows when host memory grows without end: lines of the program, types of objects, shapes of tensors.

Nothing is done until the growth detector has told of a leak (:mod:`torchobs.probes.memory.growth`). Then two counts of the
living objects enclose two snapshots of ``tracemalloc``, and the differences are told. Tracing slows Python down two to three
times while it lasts: ten seconds, five steps where these are slow, and no longer than a minute, and it ends early when it has
taken 8 MiB. Where the user runs ``tracemalloc``, nothing is traced or counted (counting would take ten times as long).
"""

from __future__ import annotations

import time
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torchobs.probes.memory.device_leak import DeviceLeak
from torchobs.probes.memory.leak_report import MOST_ROWS, MOST_TOLD, tell
from torchobs.probes.memory.live_objects import Amount, LiveObjects, count_objects, grown_kinds, grown_types
from torchobs.probes.memory.process_stats import ProcessStats
from torchobs.probes.memory.source_lines import innermost
from torchobs.support.after_fork import renew_in_child
from torchobs.support.rate_limit import RateLimiter

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.core.context import ProbeContext

FRAMES = 8
"""Frames kept of each allocation: an operator is called by the user's line through some four of torch's"""
WARM_S, TRACED_S, LONGEST_S = 2.0, 10.0, 60.0
LEAST_STEPS = 5
MOST_TRACED = 8 << 20
"""Bytes that ``tracemalloc`` may take for some 100,000 allocations, whose comparison takes a second"""
WAIT_S = 10.0
"""For a backward pass, in which objects are counted"""
AGAIN_S, MOST_TRACES = 600.0, 3


@dataclass(slots=True)
class Suspicion:
    """What the memory probes tell the leak probe, all in the sampler thread."""

    host: bool = False
    device: bool = False


class Line(NamedTuple):
    """A line whose living allocations grew."""

    location: str
    number: int
    size: int


class LeakProbe:
    """Traces a leak, at most three times in a run."""

    name = "leak"

    def __init__(self, suspicion: Suspicion, clock: Callable[[], float] = time.monotonic) -> None:
        self._suspicion, self._clock = suspicion, clock
        self._traces = RateLimiter(AGAIN_S)
        self._left = MOST_TRACES
        self._host: HostTrace | None = None
        self._device: DeviceLeak | None = None

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        self._context = context

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        for trace in (self._host, self._device):
            if trace is not None:
                trace.close()
        self._host = self._device = None

    def sample(self) -> None:
        """Begin, go on with, or end a trace."""
        suspicion, now = self._suspicion, self._clock()
        wanted = suspicion.host and self._host is None and self._left and not tracemalloc.is_tracing()
        if wanted and self._traces.take(now, "host"):
            self._left -= 1
            self._host = HostTrace(self._context, self._clock)
        if suspicion.device and self._device is None and self._traces.take(now, "device"):
            self._device = DeviceLeak.begin(self._context, now)
        suspicion.host = suspicion.device = False
        if self._host is not None and self._host.proceed():
            self._host = None
        if self._device is not None and self._device.proceed(now):
            self._device = None


class HostTrace:
    """One trace: count, trace, snapshot, snapshot, count. For the sampler thread, which calls :meth:`proceed`."""

    def __init__(self, context: ProbeContext, clock: Callable[[], float]) -> None:
        import torch  # torch is optional until training begins

        self._context, self._clock, self._torch = context, clock, torch
        self._counts: list[LiveObjects] = []
        self._snapshots: list[tracemalloc.Snapshot] = []
        self._resident: list[int] = []
        self._tracing = _Tracing()
        self._ended = "complete"
        self._next = self._trace
        self._count()

    def proceed(self) -> bool:
        """Go on if it is time to; return True once the leak was told."""
        self._next()
        return self._next == self._done

    def close(self) -> None:
        """Stop tracing."""
        self._tracing.stop()
        self._next = self._done

    def _count(self) -> None:
        """Have objects counted at the next backward pass."""
        self._since, wanted = self._clock(), len(self._counts) + 1
        breaker, counts = self._context.breaker(LeakProbe.name), self._counts

        def count() -> None:
            if len(counts) < wanted:
                counts.append(count_objects(self._torch))

        self._wanted = wanted
        self._context.at_backward(breaker.guard(count))

    def _counted(self) -> bool:
        return len(self._counts) >= self._wanted or self._clock() - self._since >= WAIT_S

    def _trace(self) -> None:
        """Begin to trace once objects are counted."""
        if self._counted():
            self._resident.append(ProcessStats().resident().all)
            self._tracing.start()
            self._since, self._first_step = self._clock(), self._context.recorder.step
            self._next = self._warm_up

    def _warm_up(self) -> None:
        """Let every allocation of a step be seen before the first snapshot."""
        if self._clock() - self._since >= WARM_S:
            self._take()
            self._since, self._first_step = self._clock(), self._context.recorder.step
            self._next = self._watch

    def _watch(self) -> None:
        passed, steps = self._clock() - self._since, self._context.recorder.step - self._first_step
        full = self._tracing.on and tracemalloc.get_tracemalloc_memory() > MOST_TRACED
        if full or passed >= LONGEST_S or (passed >= TRACED_S and steps >= LEAST_STEPS):
            self._ended = "memory" if full else "complete"
            self._passed_s, self._steps = passed, steps
            self._take()
            self._tracing.stop()
            self._resident.append(ProcessStats().resident().all)
            self._count()
            self._next = self._tell

    def _take(self) -> None:
        if self._tracing.on and tracemalloc.is_tracing():
            self._snapshots.append(tracemalloc.take_snapshot())

    def _tell(self) -> None:
        """Tell what grew, once objects are counted again."""
        if not self._counted():
            return
        self._next = self._done
        lines = self._lines()
        counts = self._counts if len(self._counts) == 2 else [LiveObjects(), LiveObjects()]  # noqa: PLR2004  # both
        types, kinds = grown_types(*counts), grown_kinds(*counts)
        tensors, grown = counts[1].tensors - counts[0].tensors, self._resident[1] - self._resident[0]
        if tensors.size > sum(line.size for line in lines):  # tensors lie outside of Python's memory: by the number of objects
            lines = sorted(lines, key=lambda line: -line.number)
        told = {
            "lines": [f"{line.location} {line.number} more, {line.size} B" for line in lines],
            "objects": [f"{name} {more} more" for name, more in types],
            "tensors": [f"{kind} {more.number} more, {more.size} B" for kind, more in kinds],
        }
        attributes: dict[str, object] = {
            "space": "host", "ended": self._ended, "seconds": round(self._passed_s, 1), "steps": self._steps, "grown": grown,
            "tensor_bytes": tensors.size, **{name: rows[:MOST_TOLD] for name, rows in told.items() if rows},
        }  # fmt: skip
        tell(self._context, attributes, {name: rows[:MOST_ROWS] for name, rows in told.items()})

    def _done(self) -> None:
        """Nothing is left to do."""

    def _lines(self) -> list[Line]:
        """Return the lines that grew between the snapshots, the most bytes first."""
        if len(self._snapshots) < 2:  # noqa: PLR2004  # a difference needs both
            return []
        earlier, later = self._snapshots
        self._snapshots = []
        sums: dict[str, Amount] = {}
        for one in later.compare_to(earlier, "traceback"):
            line = innermost(one.traceback) if one.count_diff > 0 and one.size_diff > 0 else None
            if line is not None:
                known = sums.get(line, Amount())
                sums[line] = Amount(known.number + one.count_diff, known.size + one.size_diff)
            self._context.yield_gil()
        return sorted((Line(line, *amount) for line, amount in sums.items()), key=lambda line: -line.size)


class _Tracing:
    """``tracemalloc`` while it is ours. A child that is forked meanwhile stops it, too: its allocations are nobody's."""

    def __init__(self) -> None:
        self.on = False

    def start(self) -> None:
        """Start, unless the user has."""
        if not tracemalloc.is_tracing():
            tracemalloc.start(FRAMES)
            self.on = True
            renew_in_child(self, on=self._stopped)

    def stop(self) -> None:
        """Stop what was started here."""
        if self.on:
            self.on = self._stopped()

    def _stopped(self) -> bool:
        if self.on:
            tracemalloc.stop()
        return False
