"""Find the growing part when memory grows without end: lines of the program, types of objects, shapes of tensors.

Nothing is done until the growth detector has reported a leak (:mod:`torchobs.probes.memory_growth`). Then two counts of the
living objects enclose two snapshots of ``tracemalloc``, and the differences are reported. Python is two to three times slower
while it traces: ten seconds, five steps where these are slow, a minute at most, and less when it has taken 8 MiB. Where the
user runs ``tracemalloc``, nothing is traced or counted (counting would take ten times as long).

Minutes before that, fast growth is a leak if each step leaves a graph behind that is useless to every later backward pass: none
has freed it, and the optimizer has changed the weights that it needs since.

Objects are counted in the training thread, at the beginning of a backward pass, so that nothing is kept alive that this thread
is about to drop; tensors are asked one by one through weak references. For 300,000 objects it takes some 0.1 s.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
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
from torchobs.tensors.graph import kept_tensors
from torchobs.tensors.references import collections_paused, objects_of, types_of_objects
from torchobs.tensors.values import is_without_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchobs.probes.context import ProbeContext
    from torchobs.probes.memory_growth import Suspicion

T = TypeVar("T")

GRAPH_STEPS, LOOKED_GRAPHS, MOST_NODES = 20, 128, 64
"""Steps for which graphs are watched, tensors examined (a graph keeps what lies within it alive, too), and nodes of each"""
MOST_TENSORS = 20_000
"""Tensors with their size read, of more the last in the collector's order; each takes 4 µs."""
_OWN = ("torchobs.", "tracemalloc.", "weakref.", "torch.storage.UntypedStorage")
"""Types of objects that counting makes itself"""


class Amount(NamedTuple):
    """A number of objects, and their bytes."""

    number: int
    size: int
    large: int = 0
    """how many of them may be tensors, by the size of their object"""


class TensorKind(NamedTuple):
    """Keys by which tensors are counted."""

    dtype: str
    shape: tuple[int, ...]
    device: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}] on {self.device}"


@dataclass(slots=True)
class LiveObjects:
    """One count. Memory that tensors share counts once."""

    types: Counter[int] = field(default_factory=Counter)
    """By the type's ``id``"""
    tensors: Counter[TensorKind] = field(default_factory=Counter)
    sizes: Counter[TensorKind] = field(default_factory=Counter)
    """Their bytes, by kind"""


def count_objects() -> LiveObjects:
    """Count all objects that the garbage collector tracks, and the dense tensors among them."""
    types = count_types()
    tensors = count_tensors()
    return LiveObjects(types, tensors.tensors, tensors.sizes)


def count_types() -> Counter[int]:
    """Count all objects that the garbage collector tracks by the ``id`` of their type."""
    with collections_paused():
        return Counter(map(id, types_of_objects()))


def count_tensors(tensors: Iterable[Any] | None = None) -> LiveObjects:
    """Count the dense ones of these tensors; by default of ``MOST_TENSORS`` that the garbage collector tracks."""
    live, storages = LiveObjects(), set[int]()
    with torch._C.DisableTorchFunction():  # no mode of the user's sees this
        for x in (reference() for reference in _tensors()[-MOST_TENSORS:]) if tensors is None else tensors:
            if x is not None:
                _add(live, x, storages)
    return live


def grown_types(before: Counter[int], after: Counter[int]) -> list[tuple[str, int]]:
    """Return the names of types that have more objects than before, and how many more, the most first."""
    grown = {kind: more for kind, count in after.items() if (more := count - before[kind]) > 0}
    names = {id(kind): f"{kind.__module__}.{kind.__qualname__}" for kind in subclasses(object) if id(kind) in grown}
    rows = ((name, grown[kind]) for kind, name in names.items() if not name.startswith(_OWN))
    return sorted(rows, key=lambda row: -row[1])


def grown_kinds(before: LiveObjects, after: LiveObjects) -> list[tuple[str, Amount]]:
    """Return the kinds of tensors that have more objects and no fewer bytes than before, the most bytes first."""
    differences = (
        (str(kind), Amount(number - before.tensors[kind], after.sizes[kind] - before.sizes[kind]))
        for kind, number in after.tensors.items()
    )
    rows = [(kind, more) for kind, more in differences if more.number > 0 and more.size >= 0]
    return sorted(rows, key=lambda row: (-row[1].size, -row[1].number))


def tensors_with_graph() -> list[ref[Any]]:
    """Return the tensors that have a graph."""
    with torch._C.DisableTorchFunction():
        return [reference for reference in _tensors() if (x := reference()) is not None and x.grad_fn is not None]


def is_left_behind(function: Any) -> bool:
    """Return whether a graph, by the first nodes from its end on, can not be differentiated now, and was not before.

    torch says so of a kept tensor that was changed in place since, when it is read.
    """
    nodes = [function]
    for node in nodes:
        for name, value in kept_tensors(node):
            if value is not None and "[" not in name:  # not freed, packed by a hook, or one of a list
                try:
                    getattr(node, f"_saved_{name}")
                except RuntimeError:
                    return True
        nodes += [following for following, _ in node.next_functions if following is not None][: MOST_NODES - len(nodes)]
    return False


