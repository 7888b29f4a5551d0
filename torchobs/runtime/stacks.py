"""Stacks of a rank's threads: on request, early in a stall, and where the GIL is held.

On request or in a stall the sampler thread writes them, in 17 µs, with neither locals nor values, and the states of a data
loader's workers. An exporter requests them of a hung rank only once it is sure (``ranks.state.hang_timeout_s``), and not every
run has one. In a stall no alert is raised here: the file lies beside the flight file, and ``inspect`` reads it if the run ends
there.

Where the GIL is held no Python thread runs, but the kernel still delivers signals. A POSIX timer, which the sampler thread
resets ten times a second (0.8 µs), sends a real-time signal after three seconds without a reset; ``faulthandler``'s handler
writes the stacks of all threads in C. Where there is the compiled part, that takes six signals, half a second apart: a process
that was stopped or frozen gets one as it goes on, and a stack that changes while the handler reads it can crash the process.
The signal goes to the sampler thread alone (``SIGEV_THREAD_ID``), which only waits for the GIL, so that no system call of the
application is interrupted. ``faulthandler.dump_traceback_later`` would do the same, but there is one per process, and it is the
user's; ``register(chain=True)`` would run the signal's default action, which kills the process. The signal is one without a
handler; if somebody installs one later, the timer is not set again. A forked child has neither the timer, which POSIX does not
inherit, nor the handler.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import weakref
from datetime import datetime, timezone
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.detect import hangs as stall
from torchobs.detect.hangs import Durations
from torchobs.flight import artifacts, endings
from torchobs.flight.artifacts import END, LIMITS, STACKS, STUCK, named
from torchobs.flight.layout import LIVE_PHASES
from torchobs.flight.native import compiled
from torchobs.flight.totals import DURATION_SUM, Word
from torchobs.probes.timeline import CHECKPOINT, COMPILE, DATA, EVALUATION, FORWARD, OTHER
from torchobs.support.descriptors import Descriptor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchobs.flight.artifacts import ArtifactName
    from torchobs.flight.directory import FlightDirectory
    from torchobs.flight.writer import FlightWriter
    from torchobs.probes.context import ProbeContext


_MAX_WORKERS = 8
MIN_FREE = 64 << 10
"""Bytes that must be free; the stacks of a hundred threads, ``faulthandler``'s limit, take less."""


