"""The event ring: events, finished spans and their late values, as frames at multiples of 64 bytes.

A frame is ``position:u64 length:u32 crc:u32`` and ``length`` bytes of a JSON object. ``position`` is virtual: it counts
bytes since the file's creation and never wraps; a frame is stored at ``position % ring``. The CRC covers position, length
and payload. A frame that does not fit before the ring's end is stored at its beginning. A reader needs no head: it checks
every 64 bytes and accepts a frame that is stored where its position says and matches its CRC.

A frame's ``k`` is ``event``, ``span`` or ``span_start`` (``otel/traces.py``), or ``late``: the ``grad_norm`` of a ``step``
that a device delivered after its span was written. :func:`decode` alone looks into frames; all others get an :class:`Event`, a
:class:`Span` or a :class:`Late`.

**Identifiers** of a run's traces and spans are derived from the flight file's header.

Spans are written for few steps only, and long after these ended. An identifier is a function of the run and of the span's
subject (:class:`SpanIds`), so the training thread generates none, and all ranks name a trace alike without communication. An
application's span can name the current step as its parent, and an exporter can attach an exemplar to any step's sample.
OpenTelemetry allows no identifier of zeros alone: the last digit of such a hash is 1.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections import deque
from hashlib import blake2b
from math import isfinite
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.catalog import EVENT_BY_NAME
from torchobs.flight.layout import ALIGN, Live, nonfinite_name
from torchobs.support import text as text_format
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torchobs.flight.layout import Header
    from torchobs.flight.storage import Storage

TRACE_ID = "trace_id"
"""Key in the resource, present if the launcher set a trace."""
_FRAME = struct.Struct("<QII")
MAX_PAYLOAD = 16 * 1024
_LONGEST = MAX_PAYLOAD + ALIGN
"""bytes of a frame, at most: the room that is left at the end of a lap, where none fits, is smaller"""
_MAX_PENDING = 1024
_MAX_DEPTH = 32
_FAR_NS = (1 << 63) - 1
"""OTLP's times have 64 bits"""
_NONFINITE = ("NaN", "Infinity", "-Infinity")
_MAX_BITS = 128
_FAR = 1 << 62


def plain(value: object, depth: int = _MAX_DEPTH) -> Any:
    """Convert ``value`` to JSON types: a non-finite float becomes its name, an unknown or too deep object its text."""
    if isinstance(value, float) and not isfinite(value):
        return nonfinite_name(value)
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return hex(value)  # Python refuses to print 4,300 digits in decimal
    if isinstance(value, (str, int, float)) or value is None:
        return value
    if isinstance(value, (list, tuple)) and depth > 1:
        return [plain(item, depth - 1) for item in value]
    if isinstance(value, dict) and depth > 1:
        return {str(key): plain(item, depth - 1) for key, item in value.items()}
    return str(value)


