"""Names what grows when memory grows without end: lines of the program, types of objects, shapes of tensors.

Nothing is done until the growth detector has told of a leak (:mod:`torchobs.probes.memory_growth`). Then two counts of the
living objects enclose two snapshots of ``tracemalloc``, and the differences are told. Tracing slows Python down two to three
times while it lasts: ten seconds, five steps where these are slow, and no longer than a minute, and it ends early when it has
taken 8 MiB. Where the user runs ``tracemalloc``, nothing is traced or counted (counting would take ten times as long).

Objects are counted in the training thread, at the beginning of a backward pass, so that nothing is kept alive that this thread
is about to drop; tensors are asked one by one through weak references. For 300,000 objects it takes some 0.1 s.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch

from torchobs import catalog
from torchobs.flight import artifacts
from torchobs.probes.process_memory import ProcessStats
from torchobs.support import text
from torchobs.support.after_fork import renew_in_child
from torchobs.support.rate_limit import RateLimiter
from torchobs.support.source_lines import innermost
from torchobs.taps.taps import subclasses
from torchobs.tensors.references import collections_paused, objects_of, types_of_objects

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.probes.context import ProbeContext
    from torchobs.probes.memory_growth import Suspicion


MOST_TENSORS = 20_000
"""Tensors asked for their size, of more the last in the collector's order; each takes 4 µs."""
_OWN = ("torchobs.", "tracemalloc.", "weakref.", "torch.storage.UntypedStorage")
"""Types that a count makes more of itself"""


class Amount(NamedTuple):
    """A number of objects, and their bytes."""

    number: int
    size: int


@dataclass(slots=True)
class LiveObjects:
    """One count. Memory that tensors share counts once."""

    types: Counter[int] = field(default_factory=Counter)
    """By the type's ``id``"""
    tensors: Counter[str] = field(default_factory=Counter)
    """By kind: type, shape and device"""
    sizes: Counter[str] = field(default_factory=Counter)
    """Their bytes, by kind"""


def count_objects() -> LiveObjects:
    """Count all objects that the garbage collector tracks, and the dense tensors among them."""
    with collections_paused():
        found = LiveObjects(Counter(map(id, types_of_objects())))
    storages: set[int] = set()
    with torch._C.DisableTorchFunction():  # no mode of the user's sees this
        for known in _tensors()[-MOST_TENSORS:]:
            _add(found, known, storages)
    return found


def grown_types(before: LiveObjects, after: LiveObjects) -> list[tuple[str, int]]:
    """Return the names of types that have more objects than before, and how many more, the most first."""
    grown = {kind: more for kind, count in after.types.items() if (more := count - before.types[kind]) > 0}
    names = {id(kind): f"{kind.__module__}.{kind.__qualname__}" for kind in subclasses(object) if id(kind) in grown}
    rows = ((name, grown[kind]) for kind, name in names.items() if not name.startswith(_OWN))
    return sorted(rows, key=lambda row: -row[1])


def grown_kinds(before: LiveObjects, after: LiveObjects) -> list[tuple[str, Amount]]:
    """Return the kinds of tensors that have more objects and no fewer bytes than before, the most bytes first."""
    differences = (
        (kind, Amount(number - before.tensors[kind], after.sizes[kind] - before.sizes[kind]))
        for kind, number in after.tensors.items()
    )
    rows = [(kind, more) for kind, more in differences if more.number > 0 and more.size >= 0]
    return sorted(rows, key=lambda row: (-row[1].size, -row[1].number))


def _tensors() -> list[ref[Any]]:
    """Return weak references to all tensors and parameters."""
    classes = {id(torch.Tensor), id(torch.nn.Parameter)}
    with collections_paused():
        return list(map(ref, objects_of(classes)))


def _add(found: LiveObjects, known: ref[Any], storages: set[int]) -> None:
    x = known()
    if x is None or x.layout is not torch.strided or x.is_nested or x.device.type == "meta":
        return
    try:
        storage = x.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # one of functorch's, which has no memory of its own
        return
    kind = f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(str, x.shape))}] on {x.device}"
    found.tensors[kind] += 1
    found.sizes[kind] += 0 if key in storages else size
    storages.add(key)


MOST_TOLD, MOST_ROWS = 5, 30
"""Rows of a table in the event, and in the artifact"""


