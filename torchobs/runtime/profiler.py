"""Profiles on request: ``torch.profiler`` over some steps, as a Chrome trace beside the flight file.

A profile starts and ends in the training thread when a backward pass begins (:mod:`torchobs.taps.taps`): there is
no cost without a request, and a trace of n steps holds n of each phase. A thread of its own writes the trace, because
compressing takes seconds. It makes way for the application's own profiler (:mod:`torchobs.probes.torch_profiler`).
"""

from __future__ import annotations

import tempfile
import threading
import time
import zlib
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.flight import artifacts
from torchobs.flight.artifacts import LIMITS, PROFILE, named
from torchobs.flight.files import deadly_limit, shortage, survive_limits
from torchobs.probes.process_memory import ProcessStats
from torchobs.probes.torch_profiler import ProfilerBusyError, Recording, exclusively
from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.flight.artifacts import ArtifactName
    from torchobs.flight.directory import FlightDirectory
    from torchobs.probes.context import ProbeContext
    from torchobs.support.descriptors import Descriptor

NO_STEP_S = 120.0
"""A rank without a backward pass for this long is not training."""

MAX_DURATION_S = 300.0
"""Longest profile: the trace ends here, with fewer steps than requested."""

MAX_GROWTH = 512 << 20
"""Bytes by which the process may grow while profiling: an operation takes some 500, a large model runs 10^4 in a step."""

MAX_UNCOMPRESSED_SIZE = 1 << 30
"""Bytes that an uncompressed trace takes in the temp directory at most: twenty to thirty times its compressed size."""

WRITE_TIMEOUT_S = 5.0
"""How long the session's end waits for a trace that is being written."""

_CHUNK, _GZIP = 1 << 20, 16 + zlib.MAX_WBITS


class _TooLargeError(Exception):
    """A compressed trace exceeds the artifact limit."""


class _Request(NamedTuple):
    """A profile that is asked for."""

    steps: int
    wanted: ArtifactName


class _Run(NamedTuple):
    """A profile in progress."""

    recording: Recording
    steps: int
    wanted: ArtifactName
    first: int
    """steps that had ended before the profile"""
    deadline_s: float
    memory: int


class Profiles:
    """Runs one profile at a time. ``request`` and ``sample`` are for the sampler thread.

    Each request is answered once. It waits in a queue: whoever takes it from there answers, the training thread that starts
    the profile or the sampler thread that gives it up. A profile begins and ends under the lock of :mod:`torch_profiler`,
    which the script's own profiler holds while it ends ours, in whichever thread. The sampler thread takes no lock.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._requests: deque[_Request] = deque()
        self._give_up_s = 0.0
        self._running: _Run | None = None
        self._writing: threading.Thread | None = None
        self._in_progress = False
        """from a request to its answer; set by the sampler thread, unset by whichever thread answers"""

    def request(self, steps: int, number: int) -> None:
        """Profile that many steps, unless a profile is in progress."""
        context, wanted = self._context, named(self._context.writer.name, PROFILE, number)
        if self._in_progress:
            self._report_failure(wanted, "profiler_in_use")
            return
        self._in_progress, self._give_up_s = True, time.monotonic() + NO_STEP_S
        self._requests.append(_Request(steps, wanted))
        context.at_backward(self._at_backward)

    def sample(self) -> None:
        """Give up a request if no step began in time."""
        if self._requests and time.monotonic() > self._give_up_s and (request := self._take()) is not None:
            self._fail(request.wanted, "no_step")

    def close(self) -> None:
        """Stop a running profile without a trace, and wait for a trace that is being written."""
        self._requests.clear()
        with exclusively():
            self._discard()
            writing = self._writing
        if writing is not None:
            writing.join(WRITE_TIMEOUT_S)

    def _take(self) -> _Request | None:
        """Return the request, for the caller to answer; ``None`` if there is none, or another thread has it."""
        try:
            return self._requests.popleft()
        except IndexError:
            return None

    def _at_backward(self) -> None:
        """Start, continue or end a profile. In the training thread, when a backward pass begins."""
        if self._context.device.cuda.capturing():  # starting or stopping a profiler synchronizes, which would break the capture
            self._context.at_backward(self._at_backward)
            return
        with exclusively():
            if (run := self._running) is not None:
                self._attempt(run.wanted, partial(self._go_on, run))
            elif (request := self._take()) is not None:
                self._attempt(request.wanted, partial(self._start, request))
            if self._running is not None:
                self._context.at_backward(self._at_backward)

    def _attempt(self, wanted: ArtifactName, function: Callable[[], object]) -> None:
        """Call a function; if it raises, or a signal's handler within it, the profile ends without a trace, and says so."""
        breaker, done = CircuitBreaker("profile"), False
        try:
            call(breaker, function)
            done = not breaker.failures
        finally:
            if not done:
                self._discard()
                self._fail(wanted, "error", exception=breaker.failures[0].exception if breaker.failures else "")

    def _go_on(self, run: _Run) -> None:
        if (reason := self._end_reason(run)) is not None:
            self._end(run, reason)

    def _end_reason(self, run: _Run) -> str | None:
        if self._context.recorder.ended - run.first >= run.steps:
            return "complete"
        if time.monotonic() > run.deadline_s:
            return "time"
        return "memory" if ProcessStats().resident().all - run.memory > MAX_GROWTH else None

    def _start(self, request: _Request) -> None:
        try:
            recording = Recording("torchobs profile", all_threads=True, interrupted=self._interrupted)
        except ProfilerBusyError:
            self._fail(request.wanted, "profiler_in_use")
            return
        first, deadline_s = self._context.recorder.ended, time.monotonic() + MAX_DURATION_S
        self._running = run = _Run(recording, request.steps, request.wanted, first, deadline_s, 0)
        recording.start()
        self._running = run._replace(memory=ProcessStats().resident().all)
        attributes = {"steps": request.steps, "evidence": request.wanted.id}
        self._context.event(catalog.EVENT_PROFILE_START, attributes)

    def _interrupted(self) -> None:
        """End the profile with the steps that it has. In the thread in which the application's own profiler begins."""
        if (run := self._running) is not None:
            self._attempt(run.wanted, partial(self._end, run, "interrupted"))

    def _discard(self) -> None:
        """Stop a running profile without a trace."""
        run, self._running = self._running, None
        if run is not None:
            call(CircuitBreaker("profile"), run.recording.stop)

    def _end(self, run: _Run, reason: str) -> None:
        place, ended = self._context.writer.place, self._context.recorder.ended
        self._running = None
        if not run.recording.stop() or place is None:  # the interpreter exits, or there is no directory: nobody asks for it
            self._in_progress = False
            return
        attributes = {"reason": reason, "steps": ended - run.first, "evidence": run.wanted.id}
        own = replace(place, directory=place.directory.copy())  # the session may end while the trace is written
        self._writing = threading.Thread(target=self._write, args=(run, own, attributes), name="torchobs-profile", daemon=True)
        self._writing.start()

    def _write(self, run: _Run, place: FlightDirectory, attributes: dict[str, object]) -> None:
        """Write the trace; runs in a thread of its own."""
        survive_limits()
        breaker = CircuitBreaker("profile")
        done = call(breaker, _export, run.recording.profiler, place, run.wanted)
        call(CircuitBreaker("profile"), _free_trace, run.recording.profiler)
        place.directory.close()
        if isinstance(done, int):
            self._context.event(catalog.EVENT_PROFILE_END, {**attributes, "size": done})
            self._in_progress = False
        elif done is not None:
            self._fail(run.wanted, **done)
        else:
            self._fail(run.wanted, "error", exception=breaker.failures[0].exception)

    def _fail(self, wanted: ArtifactName, reason: str, detail: str = "", exception: str = "") -> None:
        """Answer the request that is in progress: there is no trace."""
        self._report_failure(wanted, reason, detail, exception)
        self._in_progress = False

    def _report_failure(self, wanted: ArtifactName, reason: str, detail: str = "", exception: str = "") -> None:
        given = {"reason": reason, "detail": detail, "exception.type": exception, "evidence": wanted.id}
        attributes = {name: text for name, text in given.items() if text}
        self._context.writer.event(catalog.EVENT_PROFILE_FAILED.name, attributes)


