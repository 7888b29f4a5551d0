"""``torch.compile``: how often, how long, why again, and that it is at work right now, so that it does not look like a hang.

torch keeps a record of each compilation, the last 64 of them, which the sampler thread reads. Where one begins and ends is
seen in ``CompilationCallbackHandler.install_callbacks``, around every compilation of a function, of a graph's backward and
every recording of a CUDA graph. (Registered callbacks would be the official way: ``torch._dynamo.reset()`` deletes them, and
of several threads that compile only the first is told.) There the training thread also takes what a reset would delete.

``torch._dynamo`` takes a second to import, so nothing happens before somebody else has imported it, and there are no series
before the first compilation.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from math import nan
from threading import Lock, get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from torchobs.probes.compile.reasons import NEEDED
from torchobs.probes.compile.records import CompileRecords, Lookups, lookups
from torchobs.probes.core.patch import Patch
from torchobs.support.after_fork import renew_in_child
from torchobs.support.import_hooks import after_import, cancel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.abc import MetaPathFinder

    from torchobs.probes.core.context import ProbeContext

_MOST_WAITING = 4096


class Follower:
    """What is appended to a list of torch's, however often that is cleared, or shortened at its front."""

    def __init__(self, look: Callable[[], Sequence[Any]]) -> None:
        self._look, self._last = look, None
        self.fresh()

    def fresh(self) -> Sequence[Any]:
        """Return what has come since the last call."""
        items = self._look()
        start = len(items)
        while start and items[start - 1] is not self._last:
            start -= 1
        if items:
            self._last = items[-1]
        return items[start:]


class _Begun(NamedTuple):
    """A compilation at work; ``shown``: in the training's timeline."""

    begun_ns: int
    shown: bool


class CompileProbe:
    """Watches the compiler."""

    name = "compile"

    def __init__(self) -> None:
        self._handle: MetaPathFinder | None = None
        self._patch: Patch | None = None
        self._records: Follower | None = None
        self._breaks: Follower | None = None
        self._waiting: deque[tuple[bool, Any]] = deque(maxlen=_MOST_WAITING)
        self._gathering = Lock()
        self._showing = Lock()
        renew_in_child(self, _gathering=Lock, _showing=Lock)
        self._running: list[_Begun] = []
        self._owner: dict[str, int] = {}
        self._depth = 0
        self._begun_once = False
        self._lookups: Callable[[], Lookups] = dict
        self._before: Lookups = {}
        self._ledger: CompileRecords | None = None

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`: now, or right after ``torch._dynamo`` has been imported."""
        self._context = context
        self._breaker = context.breaker(self.name)
        self._handle = after_import("torch._dynamo", self._breaker.guard(self._attach))

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        if self._handle is not None:
            cancel(self._handle)
        if self._patch is not None:
            self._patch.undo()
        self._show(timeout_s=0.5)
        if self._ledger is not None:
            self._ledger.show_progress(nan)

    def sample(self) -> None:
        """Take in what has been compiled; all but free where nothing was."""
        if self._begun_once:
            self._show(timeout_s=0.0)

    def _show(self, timeout_s: float) -> None:
        if self._begun_once and self._showing.acquire(timeout=timeout_s):
            try:
                self._take_in()
            finally:
                self._showing.release()

    def _take_in(self) -> None:
        if self._ledger is None:
            self._ledger = CompileRecords(self._context, self._lookups, self._before)
        at_work = float(bool(self._running))
        self._gather()
        while self._waiting:
            is_break, item = self._waiting.popleft()
            (self._ledger.note_break if is_break else self._ledger.note_record)(item)
        self._ledger.count_lookups()
        self._ledger.show_progress(at_work)

    def _attach(self) -> None:
        callback, utils = _modules()
        if missing := set(NEEDED) - set(utils.CompilationMetrics.__dataclass_fields__):
            raise AttributeError(*sorted(missing))
        breaks, counters = utils.graph_break_reasons, utils.counters
        self._lookups = lambda: lookups(counters)
        self._before = self._lookups()
        self._records = Follower(utils.get_compilation_metrics)
        self._breaks = Follower(lambda: breaks)
        handler = type(callback.callback_handler)
        self._patch = Patch(handler, "install_callbacks", self._watched, probe=self.name)

    def _watched(self, original: Any) -> Any:
        begin, gather = self._breaker.guard(self._begin), self._breaker.guard(self._gather)

        @functools.wraps(original)
        @contextlib.contextmanager
        def install_callbacks(*args: Any, **kwargs: Any) -> Iterator[None]:
            begun = begin(args)
            try:
                with original(*args, **kwargs):
                    yield
            finally:
                if begun is not None:
                    self._end(begun)  # whether or not the fuse has blown meanwhile; cannot raise
                    gather()

        return install_callbacks

    def _begin(self, args: tuple[Any, ...]) -> _Begun:
        now_ns = monotonic_ns()
        self._gather()
        shown = self._concerns_training(args) and self._owner.setdefault("", get_ident()) == get_ident()
        if shown:
            self._depth += 1
            if self._depth == 1:
                self._context.recorder.compile_begins(now_ns)
        begun = _Begun(now_ns, shown)
        self._running.append(begun)
        self._begun_once = True
        return begun

    def _concerns_training(self, args: tuple[Any, ...]) -> bool:
        """Return True if this is the training thread, or the autograd engine's that it waits for in a backward pass."""
        if get_ident() == self._context.thread:
            return True
        return bool(self._context.backwards) and any(getattr(each, "name", "") == "LAZY_BACKWARD" for each in args)

    def _end(self, begun: _Begun) -> None:
        self._running.remove(begun)
        if not begun.shown:
            return
        self._depth -= 1
        if not self._depth:
            self._owner.clear()
            self._context.recorder.compile_ends(monotonic_ns())

    def _gather(self) -> None:
        """Take over what is new; whoever comes while another thread is at it has no need to."""
        if self._records is None or self._breaks is None or not self._gathering.acquire(blocking=False):
            return
        try:
            self._waiting.extend((True, reason) for reason in self._breaks.fresh())
            self._waiting.extend((False, record) for record in self._records.fresh())
        finally:
            self._gathering.release()


def _modules() -> tuple[Any, Any]:
    from torch._dynamo import callback, utils  # imported by now

    return callback, utils
