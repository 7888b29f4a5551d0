"""Every use that torchobs makes of torch's profiler; and profiles on request, as a Chrome trace beside the flight file.

torch allows one profiler in a process, and crashes where there are two. So there is one recording of ours at most, it does not
begin while the script profiles, and it ends when the script's own profiler is about to begin, and when the interpreter exits.
To see the script's profilers, two functions of ``torch.autograd.profiler`` are replaced when ours is first used, and stay
replaced: a profiler in its warm-up is only marked as prepared, and finding it among all objects takes 0.1 s.

A profile on request starts and ends in the training thread when a backward pass begins (:mod:`torchobs.taps.taps`): there is
no cost without a request, and a trace of n steps holds n of each phase. A thread of its own writes the trace, because
compressing takes seconds.
"""

from __future__ import annotations

import atexit
import functools
import gzip
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock, current_thread, get_ident
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from torchobs import catalog
from torchobs.flight import artifacts
from torchobs.flight.artifacts import LIMITS, PROFILE, named
from torchobs.flight.files import deadly_limit, shortage, survive_limits
from torchobs.probes.process_memory import ProcessStats
from torchobs.support.after_fork import renew_in_child
from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.taps.patch import Patch
from torchobs.tensors.references import living

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.flight.artifacts import ArtifactName
    from torchobs.flight.directory import FlightDirectory
    from torchobs.probes.context import ProbeContext

_mutex = RLock()
"""Held while one of our profilers begins or ends, and while one of the script's is prepared"""


class ProfilerBusyError(RuntimeError):
    """Another profiler, the script's or ours, is running."""