def _tensors() -> list[ref[Any]]:
    """Return weak references to all tensors and parameters."""
    classes = {id(torch.Tensor), id(torch.nn.Parameter)}
    with collections_paused():
        return list(map(ref, objects_of(classes)))


def _add(live: LiveObjects, x: Any, storages: set[int]) -> None:
    if is_without_data(x) or x.layout is not torch.strided or x.is_nested:
        return
    try:
        storage = x.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # one of functorch's, which has no memory of its own
        return
    kind = TensorKind(str(x.dtype).removeprefix("torch."), tuple(map(int, x.shape)), str(x.device))
    live.tensors[kind] += 1
    live.sizes[kind] += 0 if key in storages else size
    storages.add(key)


MOST_IN_EVENT, MOST_ROWS = 5, 30
"""Rows of a table in the event, and in the artifact"""


def _text(context: ProbeContext, attributes: dict[str, object], tables: dict[str, list[str]]) -> str:
    rank, now = context.writer.header.resource.get("rank", 0), datetime.now(timezone.utc).isoformat(timespec="seconds")
    head = " ".join(f"{name} {value}" for name, value in attributes.items() if not isinstance(value, list))
    parts = [f"# rank {rank} after step {context.recorder.step}, {now}: what grew ({head})\n"]
    parts += [f"\n{name}\n" + "".join(f"  {row}\n" for row in rows[:MOST_ROWS]) for name, rows in tables.items() if rows]
    return "".join(parts)


