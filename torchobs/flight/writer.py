"""Writer of a flight file: one record per step from the training thread, everything else from the sampler thread.

A record is *acknowledged* when :meth:`FlightWriter.append` returns: it is in the map and survives SIGKILL and the OOM killer.
(On file systems other than tmpfs the sampler thread writes it to the file within 100 ms; see ``storage``.)
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
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight import endings, files
from torchobs.flight import fold as record_fold
from torchobs.flight.details import Document
from torchobs.flight.directory import FlightDirectory, renew
from torchobs.flight.events import EventRing
from torchobs.flight.files import CreatedFile, create_flight_file, lock_name, new_header, relock
from torchobs.flight.layout import DEFAULT_SIZE, EXIT_SET, NO_STEPS, RECORD_SIZE, Header, Live, Region
from torchobs.flight.step_record import StepRecord, pack, unpack
from torchobs.flight.storage import DeferredStorage, Storage
from torchobs.flight.totals import Anomaly, Word, core_series
from torchobs.flight.value_blocks import Table
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Mapping

_GAP_NS, _PAUSE_S, _MAX_PAUSES = 1_000_000_000, 0.001, 50
_FOLDED_AT_ONCE = 64
"""Most records folded before they are published and other threads get their turn: a thread that appends without pause must
not overtake the fold by a whole ring"""
_alive: weakref.WeakSet[FlightWriter] = weakref.WeakSet()


class FlightWriter:
    """Writes one flight file. Created by :func:`open_writer`; without ``created`` it writes memory only (for tests)."""

    def __init__(self, header: Header, memory: Storage, created: CreatedFile | None = None, *, native: bool = True) -> None:
        regions = header.regions
        self.header = header
        self.memory = memory
        self._created = created
        self.hidden = False
        """True while the file shall have no name; :meth:`check_name` does not restore it then"""
        self._marks_signals = False
        self._marked_in = -1
        """Number of the lock file, as ``faulthandler`` has it"""
        self._live_at = regions[Region.LIVE].offset // 8
        self._steps_at, self._mask = regions[Region.STEPS].offset, regions[Region.STEPS].count - 1
        self._sequence = count(1)
        self._seed = header.seed
        self._recent: deque[bytes] = deque()
        self._pending: dict[int, StepRecord] = {}
        self._complete_ns = time.monotonic_ns()
        self._folding = Lock()
        renew_in_child(self, _folding=Lock)
        self.anomalies: list[Anomaly] = []
        self.taken: deque[StepRecord] | None = None
        """Receives folded records for further analysis, if set"""
        self.event_steps: deque[int] = deque(maxlen=100)
        """Steps with events, for their spans"""
        self._has_ended = False
        self._forced_at = regions[Region.STEPS].count // 2
        self._pauses_left = _MAX_PAUSES
        self._full_at = max(self._forced_at, regions[Region.STEPS].count - 2 * _FOLDED_AT_ONCE)
        self.native = native
        """Whether the compiled part is used, if it is there"""
        self.table = Table(memory, regions, header.seed)
        events = regions[Region.EVENTS]
        self.events = EventRing(memory, events.offset, events.length, header.seed, self._live_at)
        self.details = Document(memory, regions[Region.DETAILS], header.seed)
        self.history = Document(memory, regions[Region.HISTORY], header.seed)
        self.table.core.totals.clear(header.wall_ns - header.monotonic_ns)
        for metric, attributes, word in core_series():
            self.table.claim(metric, attributes, word)
        self.table.core.publish(force=True)
        self.heartbeat()
        _alive.add(self)

    @property
    def name(self) -> str:
        """The file's name in its directory; "" if there is no file."""
        return self._created.name if self._created else ""

    @property
    def path(self) -> str:
        """The file's path."""
        return f"{self._created.place.path}/{self._created.name}" if self._created else ""

    @property
    def place(self) -> FlightDirectory | None:
        """The file's directory while it is open; ``None`` if there is no file."""
        return self._created.place if self._created else None

    def append(  # noqa: PLR0913, PLR0917  # see step_record.pack
        self, step: int, end_ns: int, kind: int, flags: int, losses: int, duration_s: float, loss: float, grad_norm: float,
        learning_rate: float, phase_s: tuple[float, ...], tokens: int = 0, samples: int = 0, norm_scale: float = 1.0,
    ) -> int:  # fmt: skip
        """Write one record (fields as in ``step_record``) and return its sequence number. Any thread may call it.

        It does not wait, except for a fold by another thread while the ring is nearly full of unfolded records, which
        needs steps faster than they can be folded: at most 50 ms between two folds.

        Raises ``struct.error`` when a value does not fit its field; nothing is written then, but one number is skipped,
        as also by an interrupt within this function: the fold skips a number that is missing for a second.
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

    @property
    def ring(self) -> tuple[Any, ...]:
        """What it takes to write records as :meth:`append` does; for ``probes.hot_path``, which has the names."""
        at = self._steps_at, self._mask, self._forced_at
        return self.memory, self._sequence, self._recent, self._force, *at, self._seed

    def _force(self) -> None:
        """Fold before unfolded records could be overwritten; while another thread folds, sleep to let it proceed."""
        self.fold()
        while len(self._recent) >= self._full_at and self._pauses_left:
            self._pauses_left -= 1
            time.sleep(_PAUSE_S)
            self.fold()

    def work_done(self) -> tuple[int, int]:
        """Return the tokens and samples counted so far; for once in a while, since it waits while another thread folds."""
        core = self.table.core
        for _ in range(_MAX_PAUSES):
            self.fold()
            if not self._recent and not self._folding.locked() and core.is_settled:
                break
            time.sleep(_PAUSE_S)
        return core.totals.ints[Word.TOKENS], core.totals.ints[Word.SAMPLES]

    @property
    def unfolded(self) -> int:
        """Number of records that :meth:`fold` has not processed."""
        return len(self._recent)

    def fold(self, most: int = sys.maxsize) -> None:
        """Fold at most ``most`` new records and publish the core; found anomalies are appended to ``anomalies``.

        Does nothing while another thread is folding. Records are folded in order of their numbers.
        """
        most = min(most, len(self._recent))
        while True:
            if self._folding.locked():
                return
            with self._folding:  # see ValueBlock.publish
                self._fold(min(most, _FOLDED_AT_ONCE))
            most -= _FOLDED_AT_ONCE
            if most <= 0:
                return

    def _fold(self, most: int) -> None:
        core = self.table.core
        late = self._take_recent(core.totals.ints[Word.FOLDED_UPTO], most)
        batch = self._contiguous(core.totals.ints[Word.FOLDED_UPTO])
        if late:
            core.change(record_fold.fold_late, late, self.anomalies)
        if batch:
            core.change(record_fold.fold, batch, self.anomalies)
        core.publish()
        self._pauses_left = _MAX_PAUSES

    def _take_recent(self, upto: int, most: int) -> list[StepRecord]:
        """Move at most ``most`` appended records to ``_held``; return those with numbers that were skipped meanwhile."""
        recent, pending, late = self._recent, self._pending, list[StepRecord]()
        for seq in [seq for seq in pending if seq <= upto]:
            del pending[seq]
        for _ in range(min(len(recent), most)):
            decoded = unpack(recent[0], self._seed)
            if decoded is not None and decoded.seq > upto:
                pending[decoded.seq] = decoded
                if self.taken is not None:
                    self.taken.append(decoded)
            elif decoded is not None:
                late.append(decoded)
            recent.popleft()  # only after it is held: an interrupt may come in between
        return late

    def _contiguous(self, upto: int) -> list[StepRecord]:
        """Return the next records in order; a record waits while another thread still writes its predecessor."""
        pending, now_ns, batch, seq = self._pending, time.monotonic_ns(), list[StepRecord](), upto + 1
        while len(batch) < len(pending):
            if seq not in pending:
                if now_ns - self._complete_ns < _GAP_NS and len(pending) - len(batch) < self._forced_at:
                    break
                seq = min(later for later in pending if later > seq)
            batch.append(pending[seq])
            seq += 1
        if batch or not pending:
            self._complete_ns = now_ns
        return batch

    def elapsed_ns(self) -> int:
        """Return the ns since the file's creation."""
        return time.monotonic_ns() - self.header.monotonic_ns

    def heartbeat(self) -> None:
        """Store the heartbeat of the sampler thread; due at least every 0.5 s."""
        self.memory.word(self._live_at + Live.HEARTBEAT_NS, time.monotonic_ns())

    def phase(self, phase_id: int, begun_ns: int) -> None:
        """Store the training thread's phase: 0 for none, else 1 + the index in ``layout.LIVE_PHASES``; not after its end."""
        if not self._has_ended:  # whatever unwinds the stack has not left the loop
            self.memory.word(self._live_at + Live.PHASE, phase_id << 56 | begun_ns // 1000)

    def level(self, level: int) -> None:
        """Store the debug level in force."""
        self.memory.word(self._live_at + Live.LEVEL, level)

    def steps_since(self, since_ns: int | None) -> None:
        """Store since when steps are recorded; ``None``: recording is off."""
        self.memory.word(self._live_at + Live.STEPS_SINCE_NS, NO_STEPS if since_ns is None else since_ns)

    def command(self, number: int) -> None:
        """Store the number of the newest command read."""
        self.memory.word(self._live_at + Live.COMMAND, number)

    def exit(self, reason: int, code: int) -> None:
        """Store how the rank ended (``layout.Exit``)."""
        self._has_ended = True
        self.memory.word(self._live_at + Live.EXIT, EXIT_SET | reason << 32 | code & 0xFFFFFFFF)

    def event(self, name: str, attributes: Mapping[str, object], step: int | None = None) -> None:
        """Append an event with the present time."""
        fields: dict[str, object] = {"k": "event", "t": time.monotonic_ns(), "name": name, "attrs": dict(attributes)}
        if step is not None:
            fields["step"] = step
            if name != catalog.EVENT_SCALARS.name:  # these are points of curves
                self.event_steps.append(step)
        self.events.append(fields)

    def publish(self) -> None:
        """Publish everything: changed blocks, pending frames and stores. Raises ``OSError`` as :meth:`Storage.flush`."""
        self.table.publish()
        self.events.drain()
        if not self.hidden:  # a file without a name can be lost, and is made anew with all it held
            self.memory.flush()

    def check_name(self) -> bool:
        """Recreate the file if its name is gone (same incarnation, counters carried over); return whether it was.

        Raises ``OSError`` when it cannot be recreated; writing to the old, deleted file continues then.
        """
        created = self._created
        if created is None or self.hidden:
            return False
        if not created.place.is_there():
            renew(created.place)
        directory_fd = created.place.fd
        file_is_there = files.inode(directory_fd, created.name) == created.inode
        lock_is_there = files.inode(directory_fd, lock_name(created.name)) == created.lock.identity.inode
        if file_is_there and lock_is_there:
            return False
        files.remove(directory_fd, lock_name(created.name))
        self._created = relock(created) if file_is_there else self._move(created)
        if self._marks_signals:
            self.mark_signals()  # before the old descriptor's number can be another file's
        files.unlock(created.lock)
        return True

    def restore(self) -> bool:
        """Open the file, its lock and its directory again where the program has closed them, before anything else.

        Returns False if one of them cannot be opened by its name (:meth:`check_name`).
        """
        created = self._created
        try:
            if created is not None:
                self._restore_lock(created)
                self.memory.restore()
        except OSError:
            return self.hidden
        return True

    def _restore_lock(self, created: CreatedFile) -> None:
        """Lock the file again, and let no signal leave a mark until then, which would go to the old number."""
        if created.lock.is_intact() and (created.lock.number() == self._marked_in or not self._marks_signals):
            created.place.directory.restore()
            return
        endings.unmark_exits()
        endings.unmark_crash()
        created.lock.restore()
        if self._marks_signals:
            self.mark_signals()
        files.lock(created.lock)

    def mark_signals(self) -> None:
        """Have signals leave their marks, in the file or beside it, if they would end the process."""
        if self._created is not None:
            self._marks_signals = True
            self._marked_in = self._created.lock.number()
            endings.mark_exits(self._marked_in)
            endings.mark_crash(self._marked_in)

    def _unmark_signals(self) -> None:
        if self._marks_signals:
            self._marks_signals = False
            endings.unmark_exits()
            endings.unmark_crash()

    def hide(self) -> None:
        """Unlink the file and its lock, so that no exporter sees the rank for now."""
        self.hidden = True
        if self._created is not None:
            for name in (self._created.name, lock_name(self._created.name)):
                files.remove(self._created.place.fd, name)

    def show(self) -> None:
        """Give the file a name again. Raises ``OSError`` as :meth:`check_name`."""
        self.hidden = False
        self.check_name()

    def _move(self, created: CreatedFile) -> CreatedFile:
        """Recreate the file and switch to it."""
        files.remove(created.place.fd, created.name)
        content = self.memory.snapshot()
        with contextlib.ExitStack() as undo:
            again = create_flight_file(created.place, created.header, content)
            undo.callback(files.unlock, again.lock)
            self.memory.move(again, content)
            undo.pop_all()
        for block in self.table.blocks:
            block.publish(force=True)
        return again

    def close(self) -> None:
        """Publish everything and close the file, which stays for the exporter. Idempotent."""
        created, self._created = self._created, None
        if created is None:
            return
        with contextlib.ExitStack() as steps:  # each is done, the last first, also where the file cannot be written
            steps.callback(created.place.directory.close)
            steps.callback(files.unlock, created.lock)
            steps.callback(self._unmark_signals)
            steps.callback(self.memory.detach)
            self.fold()
            self.publish()

    def detach(self) -> None:
        """Store into private memory from now on: in a forked child the file is the parent's."""
        self._created = None
        self.memory.detach()


def open_writer(
    place: FlightDirectory, resource: Mapping[str, str | int], size: int = DEFAULT_SIZE, *, native: bool = True
) -> FlightWriter:
    """Create and publish a flight file in ``place``. ``native``: see :class:`FlightWriter`.

    Raises ``files.NoRoomError`` or ``OSError`` when it cannot be created, ``ValueError`` for a bad size.
    """
    with contextlib.ExitStack() as undo:
        created = create_flight_file(place, new_header(resource, size, in_memory=place.in_memory))
        undo.callback(files.unlock, created.lock)
        memory: Storage = Storage(created.map) if place.in_memory else DeferredStorage(created)
        undo.pop_all()
    return FlightWriter(created.header, memory, created, native=native)


def _detach_all() -> None:
    for writer in list(_alive):
        writer.detach()


os.register_at_fork(after_in_child=_detach_all)
