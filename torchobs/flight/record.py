"""The step record, which is the truth, and its fold into cumulative metrics, which is everything else.

A record is 128 bytes, little-endian:

====== ====== ================ =============================================================================================
offset type   field            meaning
====== ====== ================ =============================================================================================
0      u64    seq              position in the ring, from 1; valid iff the CRC matches and ``seq`` is the one expected there
8      u64    step             the step's number, from 1
16     u64    end_ns           CLOCK_MONOTONIC at the step's end
24     u16    kind             1 *step*; 2 *late*: values of an earlier step, delivered after its end; 3 *plain* (below)
26     u16    flags            :class:`Flag`
28     u32    losses           backward passes that the loss sums over
32     f64    duration_s       from the last step's end to this one's; evaluation, checkpoints, compilation taken out
40     f64    loss             sum over the step's backward passes, or the value logged
48     f64    grad_norm        total L2 norm, unscaled
56     f64    learning_rate    of the first parameter group
64     8×f32  phase_s          seconds in each of ``PHASE_NAMES``
96     u64    tokens
104    u32    samples
108    u32    zero
112    f64    norm_scale       the loss scale that grad_norm was divided by, 1 without
120    u32    zero
124    u32    crc              CRC-32 of the 124 bytes before, seeded (``layout``)
====== ====== ================ =============================================================================================

A *plain* step (kind 3), which is nearly every one, holds its boundaries instead of its times, so that the training thread
computes nothing: ``fetch`` u64 at 32; ``fetched``, ``backward``, ``backward_ends``, ``optimizer`` u64 at 64, each
CLOCK_MONOTONIC in ns << 4, the low bits the hook's code; ``norm_scale`` f32 at 108; ``begun_ns`` u64, the last step's end,
at 112. Without a DataLoader ``fetch`` and ``fetched`` are at 0 ns. :func:`unpack` makes the same :class:`StepRecord` of both.

:func:`fold` is one pure function, used by the sampler thread and by every reader for the records after ``FOLDED_UPTO``, so
that the view is exact after any crash. Its state is the first ``WORDS`` words of value block 0.
"""

from __future__ import annotations

import struct
import sys
import zlib
from bisect import bisect_left
from math import exp, inf, isfinite, log
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.detect.spikes import judge
from torchobs.flight.layout import RECORD_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

PHASE_NAMES = ("data", "forward", "backward", "optimizer", "other", "evaluation", "checkpoint", "compile")

_BODY = struct.Struct("<QQQHHIdddd8fQIIdI")
PLAIN = struct.Struct("<QQQHHIQddd4QQIfQI")
"""A plain step's record, without its CRC: seq, step, end_ns, kind, flags, losses, fetch, loss, grad_norm, learning_rate,
fetched, backward, backward_ends, optimizer, tokens, samples, norm_scale, begun_ns, zero."""
CRC = struct.Struct("<I")
_TOP = (1 << 63) - 1
_MAX = sys.float_info.max
_ABSENT = struct.unpack("<d", struct.pack("<Q", 0x7FF8_0000_0000_0002))[0]
ABSENT_BITS = 0x7FF8_0000_0000_0002
"""A gauge that was never set. Any NaN reads as absent: a NaN is counted, never a gauge's value."""


class Kind:
    """Kinds of record (plain integers, here and below: an ``IntFlag`` made the fold twelve times slower)."""

    STEP = 1
    LATE = 2
    PLAIN = 3
    """on disk only: decoded, it is a *step*"""


class Flag:
    """What a record holds and what happened in its step."""

    LOSS = 1
    GRAD_NORM = 2
    LEARNING_RATE = 4
    SKIPPED = 8
    """the loss scaler skipped the optimizer"""
    UNTIMED = 16
    """the step's start is unknown (the first one): no duration"""
    DIRECT = 32
    """the boundary was given by torchobs.step()"""
    CLOSURE = 64
    """the optimizer was given a closure"""


class StepRecord(NamedTuple):
    """One record, decoded. Times in seconds, ``end_ns`` on CLOCK_MONOTONIC."""

    seq: int
    step: int
    end_ns: int
    kind: int
    flags: int
    losses: int
    duration_s: float
    loss: float
    grad_norm: float
    learning_rate: float
    phase_s: tuple[float, ...]
    tokens: int
    samples: int
    norm_scale: float