FRAMES = 8
"""Frames kept of each allocation: an operator is called by the user's line through some four of torch's"""
WARM_S, TRACED_S, LONGEST_S = 2.0, 10.0, 60.0
LEAST_STEPS = 5
MOST_TRACED = 8 << 20
"""Bytes that ``tracemalloc`` may take for some 100,000 allocations: their comparison takes a second"""
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
        self._tracing = Tracing()
        self._running: Iterator[None] | None = None
        self._traces_leak = False
        """Whether that is a trace by now; else it looks for graphs, and a leak that is reported meanwhile comes first"""

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context = context

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._running = None
        self._tracing.stop()

    def sample(self) -> None:
        """Begin, go on with, or end a trace."""
        suspicion = self._suspicion
        is_free = self._running is None or (suspicion.host and not self._traces_leak)
        wanted = is_free and (suspicion.host or suspicion.is_steep) and self._left and not tracemalloc.is_tracing()
        if wanted and self._traces.take(self._clock(), suspicion.host):
            self._traces_leak = False
            self._running = self._trace() if suspicion.host else self._trace_graphs()
        suspicion.host = suspicion.is_steep = False
        if self._running is not None and next(self._running, True):
            self._running = None

    def _trace(self) -> Iterator[None]:
        """Count, trace between two snapshots, count again, report the growth; yield while there is something to wait for."""
        clock, recorder, counts = self._clock, self._context.recorder, list[LiveObjects]()
        self._left, self._traces_leak = self._left - 1, True
        yield from self._count_at_backward(counts, count_objects)
        resident = ProcessStats().resident().all
        if not tracemalloc.is_tracing():  # the program may have begun meanwhile
            self._tracing.start(FRAMES)
        begun_s = clock()
        while clock() - begun_s < WARM_S:  # so that every allocation of a step is seen before the first snapshot
            yield
        snapshots = self._tracing.snapshot()
        begun_s, first, is_full, passed_s, steps = clock(), recorder.step, False, 0.0, 0
        while not is_full and passed_s < LONGEST_S and (passed_s < TRACED_S or steps < LEAST_STEPS):
            yield
            passed_s, steps, is_full = clock() - begun_s, recorder.step - first, self._tracing.is_full()
        snapshots += self._tracing.snapshot()
        self._tracing.stop()
        grown = ProcessStats().resident().all - resident
        lines, snapshots = self._lines(snapshots), []  # with thousands of tuples, which are no part of the leak
        yield from self._count_at_backward(counts, count_objects)
        ended = "memory" if is_full else "complete"
        attributes = {"space": "host", "ended": ended, "seconds": round(passed_s, 1), "steps": steps, "grown": grown}
        self._report(attributes, lines, counts)

    def _trace_graphs(self) -> Iterator[None]:
        """Trace if each step leaves a graph behind."""
        recorder, before, after = self._context.recorder, list[list[ref[Any]]](), list[tuple[int, int]]()
        yield from self._count_at_backward(before, tensors_with_graph)
        first, until_s = recorder.step, self._clock() + LONGEST_S
        while before and recorder.step - first < GRAPH_STEPS and self._clock() < until_s:
            yield
        steps, sample = recorder.step - first, before[0][-LOOKED_GRAPHS:] if before else []

        def count_graphs() -> tuple[int, int]:
            living = [x.grad_fn for reference in sample if (x := reference()) is not None]
            return len(tensors_with_graph()), sum(map(is_left_behind, living))

        yield from self._count_at_backward(after, count_graphs)
        for number, left_behind in after:
            if min(steps, left_behind) >= GRAPH_STEPS and number - len(before[0]) >= steps:
                yield from self._trace()

    def _count_at_backward(self, counts: list[T], count: Callable[[], T]) -> Iterator[None]:
        """Run a count at the next backward pass, and wait for it."""
        wanted, until_s = len(counts) + 1, self._clock() + WAIT_S

        def count_once() -> None:
            if len(counts) < wanted:
                counts.append(count())

        self._context.at_backward(self._context.breaker(self.name).guard(count_once))
        while len(counts) < wanted and self._clock() < until_s:
            yield

    def _lines(self, snapshots: list[tracemalloc.Snapshot]) -> list[tuple[str, Amount]]:
        """Return the lines that grew between two snapshots, the most bytes first; without both none."""
        numbers, sizes, large = Counter[str](), Counter[str](), Counter[str]()
        tensor_size, tensors = sys.getsizeof(torch.empty(0, device="cpu")), Counter[tracemalloc.Traceback]()
        for sign, snapshot in zip((-1, 1), snapshots, strict=False):
            for trace in snapshot.traces:  # one by one: beside a tensor the same line may make small objects, such as its key
                tensors[trace.traceback] += sign * (trace.size >= tensor_size)
        for difference in snapshots[1].compare_to(snapshots[0], "traceback") if len(snapshots) > 1 else ():
            line = innermost(difference.traceback) if difference.count_diff > 0 and difference.size_diff > 0 else None
            if line is not None:
                numbers[line] += difference.count_diff
                sizes[line] += difference.size_diff
                large[line] += max(0, tensors[difference.traceback])
            self._context.yield_gil()
        return [(line, Amount(numbers[line], size, large[line])) for line, size in sizes.most_common()]

    def _report(self, attributes: dict[str, object], lines: list[tuple[str, Amount]], counts: list[LiveObjects]) -> None:
        """Write the event, and the whole tables as an artifact."""
        before, after = counts if len(counts) == 2 else [LiveObjects(), LiveObjects()]  # noqa: PLR2004  # both
        tensor_bytes, kinds = after.sizes.total() - before.sizes.total(), grown_kinds(before, after)
        if tensor_bytes > sum(more.size for _, more in lines):
            # tensors lie outside of Python's memory: by number, without the indices that a sampler draws for each epoch
            lines = sorted(lines, key=lambda row: (-row[1].large, -row[1].number))
        tables = {
            "lines": [f"{line} {more.number:,} more, {text.size(more.size)}" for line, more in lines],
            "objects": [f"{more:,} {name}" for name, more in grown_types(before.types, after.types)],
            "tensors": [f"{text.plural(more.number, 'tensor')} {kind}, {text.size(more.size)}" for kind, more in kinds],
        }
        attributes |= {"tensor_bytes": tensor_bytes} | {name: rows[:MOST_IN_EVENT] for name, rows in tables.items() if rows}
        writer, place = self._context.writer, self._context.writer.place
        if place is not None:
            done = artifacts.named(writer.name, artifacts.LEAK, time.time_ns() // 1_000_000)
            data = _text(self._context, attributes, tables).encode()[: artifacts.LIMITS[artifacts.LEAK]]
            if artifacts.write(place, done, len(data), lambda file: artifacts.append(file, data)) is None:
                attributes["evidence"] = done.id
        self._context.event(catalog.EVENT_MEMORY_LEAK, attributes)


class Tracing:
    """``tracemalloc``, which is one for the process, on for as long as anybody of ours wants it.

    Where the program traces itself, that is used, and left on. A forked child stops ours: nothing reads its allocations.
    """

    _lock = Lock()
    _wanted = 0
    _is_ours = False

    def __init__(self) -> None:
        self.on = False

    def start(self, frames: int = 1) -> None:
        """Begin to trace, unless the program or anybody of ours does."""
        with Tracing._lock:
            if not Tracing._wanted:
                Tracing._is_ours = not tracemalloc.is_tracing()
                if Tracing._is_ours:
                    tracemalloc.start(frames)
            Tracing._wanted += 1
            self.on = True

    def snapshot(self) -> list[tracemalloc.Snapshot]:
        """Return a snapshot, or nothing if the program has stopped the tracing."""
        return [tracemalloc.take_snapshot()] if self.on and tracemalloc.is_tracing() else []

    def is_full(self) -> bool:
        """Return whether it takes as much memory as it may."""
        return self.on and tracemalloc.get_tracemalloc_memory() > MOST_TRACED

    def stop(self) -> None:
        """Stop; with the last one the tracing ends, if it is ours."""
        with Tracing._lock:
            if self.on:
                self.on = False
                Tracing._wanted = max(0, Tracing._wanted - 1)
                if Tracing._is_ours and not Tracing._wanted:
                    tracemalloc.stop()


def _stopped() -> int:
    """Stop our tracing in a forked child; return 0, the number of its users there."""
    if Tracing._is_ours and Tracing._wanted:
        tracemalloc.stop()
    Tracing._is_ours = False
    return 0


renew_in_child(Tracing, _lock=Lock, _wanted=_stopped)
