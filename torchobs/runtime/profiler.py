"""A profile on request: ``torch.profiler`` over some steps, as a Chrome trace beside the flight file.

It begins and ends in the training thread when a backward pass begins (``probes.core.safe_point``), so that there is no cost
while nobody asks, and a trace of n steps holds n of each: backward, optimizer, data, forward. A thread of its own writes the
trace: compressing it takes seconds, in which training goes on. Two profilers cannot run at once in torch: ours does not begin
while the application's runs, and ends when the application's is about to begin.
"""

from __future__ import annotations

import functools
import gzip
import os
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs import catalog
from torchobs.flight.files import artifacts
from torchobs.flight.files.artifacts import LIMITS, PROFILE, named
from torchobs.flight.files.headroom import deadly_limit, shortage, survive_limits
from torchobs.probes.core.patch import Patch
from torchobs.support.error_guard import CircuitBreaker, call

if TYPE_CHECKING:
    from torchobs.flight.files.artifacts import ArtifactName
    from torchobs.flight.files.location import FlightDirectory
    from torchobs.probes.core.context import ProbeContext

NO_STEP_S = 120.0
"""A rank in which no backward pass begins for so long is not training."""

MOST_S = 300.0
"""What has been seen by then is the trace: nobody looks at more."""

MOST_GROWTH = 512 << 20
"""Bytes by which the process may grow meanwhile: every operation takes some 500, and a large model has 10^4 in a step."""

PLAIN_SIZE = 1 << 30
"""Bytes that a trace takes in the temp directory at most: it is twenty to thirty times what it is when it is compressed."""

WRITING_S = 5.0
"""How long the session's end waits for a trace that is being written: somebody asked for it."""

_CHUNK = 1 << 20


class _Run(NamedTuple):
    """A profile in progress."""

    profiler: Any
    patch: Patch
    steps: int
    wanted: ArtifactName
    first: int
    """steps that had ended before"""
    deadline_s: float
    memory: int


