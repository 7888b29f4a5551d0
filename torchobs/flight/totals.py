"""State of the fold: the first words of value block 0, their series, and the functions that add single values to them."""

from __future__ import annotations

import sys
from bisect import bisect_left
from math import inf
from typing import NamedTuple

from torchobs import catalog
from torchobs.detect.spikes import SETTLED, Bursts, Candidate
from torchobs.flight.step_record import StepRecord

TOP = (1 << 63) - 1
"""Greatest value of a total; it saturates there."""
MAX = sys.float_info.max
ABSENT_BITS = 0x7FF8_0000_0000_0002
"""A gauge that was never set. Any NaN reads as absent: NaN values are counted and never stored in a gauge."""


STATES = ("data", "evaluation", "checkpoint", "compile", "idle")
"""States before a step's end; only then it is clear whether training was productive."""
_HISTOGRAM = 4
"""Words of a histogram besides one for each of its bounds: the last bucket, sum, least and greatest value"""
BURST_WORDS = len(Bursts.__slots__)
_BASELINE = ("mean", "variance", "number")
_EXCURSION = 4 + (SETTLED - 1) * len(Candidate._fields)
"""At ``SETTLED`` candidates their kind is decided: one fewer is kept"""


class _Words:
    """Gives out the words of block 0, one after another."""

    def __init__(self) -> None:
        self.end = 0

    def __call__(self, width: int = 1) -> int:
        first, self.end = self.end, self.end + width
        return first


_take = _Words()


class Word:
    """Words of value block 0 that the fold owns, in their order; the others belong to the session.

    Their number is the format: a new word comes to the end, or in the place of a spare one, or the file's version rises.
    """

    FOLDED_UPTO = _take()
    CLOCK_OFFSET = _take()
    """i64: wall clock minus CLOCK_MONOTONIC at the file's creation, ns"""
    STEPS = _take()
    LAST_STEP = _take()
    LAST_STEP_TIMESTAMP = _take()
    LOSS = _take()
    LOSS_STEP = _take()
    LEARNING_RATE = _take()
    SAMPLES = _take()
    TOKENS = _take()
    GRAD_NORM = _take()
    GRAD_NORM_STEP = _take()
    NONFINITE_STEPS = _take()
    STEPS_SKIPPED = _take()
    RECORDS_LOST = _take()
    CLIPPED_STEPS = _take()
    PHASE_TIME = _take(len(catalog.PHASES))
    FIRST_LOSS = _take()
    """of the present model"""
    LOSSES = _take()
    """number of its finite losses"""
    LOSS_LEFT = _take()
    """``detect.spikes``: which of them left the start, or one of its two other states"""
    GOODPUT = _take(len(catalog.GOODPUT_STATES))
    NORMS = _take()
    """number of the present model's norms"""
    ANOMALIES = _take(len(catalog.ANOMALY_KINDS))
    LOSS_USUAL = _take()
    NORM_USUAL = _take()
    """the baseline after the last ordinary value (the norm's as a logarithm), which is reported with an anomaly"""
    ACTIVE = _take(len(catalog.ANOMALY_KINDS))
    LOSS_START = _take()
    NORM_START = _take()
    """``detect.spikes.leaves_start``: the greatest of the model's first values"""
    LOSS_BASELINE = _take(len(_BASELINE))
    MODEL_STEP = _take()
    """first step of the present model; 0: the first model"""
    NORM_BASELINE = _take(len(_BASELINE))
    MODEL_CHANGES = _take()
    LOW_NORMS = _take()
    """consecutive measured steps with a vanishing norm"""
    LAST_CLIPPED = _take()
    """the newest clipped step: its record and a late one may both have the flag"""
    CREDITED = _take(len(STATES))
    """seconds in each of ``STATES`` already added to the goodput for the unfinished step"""
    NORM_BEFORE = _take()
    """lowest usual norm from which the norms of the present model rose to a level that data explains; 0: none"""
    STEP_DURATION = _take(len(catalog.SECONDS_BOUNDS) + _HISTOGRAM)
    SPARE_2 = _take(2)
    RATE_SUM = _take()
    RATES = _take()
    """of the present model (``fold``): sum of its learning rates, and their number"""
    SPARE_3 = _take(2)
    NORM_DISTRIBUTION = _take(len(catalog.NORM_BOUNDS) + _HISTOGRAM)
    SPARE_4 = _take(1)
    TOP_RATE = _take()
    LATE_SQUARE = _take()
    """of the present model: the highest learning rate, and the mean of about the last quarter of its squared norms"""
    LOSS_BURSTS = _take(BURST_WORDS)
    NORM_BURSTS = _take(BURST_WORDS)
    """``detect.spikes.Bursts``; the norm's as logarithms"""
    RATE_JUMP = _take()
    """the step in which the learning rate last jumped to a new maximum"""
    LOSS_EXCURSION = _take(_EXCURSION)
    NORM_EXCURSION = _take(_EXCURSION)
    """``detect.spikes.UsualValues``: calm values, explained ones, the first candidate, the number of candidates,
    and of each its value, its step and its time; the norm's as logarithms"""
    LOSS_RISE = _take(3)
    """``fold.Rise``: its first and last step, and whether the loss stayed"""
    FORWARD_SHARE = _take(5)
    """``forward.ForwardShare``"""


DURATION_SUM = Word.STEP_DURATION + len(catalog.SECONDS_BOUNDS) + 1
NORM_SUM = Word.NORM_DISTRIBUTION + len(catalog.NORM_BOUNDS) + 1
WORDS = _take.end
"""Number of words that the fold owns; a histogram takes its buckets, then sum, least and greatest value."""
SIZE = WORDS * 8

