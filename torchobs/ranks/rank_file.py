"""A flight file that the scanner follows, from its discovery to the rank's end, and which incarnation of a rank is served.

Incarnations are never summed or merged. Of two processes that live at the same time and claim one rank (two scripts started
with one run id) the older keeps the rank, and the younger gets a suffix for all its life, the first digits of its incarnation:
``rank="0-3f9a12bc"``. After its restart it has other digits, so that no series goes back. A process without a step, a helper
that only imports torch, is no rank beside one that trains. So the plain rank may pass from one training to the other once,
when the first of them takes a step; an exporter that restarts gives it to the older of those that have trained, for it has
only the files. A process that starts while its predecessor still dies is served once that is over, at once where the
launcher counted a restart.
"""

from __future__ import annotations

import errno
import struct
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.config.launchers import LAUNCH, LAUNCHED_BY
from torchobs.detect import hangs
from torchobs.detect.hangs import Durations, Standstill
from torchobs.flight import endings, files, reader, throughput
from torchobs.flight.events import Tail
from torchobs.flight.files import file_name, lock_name
from torchobs.flight.layout import BadFlightFileError, Exit, Region
from torchobs.flight.reader import DecodedBlock, Distribution, FlightFile, View
from torchobs.ranks import labels, state
from torchobs.ranks.snapshot import Rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torchobs.flight.layout import Header, LiveWords


OVERLAP_NS = 3_000_000_000
"""Two incarnations coexist if both have heartbeats for this long; a shorter overlap is a restart."""

DIGITS = 8
"""Digits of the incarnation that are appended to the rank."""


NOW_NS = (1 << 63) - 1
"""A time after the birth of every file, also of one created during the scan."""


class RankCandidate(NamedTuple):
    """A flight file as a candidate for serving a rank."""

    rank: tuple[str, str, str]
    """job_name, run_id, rank"""
    incarnation: str
    """in hexadecimal"""
    same_boot: bool
    """True if its CLOCK_MONOTONIC times are comparable with ours"""
    born_ns: int
    """creation time: CLOCK_MONOTONIC, unaffected by clock jumps; wall clock for a file of another boot"""
    restart: int
    heartbeat_ns: int
    launch: str = ""
    """id shared by the processes of one launcher (``config.launchers``); empty: unknown"""
    launched_by: str = ""
    """incarnation of the process that started this one by ``multiprocessing``; it is no rank then"""
    alive_ns: int = 0
    """until when its process lived: :data:`NOW_NS` while it holds its lock and beats; 0 if it is dead, stopped or unknown"""
    displaced: bool = False
    """it was served with a suffix, or until a younger one took its place: it does not take the plain rank (back)"""
    trains: bool = False
    """it has taken a step"""


def resolve(candidates: Iterable[RankCandidate]) -> Mapping[str, str]:
    """Return the incarnations to serve with the suffixes of their ranks: one of each rank has none."""
    rivals: dict[tuple[str, str, str], list[RankCandidate]] = defaultdict(list)
    for candidate in candidates:
        rivals[candidate.rank].append(candidate)
    served: dict[str, str] = {}
    for group in rivals.values():
        holders = _holders(sorted(group, key=lambda holder: (holder.same_boot, holder.born_ns, holder.incarnation)))
        holders = [holder for holder in holders if holder.trains] or holders[:1]
        served |= {candidate.incarnation: f"-{candidate.incarnation[:DIGITS]}" for candidate in holders}
        served |= {candidate.incarnation: "" for candidate in [holder for holder in holders if not holder.displaced][:1]}
    return served


def _holders(group: Iterable[RankCandidate]) -> list[RankCandidate]:
    """Return the latest of each line of successors, the oldest line first; ``group``: the oldest candidate first."""
    holders: list[RankCandidate] = []
    for candidate in group:
        for place, holder in enumerate(holders):
            is_successor = _is_successor(holder, candidate)
            if not is_successor and holder.heartbeat_ns - candidate.born_ns > OVERLAP_NS:
                continue  # they live side by side
            if is_successor or holder.alive_ns <= candidate.born_ns:  # else the older may be about to end
                holders[place] = candidate
            break
        else:
            holders.append(candidate)
    return holders


