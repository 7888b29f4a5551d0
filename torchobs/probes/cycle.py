"""One training step, from the end of the last to its own: what the probes saw of it, written as one record.

A step ends when every optimizer of the cycle has stepped, and the cycle is learned: it is the set of optimizers seen before
one of them steps again. So a GAN's two optimizers are one step, and so are the hundreds of an optimizer-in-backward; with a
Wasserstein GAN's several critic updates the critic's are counted. Until the first repeat, an end is provisional.
"""

from __future__ import annotations

import time
import weakref
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torchobs.flight.record import Flag, Kind
from torchobs.probes.segments import BACKWARD, DATA, FORWARD, OTHER, Segments

if TYPE_CHECKING:
    from collections.abc import Callable

_U64, _U32 = (1 << 64) - 1, (1 << 32) - 1


class Append(Protocol):
    """``FlightWriter.append``."""

    def __call__(  # noqa: PLR0913, PLR0917  # the record's fields
        self, step: int, end_ns: int, kind: int, flags: int, losses: int, duration_s: float, loss: float, grad_norm: float,
        learning_rate: float, phase_s: tuple[float, ...], tokens: int = 0, samples: int = 0, norm_scale: float = 1.0,
    ) -> int:  # fmt: skip
        """Write one record."""


class Values:
    """What was seen of one step, but for its times."""

    __slots__ = (
        "flags", "learning_rate", "loss_base", "loss_sum", "losses", "norm_base", "norm_scale", "norm_squared", "samples",
        "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.flags = self.losses = self.tokens = self.samples = 0
        self.loss_sum = self.loss_base = self.norm_squared = self.norm_base = self.learning_rate = 0.0
        self.norm_scale = 1.0

    def merge(self, earlier: Values) -> None:
        """Take in what an earlier optimizer of the same step left."""
        self.flags |= earlier.flags
        self.losses += earlier.losses
        self.tokens += earlier.tokens
        self.samples += earlier.samples
        self.loss_sum += earlier.loss_sum
        self.norm_squared += earlier.norm_squared
        if earlier.flags & Flag.LEARNING_RATE:
            self.learning_rate = earlier.learning_rate


class _Ended(NamedTuple):
    """An end, provisional until it is written."""

    now_ns: int
    spent_ns: list[int]
    values: Values


class Cycle:
    """The step in progress. All methods run in the training thread (or, for optimizers in backward, an autograd thread)."""

    def __init__(self, append: Append, show_phase: Callable[[int, int], None]) -> None:
        self.segments = Segments()
        self.values = Values()
        self.step = 0
        """Number of the last step that ended."""
        self._append, self._show_phase = append, show_phase
        self._members: set[int] = set()
        self._seen: set[int] = set()
        self._alive: dict[int, weakref.ref[object]] = {}
        self._provisional: _Ended | None = None
        self.direct = False
        """Whether the user gives the boundaries by ``torchobs.step()``."""
        self.timed = True
        """Whether phases are recorded."""
        self.log_wins = False
        self.touched = False
        """Whether anything was seen since the last end."""

    # -- boundaries --------------------------------------------------------------------------------------------------------

    def turn(self, segment: int, now_ns: int) -> None:
        """A boundary: ``segment`` begins."""
        self.segments.turn(segment, now_ns)
        self._show_phase(segment + 1, now_ns)

    def fetch_begins(self, loader: int, now_ns: int) -> None:
        """See :meth:`Segments.fetch_begins`."""
        self.touched = True
        self.segments.fetch_begins(loader, now_ns)
        self._show_phase(DATA + 1, now_ns)

    def fetch_ends(self, now_ns: int, *, exhausted: bool, gradients: bool) -> None:
        """See :meth:`Segments.fetch_ends`."""
        self.segments.fetch_ends(now_ns, exhausted=exhausted, gradients=gradients)
        self._show_phase((OTHER if exhausted else FORWARD) + 1, now_ns)

    def backward_begins(self, now_ns: int) -> None:
        """See :meth:`Segments.backward_begins`."""
        self.touched = True
        if not self.segments.started and not self.step:
            self.values.flags |= Flag.UNTIMED  # nothing before it was seen
        self.segments.backward_begins(now_ns)
        self._show_phase(BACKWARD + 1, now_ns)

    # -- values ------------------------------------------------------------------------------------------------------------

    def add_loss(self, value: float, *, within_step: bool) -> None:
        """A backward pass began from a scalar. ``within_step``: inside a closure, where the last evaluation is the step's."""
        if self.log_wins:
            return
        values = self.values
        values.loss_sum = (values.loss_base if within_step else values.loss_sum) + value
        values.losses += 1
        values.flags |= Flag.LOSS

    def add_norm(self, norm: float, scale: float, *, within_step: bool) -> None:
        """The L2 norm of one optimizer's gradients, already divided by ``scale``."""
        values = self.values
        values.norm_squared = (values.norm_base if within_step else values.norm_squared) + norm * norm
        values.norm_scale = scale
        values.flags |= Flag.GRAD_NORM

    def log(self, loss: float | None, tokens: int, samples: int) -> None:
        """What the user says of the step in progress or, directly after a step that the hooks saw end, of that one."""
        self.log_wins = self.log_wins or loss is not None
        tokens, samples = max(0, min(tokens, _U64)), max(0, min(samples, _U32))
        if not self.touched and not self.direct and self._provisional is None and self.step:
            self.late(self.step, Flag.LOSS if loss is not None else 0, loss or 0.0, 0.0, tokens, samples)
            return
        values = self.values if self.touched or self._provisional is None else self._provisional.values
        values.tokens, values.samples = min(values.tokens + tokens, _U64), min(values.samples + samples, _U32)
        if loss is not None:
            values.loss_sum, values.losses = loss, 1
            values.flags |= Flag.LOSS

    def late(self, step: int, flags: int, loss: float, norm: float, tokens: int = 0, samples: int = 0) -> None:
        """Write values of a step that has ended."""
        self._append(step, time.monotonic_ns(), Kind.LATE, flags, 1, 0.0, loss, norm, 0.0, (0.0,) * 8, tokens, samples)

    # -- the step's end ----------------------------------------------------------------------------------------------------

    def optimizer_begins(self, optimizer: object) -> None:
        """An optimizer is about to step: if it has stepped in this cycle, the cycle was over before."""
        if id(optimizer) in self._seen and self._is_same(optimizer):
            self._members = set(self._seen)
            self._commit()
        elif self._provisional is not None:
            self._go_on(self._provisional)
        self.touched = True
        values = self.values
        values.loss_base, values.norm_base = values.loss_sum, values.norm_squared

    def optimizer_ends(self, optimizer: object, now_ns: int) -> None:
        """It has stepped, or the loss scaler skipped it."""
        key = id(optimizer)
        self._seen.add(key)
        if not self._is_same(optimizer):
            self._alive[key] = weakref.ref(optimizer, lambda _: self._forget(key))
        if self.direct:
            self.turn(OTHER, now_ns)
            return
        self._close(now_ns)
        if self._members and self._members <= self._seen:
            self._commit()

    def _close(self, now_ns: int) -> None:
        self._provisional = _Ended(now_ns, self.segments.close(now_ns), self.values)
        self._show_phase(OTHER + 1, now_ns)
        self.values = Values()
        self.touched = False

    def _is_same(self, optimizer: object) -> bool:
        known = self._alive.get(id(optimizer))
        return known is not None and known() is optimizer

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self._members.discard(key)
        self._seen.discard(key)

    def _go_on(self, ended: _Ended) -> None:
        """The end was none: another optimizer of the same cycle steps."""
        self._provisional = None
        spent = self.segments.spent_ns
        for index, length in enumerate(ended.spent_ns):
            spent[index] += length
        self.values.merge(ended.values)

    def end(self, now_ns: int) -> None:
        """The user says that the step has ended (``torchobs.step``)."""
        known = self.direct
        self.direct = True
        if not known and not self.touched and self._provisional is None and self.step:
            return  # the hooks have written this very step; from the next one on the user's word counts
        self.values.flags |= Flag.DIRECT
        if self._provisional is None or self.touched:
            self._close(now_ns)
        self._commit()

    def flush(self) -> None:
        """Write what is complete (at the rank's end)."""
        self._commit()

    def _commit(self) -> None:
        ended, self._provisional = self._provisional, None
        self._seen.clear()
        if ended is None:
            return
        self.step += 1
        spent, values = ended.spent_ns, ended.values
        phases = tuple([length / 1e9 for length in spent]) if self.timed else (0.0,) * 8
        norm = sqrt(values.norm_squared) if values.flags & Flag.GRAD_NORM else 0.0
        self._append(
            self.step, ended.now_ns, Kind.STEP, values.flags, values.losses & _U32, sum(spent[:5]) / 1e9, values.loss_sum, norm,
            values.learning_rate, phases, values.tokens, values.samples, values.norm_scale,
        )  # fmt: skip