class Recording:
    """A profiler of ours: prepared (warming up) when it is made, then started, then stopped.

    Args:
        purpose: for the error of a caller that wants to profile meanwhile.
        all_threads: record what other threads do, too. Such a recording can be stopped in every thread, others only where they
            began. It has no memory. Needs torch 2.7; before, it is as any other. torch writes the end of a ``record_function``
            that began in one recording into the next of the same sort, where its memory is gone: so none of ours begins in
            the same optimizer step in which another has ended.
        verbose: keep Python stacks.
        interrupted: called when the script's own profiler begins, in its thread, to stop this one.
        options: arguments of ``torch.profiler.profile``.

    Raises:
        ProfilerBusyError: another profiler runs.
    """

    def __init__(
        self, purpose: str, *, all_threads: bool = False, verbose: bool = False,
        interrupted: Callable[[], object] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        from torch.profiler import profile

        self._interrupted = interrupted
        self._thread, self.description = get_ident(), f"{purpose} in thread {current_thread().name}"
        config, self._anywhere = _configuration(all_threads=all_threads, verbose=verbose)
        with _mutex:
            _guard.refuse_if_busy()
            self.profiler: Any = profile(**options, experimental_config=config)
            self._started = False
            _guard.begin(self, self.profiler.prepare_trace)

    @property
    def ended(self) -> bool:
        """Whether it was stopped, by any code."""
        return _guard.recording is not self

    def start(self) -> None:
        """Record from now on."""
        with _mutex:
            if not self.ended:
                self._started = True
                _guard.begin(self, self.profiler.start_trace)

    def stop(self) -> bool:
        """Stop; return False if that was done before."""
        with _mutex:
            if self.ended:
                return False
            if not self._started:  # what is prepared must be started to be stopped
                _guard.begin(self, self.profiler.start_trace)
            _guard.recording = None
            self.profiler.stop_trace()
            return True

    def make_way(self) -> None:
        """Stop for another profiler, which is about to begin in this thread.

        Raises:
            ProfilerBusyError: this one can be stopped in another thread only.
        """
        if not self._anywhere and get_ident() != self._thread:
            raise ProfilerBusyError(_in_use(self.description))
        if self._interrupted is not None:
            call(CircuitBreaker("profile"), self._interrupted)
        call(CircuitBreaker("profile"), self.stop)


class _Guard:
    """The recording of this process, and the state of the script's profilers."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self._begins = self._exits = False
        self._prepared: WeakKeyDictionary[Any, int] | None = None
        """The script's profilers, each with the identity of the results it had when it was prepared: its end brings new ones"""

    def refuse_if_busy(self) -> None:
        """Raise :class:`ProfilerBusyError` if a profiler runs or warms up, in any thread."""
        import torch
        from torch.autograd import profiler

        prepared = self._watch() if self._prepared is None else self._prepared
        if self._exits:
            raise ProfilerBusyError("the interpreter exits: a profiler that begins now would crash it")
        if self.recording is not None:
            raise ProfilerBusyError(_in_use(self.recording.description))
        # the flags that torch checks, of the process and of this thread, which have no public names
        running: Any = profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()  # noqa: SLF001  # as above
        if running or any(id(profile.kineto_results) == results for profile, results in list(prepared.items())):
            raise ProfilerBusyError(_in_use("the program's own"))

    def begin(self, recording: Recording, function: Callable[[], object]) -> None:
        """Call a function of torch that begins a recording; if it raises, there is no recording."""
        self.recording, self._begins = None, True
        try:
            function()
            self.recording = recording
        finally:
            self._begins = False

    def exit(self) -> None:
        """End a running profile: torch crashes an interpreter that exits while it profiles."""
        with _mutex:
            self._exits = True
            if self.recording is not None:
                call(CircuitBreaker("profile"), self.recording.stop)

    def _watch(self) -> WeakKeyDictionary[Any, int]:
        """Watch the script's profilers from now on; those that were prepared before are found among all objects."""
        from torch.autograd import profiler

        Patch(profiler.profile, "_prepare_trace", self._preparing)
        Patch(profiler, "_run_on_profiler_start", self._starting)  # emit_nvtx and emit_itt prepare nothing
        atexit.register(self.exit)
        entered = [profile for profile in living(profiler.profile) if getattr(profile, "entered", False)]
        begun = [profile for profile in entered if profile.kineto_results is None]
        self._prepared = WeakKeyDictionary({profile: id(None) for profile in begun})
        return self._prepared

    def _preparing(self, original: Any) -> Any:
        @functools.wraps(original)
        def prepare(profile: Any) -> Any:
            with _mutex:
                if self._begins:
                    return original(profile)
                self._make_way()
                before = id(profile.kineto_results)
                prepared = original(profile)
                if self._prepared is not None:
                    self._prepared[profile] = before
                return prepared

        return prepare

    def _starting(self, original: Any) -> Any:
        @functools.wraps(original)
        def start() -> Any:
            with _mutex:
                if not self._begins:
                    self._make_way()
                return original()

        return start

    def _make_way(self) -> None:
        if self.recording is not None:
            self.recording.make_way()


def _configuration(*, all_threads: bool, verbose: bool) -> tuple[Any, bool]:
    """Return torch's configuration of a recording, and whether it can be stopped in any thread."""
    from torch._C._profiler import _ExperimentalConfig

    if all_threads:
        try:
            return _ExperimentalConfig(verbose=verbose, profile_all_threads=True), True
        except TypeError:  # before torch 2.7
            pass
    return _ExperimentalConfig(verbose=verbose), False


def _in_use(owner: str) -> str:
    return f"another profiler runs ({owner}), and torch allows one in a process: end that first"


_guard = _Guard()
renew_in_child(sys.modules[__name__], _mutex=RLock)

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

_CHUNK = 1 << 20


class _Request(NamedTuple):
    """A requested profile."""

    steps: int
    wanted: ArtifactName


class _Run(NamedTuple):
    """A profile in progress."""

    recording: Recording
    request: _Request
    first: int
    """steps that had ended before the profile"""
    deadline_s: float
    memory: int


class Profiles:
    """Runs one profile at a time. ``request`` and ``sample`` are for the sampler thread.

    Each request is answered once. It waits in a queue; the thread that takes it from there answers, the training thread that
    starts the profile or the sampler thread that gives it up. A profile begins and ends under the lock that the script's own
    profiler holds while it ends ours, in any thread. The sampler thread takes no lock.
    """

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._requests: deque[_Request] = deque()
        self._give_up_s = 0.0
        self._running: _Run | None = None
        self._writing: threading.Thread | None = None
        self._in_progress = False
        """from a request to its answer; set by the sampler thread, unset by the thread that answers"""

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
        if self._requests and time.monotonic() > self._give_up_s and (request := self._take_request()) is not None:
            self._fail(request.wanted, "no_step")

    def close(self) -> None:
        """Stop a running profile without a trace, and wait for a trace that is being written."""
        self._requests.clear()
        with _mutex:
            self._discard()
            writing = self._writing
        if writing is not None:
            writing.join(WRITE_TIMEOUT_S)

    def _take_request(self) -> _Request | None:
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
        with _mutex:
            if (run := self._running) is not None:
                if (reason := self._end_reason(run)) is not None:
                    self._attempt(run.request.wanted, partial(self._end, run, reason))
            elif (request := self._take_request()) is not None:
                self._attempt(request.wanted, partial(self._start, request))
            if self._running is not None:
                self._context.at_backward(self._at_backward)

    def _attempt(self, wanted: ArtifactName, function: Callable[[], object]) -> None:
        """Call a function; if it raises, or a signal's handler within it, the profile ends without a trace, with an event."""
        breaker, done = CircuitBreaker("profile"), False
        try:
            call(breaker, function)
            done = not breaker.failures
        finally:
            if not done:
                self._discard()
                self._fail(wanted, "error", exception=breaker.failures[0].exception if breaker.failures else "")

    def _end_reason(self, run: _Run) -> str | None:
        if self._context.recorder.ended - run.first >= run.request.steps:
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
        self._running = run = _Run(recording, request, first, deadline_s, 0)
        recording.start()
        self._running = run._replace(memory=ProcessStats().resident().all)
        attributes = {"steps": request.steps, "evidence": request.wanted.id}
        self._context.event(catalog.EVENT_PROFILE_START, attributes)

    def _interrupted(self) -> None:
        """End the profile with the steps that it has. In the thread in which the application's own profiler begins."""
        if (run := self._running) is not None:
            self._attempt(run.request.wanted, partial(self._end, run, "interrupted"))

    def _discard(self) -> None:
        """Stop a running profile without a trace."""
        run, self._running = self._running, None
        if run is not None:
            call(CircuitBreaker("profile"), run.recording.stop)

    def _end(self, run: _Run, reason: str) -> None:
        place, ended = self._context.writer.place, self._context.recorder.ended
        self._running = None
        if not run.recording.stop() or place is None:  # the interpreter exits, or there is no directory: nothing asks for it
            self._in_progress = False
            return
        attributes = {"reason": reason, "steps": ended - run.first, "evidence": run.request.wanted.id}
        lasting = replace(place, directory=place.directory.copy())  # the session may end while the trace is written
        args = run, lasting, attributes
        self._writing = threading.Thread(target=self._write, args=args, name="torchobs-profile", daemon=True)
        self._writing.start()

    def _write(self, run: _Run, place: FlightDirectory, attributes: dict[str, object]) -> None:
        """Write the trace; runs in a thread of its own."""
        survive_limits()
        breaker, profile, wanted = CircuitBreaker("profile"), run.recording.profiler, run.request.wanted
        done = call(breaker, _export, profile, place, wanted)
        # Freed now, in this thread, rather than when the profiler is garbage-collected in another one. If writing the trace
        # failed, torch writes the rest again when its file is closed; here that does no harm.
        call(CircuitBreaker("profile"), setattr, profile.profiler, "kineto_results", None)
        place.directory.close()
        if isinstance(done, int):
            self._context.event(catalog.EVENT_PROFILE_END, {**attributes, "size": done})
            self._in_progress = False
        elif done is not None:
            self._fail(wanted, **done)
        else:
            self._fail(wanted, "error", exception=breaker.failures[0].exception)

    def _fail(self, wanted: ArtifactName, reason: str, detail: str = "", exception: str = "") -> None:
        """Answer the request that is in progress: there is no trace."""
        self._report_failure(wanted, reason, detail, exception)
        self._in_progress = False

    def _report_failure(self, wanted: ArtifactName, reason: str, detail: str = "", exception: str = "") -> None:
        texts = {"reason": reason, "detail": detail, "exception.type": exception, "evidence": wanted.id}
        attributes = {name: text for name, text in texts.items() if text}
        self._context.writer.event(catalog.EVENT_PROFILE_FAILED.name, attributes)


def _export(profile: Any, place: FlightDirectory, wanted: ArtifactName) -> int | dict[str, str]:
    """Write the trace; return its size in bytes, or the attributes of the event of its failure. Raises torch's exceptions."""
    try:
        with tempfile.TemporaryDirectory(prefix="torchobs-", ignore_cleanup_errors=True) as directory:
            plain = Path(directory) / "trace.json"  # on disk: uncompressed it is twenty times the size
            if deadly_limit(MAX_UNCOMPRESSED_SIZE):
                return {"reason": "temporary_directory", "detail": "the size of files is limited (ulimit -f)"}
            profile.export_chrome_trace(str(plain))
            if not plain.exists():  # torch logged the reason, removed the file and raised nothing
                return {"reason": "temporary_directory", "detail": "torch could not write the trace there"}
            packed = plain.with_suffix(".gz")
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as target:
                shutil.copyfileobj(source, target, _CHUNK)
            return _store(packed, place, wanted)
    except OSError as problem:
        return {"reason": "temporary_directory", "detail": artifacts.refusal(problem)["detail"]}


def _store(packed: Path, place: FlightDirectory, wanted: ArtifactName) -> int | dict[str, str]:
    """Copy a compressed trace into an artifact; return as :func:`_export` does."""
    size = packed.stat().st_size
    if size > LIMITS[PROFILE]:
        return {"reason": "too_large"}
    if (lack := shortage(place.fd, size)) is not None:
        return {"reason": "no_room", "detail": lack}
    try:
        with packed.open("rb") as source, artifacts.new(place, wanted) as file:
            while chunk := source.read(_CHUNK):
                artifacts.append(file, chunk)
    except OSError as problem:
        return artifacts.refusal(problem)
    return size
