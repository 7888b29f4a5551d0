"""Collectives by process group, from torch's own flight recorder: those called, completed and pending.

The format of its dumps is that of ``FlightRecorder.hpp`` and ``FlightRecorderDetail.hpp`` in ``torch/csrc/distributed/c10d``: a
new field raises its minor version, a changed one its major. 2.4 is torch 2.5's, 2.10 is torch 2.13's. They are pickled: in JSON
they take six times as long, and lack the lines that called.

Backends fill it in differently. NCCL reports ``state`` and, with TORCH_NCCL_ENABLE_TIMING=1, durations. gloo leaves ``state``
at "scheduled" for ever, sets ``retired`` once an operation has come back, and records neither send nor recv.

While training moves, the training thread asks for the numbers alone, at the start of a backward, every ten seconds (some 60 µs
for two groups). There, because the recorder reads its maps of process groups without its lock, and they change when that thread
makes a group. When no step and no phase has ended for ten seconds the sampler thread asks instead. Once the numbers stand
still, too, it asks for the operations: these hold what waits. A full recorder of 2,000 operations takes 22 ms with Python's
lock held, and NCCL's asks for the CUDA events of those in flight, which must not go meanwhile. Never from a signal handler: the
recorder has a mutex. No thread that holds it waits for Python's lock, so that asking with that lock held cannot block for good.

How many collectives a group has called it counts itself, which the sampler reads every second. The lines that called the last
ones are read where a rank stands still, or a collective's timeout ends it: 70 ms for a full recorder.

From level advanced on the training thread reads the operations, too, for their sizes and durations.

The recorder is torch's: on by default in torch 2.13, off in older versions; TORCH_FR_BUFFER_SIZE=2000 (in older ones
TORCH_NCCL_TRACE_BUFFER_SIZE) turns it on, 0 off, before the first process group exists. Nothing here turns it on.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import nan, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.detect import hangs
from torchobs.probes.distributed import groups
from torchobs.probes.exits import places, root_cause, runtime_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torchobs.catalog import Metric
    from torchobs.probes.context import ProbeContext


MAJOR = 2
"""The major version that is understood"""

_ITEM_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "UInt16": 2, "Int": 4, "Float": 4, "UInt32": 4,
    "ComplexHalf": 4, "Long": 8, "Double": 8, "ComplexFloat": 8, "UInt64": 8, "ComplexDouble": 16,
}  # fmt: skip
"""Bytes of an element by the names of ``c10::toString(ScalarType)``; those that begin with ``Float8`` have one."""
_OPERATIONS = {
    "all_reduce_barrier": "barrier", "allreduce_coalesced": "all_reduce", "_reduce_oop": "reduce",
    "_broadcast_oop": "broadcast", "ALLGATHER_coalesced": "all_gather", "REDUCE_SCATTER_coalesced": "reduce_scatter",
    "monitored_barrier": "barrier",
}  # fmt: skip
_FAMILIES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Beginnings of names with many endings (``_all_gather_base``, ``reduce_scatter_tensor_coalesced``), without underscore"""
_PLAIN = frozenset({"broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv", "coalesced"})


class GroupStatus(NamedTuple):
    """Sequence numbers of the last collectives of one process group; 0: none yet."""

    enqueued: int
    completed: int


class Group(NamedTuple):
    """A process group: torch's name for it, the same on all its ranks, and its labels."""

    name: str
    attributes: dict[str, str]


class Operation(NamedTuple):
    """One recorded operation."""

    group_id: int
    """number of the process group's backend in this process: a key of ``Dump.groups``"""
    group: Group
    kind: str
    """a value of ``catalog.COLLECTIVE_OPERATIONS``"""
    created_ns: int
    """Unix time of the call"""
    size: int | None
    """bytes of the inputs; ``None``: unknown"""
    pending: bool
    """called, and not come back"""
    record: int
    """consecutive number in the recorder"""
    duration_s: float | None
    """on the device; ``None``: not recorded"""
    number: int | None
    """in its group, the same on all its ranks; ``None``: point to point"""
    frames: tuple[tuple[str, int, str], ...]
    """file, line and function that called it, the innermost first; empty: not requested"""


class Dump(NamedTuple):
    """The contents of a recorder."""

    groups: Mapping[int, GroupStatus]
    operations: tuple[Operation, ...]
    """oldest first"""


def decode(dumped: bytes) -> Dump | None:
    """Return the contents of a pickled dump; ``None`` unless it has the understood version's format."""
    try:
        dump = pickle.loads(dumped)  # noqa: S301  # torch has made it, in this process
        if str(dump["version"]).partition(".")[0] != str(MAJOR):
            return None
        groups = {int(key): _status(status) for key, status in dump["pg_status"].items()}
        return Dump(groups, tuple(map(_operation, dump.get("entries") or ())))
    except (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError):
        return None


