"""The writing side of a flight file: one record per step from the training thread, everything else from the sampler.

A record is *acknowledged* when :meth:`FlightWriter.append` returns: it is in the map, and outlives SIGKILL and the OOM killer.
(On a file system other than tmpfs it waits for the sampler thread, and is in the file within 100 ms; ``memory``.)
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import weakref
from collections import deque
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING
from zlib import crc32

from torchobs.flight.files import lock
from torchobs.flight.files.create import CreatedFile, create, lock_name, new_header, relock
from torchobs.flight.files.location import renew
from torchobs.flight.format.event_ring import EventRing
from torchobs.flight.format.layout import DEFAULT_SIZE, EXIT_SET, NO_STEPS, RECORD_SIZE, Live, Region
from torchobs.flight.format.step_record import CRC, PLAIN, StepRecord, pack, unpack
from torchobs.flight.metrics import core_series
from torchobs.flight.metrics import fold as record_fold
from torchobs.flight.metrics.totals import Anomaly, Word
from torchobs.flight.writer.series_table import Table
from torchobs.flight.writer.storage import DeferredStorage, DirectStorage, Storage
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchobs.flight.files.location import FlightDirectory
    from torchobs.flight.format.layout import Header

_GAP_NS = 1_000_000_000
_FOLDED_AT_ONCE = 64
"""Records, before what they say is in the file and another thread may go on: one that appends them as fast as it can must not
be a whole ring ahead by then"""
_REST_S, _MOST_RESTS = 0.001, 50
_alive: weakref.WeakSet[FlightWriter] = weakref.WeakSet()


class FlightWriter:
    """Writes one flight file. Build it by :func:`open_writer`; ``header`` and ``memory`` alone make one for tests."""

    def __init__(self, header: Header, memory: Storage, born: CreatedFile | None = None) -> None:
        regions = header.regions
        self.header = header
        self.memory = memory
        self._born = born
        self.hidden = False
        """Whether it shall have no name; set back, :meth:`check_name` gives it one again"""
        self._live_at = regions[Region.LIVE].offset // 8
        self._steps_at, self._mask = regions[Region.STEPS].offset, regions[Region.STEPS].count - 1
        self._sequence = count(1)
        self._seed = header.seed
        self._recent: deque[bytes] = deque()
        self._held: dict[int, StepRecord] = {}
        self._complete_ns = time.monotonic_ns()
        self._folding = Lock()
        renew_in_child(self, _folding=Lock)
        self.anomalies: list[Anomaly] = []
        self.taken: deque[tuple[StepRecord, bytes]] | None = None
        """Where records go as they are folded, for who wants to look at them: decoded, and as they stand in the ring"""
        self._forced_at = regions[Region.STEPS].count // 2
        self._rests_left = _MOST_RESTS
        self._full_at = max(self._forced_at, regions[Region.STEPS].count - 2 * _FOLDED_AT_ONCE)
        self.table = Table(memory, regions, header.seed)
        events = regions[Region.EVENTS]
        self.events = EventRing(memory, events.offset, events.length, header.seed, self._live_at)
        self.table.core.totals.clear(header.wall_ns - header.monotonic_ns)
        for metric, attributes, word in core_series.series():
            self.table.claim(metric, attributes, word)
        self.table.core.publish(force=True)
        self.heartbeat()
        _alive.add(self)

    @property
    def name(self) -> str:
        """The file's name in its directory; "" for one that is only memory."""
        return self._born.name if self._born else ""

    @property
    def path(self) -> str:
        """The file's path."""
        return f"{self._born.place.path}/{self._born.name}" if self._born else ""

    @property
    def place(self) -> FlightDirectory | None:
        """Its directory, while it is open; ``None`` for one that is only memory."""
        return self._born.place if self._born else None

    def append(  # noqa: PLR0913, PLR0917  # see record.pack
        self, step: int, end_ns: int, kind: int, flags: int, losses: int, duration_s: float, loss: float, grad_norm: float,
        learning_rate: float, phase_s: tuple[float, ...], tokens: int = 0, samples: int = 0, norm_scale: float = 1.0,
    ) -> int:  # fmt: skip
        """Write one record (fields as in ``record``) and return its sequence number. Any thread.

        It waits for nobody, but for a fold that another thread is in while the ring is all but full of what was not folded,
        which takes steps that are made faster than they can be counted: 50 ms at most, until a fold has ended.

        Raises ``struct.error`` when a value does not fit its field, and writes nothing then but leaves a gap of one number,
        as an interrupt between two lines here does too: the fold passes over a number that stays away for a second.
        """
        seq = next(self._sequence)
        raw = pack(
            seq, step, end_ns, kind, flags, losses, duration_s, loss, grad_norm, learning_rate, phase_s, tokens, samples,
            norm_scale, self._seed,
        )  # fmt: skip
        self.memory.store(self._steps_at + ((seq - 1) & self._mask) * RECORD_SIZE, raw)
        recent = self._recent
        recent.append(raw)
        if len(recent) >= self._forced_at:
            self._force()
        return seq

    def append_plain(  # noqa: PLR0913, PLR0917  # see record.pack
        self, step: int, end_ns: int, flags: int, losses: int, fetch: int, fetched: int, backward: int, backward_ends: int,
        optimizer: int, loss: float, grad_norm: float, learning_rate: float, tokens: int, samples: int, norm_scale: float,
        begun_ns: int,
    ) -> int:  # fmt: skip
        """Write the record of a plain step. As :meth:`append`."""
        seq = next(self._sequence)
        # packed here and not by a function of record's: every call costs, where caches are cold
        body = PLAIN.pack(
            seq, step, end_ns, 3, flags, losses, fetch, loss, grad_norm, learning_rate, fetched, backward, backward_ends,
            optimizer, tokens, samples, norm_scale, begun_ns, 0,
        )  # fmt: skip
        raw = body + CRC.pack(crc32(body, self._seed))
        self.memory.store(self._steps_at + ((seq - 1) & self._mask) * RECORD_SIZE, raw)
        recent = self._recent
        recent.append(raw)
        if len(recent) >= self._forced_at:
            self._force()
        return seq

    def _force(self) -> None:
        """Fold before the ring could wrap over what was not; where another thread is at it, let that one come forward."""
        self.fold()
        while len(self._recent) >= self._full_at and self._rests_left:
            self._rests_left -= 1
            time.sleep(_REST_S)
            self.fold()

    @property
    def unfolded(self) -> int:
        """How many records :meth:`fold` has not looked at."""
        return len(self._recent)

    def fold(self, most: int = sys.maxsize) -> None:
        """Fold ``most`` of the records that came since, and publish the core; what they show is added to ``anomalies``.

        Does nothing while another thread is folding. Records are folded in order of their numbers.
        """
        most = min(most, len(self._recent))
        while True:
            if self._folding.locked():
                return
            with self._folding:  # see block.Block.publish
                self._fold(min(most, _FOLDED_AT_ONCE))
            most -= _FOLDED_AT_ONCE
            if most <= 0:
                return

    def _fold(self, most: int) -> None:
        core_series = self.table.core
        late = self._take_recent(core_series.totals.ints[Word.FOLDED_UPTO], most)
        batch = self._contiguous(core_series.totals.ints[Word.FOLDED_UPTO])
        if late:
            core_series.change(record_fold.fold_late, late, self.anomalies)
        if batch:
            core_series.change(record_fold.fold, batch, self.anomalies)
        core_series.publish()
        self._rests_left = _MOST_RESTS

    def _take_recent(self, upto: int, most: int) -> list[StepRecord]:
        """Hold ``most`` of what was appended until it is folded; return records whose numbers were passed over meanwhile."""
        recent, held, late = self._recent, self._held, list[StepRecord]()
        for seq in [seq for seq in held if seq <= upto]:
            del held[seq]
        for _ in range(min(len(recent), most)):
            decoded = unpack(recent[0], self._seed)
            if decoded is not None and decoded.seq > upto:
                held[decoded.seq] = decoded
                if self.taken is not None:
                    self.taken.append((decoded, recent[0]))
            elif decoded is not None:
                late.append(decoded)
            recent.popleft()  # not before it is held: an interrupt may come in between
        return late

    def _contiguous(self, upto: int) -> list[StepRecord]:
        """Return the next records in order; one whose predecessor another thread is still writing waits for it."""
        held, now_ns, batch, seq = self._held, time.monotonic_ns(), list[StepRecord](), upto + 1
        while len(batch) < len(held):
            if seq not in held:
                if now_ns - self._complete_ns < _GAP_NS and len(held) - len(batch) < self._forced_at:
                    break
                seq = min(later for later in held if later > seq)
            batch.append(held[seq])
            seq += 1
        if batch or not held:
            self._complete_ns = now_ns
        return batch

    def elapsed_ns(self) -> int:
        """Return the ns since birth."""
        return time.monotonic_ns() - self.header.monotonic_ns

    def heartbeat(self) -> None:
        """Say that the sampler thread is alive. At least every 0.5 s."""
        self.memory.word(self._live_at + Live.HEARTBEAT_NS, time.monotonic_ns())

    def phase(self, phase_id: int, begun_ns: int) -> None:
        """Say what the training thread is doing; 0 is nothing, else 1 + the index in ``record.LIVE_PHASES``."""
        self.memory.word(self._live_at + Live.PHASE, phase_id << 56 | begun_ns // 1000)

    def level(self, level: int) -> None:
        """Say which debug level is in force."""
        self.memory.word(self._live_at + Live.LEVEL, level)

    def steps_since(self, since_ns: int | None) -> None:
        """Say since when steps are recorded; ``None``: they are not."""
        self.memory.word(self._live_at + Live.STEPS_SINCE_NS, NO_STEPS if since_ns is None else since_ns)

    def exit(self, reason: int, code: int) -> None:
        """Say how the rank ended (``layout.Exit``)."""
        self.memory.word(self._live_at + Live.EXIT, EXIT_SET | reason << 32 | code & 0xFFFFFFFF)

    def event(self, name: str, attributes: Mapping[str, object], step: int | None = None) -> None:
        """Append an event, dated now."""
        fields: dict[str, object] = {"k": "event", "t": time.monotonic_ns(), "name": name, "attrs": dict(attributes)}
        if step is not None:
            fields["step"] = step
        self.events.append(fields)

    def publish(self) -> None:
        """Make everything visible: blocks that changed, frames and stores that wait. Raises ``OSError`` as ``Memory.flush``."""
        self.table.publish()
        self.events.drain()
        self.memory.flush()

    def check_name(self) -> bool:
        """Recreate the file if its name is gone (same incarnation, counters carried over); tell whether it had to.

        Raises ``OSError`` when it cannot be recreated; the old map goes on being written, unseen.
        """
        born = self._born
        if born is None or self.hidden:
            return False
        file_is_there, lock_is_there = (
            _has_name(born, born.name, born.inode),
            _has_name(born, lock_name(born.name), born.lock_inode),
        )
        if file_is_there and lock_is_there:
            return False
        if not os.fstat(born.place.fd).st_nlink:
            renew(born.place)
        _unlink(born, lock_name(born.name))
        self._born = relock(born) if file_is_there else self._move(born)
        lock.release(born.lock_fd)
        return True

    def hide(self) -> None:
        """Take the file's name away, and its lock's: nobody shall see it, for now."""
        self.hidden = True
        if self._born is not None:
            for name in (self._born.name, lock_name(self._born.name)):
                _unlink(self._born, name)

    def show(self) -> None:
        """Give the file its name back. Raises ``OSError`` as :meth:`check_name`."""
        self.hidden = False
        self.check_name()

    def _move(self, born: CreatedFile) -> CreatedFile:
        """Make the file again and store into it from now on."""
        _unlink(born, born.name)
        content = self.memory.snapshot()
        with contextlib.ExitStack() as undo:
            again = create(born.place, born.header, content)
            undo.callback(lock.release, again.lock_fd)
            self.memory.move(again, content)
            undo.pop_all()
        for block in self.table.blocks:
            block.publish(force=True)
        return again

    def close(self) -> None:
        """Publish everything and let go of the file, which stays for the exporter. Idempotent."""
        born, self._born = self._born, None
        if born is None:
            return
        self.fold()
        self.publish()
        self.memory.detach()
        lock.release(born.lock_fd)
        os.close(born.place.fd)

    def detach(self) -> None:
        """In a forked child: store into private memory from now on, for the map is the parent's."""
        self._born = None
        self.memory.detach()


def open_writer(
    place: FlightDirectory,
    resource: Mapping[str, str | int],
    size: int = DEFAULT_SIZE,
) -> FlightWriter:
    """Create and publish a flight file in ``place``.

    Raises ``birth.NoRoomError`` or ``OSError`` when it cannot be had, ``ValueError`` for a bad size.
    """
    with contextlib.ExitStack() as undo:
        born = create(place, new_header(resource, size))
        undo.callback(lock.release, born.lock_fd)
        memory: Storage = DirectStorage(memoryview(born.map)) if place.in_memory else DeferredStorage(born)
        undo.pop_all()
    return FlightWriter(born.header, memory, born)


def _has_name(born: CreatedFile, name: str, inode: int) -> bool:
    try:
        return os.stat(name, dir_fd=born.place.fd, follow_symlinks=False).st_ino == inode
    except FileNotFoundError:
        return False


def _unlink(born: CreatedFile, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=born.place.fd)


def _detach_all() -> None:
    for writer in list(_alive):
        writer.detach()


os.register_at_fork(after_in_child=_detach_all)