def _free_trace(profile: Any) -> None:
    """Free the trace now, in this thread, rather than when the profiler is garbage-collected in another one.

    If writing the trace failed, torch writes the rest again when its file is closed; here that does no harm.
    """
    profile.profiler.kineto_results = None


def _export(profile: Any, place: FlightDirectory, wanted: ArtifactName) -> int | dict[str, str]:
    """Write the trace; return its size in bytes, or the attributes of the event that says why not. Raises what torch raises."""
    try:
        with tempfile.TemporaryDirectory(prefix="torchobs-", ignore_cleanup_errors=True) as directory:
            plain = Path(directory) / "trace.json"  # on disk: uncompressed it is twenty times the size
            if deadly_limit(MAX_UNCOMPRESSED_SIZE):
                return {"reason": "temporary_directory", "detail": "the size of files is limited (ulimit -f)"}
            profile.export_chrome_trace(str(plain))
            if not plain.exists():  # torch logged the reason, removed the file and raised nothing
                return {"reason": "temporary_directory", "detail": "torch could not write the trace there"}
            return _store(plain, plain.stat().st_size, place, wanted)
    except OSError as problem:
        return {"reason": "temporary_directory", "detail": artifacts.refusal(problem)["detail"]}


def _store(plain: Path, most: int, place: FlightDirectory, wanted: ArtifactName) -> int | dict[str, str]:
    """Compress a trace into an artifact; return as :func:`_export` does. ``most``: upper bound of its size in bytes."""
    problem_detail = shortage(place.fd, min(most, LIMITS[PROFILE]))
    if problem_detail is not None:
        return {"reason": "no_room", "detail": problem_detail}
    try:
        with artifacts.new(place, wanted) as file:
            size = _compress(plain, file)
    except _TooLargeError:
        return {"reason": "too_large"}
    except OSError as problem:
        return artifacts.refusal(problem)
    return size


def _compress(plain: Path, file: Descriptor) -> int:
    """Compress into an open file; return its size in bytes. Raises :class:`_TooLargeError` beyond the artifact limit."""
    packer, size, more = zlib.compressobj(6, wbits=_GZIP), 0, True
    with plain.open("rb") as source:
        while more:
            chunk = source.read(_CHUNK)
            more = bool(chunk)
            packed = packer.compress(chunk) if more else packer.flush()
            size += len(packed)
            if size > LIMITS[PROFILE]:
                raise _TooLargeError
            artifacts.append(file, packed)
    return size