def pack(  # noqa: PLR0913, PLR0917  # the record's fields, once a step: a tuple around them would cost as much as packing
    seq: int, step: int, end_ns: int, kind: int, flags: int, losses: int, duration_s: float, loss: float, grad_norm: float,
    learning_rate: float, phase_s: tuple[float, ...], tokens: int, samples: int, norm_scale: float, seed: int,
) -> bytes:  # fmt: skip
    """Return the record's 128 bytes. Raises ``struct.error`` for a value that its field cannot hold."""
    body = _BODY.pack(
        seq, step, end_ns, kind, flags, losses, duration_s, loss, grad_norm, learning_rate, *phase_s, tokens, samples, 0,
        norm_scale, 0,
    )  # fmt: skip
    return body + CRC.pack(zlib.crc32(body, seed))


def unpack(raw: bytes | memoryview, seed: int) -> StepRecord | None:
    """Decode 128 bytes; ``None`` when the CRC does not match."""
    if len(raw) != RECORD_SIZE or CRC.unpack_from(raw, RECORD_SIZE - 4)[0] != zlib.crc32(raw[: RECORD_SIZE - 4], seed):
        return None
    if raw[24] == Kind.PLAIN:
        return _unpack_plain(raw)
    seq, step, end_ns, kind, flags, losses, duration_s, loss, norm, rate, *phases, tokens, samples, _, scale, _ = (
        _BODY.unpack_from(raw)
    )
    return StepRecord(
        seq, step, end_ns, kind, flags, losses, duration_s, loss, norm, rate, tuple(phases), tokens, samples, scale
    )


def _unpack_plain(raw: bytes | memoryview) -> StepRecord | None:
    """Work the times of a plain step out; ``None`` if they are not in order, which only a forger writes."""
    seq, step, end_ns, _, flags, losses, *stamps, tokens, samples, scale, begun_ns, _ = PLAIN.unpack_from(raw)
    fetch, loss, norm, rate, fetched, backward, backward_ends, optimizer = stamps
    fetch, fetched = (fetch >> 4, fetched >> 4) if fetched >> 4 else (begun_ns, begun_ns)
    backward, backward_ends, optimizer = backward >> 4, backward_ends >> 4, optimizer >> 4
    if not begun_ns <= fetch <= fetched <= backward <= backward_ends <= optimizer <= end_ns:
        return None
    other = fetch - begun_ns + optimizer - backward_ends
    phases = (fetched - fetch, backward - fetched, backward_ends - backward, end_ns - optimizer, other, 0, 0, 0)
    seconds = tuple([length / 1e9 for length in phases])
    length_s = (end_ns - begun_ns) / 1e9
    return StepRecord(seq, step, end_ns, Kind.STEP, flags, losses, length_s, loss, norm, rate, seconds, tokens, samples, scale)


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
    PHASE_TIME = 16
    GOODPUT = 24
    ANOMALIES = 32
    ACTIVE = 40
    LOSS_BASELINE = 48
    NORM_BASELINE = 52
    STEP_DURATION = 64
    NORM_DISTRIBUTION = 96


_DURATION_SUM = Word.STEP_DURATION + len(catalog.SECONDS_BOUNDS) + 1
_NORM_SUM = Word.NORM_DISTRIBUTION + len(catalog.NORM_BOUNDS) + 1
WORDS = _NORM_SUM + 3
"""Words that the fold owns; a histogram takes its buckets, then sum, least and greatest value."""
_SIZE = WORDS * 8

_NONFINITE_LOSS, _NONFINITE_GRADIENT, _GRADIENT_EXPLOSION, _LOSS_SPIKE = range(len(catalog.ANOMALY_KINDS))
LEAST_NORM_EXCESS = log(8.0)
"""An explosion is at least 8 times the usual norm (on the log scale, where norms are near normal)."""
LEAST_LOSS_EXCESS = 0.25
"""A loss spike is at least a quarter of the usual loss above it, or 0.25 where the loss is near 0."""


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
        for total in (_DURATION_SUM, _NORM_SUM):
            self.floats[total + 1], self.floats[total + 2] = inf, -inf