class EventRing:
    """Writer of the ring. Any thread may append without waiting: while another thread writes, that one takes the frame over."""

    __slots__ = ("__weakref__", "_lock", "_memory", "_offset", "_pending", "_position", "_seed", "_size", "dropped", "live_at")

    def __init__(self, memory: Storage, offset: int, size: int, seed: int, live_at: int) -> None:
        self._memory, self._offset, self._size, self._seed = memory, offset, size, seed
        self.live_at = live_at
        self._position = 0
        self._pending: deque[bytes] = deque()
        self._lock = Lock()
        renew_in_child(self, _lock=Lock)
        self.dropped = 0

    @property
    def limit(self) -> int:
        """Maximum length of a frame's payload in bytes."""
        return min(MAX_PAYLOAD, self._size // 4)

    @property
    def laps(self) -> float:
        """How many times the ring's size has been written since its creation."""
        return self._position / self._size

    def append(self, fields: Mapping[str, object]) -> None:
        """Add one frame; it is dropped and counted if too long, or if 1,024 frames are pending."""
        # names and paths need not be UTF-8; the error handler keeps what can be encoded
        text = json.dumps(plain(dict(fields)), ensure_ascii=False, separators=(",", ":"))
        self.put(text.encode(errors="replace"))

    def put(self, payload: bytes) -> None:
        """Add one frame from encoded JSON."""
        if len(payload) > self.limit or len(self._pending) >= _MAX_PENDING:
            self.dropped += 1
            return
        self._pending.append(payload)
        self.drain()

    def drain(self) -> None:
        """Write the pending frames, unless another thread is doing so."""
        while self._pending:
            if self._lock.locked():
                return
            with self._lock:  # see ValueBlock.publish
                if self._pending:
                    self._write(self._pending.popleft())

    def _write(self, payload: bytes) -> None:
        length = _aligned(len(payload))
        room = self._size - self._position % self._size
        position = self._position if length <= room else self._position + room
        crc = zlib.crc32(payload, zlib.crc32(_FRAME.pack(position, len(payload), 0), self._seed))
        frame = _FRAME.pack(position, len(payload), crc) + payload
        self._memory.store(self._offset + position % self._size, frame)
        self._position = position + length
        self._memory.word(self.live_at + Live.EVENT_HEAD, self._position)


class Event(NamedTuple):
    """An event. ``time_ns``: Unix time, by the clock pair read at the rank's start."""

    name: str
    time_ns: int
    step: int | None
    attributes: Mapping[str, Any]
    position: int = 0
    """of its frame: a later event has a greater one"""

    @property
    def time_s(self) -> float:
        """The same in seconds."""
        return self.time_ns / 1e9

    def text(self, name: str, longest: int = text_format.LONGEST) -> str:
        """Return an attribute as one sanitised line; empty if absent."""
        value = self.attributes.get(name)
        if value is None:
            return ""
        return text_format.clean(text_format.joined(value) if isinstance(value, list) and value else value, longest)

    def texts(self, name: str, most: int | None = None, longest: int = text_format.LONGEST) -> list[str]:
        """Return the first items of an attribute that is a list, sanitised; empty if it is none."""
        value = self.attributes.get(name)
        return [text_format.clean(item, longest) for item in value[:most]] if isinstance(value, list) else []

    def number(self, name: str) -> float | None:
        """Return a numeric attribute, also one spelled as text (``"NaN"``); else ``None``."""
        value = self.attributes.get(name)
        if isinstance(value, str) and value in _NONFINITE:
            return float(value)
        return float(value) if isinstance(value, (int, float)) and not abs(value) >= float(_FAR) ** 4 else None

    def count(self, name: str) -> int:
        """Return an attribute that is a count; 0 if absent or invalid."""
        number = self.number(name)
        return int(number) if number is not None and 0 < number < _FAR else 0


class Span(NamedTuple):
    """A span. Times in Unix ns."""

    name: str
    begun_ns: int
    ended_ns: int | None
    """``None``: it has only begun"""
    attributes: Mapping[str, Any]
    position: int
    is_ours: bool
    """written by torchobs, not by the application, so that the catalog describes its attributes"""
    fields: Mapping[str, Any]
    """its frame, for the push, which sends all there is"""

    @property
    def duration_s(self) -> float:
        """Length of a finished span in seconds."""
        return ((self.ended_ns or self.begun_ns) - self.begun_ns) / 1e9


class Late(NamedTuple):
    """A gradient norm that came after the span of its step."""

    step: int
    grad_norm: float


def decode(position: int, payload: bytes, header: Header) -> Event | Span | Late | None:
    """Return the entry in a frame; ``None`` for an impossible one: an application may give a span any times."""
    fields = fields_of(payload) or {}
    match fields.get("k"), fields.get("name"), fields.get("attrs"):
        case "event", str(name), dict(values):
            time_ns, step = fields.get("t"), fields.get("step")
            if isinstance(time_ns, int) and 0 <= time_ns <= _FAR_NS and (step is None or isinstance(step, int)):
                return Event(name, header.wall_ns_of(time_ns), step, _in_catalog(name, values), position)
        case "span" | "span_start", str(name), dict(values):
            begun_ns, ended_ns = fields.get("t0"), fields.get("t1") if fields["k"] == "span" else _FAR_NS
            if isinstance(begun_ns, int) and isinstance(ended_ns, int) and 0 <= begun_ns <= ended_ns <= _FAR_NS:
                scope = fields.get("scope")
                is_ours = isinstance(scope, list) and scope[:1] == ["torchobs"]
                return Span(name, begun_ns, None if ended_ns == _FAR_NS else ended_ns, values, position, is_ours, fields)
        case "late", _, _:
            if isinstance(step := fields.get("step"), int) and isinstance(norm := fields.get("grad_norm"), (int, float)):
                return Late(step, norm)
    return None


def _in_catalog(name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of an event without those that the catalog rules out: no number with a unit, of no closed set."""
    event = EVENT_BY_NAME.get(name)
    wrong = {
        attribute.name
        for attribute in (event.attributes if event else ())
        if (value := values.get(attribute.name)) is not None
        and (
            (attribute.values and value not in attribute.values)
            or (attribute.unit and not (isinstance(value, (int, float)) or value in _NONFINITE))
        )
    }
    return {key: value for key, value in values.items() if key not in wrong} if wrong else values


def scan(ring: bytes, seed: int) -> Iterator[tuple[int, bytes]]:
    """Yield position and payload of every valid frame, oldest first."""
    return iter(sorted(_frames(ring, seed)))


def read(frames: Iterable[tuple[int, bytes]], header: Header, *names: str) -> list[Event | Span | Late]:
    """Return the entries of the frames, in their order; with ``names`` only those that mention one, the others not decoded."""
    marks = [f'"{name}"'.encode() for name in names]
    chosen = (frame for frame in frames if not marks or any(mark in frame[1] for mark in marks))
    return [item for position, payload in chosen if (item := decode(position, payload, header)) is not None]


def fields_of(payload: bytes) -> dict[str, Any] | None:
    """Decode a JSON object; ``None`` if it is none."""
    try:
        fields = json.loads(payload)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


class Tail:
    """Incremental reader of a ring: returns each frame once, and reads only the part written since the last call."""

    __slots__ = ("_head", "_next", "_seed", "_size", "missed")

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self.missed = 0
        """bytes before the frames of the last call that were overwritten before it"""
        self._head = self._next = 0

    def read_new(self, head: int, read: Callable[[int, int], bytes]) -> list[tuple[int, bytes]]:
        """Return position and payload of the new frames, oldest first; none before ``head`` has changed.

        ``head``: the end of the newest frame as the writer published it; ``read(at, length)`` reads the ring.
        """
        self.missed = 0
        if head == self._head:
            return []
        frames = sorted(frame for at, length in self._parts(head) if length for frame in self._frames(read(at, length), at))
        self._head = head
        if frames:  # not the head: with reordered stores it can be visible before its frame
            gap = frames[0][0] - self._next
            self.missed = gap if gap > _LONGEST else 0  # or else it is the room that is left at the end of a lap
            position, payload = frames[-1]
            self._next = position + _aligned(len(payload))
        return frames

    def _parts(self, head: int) -> list[tuple[int, int]]:
        length = head - self._next
        if not 0 < length < self._size:
            return [(0, self._size)]
        at = self._next % self._size
        first = min(length, self._size - at)
        return [(at, first), (0, length - first)]

    def _frames(self, part: bytes, at: int) -> Iterator[tuple[int, bytes]]:
        return (frame for frame in _frames(part, self._seed, at, self._size) if frame[0] >= self._next)


def _frames(part: bytes, seed: int, offset: int = 0, size: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the frames of a ring, or of the part that begins at ``offset`` of a ring of ``size`` bytes."""
    size = size or len(part)
    at = 0
    while at < len(part) - _FRAME.size:
        position, length, crc = _FRAME.unpack_from(part, at)
        begin, at = at, at + ALIGN
        if not length or position % size != begin + offset or length > min(MAX_PAYLOAD, len(part) - begin - _FRAME.size):
            continue
        payload = part[begin + _FRAME.size : begin + _FRAME.size + length]
        if crc == zlib.crc32(payload, zlib.crc32(_FRAME.pack(position, length, 0), seed)):
            yield position, payload
            at = begin + _aligned(length)  # frames do not overlap


def _aligned(length: int) -> int:
    """Return the size in bytes of a frame with a payload of that length."""
    return -(-(_FRAME.size + length) // ALIGN) * ALIGN


class SpanId(NamedTuple):
    """A span and its trace, in hexadecimal digits."""

    trace: str
    span: str


class SpanIds:
    """Identifiers of one incarnation's spans."""

    __slots__ = ("_life", "run")

    def __init__(self, header: Header) -> None:
        self.run = SpanId(trace_id(header), derived(header.incarnation.hex(), "run"))
        restart = header.resource.get("restart")
        self._life = f"{self.run.trace}/{restart if isinstance(restart, int) else 0}"

    def segment(self, epoch: int, part: int) -> SpanId:
        """Return the identifiers of the part (from 0) of an epoch (0: before the first, or without any)."""
        what = f"segment/{epoch}/{part}"
        return SpanId(derived(self._life, what, 16), derived(self.run.span, what))

    def step(self, number: int) -> SpanId:
        """Return the identifiers of a step."""
        return SpanId(self.step_trace(number), derived(self.run.span, str(number)))

    def step_trace(self, number: int) -> str:
        """Return the trace of a step, the same on all ranks."""
        return derived(self._life, f"step/{number}", 16)


def trace_id(header: Header) -> str:
    """Return the run's trace id, 32 hexadecimal digits; the incarnation's in a file that names no run."""
    trace, run_id = header.resource.get(TRACE_ID), header.resource.get("run_id")
    if isinstance(trace, str):
        return trace
    return derived("torchobs", run_id, 16) if isinstance(run_id, str) and run_id else header.incarnation.hex()


def derived(parent: str, what: str, size: int = 8) -> str:
    """Return the identifier, of ``size`` bytes, of a part of the parent by its name: of a phase within its step's span."""
    digits = blake2b(f"{parent}/{what}".encode(errors="replace"), digest_size=size).hexdigest()
    return digits if digits.strip("0") else f"{digits[:-1]}1"
