"""Every use that torchobs makes of torch's profiler. torch allows one in a process, and crashes where there are two.

So there is one recording of ours at most, it does not begin while the script profiles, and it ends when the script's own
profiler is about to begin, and when the interpreter exits. To see the script's profilers, two functions of
``torch.autograd.profiler`` are replaced when ours is first used, and stay replaced: a profiler in its warm-up has no other
mark than that it was prepared, and finding it among all objects takes a tenth of a second.
"""

from __future__ import annotations

import atexit
import functools
import sys
from threading import RLock, current_thread, get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torchobs.support.after_fork import renew_in_child
from torchobs.support.error_guard import CircuitBreaker, call
from torchobs.taps.patch import Patch
from torchobs.tensors.references import living

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_mutex = RLock()
"""Held while a profiler of ours begins or ends, and while one of the script's is prepared"""


def exclusively() -> AbstractContextManager[object]:
    """Return a lock for a block in which no profiler begins or ends in another thread. It may be taken again in the block."""
    return _mutex


class ProfilerBusyError(RuntimeError):
    """Another profiler runs, the script's or one of ours."""


class Recording:
    """A profiler of ours: prepared (warming up) when it is made, then started, then stopped.

    Args:
        purpose: what it is for, in the error of whoever wants to profile meanwhile.
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
        """Whether it was stopped, by whoever."""
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
    """The recording of this process, and what is known of the script's profilers."""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self._begins = self._exits = False
        self._prepared: WeakKeyDictionary[Any, int] | None = None
        """The script's profilers, each with the identity of the results it had when it was prepared: its end brings new ones"""

    def refuse_if_busy(self) -> None:
        """Raise :class:`ProfilerBusyError` if a profiler runs or warms up, in whichever thread."""
        from torch.autograd import profiler

        prepared = self._watch() if self._prepared is None else self._prepared
        if self._exits:
            raise ProfilerBusyError("the interpreter exits: a profiler that begins now would crash it")
        if self.recording is not None:
            raise ProfilerBusyError(_in_use(self.recording.description))
        running: Any = profiler._is_profiler_enabled or _enabled_in_this_thread()  # the flags that torch checks
        if running or any(id(one.kineto_results) == results for one, results in list(prepared.items())):
            raise ProfilerBusyError(_in_use("the program's own"))

    def begin(self, recording: Recording, function: Callable[[], object]) -> None:
        """Call a function of torch that begins a recording; if it raises, there is none."""
        self.recording, self._begins = None, True
        try:
            function()
            self.recording = recording
        finally:
            self._begins = False

    def exit(self) -> None:
        """End what still runs: torch crashes an interpreter that exits while it profiles."""
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
        begun = [one for one in living(profiler.profile) if getattr(one, "entered", False) and one.kineto_results is None]
        self._prepared = WeakKeyDictionary({one: id(None) for one in begun})
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


def _enabled_in_this_thread() -> bool:
    import torch

    return bool(torch._C._autograd._profiler_enabled())  # torch has no public name for it


def _in_use(whose: str) -> str:
    return f"another profiler runs ({whose}), and torch allows one in a process: end that first"


_guard = _Guard()
renew_in_child(sys.modules[__name__], _mutex=RLock)