def _is_successor(older: RankCandidate, younger: RankCandidate) -> bool:
    """Return whether the launcher started the younger one in place of the older one."""
    if not (older.same_boot and younger.same_boot) or younger.launched_by == older.incarnation:
        return True
    is_same_launch = not (older.launch and younger.launch) or older.launch == younger.launch
    return younger.restart > older.restart and is_same_launch


_EVENTS = (catalog.SPAN_STEP.name, "late", catalog.EVENT_EXCEPTION.name)
"""Records of the event ring that a rank's state and its exemplars come from"""
READ_ERRORS = (
    *(OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError, MemoryError),
    struct.error,
)
"""Exceptions that reading a file can raise; the file is then bad, and the exporter continues with the others."""

_PASSING = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS),
        *(errno.EACCES, errno.EPERM, errno.EBADF, errno.EIO, errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT),
    }
)

REPORTED_NS = 10_000_000_000
"""How long a superseded rank stays in snapshots after its end: a client that polls every second misses none."""
SURELY_DEAD_S = 10.0
_NEVER_NS = -(1 << 62)


def is_passing(problem: BaseException) -> bool:
    """Return whether the error is not the file's fault: out of descriptors or memory, or temporarily unreadable.

    The rank's known state is kept then, instead of counting the rank as gone.
    """
    return isinstance(problem, MemoryError) or (isinstance(problem, OSError) and problem.errno in _PASSING)


class Now(NamedTuple):
    """The exporter's clocks at one moment."""

    monotonic_ns: int
    wall_ns: int
    boot_id: bytes