def fold(totals: Totals, records: Sequence[StepRecord], found: list[Anomaly] | None = None) -> None:
    """Add ``records``, in ring order, to ``totals``; anomalies are appended to ``found``. Pure: no clock, no I/O.

    Each subject is one pass over the batch with its state in local variables: item access through a memoryview costs as
    much as the arithmetic, and at a thousand steps a second the sampler's share of the GIL is what training feels. The
    result does not depend on how the records were cut into batches, to the last bit: sums run in ring order from the
    stored value, else a reader's total could step back by one rounding error, which Prometheus takes for a reset.

    A record that is in ``totals`` already is passed over, and an exception changes nothing: a batch that an interrupt (a
    signal handler that raises) has cut short can be given once more.
    """
    upto = totals.ints[Word.FOLDED_UPTO]
    fresh = records if records and records[0].seq > upto else [record for record in records if record.seq > upto]
    if not fresh:
        return
    changed, noted, newest = Totals(bytearray(totals.buffer[:_SIZE])), list[Anomaly](), fresh[-1].seq
    fold_late(changed, fresh, noted)
    _add(changed, Word.RECORDS_LOST, newest - upto - len(fresh))
    changed.ints[Word.FOLDED_UPTO] = newest
    totals.buffer[:_SIZE] = changed.buffer
    if found is not None:
        found += noted


def fold_late(totals: Totals, records: Sequence[StepRecord], found: list[Anomaly]) -> None:
    """Add records whose numbers were passed over, and counted as lost, because they took too long to come."""
    _add(totals, Word.TOKENS, sum(record.tokens for record in records))
    _add(totals, Word.SAMPLES, sum(record.samples for record in records))
    rates = (record.learning_rate for record in reversed(records) if record.flags & Flag.LEARNING_RATE)
    totals.floats[Word.LEARNING_RATE] = next(filter(isfinite, rates), totals.floats[Word.LEARNING_RATE])
    steps = [record for record in records if record.kind == Kind.STEP]
    if steps:
        _fold_progress(totals, steps)
        _fold_times(totals, steps)
    _fold_losses(totals, [record for record in records if record.flags & Flag.LOSS], found)
    _fold_norms(totals, [record for record in records if record.flags & Flag.GRAD_NORM], found)
    totals.ints[Word.STEPS_SKIPPED] += sum(1 for record in records if record.flags & Flag.SKIPPED)


def _add(totals: Totals, word: int, number: int) -> None:
    # a user's tokens may be anything that a record holds, and a total that wraps around is a counter that steps back
    totals.ints[word] = min(totals.ints[word] + number, _TOP)


def _fold_progress(totals: Totals, steps: list[StepRecord]) -> None:
    ints, floats, last = totals.ints, totals.floats, steps[-1]
    ints[Word.STEPS] += len(steps)
    ints[Word.LAST_STEP] = last.step
    floats[Word.LAST_STEP_TIMESTAMP] = (last.end_ns + _signed(ints[Word.CLOCK_OFFSET])) / 1e9
    durations = [record.duration_s for record in steps if not record.flags & Flag.UNTIMED]
    _observe(totals, Word.STEP_DURATION, catalog.SECONDS_BOUNDS, _DURATION_SUM, durations)


def _fold_times(totals: Totals, steps: list[StepRecord]) -> None:
    floats = totals.floats
    data, forward, backward, optimizer, other = floats[Word.PHASE_TIME : Word.PHASE_TIME + 5]
    productive, starved, skipped, evaluation, checkpoint, compiling = floats[Word.GOODPUT : Word.GOODPUT + 6]
    for record in steps:
        data_s, forward_s, backward_s, optimizer_s, other_s, evaluation_s, checkpoint_s, compile_s = record.phase_s
        data += data_s
        forward += forward_s
        backward += backward_s
        optimizer += optimizer_s
        other += other_s
        starved += data_s
        evaluation += evaluation_s
        checkpoint += checkpoint_s
        compiling += compile_s
        if record.flags & Flag.SKIPPED:
            skipped += forward_s + backward_s + optimizer_s + other_s
        else:
            productive += forward_s + backward_s + optimizer_s + other_s
    for index, value in enumerate((data, forward, backward, optimizer, other)):
        floats[Word.PHASE_TIME + index] = value
    for index, value in enumerate((productive, starved, skipped, evaluation, checkpoint, compiling)):
        floats[Word.GOODPUT + index] = value


