"""What the fold keeps: the first words of value block 0, and how single values are added to them."""

from __future__ import annotations

import sys
from bisect import bisect_left
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog

if TYPE_CHECKING:
    from torchobs.flight.format.step_record import StepRecord

TOP = (1 << 63) - 1
"""No total goes beyond"""
MAX = sys.float_info.max
ABSENT_BITS = 0x7FF8_0000_0000_0002
"""A gauge that was never set. Any NaN reads as absent: a NaN is counted, never a gauge's value."""


class Word:
    """Words of value block 0 that the fold owns; the others of the block are the session's."""

    FOLDED_UPTO = 0
    CLOCK_OFFSET = 1
    """i64: wall clock minus CLOCK_MONOTONIC at birth, ns"""
    STEPS = 2
    LAST_STEP = 3
    LAST_STEP_TIMESTAMP = 4
    LOSS = 5
    LOSS_STEP = 6
    LEARNING_RATE = 7
    SAMPLES = 8
    TOKENS = 9
    GRAD_NORM = 10
    GRAD_NORM_STEP = 11
    NONFINITE_STEPS = 12
    STEPS_SKIPPED = 13
    RECORDS_LOST = 14
    CLIPPED_STEPS = 15
    PHASE_TIME = 16
    GOODPUT = 24
    ANOMALIES = 32
    LOSS_USUAL, NORM_USUAL = 38, 39
    """the baseline when the last ordinary value had been learned (the norm's as a logarithm): what an anomaly is told beside"""
    ACTIVE = 40
    LOSS_START, NORM_START = 46, 47
    """``detect.spikes.leaves_start``: the greatest of the model's first values"""
    LOSS_BASELINE = 48
    MODEL_STEP = 51
    """the first step of the model at hand; 0: the first model's"""
    NORM_BASELINE = 52
    MODEL_CHANGES = 55
    LOW_NORMS = 56
    """measured steps in a row whose norm was vanishing"""
    LAST_CLIPPED = 57
    """the newest step that was clipped: its record and a later one of a device's may both say so"""
    CREDITED = 58
    """seconds of ``credit.STATES`` that stand in the goodput, of a step that has not ended"""
    STEP_DURATION = 64
    NORM_DISTRIBUTION = 96


DURATION_SUM = Word.STEP_DURATION + len(catalog.SECONDS_BOUNDS) + 1
NORM_SUM = Word.NORM_DISTRIBUTION + len(catalog.NORM_BOUNDS) + 1
WORDS = NORM_SUM + 3
"""Words that the fold owns; a histogram takes its buckets, then sum, least and greatest value."""
SIZE = WORDS * 8

NONFINITE_LOSS, NONFINITE_GRADIENT, GRADIENT_EXPLOSION, LOSS_SPIKE, GRADIENT_VANISHING = range(len(catalog.ANOMALY_KINDS))


class Anomaly(NamedTuple):
    """What the fold found in one record. ``value`` and ``baseline`` in the unit of the metric."""

    kind: str
    step: int
    end_ns: int
    value: float
    baseline: float


class Totals:
    """The fold's state: one buffer of 64-bit words, seen as unsigned integers and as floats."""

    __slots__ = ("buffer", "floats", "ints")

    def __init__(self, buffer: bytearray | memoryview) -> None:
        self.buffer = memoryview(buffer)
        self.ints = self.buffer.cast("Q")
        self.floats = self.buffer.cast("d")

    def clear(self, clock_offset_ns: int) -> None:
        """Set the state of a rank that has done no step yet."""
        for index in range(WORDS):
            self.ints[index] = 0
        self.ints[Word.CLOCK_OFFSET] = clock_offset_ns & ((1 << 64) - 1)
        for gauge in (Word.LAST_STEP_TIMESTAMP, Word.LOSS, Word.LEARNING_RATE, Word.GRAD_NORM):
            self.ints[gauge] = ABSENT_BITS
        for total in (DURATION_SUM, NORM_SUM):
            self.floats[total + 1], self.floats[total + 2] = inf, -inf


def add(totals: Totals, word: int, number: int) -> None:
    """Add to a total that stays where it is at its end."""
    # a user's tokens may be anything that a record holds, and a total that wraps around is a counter that steps back
    totals.ints[word] = min(totals.ints[word] + number, TOP)


def load_baseline(totals: Totals, at: int) -> tuple[float, float, int]:
    """Return mean, variance and how many values were seen (``detect.spikes``)."""
    return totals.floats[at], totals.floats[at + 1], totals.ints[at + 2]


def store_baseline(totals: Totals, at: int, mean: float, variance: float, seen: int) -> None:
    """Keep them."""
    totals.floats[at], totals.floats[at + 1], totals.ints[at + 2] = mean, variance, seen


def begin_model(totals: Totals, step: int) -> None:
    """Forget what was usual: another model is trained from that step on; what comes late of earlier ones is not its."""
    ints = totals.ints
    ints[Word.MODEL_CHANGES] += 1
    ints[Word.MODEL_STEP] = ints[Word.LOSS_STEP] = ints[Word.GRAD_NORM_STEP] = step
    ints[Word.LOW_NORMS] = 0
    for baseline in (Word.LOSS_BASELINE, Word.NORM_BASELINE):
        store_baseline(totals, baseline, 0.0, 0.0, 0)
    for word in (Word.LOSS_START, Word.NORM_START, Word.LOSS_USUAL, Word.NORM_USUAL):
        totals.floats[word] = 0.0
    for kind in range(len(catalog.ANOMALY_KINDS)):
        totals.floats[Word.ACTIVE + kind] = 0.0


def note(found: list[Anomaly], kind: int, record: StepRecord, value: float, baseline: float) -> None:
    """Add to what was found."""
    found.append(Anomaly(catalog.ANOMALY_KINDS[kind], record.step, record.end_ns, value, baseline))


def is_active(totals: Totals, kind: int) -> bool:
    """Return True if the last judged record was anomalous in this way."""
    return totals.floats[Word.ACTIVE + kind] > 0.0


def count(totals: Totals, kind: int, number: int, *, active: bool) -> None:
    """Add to a kind's anomalies, and say whether it goes on."""
    totals.ints[Word.ANOMALIES + kind] += number
    totals.floats[Word.ACTIVE + kind] = float(active)


def observe(totals: Totals, buckets: int, bounds: tuple[float, ...], total: int, values: list[float]) -> None:
    """Add finite values to the histogram whose buckets begin at that word; ``total`` is the word after them."""
    if not values:
        return
    ints, floats = totals.ints, totals.floats
    sum_, least, greatest = floats[total : total + 3]
    for value in values:
        ints[buckets + bisect_left(bounds, value)] += 1
        sum_ += value
        least = min(least, value)
        greatest = max(greatest, value)
    # an infinite sum would be no value, and its series gone
    floats[total], floats[total + 1], floats[total + 2] = min(sum_, MAX), least, greatest


def signed(word: int) -> int:
    """Return the integer that a word holds."""
    return word - (1 << 64) if word >> 63 else word