class RankFile:
    """An open flight file and its observed state. Not thread-safe."""

    def __init__(self, file: FlightFile, name: str, now: Now, owner: int | None) -> None:
        """Use :func:`open_tracked`."""
        header = file.header
        self.file, self.name, self.header, self.owner = file, name, header, owner
        self.incarnation = header.incarnation.hex()
        self.rank, self.info = labels.identity(header.resource), labels.of_info(header.resource)
        self.same_boot = header.boot_id == now.boot_id
        self.view: View = file.read()
        self._new_events = Tail(header.regions[Region.EVENTS].length, header.seed)
        self._exemplars = labels.Exemplars(header)
        self.exception: Mapping[str, str] = {}
        """attributes of ``catalog.RANK_EXCEPTION``; empty: no exception of its main thread is in its event ring"""
        self.lock_held = False
        self._ended_by: tuple[int, float] | None = None
        self._ends = False
        self._fatal: int | None = None
        """the signal of a crash"""
        self._crash: tuple[str, ...] = ()
        self.opened = 0
        self.state = "alive"
        self.fading = False
        self._closed = False
        self.suffix: str | None = None
        """appended to its rank when it was last served; ``None``: never served"""
        self.displaced = False
        """it was served with a suffix, or until a younger one took its place"""
        self._superseded_ns: int | None = None
        self.ended_in: int | None = None
        """number of the snapshot in which it was first seen to be dead"""
        self._learned_s = _timeout_s(self.view)
        self._usual: tuple[int | None, float | None] = None, None
        """The last step's end, and the median duration of the steps up to it"""
        self._observed_ns = _NEVER_NS
        self._beat_ns = beat_ns(header, self.view.live, now)

    def candidate(self) -> RankCandidate:
        """Return this incarnation as a candidate for serving."""
        beats = self.up and self.state != "unresponsive" and self.view.live.exit_reason is None
        alive_ns = NOW_NS if self.lock_held else self.view.live.heartbeat_ns or 0
        claim = candidate_of(self.header, self.view.live, same_boot=self.same_boot)
        trains = self.view.last_step_ns is not None
        return claim._replace(alive_ns=alive_ns * beats, displaced=self.displaced, trains=trains)

    @property
    def exemplars(self) -> labels.Shown:
        """Exemplars of its histograms."""
        return self._exemplars.shown

    @property
    def up(self) -> bool:
        """True while the process exists."""
        return self.state in state.LIVING

    def follow(self, directory_fd: int) -> None:
        """Switch to the file if its writer recreated it. Raises one of :data:`READ_ERRORS` if it is another incarnation's."""
        if not self._closed:
            self.file.follow(directory_fd, self.name)

    def observe(self, directory_fd: int, now: Now, hang_timeout_s: float | None, grace_s: float = 0.0) -> None:
        """Query the lock, read the file, update the state. Raises :data:`READ_ERRORS`, after updating from older data.

        ``grace_s``: how long after SIGTERM the first process of a container, which that does not end, is killed.
        """
        if self._closed:
            return
        # the lock first: if it is free, the following read is final
        self.lock_held = self.same_boot and is_held(directory_fd, lock_name(self.name), before=self.lock_held)
        was_up = self.up
        may_have_mark = not self.lock_held or self.header.pid == 1
        self._ended_by = endings.ended_by(directory_fd, lock_name(self.name)) if may_have_mark else None
        terminated_age_s = self.terminated_age_s(now)
        # killed in the grace, too: a lock that has just become free says alive until its heartbeat is old
        self._ends = self.header.pid == 1 and terminated_age_s is not None and terminated_age_s <= grace_s
        self._fatal, self._crash = (None, ()) if self.lock_held else endings.crash(directory_fd, lock_name(self.name))
        try:
            self._read(now)
        finally:  # an unreadable file counts as one without a heartbeat
            self._observed_ns = now.monotonic_ns
            learned_s = inf if self._may_never_train() else self._learned_s
            observation = self._observation(now, learned_s if hang_timeout_s is None else hang_timeout_s)
            self.state, self.fading = state.judge(observation), state.fading(observation)
        if was_up and not self.up and not self.lock_held:
            self._read(now)

    def progress_age_s(self, now: Now) -> float | None:
        """Return the seconds since the last step, or the start if none; ``None`` if steps are not recorded."""
        recorded_ns = self.view.live.steps_since_ns
        if recorded_ns is None:
            return None
        since = max(self.view.last_step_ns or self.header.monotonic_ns, recorded_ns)
        return max(0.0, (now.monotonic_ns - since) / 1e9)

    def terminated_age_s(self, now: Now) -> float | None:
        """Return the seconds since a SIGTERM left its mark; ``None`` without one."""
        return None if self._ended_by is None else now.wall_ns / 1e9 - self._ended_by[1]

    def standstill(self, now: Now) -> Standstill | None:
        """Return the time without a step of a rank that stands still (``detect.hangs``), else ``None``."""
        age_s, quiet_s = self.progress_age_s(now), self._quiet_s(now)
        steps = self.state in {"alive", "hung"} and self.view.last_step_ns is not None
        if not steps or age_s is None or quiet_s is None or quiet_s < hangs.LEAST_S:
            return None
        histogram, bounds = _durations_of(self.view)
        durations = Durations(histogram.counts, bounds, histogram.greatest or bounds[-1]) if histogram else Durations()
        return hangs.standstill(age_s, quiet_s, self.view.live.phase, self._usual_step_s(), durations)

    def _usual_step_s(self) -> float | None:
        """Return the median duration of the latest steps, which are read once in each standstill."""
        if self._usual[0] != self.view.last_step_ns:
            with suppress(*READ_ERRORS):
                records = self.file.latest(throughput.RECORDS)
                self._usual = self.view.last_step_ns, throughput.usual_step_s(records)
        return self._usual[1]

    def _may_never_train(self) -> bool:
        """Return whether a lone rank had no batch or backward pass yet: it may serve, evaluate, or be a notebook."""
        alone = (labels.number(self.header.resource, "world_size") or 1) == 1
        return alone and self.view.last_step_ns is None and self.view.live.phase == "other"

    def _quiet_s(self, now: Now) -> float | None:
        """Return the seconds since the last sign of a step or its phases: a rank that still takes batches has not hung."""
        age_s, begun_ns = self.progress_age_s(now), self.view.live.phase_begun_ns
        if age_s is None or begun_ns is None:
            return age_s
        return min(age_s, max(0.0, (now.monotonic_ns - begun_ns) / 1e9))

    def served(self, suffix: str, now: Now) -> Rank:
        """Return the rank as it is now; ``suffix`` is appended to its label."""
        job_name, run_id, rank = self.rank
        return Rank(
            job_name=job_name,
            run_id=run_id,
            rank=rank + suffix,
            incarnation=self.incarnation,
            info=self.info,
            state=self.state,
            up=self.up,
            view=self.view,
            progress_age_s=self.progress_age_s(now) if self.up else None,
            beat_age_s=self.beat_age_s(now),
            ended_in=self.ended_in,
            opened=self.opened,
            exemplars=self.exemplars,
            exception=self.exception,
            crash=self._crash,
            standstill=self.standstill(now),
            terminated_age_s=self.terminated_age_s(now),
        )

    def beat_age_s(self, now: Now) -> float:
        """Return the seconds since the last heartbeat, or for a dead rank since its end."""
        return (now.monotonic_ns - self._beat_ns) / 1e9

    def certainly_dead(self, now: Now) -> bool:
        """Return whether the rank is surely dead: a living process can lose its lock, and its heartbeat can pause."""
        return not self.up and (not self.same_boot or self.beat_age_s(now) > SURELY_DEAD_S)

    def final_suffix(self, now: Now) -> str | None:
        """Return the suffix of a superseded rank while its final counts are still to be reported; else ``None``.

        A program that repeats ``init()``, training and ``shutdown()`` has a new incarnation each time, and possibly no scan
        saw one dead while it was the newest. Ignored are ranks that still run, and those never served and long dead, which
        ended before this exporter started.
        """
        is_old = self.suffix is None and self.certainly_dead(now)
        if is_old or (self.up and not self.fading):
            return None
        if self._superseded_ns is None:
            self._superseded_ns = now.monotonic_ns
        return self.suffix or "" if now.monotonic_ns - self._superseded_ns < REPORTED_NS else None

    @contextmanager
    def access(self, directory_fd: int) -> Iterator[FlightFile]:
        """Give access to the file in a ``with`` block, reopened if it was closed. Raises one of :data:`READ_ERRORS`."""
        if not self._closed:
            yield self.file
            return
        again = reader.open_file(directory_fd, self.name, self.owner)
        try:
            if again.header != self.header:
                raise BadFlightFileError("another incarnation has this name now")
            again.read(final=True)
            yield again
        finally:
            again.close()

    def release(self) -> None:
        """Close the file and keep the view. Idempotent."""
        self._closed = True
        self.file.close()

    def _read(self, now: Now) -> None:
        before, view = self.view.live.heartbeat_ns, self.file.read(final=not self.up and not self.lock_held)
        self._learned_s = _timeout_s(view)
        beat = view.live.heartbeat_ns
        if beat is not None and beat != before:
            # the rank's own time is exact if comparable with ours: both CLOCK_MONOTONIC, unless in another time namespace
            self._beat_ns = beat if self._observed_ns <= beat <= now.monotonic_ns else now.monotonic_ns
        self.view = self._with_mark(view, self.beat_age_s(now))
        fresh = self.file.fresh_events(self._new_events, view.live.event_head, *_EVENTS)
        self._exemplars.add(fresh)
        self.exception = state.newest_exception(fresh) or self.exception

    def _with_mark(self, view: View, beat_age_s: float) -> View:
        """Return the view, with the signal that ended the rank as its exit, unless the rank recorded its exit itself."""
        live = view.live
        if self._fatal is not None and live.exit_reason is None:
            return replace(view, live=replace(live, exit_reason=Exit.CRASHED, exit_code=128 + self._fatal))
        if self._ended_by is None or live.exit_reason is not None:
            return view
        number, marked_s = self._ended_by
        terminated = replace(view, live=replace(live, exit_reason=Exit.TERMINATED, exit_code=128 + number))
        if self._ends:
            return terminated
        if self.lock_held:
            return view
        last_s = self.header.wall_s(live.heartbeat_ns or self.header.monotonic_ns)
        lived_on_s = last_s - marked_s
        survives = lived_on_s > state.FADED_AFTER_S >= beat_age_s  # its lock is free because the program has closed it
        if lived_on_s > endings.LASTING_S or survives:
            return view
        return terminated

    def _observation(self, now: Now, hang_timeout_s: float) -> state.Observation:
        live = self.view.live
        return state.Observation(
            same_boot=self.same_boot,
            lock_held=self.lock_held,
            beat_age_s=self.beat_age_s(now),
            exit_reason=live.exit_reason,
            exit_code=live.exit_code,
            phase=live.phase,
            quiet_s=self._quiet_s(now),
            hang_timeout_s=hang_timeout_s,
            ends=self._ends,
        )


