"""Epochs: passes over the training loader, distinguished from other iterations by the steps that end in them.

An iteration is an epoch if steps end before another one begins, and if it iterates the training loader: the first loader that
trains. A loop that makes a new loader for every epoch is followed, too: if the iterator of the last epoch was deleted before a
step ended, or exhausted (that of persistent workers lives as long as its loader), the next iteration that trains is an epoch of
any loader. (An evaluation during an epoch leaves that iterator alive until a step has ended; between epochs none trains.)
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from threading import RLock
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from torchobs import catalog
from torchobs.probes.context import LONG_NS, EpochStart, span_limiter
from torchobs.probes.same_order import SameOrder
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from torchobs.probes.context import ProbeContext
    from torchobs.probes.same_order import Order


@dataclass(frozen=True, slots=True)
class _Iteration:
    """One call of a loader's ``__iter__``."""

    loader: weakref.ref[Any]
    iterator: weakref.ref[Any]
    begun_ns: int
    step: int
    """The last step that had ended by then"""
    order: Order | None
    gone: list[int]
    """The same when the iterator was deleted, or when the next one began after it was exhausted"""


class EpochProbe:
    """Counts epochs, and writes a span for each."""

    name = "epochs"

    def __init__(self) -> None:
        self._budget = span_limiter()
        self._lock = RLock()  # held for microseconds; a signal handler may iterate a loader, too
        renew_in_child(self, _lock=RLock)
        self._latest: _Iteration | None = None
        self._enclosing: _Iteration | None = None
        """An iteration without a step, still in progress when the latest began: an evaluation may come first"""
        self._epoch: _Iteration | None = None

    def install(self, context: ProbeContext) -> None:
        """See :class:`~torchobs.probes.context.Probe`."""
        self._context, self._order = context, SameOrder(context)
        context.count(catalog.EPOCHS, 0)
        context.set_gauge(catalog.STEPS_PLANNED, context.settings.total_steps)
        context.hooks.iterated.register(context.breaker(self.name), self._begun)

    def remove(self) -> None:
        """See :class:`~torchobs.probes.context.Probe`: the last epoch ends with the run."""
        self.sample()
        self._end(monotonic_ns(), self._context.recorder.ended)

    def _begun(self, loader: Any, iterator: Any) -> None:
        with self._lock:
            self._settle()
            if self._epoch is not None and self._is_exhausted(self._epoch):
                self._epoch.gone.append(self._context.recorder.ended)
            pending = self._latest
            if self._enclosing is None and pending is not None and not pending.gone and not self._is_exhausted(pending):
                self._enclosing = pending
            recorder, gone = self._context.recorder, list[int]()
            reference, order = weakref.ref(iterator, lambda _: gone.append(recorder.ended)), self._order.begun(loader)
            self._latest = _Iteration(weakref.ref(loader), reference, monotonic_ns(), recorder.ended, order, gone)

    def _is_exhausted(self, iteration: _Iteration) -> bool:
        """Return whether its iterator still exists and was exhausted in the step in progress."""
        iterator = iteration.iterator()
        sampler = id(getattr(iterator, "_index_sampler", None))  # the id that the data probe records for fetches
        return iterator is not None and sampler in self._context.recorder.exhausted(iteration.begun_ns)

    def sample(self) -> None:
        """Decide whether the latest iteration trains."""
        latest = self._latest
        if latest is not None and self._context.recorder.ended > latest.step:
            with self._lock:
                self._settle()

    def _settle(self) -> None:
        latest, epoch, self._latest = self._latest, self._epoch, None
        if latest is None or self._context.recorder.ended <= latest.step:
            self._latest = latest
            return
        enclosing, self._enclosing = self._enclosing, None
        if enclosing is not None and (not enclosing.gone or enclosing.gone[0] > latest.step):
            latest = enclosing
        loader = latest.loader()  # that of `for batch in DataLoader(...)` may be deleted
        is_same = epoch is not None and loader is not None and epoch.loader() is loader
        if epoch is None or is_same or (epoch.gone and epoch.gone[0] <= latest.step):
            self._end(latest.begun_ns, latest.step)
            self._order.epoch(latest.order, latest.step - epoch.step if epoch is not None else 0, latest.step)
            self._epoch = latest
            training = self._context.training
            training.epoch += 1
            training.epochs.append(EpochStart(training.epoch, latest.begun_ns, latest.step))
            self._context.count(catalog.EPOCHS, 1)

    def _end(self, now_ns: int, step: int) -> None:
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        if now_ns - epoch.begun_ns >= LONG_NS or self._budget.take(now_ns):
            attributes = {"epoch": self._context.training.epoch, "steps": step - epoch.step}
            self._context.write_span(catalog.SPAN_EPOCH.name, epoch.begun_ns, now_ns, attributes, failed=False)