NONFINITE_LOSS, NONFINITE_GRADIENT, GRADIENT_EXPLOSION, LOSS_SPIKE, GRADIENT_VANISHING, DIVERGED = range(
    len(catalog.ANOMALY_KINDS)
)


def core_series() -> list[tuple[catalog.Metric, dict[str, str], int]]:
    """Return the series that the fold maintains, each with its word in block 0."""
    single = (
        (catalog.STEPS, Word.STEPS), (catalog.LAST_STEP_TIMESTAMP, Word.LAST_STEP_TIMESTAMP), (catalog.LOSS, Word.LOSS),
        (catalog.SAMPLES, Word.SAMPLES), (catalog.TOKENS, Word.TOKENS), (catalog.GRAD_NORM, Word.GRAD_NORM),
        (catalog.GRAD_NONFINITE_STEPS, Word.NONFINITE_STEPS), (catalog.AMP_STEPS_SKIPPED, Word.STEPS_SKIPPED),
        (catalog.STEP_DURATION, Word.STEP_DURATION), (catalog.GRAD_NORM_DISTRIBUTION, Word.NORM_DISTRIBUTION),
        (catalog.GRAD_CLIPPED_STEPS, Word.CLIPPED_STEPS), (catalog.MODEL_CHANGES, Word.MODEL_CHANGES),
    )  # fmt: skip
    several = (
        (catalog.STEP_PHASE_TIME, "phase", catalog.PHASES, Word.PHASE_TIME),
        (catalog.GOODPUT_TIME, "state", catalog.GOODPUT_STATES, Word.GOODPUT),
        (catalog.ANOMALIES, "kind", catalog.ANOMALY_KINDS, Word.ANOMALIES),
        (catalog.ANOMALY_ACTIVE, "kind", catalog.ANOMALY_KINDS, Word.ACTIVE),
    )
    series: list[tuple[catalog.Metric, dict[str, str], int]] = [(metric, {}, word) for metric, word in single]
    for metric, label, values, first in several:
        series += [(metric, {label: value}, first + index) for index, value in enumerate(values)]
    return [
        *series,
        (catalog.LEARNING_RATE, {"group": "0"}, Word.LEARNING_RATE),
        (catalog.FLIGHT_DROPPED, {"what": "record"}, Word.RECORDS_LOST),
    ]


class Anomaly(NamedTuple):
    """An anomaly in one record. ``value`` and ``baseline`` in the metric's unit."""

    kind: str
    step: int
    end_ns: int
    value: float
    baseline: float


class Totals:
    """The fold's state: one buffer of 64-bit words, with views as unsigned integers and as floats."""

    __slots__ = ("buffer", "floats", "ints")

    def __init__(self, buffer: bytearray | memoryview) -> None:
        self.buffer = memoryview(buffer)
        self.ints = self.buffer.cast("Q")
        self.floats = self.buffer.cast("d")

    def clear(self, clock_offset_ns: int) -> None:
        """Set the state of a rank before its first step."""
        for index in range(WORDS):
            self.ints[index] = 0
        self.ints[Word.CLOCK_OFFSET] = clock_offset_ns & ((1 << 64) - 1)
        for gauge in (Word.LAST_STEP_TIMESTAMP, Word.LOSS, Word.LEARNING_RATE, Word.GRAD_NORM):
            self.ints[gauge] = ABSENT_BITS
        for total in (DURATION_SUM, NORM_SUM):
            self.floats[total + 1], self.floats[total + 2] = inf, -inf


def add(totals: Totals, word: int, number: int) -> None:
    """Add to a total, which saturates."""
    # users may log any number of tokens, and a total that wraps around would be a decreasing counter
    totals.ints[word] = min(totals.ints[word] + number, TOP)


def begin_model(totals: Totals, step: int) -> None:
    """Reset anomalies: a new model is trained from ``step`` on; late values of earlier steps are not its."""
    ints = totals.ints
    ints[Word.MODEL_CHANGES] += 1
    ints[Word.MODEL_STEP] = ints[Word.LOSS_STEP] = ints[Word.GRAD_NORM_STEP] = step
    ints[Word.LOW_NORMS] = ints[Word.RATE_JUMP] = 0
    for kind in range(len(catalog.ANOMALY_KINDS)):
        totals.floats[Word.ACTIVE + kind] = 0.0


def add_anomaly(anomalies: list[Anomaly], kind: int, record: StepRecord | Candidate, value: float, baseline: float) -> None:
    """Append an anomaly to ``anomalies``."""
    anomalies.append(Anomaly(catalog.ANOMALY_KINDS[kind], record.step, record.end_ns, value, baseline))


def is_active(totals: Totals, kind: int) -> bool:
    """Return whether the last judged record was anomalous in this way."""
    return totals.floats[Word.ACTIVE + kind] > 0.0


def count(totals: Totals, kind: int, number: int, *, active: bool) -> None:
    """Add to a kind's anomalies and set whether it is active."""
    totals.ints[Word.ANOMALIES + kind] += number
    totals.floats[Word.ACTIVE + kind] = float(active)


def observe(totals: Totals, buckets: int, bounds: tuple[float, ...], total: int, values: list[float]) -> None:
    """Add finite values to the histogram with buckets from word ``buckets`` on; ``total`` is the word after them."""
    if not values:
        return
    ints, floats = totals.ints, totals.floats
    sum_, least, greatest = floats[total : total + 3]
    for value in values:
        ints[buckets + bisect_left(bounds, value)] += 1
        sum_ += value
        least = min(least, value)
        greatest = max(greatest, value)
    # an infinite sum would make the series absent
    floats[total], floats[total + 1], floats[total + 2] = min(max(sum_, -MAX), MAX), least, greatest


def signed(word: int) -> int:
    """Return a word as a signed integer."""
    return word - (1 << 64) if word >> 63 else word