def candidate_of(header: Header, live: LiveWords, *, same_boot: bool) -> RankCandidate:
    """Return an incarnation as a candidate for serving its rank."""
    resource = header.resource
    return RankCandidate(
        rank=labels.identity(resource),
        incarnation=header.incarnation.hex(),
        same_boot=same_boot,
        born_ns=header.monotonic_ns if same_boot else header.wall_ns,
        restart=labels.number(resource, "restart") or 0,
        heartbeat_ns=live.heartbeat_ns or 0,
        launch=labels.text(resource.get(LAUNCH, "")),
        launched_by=labels.text(resource.get(LAUNCHED_BY, "")),
    )


def beat_ns(header: Header, live: LiveWords, now: Now) -> int:
    """Return the time of the last heartbeat on our CLOCK_MONOTONIC, as far as the file shows it."""
    last_ns = live.heartbeat_ns or header.monotonic_ns
    if header.boot_id == now.boot_id:
        return min(now.monotonic_ns, last_ns)
    ago_ns = now.wall_ns - header.wall_ns_of(last_ns)
    return now.monotonic_ns - max(0, ago_ns)


def read_claim(file: FlightFile, directory_fd: int, name: str, now: Now) -> RankCandidate:
    """Return the claim of an open file by its header, live words and lock, without its values."""
    header, same_boot = file.header, file.header.boot_id == now.boot_id
    locked = same_boot and is_held(directory_fd, lock_name(name))
    live = file.live()  # after the lock: if that is free, these are the final ones
    age_s = (now.monotonic_ns - beat_ns(header, live, now)) / 1e9
    beats = locked and age_s <= state.UNRESPONSIVE_AFTER_S and live.exit_reason is None
    return candidate_of(header, live, same_boot=same_boot)._replace(alive_ns=NOW_NS * beats, trains=file.has_steps())