class Profiles:
    """Does one profile at a time. ``ask`` and ``sample`` are for the sampler thread."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._asked: tuple[int, ArtifactName, float] | None = None
        self._run: _Run | None = None
        self._writing: threading.Thread | None = None

    def ask(self, steps: int, number: int) -> None:
        """Profile that many steps, unless there is a profile already."""
        context, wanted = self._context, named(self._context.writer.name, PROFILE, number)
        busy = self._asked is not None or self._run is not None or (self._writing is not None and self._writing.is_alive())
        if busy or context.at_backward is None:
            self._fail(wanted, "profiler_in_use")
            return
        self._asked = steps, wanted, time.monotonic() + NO_STEP_S
        context.at_backward(self._at_backward)

    def sample(self) -> None:
        """See whether anything comes of it."""
        asked = self._asked
        if asked is not None and time.monotonic() > asked[2]:
            self._asked = None
            self._fail(asked[1], "no_step")

    def close(self) -> None:
        """End what is running, without a trace (only the thread that began it can), and let what is written be written."""
        self._asked = None
        if self._run is not None and threading.get_ident() == self._context.thread:
            self._stop()
        if self._writing is not None:
            self._writing.join(WRITING_S)

    def _at_backward(self) -> None:
        """In the training thread, when a backward pass begins. Cannot raise."""
        if self._context.device.cuda.capturing():  # a profiler that begins or ends waits for the device, which ends the capture
            if self._context.at_backward is not None:
                self._context.at_backward(self._at_backward)
            return
        breaker, asked, run = CircuitBreaker("profile"), self._asked, self._run
        call(breaker, self._advance)
        for trip in breaker.trips:
            call(CircuitBreaker("profile"), self._stop)
            wanted = run.wanted if run is not None else asked[1] if asked is not None else None
            if wanted is not None:
                self._fail(wanted, "error", exception=trip.exception)

    def _advance(self) -> None:
        run = self._run
        if run is None:
            asked, self._asked = self._asked, None
            if asked is not None:
                self._start(*asked[:2])
        elif (reason := self._why_over(run)) is not None:
            self._end(reason)
        if self._run is not None and self._context.at_backward is not None:
            self._context.at_backward(self._at_backward)

    def _why_over(self, run: _Run) -> str | None:
        if self._context.recorder.ended - run.first >= run.steps:
            return "complete"
        if time.monotonic() > run.deadline_s:
            return "time"
        return "memory" if _resident() - run.memory > MOST_GROWTH else None

    def _start(self, steps: int, wanted: ArtifactName) -> None:
        from torch import profiler
        from torch.autograd import profiler as autograd_profiler

        if autograd_profiler._is_profiler_enabled:  # noqa: SLF001  # the flag that torch itself asks
            self._fail(wanted, "profiler_in_use")
            return
        profile = profiler.profile()
        profile.start()
        patch = Patch(autograd_profiler.profile, "_prepare_trace", self._making_way)
        first, deadline_s = self._context.recorder.ended, time.monotonic() + MOST_S
        self._run = _Run(profile, patch, steps, wanted, first, deadline_s, _resident())
        attributes = {"steps": steps, "evidence": wanted.id}
        self._context.writer.event(catalog.EVENT_PROFILE_START.name, attributes, self._context.recorder.step)

    def _making_way(self, original: Any) -> Any:
        """Return a ``_prepare_trace`` that ends our profile first: two at once are an error in the application."""

        # both ways to begin one lead through it
        @functools.wraps(original)
        def prepare(profile: Any) -> Any:
            if self._run is not None and threading.get_ident() == self._context.thread:
                call(CircuitBreaker("profile"), self._end, "interrupted")
            return original(profile)

        return prepare

    def _stop(self) -> _Run | None:
        """End the profiler in this thread, which began it."""
        run, self._run = self._run, None
        if run is not None:
            run.patch.undo()
            run.profiler.stop()
        return run

    def _end(self, reason: str) -> None:
        place, ended = self._context.writer.place, self._context.recorder.ended
        run = self._stop()
        if run is None or place is None:
            return
        attributes = {"reason": reason, "steps": ended - run.first, "evidence": run.wanted.id}
        own = replace(place, fd=os.dup(place.fd))  # the session may end while the trace is written
        self._writing = threading.Thread(target=self._write, args=(run, own, attributes), name="torchobs-profile", daemon=True)
        self._writing.start()

    def _write(self, run: _Run, place: FlightDirectory, attributes: dict[str, object]) -> None:
        """Write the trace down, in a thread of its own."""
        survive_limits()
        breaker = CircuitBreaker("profile")
        done = call(breaker, _export, run.profiler, place, run.wanted)
        call(CircuitBreaker("profile"), _let_go, run.profiler)
        os.close(place.fd)
        if isinstance(done, int):
            self._context.writer.event(catalog.EVENT_PROFILE_END.name, {**attributes, "size": done})
        elif done is not None:
            self._fail(run.wanted, **done)
        else:
            self._fail(run.wanted, "error", exception=breaker.trips[0].exception)

    def _fail(self, wanted: ArtifactName, reason: str, detail: str = "", exception: str = "") -> None:
        given = {"reason": reason, "detail": detail, "exception.type": exception, "evidence": wanted.id}
        attributes = {name: text for name, text in given.items() if text}
        self._context.writer.event(catalog.EVENT_PROFILE_FAILED.name, attributes, self._context.recorder.step)


def _let_go(profile: Any) -> None:
    """Have torch free the trace now, in this thread, and not when its profiler is collected as garbage in another one.

    What it could not write to its end is written once more when that file is closed, and only here that harms nobody.
    """
    profile.profiler.kineto_results = None


def _export(profile: Any, place: FlightDirectory, wanted: ArtifactName) -> int | dict[str, str]:
    """Write the trace; return its size in bytes, or why there is none, as an event's attributes. Raises what torch does."""
    try:
        with tempfile.TemporaryDirectory(prefix="torchobs-", ignore_cleanup_errors=True) as directory:
            plain = Path(directory) / "trace.json"  # on disk: uncompressed it is twenty times the size
            if deadly_limit(PLAIN_SIZE):
                return {"reason": "temporary_directory", "detail": "the size of files is limited (ulimit -f)"}
            profile.export_chrome_trace(str(plain))
            if not plain.exists():  # torch has logged why, removed what there was, and raised nothing
                return {"reason": "temporary_directory", "detail": "torch could not write the trace there"}
            return _keep(plain, plain.stat().st_size, place, wanted)
    except OSError as problem:
        return {"reason": "temporary_directory", "detail": artifacts.refusal(problem)["detail"]}


def _keep(plain: Path, most: int, place: FlightDirectory, wanted: ArtifactName) -> int | dict[str, str]:
    """Compress a trace into evidence; return as :func:`_export`. ``most``: bytes that it may take."""
    lack = shortage(place.fd, min(most, LIMITS[PROFILE]))
    if lack is not None:
        return {"reason": "no_room", "detail": lack}
    temporary = None
    try:
        temporary, fd = artifacts.create_unfinished(place)
        try:
            size = _compress(plain, fd)
        finally:
            os.close(fd)
        if size is not None:
            artifacts.finish(place, temporary, wanted)
            return size
    except OSError as problem:
        if temporary is not None:
            artifacts.remove(place, temporary)
        return artifacts.refusal(problem)
    artifacts.remove(place, temporary)
    return {"reason": "too_large"}


def _compress(plain: Path, fd: int) -> int | None:
    """Compress into an open file; return how long it is, ``None`` if it would be longer than evidence may be."""
    with plain.open("rb") as source, open(fd, "wb", closefd=False) as target:
        with gzip.GzipFile("", "wb", 6, target, mtime=0) as packed:
            while chunk := source.read(_CHUNK):
                packed.write(chunk)
                if target.tell() > LIMITS[PROFILE]:
                    return None
        target.flush()
        size = os.fstat(fd).st_size
        return size if size <= LIMITS[PROFILE] else None


def _resident() -> int:
    """Return the bytes of memory that this process has, 0 where that cannot be told."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
