"""The writing side of a flight file: one record per step from the training thread, everything else from the sampler.

A record is *acknowledged* when :meth:`FlightWriter.append` returns: it is in the map, and outlives SIGKILL and the OOM killer.
(On a file system other than tmpfs it is queued, and in the map within 100 ms; ``memory``.)
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING

from torchobs.flight import lock, record
from torchobs.flight.birth import Born, create, lock_name, new_header
from torchobs.flight.events import EventRing
from torchobs.flight.layout import DEFAULT_SIZE, EXIT_SET, RECORD_SIZE, Live, Region
from torchobs.flight.memory import DeferredMemory, DirectMemory, Memory
from torchobs.flight.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchobs.flight.layout import Header
    from torchobs.flight.place import Place

_GAP_NS = 1_000_000_000
_alive: weakref.WeakSet[FlightWriter] = weakref.WeakSet()


class FlightWriter:
    """Writes one flight file. Build it by :func:`open_writer`; ``header`` and ``memory`` alone make one for tests."""

    def __init__(self, header: Header, memory: Memory, born: Born | None = None) -> None:
        regions = header.regions
        self.header = header
        self.memory = memory
        self._born = born
        self._live_at = regions[Region.LIVE].offset // 8
        self._steps_at, self._mask = regions[Region.STEPS].offset, regions[Region.STEPS].count - 1
        self._sequence = count(1)
        self._seed = header.seed
        self._recent: deque[bytes] = deque()
        self._held: dict[int, bytes] = {}
        self._expected, self._complete_ns = 1, time.monotonic_ns()
        self._folding = Lock()
        self.anomalies: list[record.Anomaly] = []
        self._forced_at = regions[Region.STEPS].count // 2
        self.table = Table(memory, regions, header.seed)
        events = regions[Region.EVENTS]
        self.events = EventRing(memory, events.offset, events.length, header.seed, self._live_at)
        self.table.core.totals.clear(header.wall_ns - header.monotonic_ns)
        for metric, attributes, word in record.series():
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

    def append(  # noqa: PLR0913, PLR0917  # see record.pack
        self, step: int, end_ns: int, kind: int, flags: int, losses: int, duration_s: float, loss: float, grad_norm: float,
        learning_rate: float, phase_s: tuple[float, ...], tokens: int = 0, samples: int = 0, norm_scale: float = 1.0,
    ) -> int:  # fmt: skip
        """Write one record (fields as in ``record``) and return its sequence number. Any thread; never waits.

        Raises ``struct.error`` when a value does not fit its field, and writes nothing then but leaves a gap of one number,
        as an interrupt between two lines here does too: the fold passes over a number that stays away for a second.
        """
        seq = next(self._sequence)
        raw = record.pack(
            seq, step, end_ns, kind, flags, losses, duration_s, loss, grad_norm, learning_rate, phase_s, tokens, samples,
            norm_scale, self._seed,
        )  # fmt: skip
        self.memory.store(self._steps_at + ((seq - 1) & self._mask) * RECORD_SIZE, raw)
        self.memory.word(self._live_at + Live.STEP_HEAD, seq)
        self._recent.append(raw)
        if len(self._recent) >= self._forced_at:
            self.fold()  # before the ring could wrap over what was not folded
        return seq

    def fold(self) -> None:
        """Fold the records written since the last call and publish the core; what they show is added to ``anomalies``.

        Does nothing while another thread is folding. Records are folded in order of their numbers.
        """
        if not self._folding.acquire(blocking=False):
            return
        try:
            batch = self._contiguous()
            if batch:
                core = self.table.core
                core.change(lambda totals: record.fold(totals, batch, self.anomalies))
                core.publish()
        finally:
            self._folding.release()

    def _contiguous(self) -> list[record.StepRecord]:
        """Return the next records in order; one whose predecessor another thread is still writing waits for it."""
        held, now_ns = self._held, time.monotonic_ns()
        for _ in range(len(self._recent)):
            raw = self._recent.popleft()
            held[int.from_bytes(raw[:8], "little")] = raw
        if held and self._expected not in held:
            if now_ns - self._complete_ns < _GAP_NS:
                return []
            self._expected = min(held)
        self._complete_ns = now_ns
        batch = []
        while (following := held.pop(self._expected, None)) is not None:
            decoded = record.unpack(following, self._seed)
            if decoded is not None:
                batch.append(decoded)
            self._expected += 1
        return batch

    def heartbeat(self) -> None:
        """Say that the sampler thread is alive. At least every 0.5 s."""
        self.memory.word(self._live_at + Live.HEARTBEAT_NS, time.monotonic_ns())

    def phase(self, phase_id: int, begun_ns: int) -> None:
        """Say what the training thread is doing; 0 is nothing, else 1 + the index in ``record.PHASE_NAMES``."""
        self.memory.word(self._live_at + Live.PHASE, phase_id << 56 | begun_ns // 1000)

    def level(self, level: int) -> None:
        """Say which debug level is in force."""
        self.memory.word(self._live_at + Live.LEVEL, level)

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
        """Make everything visible: blocks that changed, frames that wait, queued stores."""
        self.table.publish()
        self.events.drain()
        self.memory.flush()

    def check_name(self) -> bool:
        """Recreate the file if its name is gone (same incarnation, counters carried over); tell whether it had to.

        Raises ``OSError`` when it cannot be recreated; the old map goes on being written, unseen.
        """
        born = self._born
        if born is None or _exists(born):
            return False
        for name in (born.name, lock_name(born.name)):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=born.place.fd)
        again = create(born.place, born.header, self.memory.snapshot())
        self._born = again
        self.memory.replace(memoryview(again.map))
        first, last = self._steps_at, self._steps_at + (self._mask + 1) * RECORD_SIZE
        again.map[first:last] = born.map[first:last]  # steps that were written between the copy and the switch
        with contextlib.suppress(OSError):
            lock.release(born.lock_fd)
        return True

    def close(self) -> None:
        """Publish everything and let go of the file, which stays for the exporter. Idempotent."""
        born, self._born = self._born, None
        if born is None:
            return
        self.fold()
        self.publish()
        self.memory.replace(memoryview(bytearray(self.header.file_size)))
        lock.release(born.lock_fd)
        os.close(born.place.fd)

    def detach(self) -> None:
        """In a forked child: store into private memory from now on, for the map is the parent's."""
        self._born = None
        self.memory.replace(memoryview(bytearray(self.header.file_size)))


def open_writer(
    place: Place,
    resource: Mapping[str, str | int],
    size: int = DEFAULT_SIZE,
    memory: Callable[[memoryview], Memory] | None = None,
) -> FlightWriter:
    """Create and publish a flight file in ``place``.

    Raises ``birth.NoRoomError`` or ``OSError`` when it cannot be had, ``ValueError`` for a bad size.
    """
    born = create(place, new_header(resource, size))
    kind = memory or (DirectMemory if place.in_memory else DeferredMemory)
    return FlightWriter(born.header, kind(memoryview(born.map)), born)


def _exists(born: Born) -> bool:
    try:
        os.stat(born.name, dir_fd=born.place.fd, follow_symlinks=False)
        os.stat(lock_name(born.name), dir_fd=born.place.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _detach_all() -> None:
    for writer in list(_alive):
        writer.detach()


os.register_at_fork(after_in_child=_detach_all)