def open_tracked(directory_fd: int, name: str, owner: int | None, now: Now) -> RankFile:
    """Open and read a flight file. Raises one of :data:`READ_ERRORS`; then nothing is left open."""
    file = reader.open_file(directory_fd, name, owner)
    try:
        _check_name(file, name)
        return RankFile(file, name, now, owner)
    except READ_ERRORS:
        file.close()
        raise


def _check_name(file: FlightFile, name: str) -> None:
    if name != file_name(file.header):
        raise BadFlightFileError("a copy: its header gives another name")


def is_held(directory_fd: int, name: str, *, before: bool = False) -> bool:
    """Return whether a rank's lock is held; ``before``: whether it was, in case it cannot be queried at present."""
    try:
        return files.is_locked(directory_fd, name)
    except OSError as problem:
        # missing or invalid lock: only the heartbeat can show that the rank lives
        return before and is_passing(problem)


def _durations_of(view: View) -> tuple[Distribution | None, Sequence[float]]:
    """Return the distribution of a rank's step times, in block 0, and the bounds of its buckets; ``None`` before the first."""
    block = view.blocks[0] if view.blocks else DecodedBlock()
    for series, value in zip(block.series, block.values, strict=True):
        if series.name == catalog.STEP_DURATION.name and isinstance(value, Distribution):
            return value, series.bounds
    return None, ()


def _timeout_s(view: View) -> float:
    """Return how long the rank may be without a step, learned from its step times."""
    durations, bounds = _durations_of(view)
    return state.FIRST_STEP_S if durations is None else state.hang_timeout_s(durations, bounds)