def _fold_losses(totals: Totals, records: list[StepRecord], found: list[Anomaly]) -> None:
    ints, floats = totals.ints, totals.floats
    newest, last, finite = ints[Word.LOSS_STEP], floats[Word.LOSS], not _is_active(totals, _NONFINITE_LOSS)
    mean, variance, seen = _load_baseline(totals, Word.LOSS_BASELINE)
    spikes = nonfinite = 0
    spike = _is_active(totals, _LOSS_SPIKE)
    for record in records:
        loss, late = record.loss, record.step < newest
        if not isfinite(loss):
            nonfinite += 1
            _note(found, _NONFINITE_LOSS, record, loss, last)
            if not late:
                newest, finite, spike = record.step, False, False
            continue
        if late:
            continue  # a device delivered it after a newer step's
        newest, finite, last, usual = record.step, True, loss, mean
        least = LEAST_LOSS_EXCESS * max(1.0, abs(mean))
        spike, mean, variance, seen = judge(loss, mean, variance, seen, least)
        if spike:
            spikes += 1
            _note(found, _LOSS_SPIKE, record, loss, usual)
    if records:
        ints[Word.LOSS_STEP], floats[Word.LOSS] = newest, last
        _store_baseline(totals, Word.LOSS_BASELINE, mean, variance, seen)
        _count(totals, _NONFINITE_LOSS, nonfinite, active=not finite)
        _count(totals, _LOSS_SPIKE, spikes, active=spike)


def _fold_norms(totals: Totals, records: list[StepRecord], found: list[Anomaly]) -> None:
    ints, floats = totals.ints, totals.floats
    newest, last, finite = ints[Word.GRAD_NORM_STEP], floats[Word.GRAD_NORM], not _is_active(totals, _NONFINITE_GRADIENT)
    mean, variance, seen = _load_baseline(totals, Word.NORM_BASELINE)
    explosions = nonfinite = 0
    spike = _is_active(totals, _GRADIENT_EXPLOSION)
    for record in records:
        norm, late, exploded = record.grad_norm, record.step < newest, False
        if not isfinite(norm):
            nonfinite += 1
            _note(found, _NONFINITE_GRADIENT, record, norm, last)
        elif norm > 0.0:  # a zero norm has no logarithm and is no explosion
            usual = mean
            exploded, mean, variance, seen = judge(log(norm), mean, variance, seen, LEAST_NORM_EXCESS)
            if exploded:
                explosions += 1
                _note(found, _GRADIENT_EXPLOSION, record, norm, exp(usual))
        if not late:
            newest, finite, spike = record.step, isfinite(norm), exploded
            last = norm if finite else last
    if records:
        ints[Word.GRAD_NORM_STEP], floats[Word.GRAD_NORM] = newest, last
        ints[Word.NONFINITE_STEPS] += nonfinite
        _store_baseline(totals, Word.NORM_BASELINE, mean, variance, seen)
        _count(totals, _NONFINITE_GRADIENT, nonfinite, active=not finite)
        _count(totals, _GRADIENT_EXPLOSION, explosions, active=spike)
        norms = [record.grad_norm for record in records if isfinite(record.grad_norm)]
        _observe(totals, Word.NORM_DISTRIBUTION, catalog.NORM_BOUNDS, _NORM_SUM, norms)


def _load_baseline(totals: Totals, at: int) -> tuple[float, float, int]:
    return totals.floats[at], totals.floats[at + 1], totals.ints[at + 2]


def _store_baseline(totals: Totals, at: int, mean: float, variance: float, seen: int) -> None:
    totals.floats[at], totals.floats[at + 1], totals.ints[at + 2] = mean, variance, seen


def _note(found: list[Anomaly], kind: int, record: StepRecord, value: float, baseline: float) -> None:
    found.append(Anomaly(catalog.ANOMALY_KINDS[kind], record.step, record.end_ns, value, baseline))


def _is_active(totals: Totals, kind: int) -> bool:
    return totals.floats[Word.ACTIVE + kind] > 0.0


def _count(totals: Totals, kind: int, number: int, *, active: bool) -> None:
    totals.ints[Word.ANOMALIES + kind] += number
    totals.floats[Word.ACTIVE + kind] = float(active)


def _observe(totals: Totals, buckets: int, bounds: tuple[float, ...], total: int, values: list[float]) -> None:
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
    floats[total], floats[total + 1], floats[total + 2] = min(sum_, _MAX), least, greatest


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