def tell(context: ProbeContext, attributes: dict[str, object], tables: dict[str, list[str]]) -> None:
    """Write the event, and the whole tables as an artifact."""
    writer, place = context.writer, context.writer.place
    if place is not None:
        done = artifacts.named(writer.name, artifacts.LEAK, time.time_ns() // 1_000_000)
        if artifacts.write(place, done, _text(context, attributes, tables).encode()) is None:
            attributes = {**attributes, "evidence": done.id}
    context.event(catalog.EVENT_MEMORY_LEAK, attributes)


def _text(context: ProbeContext, attributes: dict[str, object], tables: dict[str, list[str]]) -> str:
    rank, now = context.writer.header.resource.get("rank", 0), datetime.now(timezone.utc).isoformat(timespec="seconds")
    head = " ".join(f"{name} {value}" for name, value in attributes.items() if not isinstance(value, list))
    parts = [f"# rank {rank} after step {context.recorder.step}, {now}: what grew ({head})\n"]
    parts += [f"\n{name}\n" + "".join(f"  {row}\n" for row in rows) for name, rows in tables.items() if rows]
    return "".join(parts)


FRAMES = 8
"""Frames kept of each allocation: an operator is called by the user's line through some four of torch's"""
WARM_S, TRACED_S, LONGEST_S = 2.0, 10.0, 60.0
LEAST_STEPS = 5
MOST_TRACED = 8 << 20
"""Bytes that ``tracemalloc`` may take for some 100,000 allocations, whose comparison takes a second"""
WAIT_S = 10.0
"""For a backward pass, in which objects are counted"""
AGAIN_S, MOST_TRACES = 600.0, 3


class LeakProbe:
    """Traces a leak, at most three times in a run."""

    name = "leak"

    def __init__(self, suspicion: Suspicion, clock: Callable[[], float] = time.monotonic) -> None:
        self._suspicion, self._clock = suspicion, clock
        self._traces = RateLimiter(AGAIN_S)
        self._left = MOST_TRACES
        self._host: HostTrace | None = None

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context = context

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        if self._host is not None:
            self._host.close()
        self._host = None

    def sample(self) -> None:
        """Begin, go on with, or end a trace."""
        suspicion = self._suspicion
        wanted = suspicion.host and self._host is None and self._left and not tracemalloc.is_tracing()
        if wanted and self._traces.take(self._clock()):
            self._left -= 1
            self._host = HostTrace(self._context, self._clock)
        suspicion.host = False
        if self._host is not None and self._host.proceed():
            self._host = None


class HostTrace:
    """One trace: count, trace, snapshot, snapshot, count. For the sampler thread, which calls :meth:`proceed`."""

    def __init__(self, context: ProbeContext, clock: Callable[[], float]) -> None:
        self._context, self._clock = context, clock
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
                counts.append(count_objects())

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
        grown, tensor_bytes = self._resident[1] - self._resident[0], counts[1].sizes.total() - counts[0].sizes.total()
        if tensor_bytes > sum(
            more.size for _, more in lines
        ):  # tensors lie outside of Python's memory: by the number of objects
            lines = sorted(lines, key=lambda row: -row[1].number)
        told = {
            "lines": [f"{line} {more.number:,} more, {text.size(more.size)}" for line, more in lines],
            "objects": [f"{more:,} {name}" for name, more in types],
            "tensors": [f"{text.plural(more.number, 'tensor')} {kind}, {text.size(more.size)}" for kind, more in kinds],
        }
        attributes: dict[str, object] = {
            "space": "host", "ended": self._ended, "seconds": round(self._passed_s, 1), "steps": self._steps, "grown": grown,
            "tensor_bytes": tensor_bytes, **{name: rows[:MOST_TOLD] for name, rows in told.items() if rows},
        }  # fmt: skip
        tell(self._context, attributes, {name: rows[:MOST_ROWS] for name, rows in told.items()})

    def _done(self) -> None:
        """Nothing is left to do."""

    def _lines(self) -> list[tuple[str, Amount]]:
        """Return the lines that grew between the snapshots, the most bytes first."""
        if len(self._snapshots) < 2:  # noqa: PLR2004  # a difference needs both
            return []
        earlier, later = self._snapshots
        self._snapshots = []
        numbers, sizes = Counter[str](), Counter[str]()
        for one in later.compare_to(earlier, "traceback"):
            line = innermost(one.traceback) if one.count_diff > 0 and one.size_diff > 0 else None
            if line is not None:
                numbers[line] += one.count_diff
                sizes[line] += one.size_diff
            self._context.yield_gil()
        return [(line, Amount(numbers[line], size)) for line, size in sizes.most_common()]


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
