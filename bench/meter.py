"""How long our own code runs between real steps: timed from outside, what torch does inside taken out.

Before ``init()`` the originals are wrapped (inner), after it whatever stands in their place (outer): the difference is ours,
guards and wrappers included. What is measured now and then (norms, at level advanced also weights) is a part of it, and timed
by itself.
"""

from __future__ import annotations

import itertools
import statistics
import struct
import zlib
from collections import Counter
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader

from torchobs.probes.clipping import ClipWatch
from torchobs.probes.gradients import GradientProbe
from torchobs.probes.layers import UpdateWatch
from torchobs.taps.patch import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

_SITES = (
    (dataloader._BaseDataLoaderIter, "__next__"), (torch.autograd, "backward"),
    (clip_grad, "_get_total_norm"), (clip_grad, "_clip_grads_with_norm_"),
)  # fmt: skip
_MEASURED = (
    (GradientProbe, "_measure"), (GradientProbe, "_use_clipping_norm"), (ClipWatch, "_note_total"),
    (UpdateWatch, "_copy"), (UpdateWatch, "_compare"),
)  # fmt: skip
"""What is done now and then, paced by what it costs"""
_NORMS = {"_measure", "_use_clipping_norm"}
HOOKS: tuple[dict[int, Any], ...] = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)


class Step(NamedTuple):
    """Our part of a step, in ns: the bookkeeping, and what is measured now and then, with its functions' names."""

    measured: frozenset[str]
    ours: int
    norms: int


class Meter:
    """Install ``inner``, then what is measured, then ``outer``; :meth:`step` after each step.

    At the end :meth:`remove_outer`, remove what was measured, :meth:`remove`: who is not on top can't be taken away.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._sum = self._norm = self._depth = 0
        self._measured: set[str] = set()
        self._inner: list[Patch] = []
        self._outer: list[Patch] = []

    def inner(self) -> None:
        """Wrap what is there before."""
        self._inner += [Patch(owner, name, lambda original: self._timed(original, -1)) for owner, name in _SITES]
        self._inner += [Patch(owner, name, self._timed_measuring) for owner, name in _MEASURED]

    def outer(self) -> None:
        """Wrap what stands there now."""
        self._outer += [Patch(owner, name, lambda original: self._timed(original, 1)) for owner, name in _SITES]
        for hooks in HOOKS:
            for key, hook in hooks.items():
                hooks[key] = self._timed(hook, 1)

    def remove_outer(self) -> None:
        """Restore what is measured."""
        for patch in reversed(self._outer):
            patch.undo()

    def remove(self) -> None:
        """Restore the sites."""
        for patch in reversed(self._inner):
            patch.undo()

    def step(self) -> None:
        """A step has ended."""
        self.steps.append(Step(frozenset(self._measured), self._sum - self._norm, self._norm))
        self._sum = self._norm = 0
        self._measured.clear()

    @property
    def ours_us(self) -> float:
        """Mean of the bookkeeping."""
        return self._mean_us(lambda step: step.ours)

    @property
    def norms_us(self) -> float:
        """Mean of what is measured now and then."""
        return self._mean_us(lambda step: step.norms)

    @property
    def interval(self) -> float:
        """Steps between two measurements of norms."""
        return len(self.steps) / max(1, sum(not step.measured.isdisjoint(_NORMS) for step in self.steps))

    def _mean_us(self, of: Callable[[Step], int]) -> float:
        """Of the medians of the steps in which the same was measured, so that a preemption is not ours."""
        kinds = Counter(step.measured for step in self.steps)
        medians = {kind: statistics.median(of(step) for step in self.steps if step.measured == kind) for kind in kinds}
        return sum(medians[kind] * count for kind, count in kinds.items()) / len(self.steps) / 1000

    def _timed(self, function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._sum += sign * (perf_counter_ns() - begun)

        return timed

    def _timed_measuring(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = perf_counter_ns()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:  # one may call another
                    self._norm += perf_counter_ns() - begun
                    self._measured.add(function.__name__)

        return timed


class EmptyHooks:
    """Optimizer hooks that do nothing."""

    def install(self) -> None:
        """Put the hooks in place."""
        self._handles = [
            torch_optimizer.register_optimizer_step_pre_hook(lambda *_: None),
            torch_optimizer.register_optimizer_step_post_hook(self._record),
        ]

    def remove(self) -> None:
        """Remove them."""
        for handle in self._handles:
            handle.remove()

    def _record(self, *_: Any) -> None:
        pass


class Floor(EmptyHooks):
    """The least that any such tool does: empty hooks at the same places, and one record per step with its CRC."""

    def __init__(self) -> None:
        self._ring = memoryview(bytearray(4096 * 128))
        self._sequence = itertools.count()

    def install(self) -> None:
        """Put the hooks in place."""
        self.patches = [Patch(owner, name, _empty) for owner, name in _SITES]
        super().install()

    def remove(self) -> None:
        """Remove them."""
        for patch in self.patches:
            patch.undo()
        super().remove()

    def _record(self, *_: Any) -> None:
        number = next(self._sequence)
        body = _BODY.pack(number, 1, perf_counter_ns(), 3, 7, 1, 2, 0.1, 0.2, 0.3, 4, 5, 6, 7, 8, 9, 1.0, 11, 0)
        at = (number & 4095) * 128
        self._ring[at : at + 128] = body + _CRC.pack(zlib.crc32(body, 7))


_BODY, _CRC = struct.Struct("<QQQHHIQddd4QQIfQI"), struct.Struct("<I")


def _empty(original: Callable[..., Any]) -> Callable[..., Any]:
    def empty(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return empty
