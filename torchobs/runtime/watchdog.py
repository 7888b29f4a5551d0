"""Stacks of a rank that is stuck holding the GIL: no Python thread runs then, but the kernel still delivers signals.

A POSIX timer, which the sampler thread resets ten times a second (0.8 µs), sends a real-time signal after three seconds
without a reset; its handler, ``faulthandler``'s, writes the stacks of all threads in C, without the GIL. The signal goes to
the sampler thread alone (``SIGEV_THREAD_ID``), which only waits for the GIL, so that no system call of the application is
interrupted. ``faulthandler.dump_traceback_later`` would do the same, but there is one per process, and it is the user's;
``register(chain=True)`` would run the signal's default action, which kills the process.

The signal is one without a handler; if somebody installs one later, the timer is not set again. A forked child has neither
the timer, which POSIX does not inherit, nor the handler.
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
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.flight.files import artifacts, endings
from torchobs.flight.files.artifacts import END, STUCK, named
from torchobs.support.descriptors import Descriptor

if TYPE_CHECKING:
    from torchobs.flight.files.artifacts import ArtifactName
    from torchobs.flight.files.location import FlightDirectory
    from torchobs.flight.writer.writer import FlightWriter

SILENCE_S = 3.0
"""One second more than the exporter's threshold for an unresponsive rank: the stacks follow a second after the state."""

