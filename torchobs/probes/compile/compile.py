"""``torch.compile``: number, duration and causes of compilations, and compilation in progress, which could look like a hang.

torch keeps records of the last 64 compilations, which the sampler thread reads. Start and end are seen in
``CompilationCallbackHandler.install_callbacks``, which wraps every compilation of a function or of a graph's backward, and
every CUDA graph recording. (Registered callbacks would be the official way, but ``torch._dynamo.reset()`` deletes them, and
of several compiling threads only the first calls them.) There the training thread also collects records that a reset would
delete.

Importing ``torch._dynamo`` takes a second, so nothing happens before somebody else has imported it, and there are no series
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

_MAX_WAITING = 4096
_TRIAL_WAITS_S = 1.0
"""How long a trial waits for a collection that another thread is at: what that collects is of before"""


class ListReader:
    """Reads new items of a list of torch's, even if the list is cleared, or trimmed at its front."""

    def __init__(self, read: Callable[[], Sequence[Any]]) -> None:
        self._read, self._last = read, None
        self.fresh()

    def fresh(self) -> Sequence[Any]:
        """Return the items added since the last call."""
        items = self._read()
        start = len(items)
        while start and items[start - 1] is not self._last:
            start -= 1
        if items:
            self._last = items[-1]
        return items[start:]


class _Started(NamedTuple):
    """A running compilation; ``shown``: it is recorded in the step's timeline."""

    started_ns: int
    shown: bool


class CompileProbe:
    """Watches the compiler's records, graph breaks and cache lookups."""

    name = "compile"

    def __init__(self) -> None:
        self._handle: MetaPathFinder | None = None
        self._patch: Patch | None = None
        self._records: ListReader | None = None
        self._breaks: ListReader | None = None
        self._waiting: deque[tuple[Any, int | None]] = deque(maxlen=_MAX_WAITING)
        self._gather_lock = Lock()
        self._show_lock = Lock()
        renew_in_child(self, _gather_lock=Lock, _show_lock=Lock)
        self._running: list[_Started] = []
        self._owner: dict[str, int] = {}
        self._depth = 0
        self._started_once = False
        self._on_trial = False
        self._lookups: Callable[[], Lookups] = dict
        self._before: Lookups = {}
        self._compile_records: CompileRecords | None = None

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`: now, or right after ``torch._dynamo`` has been imported."""
        self._context = context
        self._breaker = context.breaker(self.name)
        self._handle = after_import("torch._dynamo", self._breaker.guard(self._attach))
        context.hooks.compiles_on_trial.register(self._breaker, self._try)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.core.context.Probe`."""
        cancel(self._handle)
        if self._patch is not None:
            self._patch.undo()
        self._show(timeout_s=0.5)
        if self._compile_records is not None:
            self._compile_records.show_progress(nan)

    def sample(self) -> None:
        """Publish new compilations; nearly free without any."""
        if self._started_once:
            self._show(timeout_s=0.0)

    def _show(self, timeout_s: float) -> None:
        if self._started_once and self._show_lock.acquire(timeout=timeout_s):
            try:
                self._publish()
            finally:
                self._show_lock.release()

    def _publish(self) -> None:
        if self._compile_records is None:
            self._compile_records = CompileRecords(self._context, self._lookups, self._before)
        at_work = float(bool(self._running))
        self._gather()
        while self._waiting:
            item, step = self._waiting.popleft()
            if step is None:
                self._compile_records.note_break(item)
            else:
                self._compile_records.note_record(item, step)
        self._compile_records.count_lookups()
        self._compile_records.show_progress(at_work)

    def _attach(self) -> None:
        callback, utils = _modules()
        if missing := set(NEEDED) - set(utils.CompilationMetrics.__dataclass_fields__):
            raise AttributeError(*sorted(missing))
        breaks, counters = utils.graph_break_reasons, utils.counters
        self._lookups = lambda: lookups(counters)
        self._before = self._lookups()
        self._records = ListReader(utils.get_compilation_metrics)
        self._breaks = ListReader(lambda: breaks)
        handler = type(callback.callback_handler)
        self._patch = Patch(handler, "install_callbacks", self._watched, probe=self.name)

    def _watched(self, original: Any) -> Any:
        begin, gather = self._breaker.guard(self._begin), self._breaker.guard(self._gather)

        @functools.wraps(original)
        @contextlib.contextmanager
        def install_callbacks(*args: Any, **kwargs: Any) -> Iterator[None]:
            started = begin(args)
            try:
                with original(*args, **kwargs):
                    yield
            finally:
                if started is not None:
                    self._end(started)  # even if the breaker has tripped meanwhile; cannot raise
                    gather()

        return install_callbacks

    def _begin(self, args: tuple[Any, ...]) -> _Started:
        now_ns = monotonic_ns()
        self._gather()
        shown = not self._on_trial and self._concerns_training(args) and self._owner.setdefault("", get_ident()) == get_ident()
        if shown:
            self._depth += 1
            if self._depth == 1:
                self._context.recorder.compile_begins(now_ns)
        started = _Started(now_ns, shown)
        self._running.append(started)
        self._started_once = True
        return started

    def _concerns_training(self, args: tuple[Any, ...]) -> bool:
        """Return True in the training thread, and in the autograd engine's thread that it waits for in a backward pass."""
        if get_ident() == self._context.training.thread:
            return True
        return bool(self._context.training.backwards) and any(getattr(each, "name", "") == "LAZY_BACKWARD" for each in args)

    def _end(self, started: _Started) -> None:
        self._running.remove(started)
        if not started.shown:
            return
        self._depth -= 1
        if not self._depth:
            self._owner.clear()
            self._context.recorder.compile_ends(monotonic_ns())

    def _try(self, begins: bool) -> None:  # noqa: FBT001  # a hook's only argument
        """Collect what the training has compiled before a trial, and let go of what was compiled on trial."""
        self._gather(_TRIAL_WAITS_S, begins=begins)

    def _gather(self, timeout_s: float = 0.0, *, begins: bool | None = None) -> None:
        """Collect new records and breaks; does nothing while another thread collects, for longer than that.

        ``begins``: a trial begins or ends then, before another thread can collect what comes after.
        """
        held = self._gather_lock.acquire(timeout=timeout_s)
        try:
            if held and self._records is not None and self._breaks is not None:
                self._collect(self._records, self._breaks)
            self._on_trial = self._on_trial if begins is None else begins
        finally:
            if held:
                self._gather_lock.release()

    def _collect(self, all_records: ListReader, all_breaks: ListReader) -> None:
        step = self._context.recorder.step
        breaks, records = all_breaks.fresh(), all_records.fresh()
        if not self._on_trial:
            self._waiting.extend((reason, None) for reason in breaks)
            self._waiting.extend((record, step) for record in records)


def _modules() -> tuple[Any, Any]:
    from torch._dynamo import callback, utils  # imported by now

    return callback, utils
