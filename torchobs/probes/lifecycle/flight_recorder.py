"""Parse what torch's flight recorder dumps about the collectives of a process. Pure.

The format is that of ``FlightRecorder.hpp`` and ``FlightRecorderDetail.hpp`` in ``torch/csrc/distributed/c10d``: a new field
raises its minor version, a changed one its major. 2.4 is torch 2.5's, the first with JSON; 2.10 is torch 2.13's. In JSON all
values of ``pg_status`` are text and absent times 0; the pickled form has numbers and ``None``, and the lines that called. Both
are read; of a pickled one plain values alone are taken.

Backends fill it in differently. NCCL reports ``state`` and, with TORCH_NCCL_ENABLE_TIMING=1, durations. gloo leaves ``state``
at "scheduled" for ever, sets ``retired`` once an operation has come back, and records neither send nor recv.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

MAJOR = 2
"""The major version that is understood"""
_LONGEST_MS = 1e12
MOST_ENTRIES = 100_000
"""More than anybody sets: a dump beyond it is refused"""

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


class UnreadableError(ValueError):
    """A dump that is damaged, or of a version that is not understood; the message says which."""


class GroupStatus(NamedTuple):
    """Sequence numbers of the last collectives of one process group; 0: none yet."""

    enqueued: int
    completed: int


class Operation(NamedTuple):
    """One recorded operation."""

    group_id: int
    """number of the process group's backend in this process: a key of ``Dump.groups``"""
    group_name: str
    """torch's name of the group, the same on all its ranks"""
    description: str
    backend: str
    kind: str
    """a value of ``catalog.COLLECTIVE_OPERATIONS``"""
    created_ns: int
    """Unix time of the call"""
    size: int | None
    """bytes of the inputs; ``None``: unknown"""
    pending: bool
    """it has been called, and has not come back"""
    record: int
    """consecutive number in the recorder"""
    duration_s: float | None
    """on the device; ``None``: not recorded"""


class RecordedCall(NamedTuple):
    """One recorded collective, and the lines that called it."""

    group_name: str
    description: str
    backend: str
    kind: str
    """a value of ``catalog.COLLECTIVE_OPERATIONS``"""
    number: int
    """in its group, the same on all its ranks"""
    frames: tuple[tuple[str, int, str], ...]
    """file, line and function, the innermost first"""


class Dump(NamedTuple):
    """What a recorder knows."""

    groups: Mapping[int, GroupStatus]
    operations: tuple[Operation, ...]
    """oldest first; those that make no sense are left out"""


def decode(dumped: bytes) -> Dump:
    """Return the contents of a dump in JSON. Raises :class:`UnreadableError`."""
    try:
        return parse(json.loads(dumped))
    except (ValueError, RecursionError) as problem:
        if isinstance(problem, UnreadableError):
            raise
        reason = "is no valid JSON"
        raise UnreadableError(reason) from problem


def parse(dump: object) -> Dump:
    """Return the contents of a dump as objects. Raises :class:`UnreadableError`."""
    if not isinstance(dump, Mapping):
        reason = "is no mapping"
        raise UnreadableError(reason)
    version = dump.get("version")
    major = version.partition(".")[0] if isinstance(version, str) else ""
    if major != str(MAJOR):
        reason = f"has version {str(version)[:16]!r}, and {MAJOR} is understood"
        raise UnreadableError(reason)
    status, entries = dump.get("pg_status"), dump.get("entries") or ()
    if not isinstance(status, Mapping) or not isinstance(entries, (list, tuple)) or len(entries) > MOST_ENTRIES:
        reason = "has no status of process groups"
        raise UnreadableError(reason)
    groups = {int(key): found for key, one in status.items() if _is_number(key) and (found := _status(one)) is not None}
    return Dump(groups, tuple(_operations(entries)))


def calls(dumped: bytes, most: int) -> list[RecordedCall]:
    """Return the last collectives in a pickled dump, oldest first; empty if it makes no sense."""
    try:
        dump = _Plain(io.BytesIO(dumped)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, LookupError):
        return []
    version = dump.get("version") if isinstance(dump, dict) else None
    if not isinstance(version, str) or version.partition(".")[0] != str(MAJOR) or not isinstance(dump.get("entries"), list):
        return []
    found = [call for entry in dump["entries"][-2 * most :] if (call := _call(entry)) is not None]
    return found[-most:]