_SIGEV_THREAD_ID = 4
_CLOCK_MONOTONIC = 1
_SIGACTION_SIZE = 256
_HANDLER_SIZE = 8
_registered: weakref.WeakSet[Watchdog] = weakref.WeakSet()
"""Those with a handler; a closed one keeps it where its sampler thread has not ended, which may have a signal pending."""


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
        self._writer, self._silence_ns = writer, round(SILENCE_S * 1e9)
        self._unarmed = _ITimerSpec(0, 0, 0, 0)
        self._armed = _ITimerSpec(0, 0, self._silence_ns // 1_000_000_000, self._silence_ns % 1_000_000_000)
        self._timer = ctypes.c_void_p()
        self._thread: threading.Thread | None = None
        self._signal = -1
        self._file: Descriptor | None = None
        self._number = -1
        """The file's number, as ``faulthandler`` has it"""
        self._handler = b""
        self._no_file = True
        """No file to write to"""
        self._last_error = ""
        self._last_ns = 0
        self._own = named(writer.name, STUCK, 0)
        self._libc: Any = None

    def sample(self) -> None:
        """Reset the timer; the first call sets everything up. Raises ``OSError`` without a free descriptor."""
        if self._thread is None:
            self._thread = threading.current_thread()
            self._set_up()
        if self._signal < 0 or self._thread is not threading.current_thread():
            return  # unavailable; or the session's last round, in another thread
        self._restore_file()
        if self._no_file and not self._create_file():
            self._disarm()
            return
        now_ns = time.monotonic_ns()
        if now_ns - self._last_ns > self._silence_ns and self._last_ns:
            self._report_stacks((now_ns - self._last_ns) / 1e9)
        self._last_ns = now_ns
        if self._is_ours() and not self._no_file:
            self._set(self._armed)
        else:
            self._disarm()

    def close(self) -> None:
        """Release the timer, the signal and the file. Idempotent, from any thread."""
        if self._signal < 0:
            return
        self._disarm()
        thread = self._thread
        if thread is threading.current_thread() or thread is None or not thread.is_alive():
            self.unregister()  # else a pending signal would kill the process by default
        place = self._writer.place
        if place is not None and _size(self._own, place.fd) == 0:
            artifacts.remove(place, self._own.name)

    def unregister(self) -> None:
        """Unregister the handler: at the end, and in a forked child."""
        number, self._signal = self._signal, -1
        _registered.discard(self)
        if number < 0:
            return
        if self._action(number) == self._handler:
            faulthandler.unregister(number)
            if self._file is not None:
                self._file.close()

    def _set_up(self) -> None:
        place, number = self._writer.place, _unused_signal()
        self._libc = _library()
        if place is None or number is None or self._libc is None:
            return
        # It may still count as registered where somebody replaced an earlier session's handler and took theirs away again;
        # register() would install nothing then, and the signal's default action kills the process.
        faulthandler.unregister(number)
        self._signal = number
        self._write_to(_nowhere())
        self._handler = self._action(number)
        _registered.add(self)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        how = _SigEvent(signal=number, how=_SIGEV_THREAD_ID, thread=threading.get_native_id())
        if self._libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(how), ctypes.byref(self._timer)):
            self.unregister()

    def _write_to(self, file: Descriptor) -> None:
        """Have the stacks written to that file."""
        before, self._file = self._file, file
        self._number = file.number()
        faulthandler.register(self._signal, file=self._number, all_threads=True, chain=False)
        if before is not None and before is not file:
            before.close()

    def _restore_file(self) -> None:
        """Open the file again if the program has closed it: ``faulthandler`` has its number, which may be another file's."""
        file = self._file
        try:
            if file is not None and file.number() != self._number:
                self._write_to(file)
        except OSError:  # its name is gone as well
            self._no_file = True
            self._disarm()
            try:
                self._write_to(_nowhere())
            except OSError:
                self.unregister()
                raise

    def _set(self, when: _ITimerSpec) -> None:
        self._libc.timer_settime(self._timer, 0, ctypes.byref(when), None)

    def _disarm(self) -> None:
        self._set(self._unarmed)

    def _is_ours(self) -> bool:
        return self._action(self._signal) == self._handler

    def _action(self, number: int) -> bytes:
        """Return the address of the signal's handler (the first word of ``struct sigaction`` on x86-64 and arm64)."""
        action = ctypes.create_string_buffer(_SIGACTION_SIZE)
        self._libc.sigaction(number, None, action)
        return action.raw[:_HANDLER_SIZE]

    def _report_stacks(self, silent_s: float) -> None:
        """Store the stacks written while the sampler was blocked under their own name, and record an event."""
        place = self._writer.place
        if place is None:
            return
        size = _size(self._own, place.fd)
        done = named(self._writer.name, STUCK, time.time_ns() // 1_000_000)
        refused = self._append_end(size) if size is not None else None
        if size:
            refused = self._finish(place, done, silent_s) or refused
        if refused is not None:
            self._report_failure(refused, done)
        if size is None or self._no_file:
            self._create_file()

    def _finish(self, place: FlightDirectory, done: ArtifactName, silent_s: float) -> dict[str, str] | None:
        """Rename the file to its artifact name; on failure, return the event's attributes that say why."""
        try:
            artifacts.finish(place, self._own.name, done)
        except OSError as problem:
            self._truncate(0)
            return artifacts.refusal(problem)
        self._no_file = True  # the next stacks go to another file
        attributes = {"cause": "stuck", "evidence": done.id, "silent_s": round(silent_s, 3)}
        self._writer.event(catalog.EVENT_STACKS.name, attributes)
        return None

    def _report_failure(self, refused: dict[str, str], wanted: ArtifactName) -> None:
        self._writer.event(catalog.EVENT_STACKS_FAILED.name, {"cause": "stuck", **refused, "evidence": wanted.id})

    def _append_end(self, size: int) -> dict[str, str] | None:
        """Append the end marker; on failure, return the event's attributes that say why."""
        try:
            self._truncate(min(size, artifacts.LIMITS[STUCK] - len(END)))
            if self._file is not None:
                artifacts.append(self._file, END)
        except OSError as problem:
            return artifacts.refusal(problem)
        finally:
            if not size:  # nothing was written although there was space, as after SIGSTOP
                self._truncate(0)
        return None

    def _truncate(self, size: int) -> None:
        if self._file is not None:
            os.ftruncate(self._file.number(), size)

    def _create_file(self) -> bool:
        """Create an empty file for the next stacks; return True on success. Without one no timer is set; an event says why."""
        place, self._no_file = self._writer.place, True
        if place is None:
            return False
        try:
            self._write_to(artifacts.create(place, self._own.name))
        except OSError as problem:
            refused = artifacts.refusal(problem)
            if refused["detail"] != self._last_error:  # this runs up to ten times a second
                self._last_error = refused["detail"]
                self._report_failure(refused, self._own)
            return False
        self._no_file, self._last_error = False, ""
        return True


def _nowhere() -> Descriptor:
    return Descriptor("watchdog", os.devnull, os.O_WRONLY)


def _size(own: ArtifactName, directory_fd: int) -> int | None:
    try:
        return os.stat(own.name, dir_fd=directory_fd, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None


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