def write_stacks(
    context: ProbeContext, number: int, cause: str = "asked", more: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Write the stacks as the artifact of that number, and an event with ``cause`` and ``more``.

    On failure, the event says why; it is logged only where the stacks were asked for.
    """
    writer, place = context.writer, context.writer.place
    if place is None:
        return
    from torchobs.probes.data import state_of  # which imports torch

    evidence = named(writer.name, STACKS, number)
    workers = [worker for workers in context.hooks.loader_workers.ask() for worker in workers][:_MAX_WORKERS]
    states = [f"{worker.name}: {state_of(worker.pid)}" for worker in workers]

    def fill(file: Descriptor) -> None:
        artifacts.append(file, _header(context, states).encode())
        faulthandler.dump_traceback(file=file.number(), all_threads=True)
        os.ftruncate(file.number(), min(os.fstat(file.number()).st_size, LIMITS[STACKS] - len(END)))
        artifacts.append(file, END)

    refused = artifacts.write(place, evidence, MIN_FREE, fill)
    if refused is None:
        loader: dict[str, object] = {"workers": states} if workers else {}
        if workers and workers[0].awaited:
            loader["awaited"] = workers[0].name
        context.event(catalog.EVENT_STACKS, {"cause": cause, **more, **loader, "evidence": evidence.id})
        return
    context.event(catalog.EVENT_STACKS_FAILED, {"cause": cause, **refused, "evidence": evidence.id})
    if cause == "asked":
        context.warn_limited("stacks", f"stacks could not be written to {place.path}: {refused['detail']}", rank_only=True)


def _header(context: ProbeContext, states: Sequence[str]) -> str:
    """Return the lines besides ``faulthandler``'s: rank, step, time, names of threads, and the states of a loader's workers."""
    threads = "".join(f"# Thread 0x{thread.ident or 0:016x} is {thread.name!r}\n" for thread in threading.enumerate())
    workers = "".join(f"# {state}\n" for state in states)
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    rank = context.writer.header.resource.get("rank", 0)
    return f"# rank {rank} after step {context.recorder.step}, {now}\n{threads}{workers}\n"


PAUSE_NS = 2_000_000_000
"""Time between two rounds of the sampler from which the process was stopped or starved, and not hung"""

IDLE = LIVE_PHASES.index("idle")
_EVALUATION_PHASES = frozenset({DATA, FORWARD, OTHER})
"""Phases that the last boundary may indicate while a model is evaluated"""
_PATIENT = frozenset({EVALUATION, CHECKPOINT, COMPILE, IDLE})
"""Phases of any length"""


def live_phase(context: ProbeContext) -> tuple[int, int]:
    """Return the activity of the training thread, as an index into ``LIVE_PHASES``, and since when, in ns."""
    phase, since_ns = context.recorder.phase()
    if phase in _EVALUATION_PHASES and context.training.evaluating_since_ns:
        return EVALUATION, context.training.evaluating_since_ns
    return (IDLE if context.training.idle else phase), since_ns


def durations(context: ProbeContext) -> Durations:
    """Return the histogram of the durations of the steps so far."""
    totals = context.writer.table.core.totals
    counts = totals.ints[Word.STEP_DURATION : DURATION_SUM].tolist()
    return Durations(counts, catalog.SECONDS_BOUNDS, totals.floats[DURATION_SUM + 2])


class StallWatch:
    """One per session, for the sampler thread. Writes once in each stall; costs a comparison while training goes on."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._survived = 0
        self._written_ns = 0
        """Begin of the stall with stacks written already; 0: none"""
        self._last_ns = self._resumed_ns = time.monotonic_ns()

    def sample(self) -> None:
        """Write the stacks if no sign of a step came for longer than usual."""
        now_ns = time.monotonic_ns()
        if now_ns - self._last_ns > PAUSE_NS:
            self._resumed_ns = now_ns
        self._last_ns = now_ns
        phase, since_ns = live_phase(self._context)
        if self._written_ns and since_ns > self._written_ns:
            self._written_ns, self._survived = 0, self._survived + 1
        quiet_s = (now_ns - max(since_ns, self._resumed_ns)) / 1e9
        if quiet_s < stall.LEAST_S or self._written_ns or phase in _PATIENT or self._may_never_train(phase):
            return
        if quiet_s >= stall.early_limit_s(*durations(self._context), self._survived) and not self._is_evaluating():
            self._written_ns = now_ns
            more: dict[str, object] = {"phase": LIVE_PHASES[phase], "quiet_s": round(quiet_s, 3)}
            for collectives in self._context.hooks.recent_collectives.ask():
                more |= collectives
            write_stacks(self._context, time.time_ns() // 1_000_000, "stalled", more)

    def _is_evaluating(self) -> bool:
        """Return whether a model is being evaluated: on a busy machine the phase probe may not have noticed yet."""
        progress = self._context.recorder.so_far()
        return progress is not None and bool(progress[1].evaluating_since())

    def _may_never_train(self, phase: int) -> bool:
        """Return whether a lone rank is before its first batch and backward pass: it may serve, evaluate, or be a notebook."""
        alone = self._context.writer.header.resource.get("world_size", 1) == 1
        return alone and phase == OTHER and not self._context.recorder.ended


SILENCE_S = 3.0
"""One second more than the exporter's threshold for an unresponsive rank: the stacks follow a second after the state."""

_SIGEV_THREAD_ID = 4
_CLOCK_MONOTONIC = 1
_SIGACTION_SIZE = 256
_HANDLER_SIZE = 8
_registered: weakref.WeakSet[Watchdog] = weakref.WeakSet()
"""Signals with a handler; it stays after the end if the sampler thread has not ended, and may have a signal pending."""


class _ITimerSpec(ctypes.Structure):
    """``struct itimerspec``."""

    _fields_ = (("interval_s", ctypes.c_long), ("interval_ns", ctypes.c_long), ("s", ctypes.c_long), ("ns", ctypes.c_long))


class _SigEvent(ctypes.Structure):
    """``struct sigevent``, 64 bytes on Linux."""

    _fields_ = (
        ("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("how", ctypes.c_int), ("thread", ctypes.c_int),
        ("rest", ctypes.c_char * 44),
    )  # fmt: skip


class Watchdog:
    """One per session. Only :meth:`close` may be called outside the sampler thread."""

    def __init__(self, writer: FlightWriter) -> None:
        self._writer, self._silence_ns, self._native = writer, round(SILENCE_S * 1e9), compiled()
        self._unarmed = _ITimerSpec(0, 0, 0, 0)
        first = divmod(self._silence_ns // (self._native.SILENT_SIGNALS if self._native else 1), 1_000_000_000)
        self._armed = _ITimerSpec(*(first if self._native else (0, 0)), *first)
        self._timer = ctypes.c_void_p()
        self._thread: threading.Thread | None = None
        self._signal = -1
        self._handler = b""
        self._file: Descriptor | None = None
        self._ready = False
        """Whether that file is empty, for the next stacks"""
        self._last_error = ""
        self._last_ns = 0
        self._stuck = named(writer.name, STUCK, 0)
        self._libc: Any = None

    def sample(self) -> None:
        """Reset the timer; the first call sets everything up."""
        if self._thread is None:
            self._thread = threading.current_thread()
            self._set_up()
        place, file = self._writer.place, self._file
        if self._signal < 0 or place is None or file is None or self._thread is not threading.current_thread():
            return  # unavailable; or the session's last round, in another thread
        if not file.is_intact():
            self._ready = False  # the program has closed it: ``faulthandler`` has its number, which may be another file's
        now_ns = time.monotonic_ns()
        if self._ready and now_ns - self._last_ns > self._silence_ns and self._last_ns:
            self._report_stacks(place, file, (now_ns - self._last_ns) / 1e9)
        self._last_ns = now_ns
        if self._native is not None:
            self._native.count_anew()
        self._set(self._armed if (self._ready or self._create_file()) and self._is_ours() else self._unarmed)

    def close(self) -> None:
        """Release the timer, the signal and the file. Idempotent, from any thread."""
        place, thread, file = self._writer.place, self._thread, self._file
        if self._signal < 0:
            return
        self._set(self._unarmed)
        with contextlib.suppress(OSError):
            if place is not None and file is not None and not os.fstat(file.number()).st_size:
                artifacts.remove(place, self._stuck.name)
        if thread is threading.current_thread() or thread is None or not thread.is_alive():
            self.unregister()  # else a pending signal would kill the process by default

    def unregister(self) -> None:
        """Unregister the handler: at the end, and in a forked child."""
        number, self._signal = self._signal, -1
        _registered.discard(self)
        if number >= 0 and self._action(number) == self._handler:
            faulthandler.unregister(number)
            if self._file is not None:
                self._file.close()

    def _set_up(self) -> None:
        number, self._libc = _unused_signal(), _library()
        if number is None or self._libc is None:
            return
        # It may still count as registered where somebody replaced an earlier session's handler and took theirs away again;
        # register() would install nothing then, and the signal's default action kills the process.
        faulthandler.unregister(number)
        self._signal = number
        if not self._create_file():
            self._signal = -1
            return
        if self._native is not None:
            self._native.count_signals(number)
        self._handler = self._action(number)
        _registered.add(self)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        how = _SigEvent(signal=number, how=_SIGEV_THREAD_ID, thread=threading.get_native_id())
        if self._libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(how), ctypes.byref(self._timer)):
            self.unregister()

    def _set(self, when: _ITimerSpec) -> None:
        self._libc.timer_settime(self._timer, 0, ctypes.byref(when), None)

    def _is_ours(self) -> bool:
        return self._action(self._signal) == self._handler

    def _action(self, number: int) -> bytes:
        """Return the address of the signal's handler (the first word of ``struct sigaction`` on x86-64 and arm64)."""
        action = ctypes.create_string_buffer(_SIGACTION_SIZE)
        self._libc.sigaction(number, None, action)
        return action.raw[:_HANDLER_SIZE]

    def _report_stacks(self, place: FlightDirectory, file: Descriptor, silent_s: float) -> None:
        """Store the stacks written while the sampler was blocked under their own name, and record an event."""
        done = named(self._writer.name, STUCK, time.time_ns() // 1_000_000)
        try:
            size = os.fstat(file.number()).st_size
            os.ftruncate(file.number(), min(size, LIMITS[STUCK] - len(END)))
            artifacts.append(file, END)
            if size:  # nothing was written although there was space, as after SIGSTOP: nothing to report
                artifacts.finish(place, self._stuck.name, done)
                attributes = {"cause": "stuck", "evidence": done.id, "silent_s": round(silent_s, 3)}
                self._writer.event(catalog.EVENT_STACKS.name, attributes)
        except OSError as problem:
            self._report_failure(artifacts.refusal(problem), done)
        self._ready = False  # the next stacks go to another file

    def _report_failure(self, refused: dict[str, str], wanted: ArtifactName) -> None:
        self._writer.event(catalog.EVENT_STACKS_FAILED.name, {"cause": "stuck", **refused, "evidence": wanted.id})

    def _create_file(self) -> bool:
        """Create an empty file for the next stacks; return whether it exists. Without it an event is written, no timer set."""
        place, before = self._writer.place, self._file
        if place is None:
            return False
        if before is not None:
            self._set(self._unarmed)
            before.close()  # before another file may get its number, and its inode
        artifacts.remove(place, self._stuck.name)
        try:
            file = artifacts.create(place, self._stuck.name)
        except OSError as problem:
            refused = artifacts.refusal(problem)
            if refused["detail"] != self._last_error:  # this runs up to ten times a second
                self._last_error = refused["detail"]
                self._report_failure(refused, self._stuck)
            return False
        faulthandler.register(self._signal, file=file.number(), all_threads=True, chain=False)
        self._file, self._ready, self._last_error = file, True, ""
        return True


def _library() -> Any:
    """Return the C library if it has POSIX timers: in librt before glibc 2.34, and not at all on macOS."""
    if sys.platform != "linux":
        return None
    for name in (None, "librt.so.1"):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            library.timer_create  # noqa: B018  # raises AttributeError where there is none
            return library
    return None


def _unused_signal() -> int | None:
    """Return the highest real-time signal that has no handler and is not ignored; ``None`` if there is none."""
    taken = endings.kernel_handlers()
    if sys.platform != "linux" or taken is None:
        return None
    # the highest is used by valgrind and others
    return next((n for n in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1) if not taken >> (n - 1) & 1), None)


def _after_fork() -> None:
    for watchdog in list(_registered):
        watchdog.unregister()


os.register_at_fork(after_in_child=_after_fork)
