"""What is usual of the losses, or of the gradients' norms, while records are added: a part of the fold's state."""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING, NamedTuple

from torchobs.detect.excursions import Candidate, Excursions
from torchobs.detect.spikes import LEAST_LOSS_EXCESS, LEAST_NORM_EXCESS, START, WARM_UP, Bursts, judge, leaves_start
from torchobs.flight.metrics.totals import BURST_WORDS, GRADIENT_EXPLOSION, LOSS_SPIKE, Word, add_anomaly

if TYPE_CHECKING:
    from torchobs.flight.metrics.totals import Anomaly, Totals


class _Words(NamedTuple):
    """Where it is stored, and the kind of its spikes. ``logs``: the baseline is one of logarithms."""

    baseline: int
    usual: int
    start: int
    bursts: int
    excursion: int
    kind: int
    logs: bool


_LOSS = _Words(
    Word.LOSS_BASELINE, Word.LOSS_USUAL, Word.LOSS_START, Word.LOSS_BURSTS, Word.LOSS_EXCURSION, LOSS_SPIKE, logs=False
)  # fmt: skip
_NORM = _Words(
    Word.NORM_BASELINE, Word.NORM_USUAL, Word.NORM_START, Word.NORM_BURSTS, Word.NORM_EXCURSION, GRADIENT_EXPLOSION, logs=True
)  # fmt: skip


class Rise(NamedTuple):
    """The newest steps in which the loss was above its baseline, for norms that come in records of their own."""

    first: int
    last: int
    """0: there were none"""
    lasts: int
    """the loss stayed: a new baseline"""
    newest: int
    """step of the newest loss"""

    def add(self, step: int, past: UsualValues, *, waited: bool) -> Rise:
        """Return it with the loss that was added to ``past``. ``waited``: candidates waited before it."""
        if not past.is_high:
            return self._replace(newest=step)
        goes_on = waited or (self.last == self.newest and not self.lasts)
        return Rise(self.first if goes_on and self.last else step, step, int(past.settled), step)

    def explains(self, step: int, before: int, past: UsualValues) -> bool:
        """Return True if a norm may be high because the loss is. ``before``: step of the norm before it; ``past``: of norms.

        If the loss of its step has not come yet, the newest one counts. A loss that stayed explains the norms that are high
        since then, also where not each step's is measured.
        """
        if not self.last or step < self.first:
            return False
        if step <= self.last or self.last == self.newest < step:
            return True
        begun = bool(past.excursions.waiting) and past.excursions.explained > 0.0
        return self.lasts > 0 and (before <= self.last or begun)


class UsualValues:
    """Baseline and excursions of one series."""

    __slots__ = ("_mean", "_seen", "_start", "_totals", "_variance", "_words", "excursions", "is_high", "settled", "usual")

    def __init__(self, totals: Totals, words: _Words) -> None:
        floats, ints = totals.floats, totals.ints
        self._totals, self._words = totals, words
        self._mean, self._variance = floats[words.baseline], floats[words.baseline + 1]
        self._seen = ints[words.baseline + 2]
        self.usual, self._start = floats[words.usual], floats[words.start]
        """usual: the baseline after the last ordinary value; of norms their logarithm"""
        self.is_high = self.settled = False
        """Whether the last value was above the baseline, far or as a candidate; whether it has become a new one with it"""
        bursts = Bursts(*floats[words.bursts : words.bursts + BURST_WORDS])
        at = words.excursion
        places = range(at + 4, at + 4 + 3 * ints[at + 3], 3)
        waiting = [Candidate(floats[place], ints[place + 1], ints[place + 2]) for place in places]
        self.excursions = Excursions(bursts, waiting, (floats[at], floats[at + 1], floats[at + 2]), logs=words.logs)

    @classmethod
    def losses(cls, totals: Totals) -> UsualValues:
        """Return those of losses."""
        return cls(totals, _LOSS)

    @classmethod
    def norms(cls, totals: Totals) -> UsualValues:
        """Return those of norms."""
        return cls(totals, _NORM)

    @property
    def baseline(self) -> tuple[float, float, int]:
        """Mean, variance and number of values."""
        return self._mean, self._variance, self._seen

    def add(self, value: float, step: int, end_ns: int, *, explained: bool) -> tuple[list[Candidate], bool]:
        """Add a finite value, a norm above 0; return the spikes that are certain by now, and whether it is one."""
        logs, self.is_high, self.settled = self._words.logs, False, False
        number = log(value) if logs else value
        candidate = Candidate(number, step, end_ns)
        if self._seen < WARM_UP and leaves_start(value, self._start, self._seen):  # not learned by the baseline
            self._seen += 1
            if not logs or self._start > 0.0:
                self.usual = min(self.usual, log(self._start) if logs else self._start)
            return [candidate], True
        least = LEAST_NORM_EXCESS if logs else LEAST_LOSS_EXCESS * max(1.0, abs(self._mean))
        far, mean, variance, seen = judge(number, self._mean, self._variance, self._seen, least, skewed=not logs)
        spikes, is_spike, level = self.excursions.judge(candidate, self._mean, self._variance, far=far, explained=explained)
        self.settled, waiting = level is not None, self.excursions.waiting
        self.is_high = far or self.settled or bool(waiting and waiting[-1] is candidate)
        if not waiting:
            self._mean, self._variance, self._seen = level or (mean, variance, seen)
            self.usual = self.usual if is_spike else self._mean
            if self._seen <= START:
                self._start = max(self._start, abs(value)) if self._seen > 1 else abs(value)
        return spikes, is_spike

    def give_up(self, *, ended: bool = False) -> list[Candidate]:
        """Return the spikes among the candidates, which one follows that is not finite; ``ended``: which nothing follows."""
        return self.excursions.give_up(self._mean, self._variance, ended=ended)

    def report(self, spikes: list[Candidate], found: list[Anomaly]) -> int:
        """Append these spikes to ``found``; return their number."""
        unit = exp if self._words.logs else float
        for candidate in spikes:
            add_anomaly(found, self._words.kind, candidate, unit(candidate.value), unit(self.usual))
        return len(spikes)

    def store(self) -> None:
        """Write all into the fold's state."""
        floats, ints, words = self._totals.floats, self._totals.ints, self._words
        floats[words.baseline], floats[words.baseline + 1], ints[words.baseline + 2] = self.baseline
        floats[words.usual], floats[words.start] = self.usual, self._start
        excursions, past, at = self.excursions, self.excursions.bursts, words.excursion
        for index, value in enumerate((past.recent, past.peak, past.length, past.top, past.calm)):
            floats[words.bursts + index] = value
        floats[at], floats[at + 1], floats[at + 2] = excursions.calm, excursions.explained, excursions.first
        ints[at + 3] = len(excursions.waiting)
        for index, candidate in enumerate(excursions.waiting):
            place = at + 4 + 3 * index
            floats[place], ints[place + 1], ints[place + 2] = candidate


def begin_values(totals: Totals, found: list[Anomaly]) -> None:
    """Forget all: another model is trained. What its last values were is decided before."""
    ints = totals.ints
    for words in (_LOSS, _NORM):
        past = UsualValues(totals, words)
        ints[Word.ANOMALIES + words.kind] += past.report(past.give_up(ended=True), found)
        many = (words.baseline, 3), (words.bursts, BURST_WORDS), (words.excursion, 4)
        for at, count in (*many, (words.usual, 1), (words.start, 1)):
            ints[at : at + count] = memoryview(bytes(8 * count)).cast("Q")
    ints[Word.LOSS_RISE + 1] = 0