class _Plain(pickle.Unpickler):
    """Reads plain values: none of a class, which could be made to run code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Refuse it."""
        reason = f"has a {module_name}.{global_name}"
        raise pickle.UnpicklingError(reason)


def _call(entry: object) -> RecordedCall | None:
    if not isinstance(entry, dict) or entry.get("is_p2p"):
        return None
    group, name, number = entry.get("process_group"), entry.get("profiling_name"), entry.get("collective_seq_id")
    if not isinstance(group, (list, tuple)) or len(group) != 2 or not isinstance(name, str) or type(number) is not int:  # noqa: PLR2004  # name, description
        return None
    frames = entry.get("frames")
    read = [_frame(frame) for frame in frames] if isinstance(frames, list) else []
    lines = tuple(frame for frame in read if frame is not None)
    return RecordedCall(str(group[0]), str(group[1]), name.partition(":")[0], operation(name), number, lines)


def _frame(frame: object) -> tuple[str, int, str] | None:
    if not isinstance(frame, dict):
        return None
    file, line, function = (frame.get(key) for key in ("filename", "line", "name"))
    return (file, line, function) if isinstance(file, str) and type(line) is int and isinstance(function, str) else None


def operation(name: str) -> str:
    """Return which of ``catalog.COLLECTIVE_OPERATIONS`` a ``profiling_name`` means: ``nccl:_all_gather_base``, all_gather."""
    word = name.partition(":")[2].partition(" ")[0]
    if word in _OPERATIONS:
        return _OPERATIONS[word]
    if word in _PLAIN:
        return word
    return next((family for family in _FAMILIES if word.lstrip("_").startswith(family)), "other")


def _operations(entries: list[Any] | tuple[Any, ...]) -> Iterator[Operation]:
    for entry in entries:
        if not isinstance(entry, Mapping):
            continue
        group, name, number = entry.get("process_group"), entry.get("profiling_name"), entry.get("pg_id")
        created_ns = entry.get("time_created_ns")
        if not isinstance(group, (list, tuple)) or len(group) != 2 or not isinstance(name, str):  # noqa: PLR2004  # name, description
            continue
        record = entry.get("record_id")
        if type(number) is not int or type(created_ns) is not int or type(record) is not int:
            continue
        done = entry.get("retired") is True or entry.get("state") == "completed"
        kind, size = operation(name), _size(entry.get("input_sizes"), entry.get("input_dtypes"))
        backend = name.partition(":")[0]
        took_s = _seconds(entry.get("duration_ms"))
        yield Operation(number, str(group[0]), str(group[1]), backend, kind, created_ns, size, not done, record, took_s)


def _seconds(duration_ms: object) -> float | None:
    return float(duration_ms) / 1e3 if isinstance(duration_ms, (int, float)) and 0 <= duration_ms < _LONGEST_MS else None


def _size(shapes: object, types: object) -> int | None:
    if not isinstance(shapes, (list, tuple)) or not isinstance(types, (list, tuple)) or len(shapes) != len(types):
        return None
    total = 0
    for shape, name in zip(shapes, types, strict=True):
        item = 1 if str(name).startswith("Float8") else _ITEM_BYTES.get(str(name))
        if item is None or not isinstance(shape, (list, tuple)) or not all(type(n) is int and n >= 0 for n in shape):
            return None
        total += item * prod(shape)
    return total


def _status(one: object) -> GroupStatus | None:
    if not isinstance(one, Mapping):
        return None
    found = [one.get(f"last_{what}_collective") for what in ("enqueued", "completed")]
    if not all(_is_number(value) for value in found):
        return None
    enqueued, completed = (max(0, int(value)) for value in found if value is not None)  # -1: none yet
    return GroupStatus(enqueued, completed)


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return len(value) < 20 and value.removeprefix("-").isdecimal() and value.isascii()  # noqa: PLR2004  # digits of 2^63
    return type(value) is int
