"""Detect epochs in one order: a ``DistributedSampler`` shuffles for several ranks, and its ``set_epoch()`` is not called.

A learning-rate finder, or an epoch that is begun anew, comes in the order of the first epoch; and some make two passes of an
epoch. So three must be alike, and who ever gives the sampler another epoch is left alone from then on.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchobs import catalog

if TYPE_CHECKING:
    from torchobs.probes.context import ProbeContext

LEAST_STEPS = 8
"""Steps of an epoch from which its order matters; fewer repeated batches are a test whether a model can learn them"""
_LEAST_REPEATS = 2
"""Epochs in one order, in a row"""


@dataclass(frozen=True, slots=True)
class Order:
    """The values that determined the order of a shuffling ``DistributedSampler`` when its loader was iterated."""

    sampler: weakref.ref[Any]
    follows: tuple[object, object]


class SameOrder:
    """A part of ``epochs.EpochProbe``, called under its lock. Reported once."""

    def __init__(self, context: ProbeContext) -> None:
        self._context = context
        self._last: Order | None = None
        """State of the last epoch"""
        self._repeats = 0
        self._is_set = self._is_reported = self._stands = False

    def begun(self, loader: Any) -> Order | None:
        """Return the state that decides an iterated loader's order; ``None`` if no ``DistributedSampler`` shuffles."""
        order, last = _order(loader), self._last
        if order is not None and last is not None and order.sampler == last.sampler and order.follows != last.follows:
            self._take_back()
        return order

    def epoch(self, order: Order | None, before: int, step: int) -> None:
        """Judge an epoch that began after that step, and has trained; ``before``: steps of the epoch before."""
        last, self._last = self._last, order
        if order is None or last is None or order.sampler != last.sampler:
            self._repeats, self._is_set, self._stands = 0, False, False
        if order is None or (sampler := order.sampler()) is None:
            return
        if _follows(sampler) != order.follows:  # torch draws the order only at the first batch, after `iter(loader)`
            self._take_back()
        self._repeats = self._repeats + 1 if order == last and before >= LEAST_STEPS else 0
        if self._repeats >= _LEAST_REPEATS and not (self._is_set or self._is_reported):
            self._is_reported = self._stands = True
            self._context.report("same_order", step)

    def _take_back(self) -> None:
        """Record that the sampler gets epochs; write the event again, of no parameter, if the contrary was reported."""
        self._is_set = True
        if self._stands:
            self._stands = False
            self._context.event(catalog.EVENT_LOOP_MISTAKE, {"kind": "same_order", "parameters_affected": 0})


def _order(loader: Any) -> Order | None:
    from torch.utils.data import DistributedSampler

    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):  # of a batch sampler of one's own
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    # a subclass may draw in its own way, and have nothing of what its parent has
    if not isinstance(sampler, DistributedSampler) or type(sampler).__iter__ is not DistributedSampler.__iter__:
        return None
    if not getattr(sampler, "shuffle", False) or getattr(sampler, "num_replicas", 1) < 2:  # noqa: PLR2004  # ranks
        return None
    return Order(weakref.ref(sampler), _follows(sampler))


def _follows(sampler: Any) -> tuple[object, object]:
    return getattr(sampler, "seed", None), getattr(sampler, "epoch", None)