def operation(name: str) -> str:
    """Return a ``profiling_name``'s value of ``catalog.COLLECTIVE_OPERATIONS``: ``nccl:_all_gather_base``, all_gather."""
    word = name.partition(":")[2].partition(" ")[0]
    if word in _OPERATIONS:
        return _OPERATIONS[word]
    if word in _PLAIN:
        return word
    return next((family for family in _FAMILIES if word.lstrip("_").startswith(family)), "other")


def _operation(entry: Mapping[str, Any]) -> Operation:
    (group, description), name, took_ms = entry["process_group"], entry["profiling_name"], entry.get("duration_ms")
    labels = _labels(group, description, name.partition(":")[0])
    done = entry["retired"] is True or entry["state"] == "completed"
    kind, size = operation(name), _size(entry["input_sizes"], entry["input_dtypes"])
    frames = tuple((frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames") or ())
    return Operation(
        entry["pg_id"], Group(group, labels), kind, entry["time_created_ns"], size, not done, entry["record_id"],
        None if took_ms is None else took_ms / 1e3, None if entry.get("is_p2p") else entry["collective_seq_id"], frames,
    )  # fmt: skip


def _size(shapes: Sequence[Sequence[int]], types: Sequence[str]) -> int | None:
    items = [1 if name.startswith("Float8") else _ITEM_BYTES.get(name) for name in types]
    return None if None in items else sum(item * prod(shape) for item, shape in zip(items, shapes, strict=True) if item)


def _status(status: Mapping[str, Any]) -> GroupStatus:
    return GroupStatus(*(max(0, int(status[f"last_{what}_collective"])) for what in ("enqueued", "completed")))  # -1: none yet


ADVANCED = 2
"""The debug level from which sizes and durations are counted"""
MOST_GROUPS = 8
_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
"""The recorder that gloo and others fill (torch 2.8), and NCCL's own (torch 2.5, builds with NCCL)"""
_COUNTING = frozenset({"gloo", "nccl"})
"""Backends that number their collectives: a group of several backends counts those of one"""
_ROUNDS = 10
"""The counts are published once a second"""
_MOST_CALLS = 64
_LONGEST_SITE = 120
_UNDESCRIBED = "undefined"
_NAME_LENGTH, _DESCRIPTION_LENGTH = 12, 40
"""A group's name is a number, or a hash of 40 digits."""
_TINY_S = 1e-3
"""Shortest age of a pending collective: 0 means that nothing waits."""

_Id = tuple[str, int]
"""A recorder, and the number of a group in it"""


class CollectivesProbe:
    """Reads torch's flight recorder, where there is one and process groups exist."""

    name = "collectives"

    def __init__(self) -> None:
        self._dumps: dict[str, Callable[..., bytes]] = {}
        self._groups: dict[_Id, Group | None] = {}
        self._taken: dict[str, Dump] | None = None
        self._last: object = None
        self._mark: object = None
        self._counted: dict[str, int] = {}
        self._reported = ""
        self._gauges: dict[tuple[Metric, str, str], dict[str, str]] = {}
        self._living: set[str] = set()
        """Labels of the groups that count their collectives themselves"""
        self._rounds = 0
        self._installed = False

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        import torch.distributed

        self._context, self._distributed = context, torch.distributed
        if not torch.distributed.is_available():
            return
        bindings = torch._C._distributed_c10d
        self._dumps = {name: dump for name in _RECORDERS if (dump := getattr(bindings, name, None)) is not None}
        self._take = context.breaker(self.name).guard(self._read_in_training)
        context.hooks.explain_error.register(context.breaker(self.name), self._explain_timeout)
        context.hooks.recent_collectives.register(context.breaker(self.name), self.recent)
        self._installed = True

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._installed = False

    def sample(self) -> None:
        """Publish the numbers that the training thread has read, and once a second how many collectives were called."""
        self._rounds += 1
        if self._installed and not self._rounds % _ROUNDS:
            self._publish_counts()
        taken, self._taken = self._taken, None
        if taken is not None:
            self._last = {name: dump.groups for name, dump in taken.items()}
            self._publish(taken)
            self._remove_pending()
            if self._context.hooks.level.value >= ADVANCED:
                self._count(taken)

    def observe(self) -> None:
        """Have the training thread read the numbers; read here if that thread makes no progress."""
        if not self._installed:
            return
        if not self._distributed.is_initialized():
            self._mark = None
            self._living.clear()
            self._remove_gauges(())
            return
        self._publish_counts()
        if not self._dumps:
            self._say("this torch has no flight recorder that can be read")
            return
        recorder = self._context.recorder
        mark, before = (recorder.step, recorder.phase(), len(groups())), self._mark
        self._mark = mark
        if mark != before:
            self._context.at_backward(self._take)
            self._remove_pending()
        else:
            self._read_stalled()

    # -- reading -----------------------------------------------------------------------------------------------------------

    def _read_in_training(self) -> None:
        if self._distributed.is_initialized():
            detailed = self._context.hooks.level.value >= ADVANCED
            self._taken = self._learn(self._read(operations=True)) if detailed else self._numbers()

    def _numbers(self) -> dict[str, Dump]:
        """Read the numbers; when there are new groups once the operations, too, which have the groups' names."""
        read = self._read(operations=False)
        if any((name, number) not in self._groups for name, dump in read.items() for number in dump.groups):
            return self._learn(self._read(operations=True))
        return read

    def _read_stalled(self) -> None:
        """Read the numbers; if they stand still, the operations."""
        self._taken = None  # of the time before
        read = self._numbers()
        now = {name: dump.groups for name, dump in read.items()}
        still, self._last = now == self._last, now
        self._publish(read)
        if still:
            self._publish_pending(self._read(operations=True, only_active=True))
        else:
            self._remove_pending()

    def _read(self, *, operations: bool, lines: bool = False, only_active: bool = False) -> dict[str, Dump]:
        read = {}
        for name, dump in self._dumps.items():
            contents = decode(dump(includeCollectives=operations, includeStackTraces=lines, onlyActive=only_active))
            if contents is not None:
                read[name] = contents
            else:
                self._say(f"its dump is not as torch writes version {MAJOR}")
        return read

    def _learn(self, read: dict[str, Dump]) -> dict[str, Dump]:
        """Record the groups by number, and return the entries. A group without an operation in the recorder stays nameless."""
        for recorder, dump in read.items():
            named = {call.group_id: call.group for call in dump.operations}
            for number in dump.groups:
                group = self._groups.get((recorder, number))
                self._groups[recorder, number] = group or named.get(number)
        return read

    def _shown(self, read: dict[str, Dump]) -> list[tuple[_Id, Group]]:
        """Return the first groups that still exist and are not of one rank."""
        world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
        living = {name for group, name in list(getattr(world, "pg_names", {}).items()) if group.size() > 1}
        ids = [(name, number) for name, dump in read.items() for number in sorted(dump.groups)]
        shown = [(ident, group) for ident in ids if (group := self._groups.get(ident)) is not None and group.name in living]
        return shown[:MOST_GROUPS]

    # -- the last calls, where a rank stands still or a timeout has ended it -------------------------------------------------

    def recent(self) -> dict[str, list[str]]:
        """Return the last collectives of all groups with the lines that called them, as an event's attribute."""
        calls = [call for dump in self._read(operations=True, lines=True).values() for call in dump.operations]
        texts = [
            f"{call.group.attributes['group']} ({call.group.attributes['backend']}) #{call.number} {call.kind} at {_site(call)}"
            for call in calls[-2 * _MOST_CALLS :]
            if call.number is not None
        ]
        return {"collectives": texts[-_MOST_CALLS:]} if texts else {}

    def _explain_timeout(self, error: BaseException) -> dict[str, list[str]]:
        """Return the same for a timeout of torch.distributed. In the thread that it has ended."""
        timed_out = hangs.parse_timeout(runtime_message(root_cause(error))) is not None
        return self.recent() if timed_out and self._distributed.is_initialized() else {}

    # -- publishing, in the sampler thread ---------------------------------------------------------------------------------

    def _publish_counts(self) -> None:
        """Publish the process groups' own counts, which take no recorder."""
        living: set[str] = set()
        for group in groups():
            try:
                labels, number = self._count_of(group)
            except (AttributeError, RuntimeError, TypeError, ValueError):  # the training thread has just destroyed the group
                continue
            if number:
                living.add(labels["group"])
                self._set(catalog.COLLECTIVE_ENQUEUED, number, labels)
            if len(living) >= MOST_GROUPS:
                break
        self._living = living

    def _count_of(self, group: Any) -> tuple[dict[str, str], int]:
        """Return a group's labels, and how many collectives it has counted; 0 if it has no other rank, or does not count."""
        backend = self._distributed.get_backend(group)
        labels = _labels(getattr(group, "group_name", ""), getattr(group, "group_desc", ""), backend)
        counts = backend in _COUNTING and group.size() > 1
        return labels, group._get_sequence_number_for_group() if counts else 0

    def _publish(self, read: dict[str, Dump]) -> None:
        self._say_if_empty(read)
        shown = self._shown(read)
        for (recorder, number), group in shown:
            if group.attributes["group"] not in self._living:
                self._set(catalog.COLLECTIVE_ENQUEUED, read[recorder].groups[number].enqueued, group.attributes)
        self._remove_gauges({*self._living, *(group.attributes["group"] for _, group in shown)})

    def _publish_pending(self, read: dict[str, Dump]) -> None:
        now_ns = time.time_ns()
        for (recorder, number), group in self._shown(read):
            status = read[recorder].groups[number]
            self._set(catalog.COLLECTIVE_COMPLETED, status.completed, group.attributes)
            waiting = [call for call in read[recorder].operations if call.group_id == number and call.pending]
            oldest = min(waiting, key=lambda call: call.created_ns, default=None)
            attributes = group.attributes | {"operation": oldest.kind if oldest else "none"}
            age_s = max(_TINY_S, (now_ns - oldest.created_ns) / 1e9) if oldest else 0.0
            self._set(catalog.COLLECTIVE_PENDING_AGE, age_s, attributes)
            size = oldest.size if oldest else None
            self._set(catalog.COLLECTIVE_PENDING_SIZE, nan if size is None else size, attributes)

    def _count(self, read: dict[str, Dump]) -> None:
        """Count operations that have come back since the last time, up to the first one that has not."""
        for recorder, dump in read.items():
            last = self._counted.get(recorder, -1)
            if dump.operations and dump.operations[-1].record < last:
                last = -1  # the recorder was reset
            for call in takewhile(lambda call: not call.pending, (call for call in dump.operations if call.record > last)):
                self._counted[recorder] = call.record
                self._observe(catalog.COLLECTIVE_DURATION, call.duration_s)
                self._observe(catalog.COLLECTIVE_SIZE, call.size)
                self._context.count(catalog.COLLECTIVE_INPUT, call.size or 0, {"operation": call.kind})
            self._context.yield_gil()

    def _observe(self, metric: Metric, value: float | None) -> None:
        cell = self._context.writer.table.cell(metric, {}) if value is not None else None
        if cell is not None and value is not None:
            cell.observe(value)

    def _remove_pending(self) -> None:
        for metric, backend, group in list(self._gauges):
            if metric is not catalog.COLLECTIVE_ENQUEUED:
                self._context.set_gauge(metric, nan, self._gauges.pop((metric, backend, group)))

    def _remove_gauges(self, kept: Iterable[str]) -> None:
        """Remove the series of groups that are gone."""
        for metric, backend, group in list(self._gauges):
            if group not in kept:
                self._context.set_gauge(metric, nan, self._gauges.pop((metric, backend, group)))

    def _set(self, metric: Metric, value: float, attributes: dict[str, str]) -> None:
        key = metric, attributes["backend"], attributes["group"]
        before = self._gauges.get(key)
        if before is not None and before != attributes:
            self._context.set_gauge(metric, nan, before)
        if before is None and value != value:  # noqa: PLR0124  # NaN: no series is made for what is absent
            return
        self._gauges[key] = attributes
        self._context.set_gauge(metric, value, attributes)

    def _say_if_empty(self, read: dict[str, Dump]) -> None:
        if self._context.recorder.step and self._world_size() > 1 and not any(dump.groups for dump in read.values()):
            self._say("it is empty: TORCH_FR_BUFFER_SIZE is 0, or is not set in a torch that needs it, or the backend has none")

    def _world_size(self) -> int:
        """Return the number of ranks, 0 if the training thread has just destroyed the process group."""
        try:
            return int(self._distributed.get_world_size())
        except (ValueError, RuntimeError):
            return 0

    def _say(self, reason: str) -> None:
        """Record once why nothing can be read."""
        if reason != self._reported:
            self._reported = reason
            self._context.event(catalog.EVENT_COLLECTIVES_UNKNOWN, {"reason": reason})


def _labels(name: str, description: str, backend: str) -> dict[str, str]:
    """Return a group's labels. Names alone are not readable, and descriptions alone not unique: ``mesh_tp`` is many groups."""
    described = description if description != _UNDESCRIBED else ""
    if described == "default_pg":
        label = "default"
    else:
        label = ":".join(part for part in (described[:_DESCRIPTION_LENGTH], name[:_NAME_LENGTH]) if part)
    return {"backend": backend if backend in catalog.PROCESS_GROUP_BACKEND.values else "other", "group": label}


def _site(call: Operation) -> str:
    """Return the innermost line of the user's code that called it."""
    location, caller = places((file, f"{file}:{line} in {function}") for file, line, function in reversed(call.frames))
    return (caller or location)[-_LONGEST_SITE:]
