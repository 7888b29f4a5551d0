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
import zlib
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from torchobs import catalog
from torchobs.detect.spikes import START, WARM_UP, judge, leaves_start
from torchobs.flight.credit import credited, repay
from torchobs.flight.layout import RECORD_SIZE
from torchobs.flight.norms import fold_norms
from torchobs.flight.totals import (
    ABSENT_BITS,
    DURATION_SUM,
    LOSS_SPIKE,
    NONFINITE_LOSS,
    SIZE,
    WORDS,
    Anomaly,
    Totals,
    Word,
    add,
    begin_model,
    count,
    is_active,
    load_baseline,
    note,
    observe,
    signed,
    store_baseline,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ABSENT_BITS", "CRC", "LIVE_PHASES", "PHASE_NAMES", "PLAIN", "WORDS", "Anomaly", "Flag", "Kind", "StepRecord", "Totals",
    "Word", "fold", "fold_late", "pack", "unpack",
]  # fmt: skip

PHASE_NAMES = ("data", "forward", "backward", "optimizer", "other", "evaluation", "checkpoint", "compile")
LIVE_PHASES = (*PHASE_NAMES, "idle")
"""What the training thread may be at now: idle is to have left its training loop."""

_BODY = struct.Struct("<QQQHHIdddd8fQIIdI")
PLAIN = struct.Struct("<QQQHHIQddd4QQIfQI")
"""A plain step's record, without its CRC: seq, step, end_ns, kind, flags, losses, fetch, loss, grad_norm, learning_rate,
fetched, backward, backward_ends, optimizer, tokens, samples, norm_scale, begun_ns, zero."""
CRC = struct.Struct("<I")


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
    CLIPPED = 128
    """the gradient was clipped"""
    NEW_MODEL = 256
    """parameters that had never been stepped: what was usual before is no measure from here on"""


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


LEAST_LOSS_EXCESS = 0.25
"""A loss spike is at least a quarter of the usual loss above it, or 0.25 where the loss is near 0; beyond the tail as well."""


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
    changed, noted, newest = Totals(bytearray(totals.buffer[:SIZE])), list[Anomaly](), fresh[-1].seq
    for part in _by_model(fresh):
        if part[0].flags & Flag.NEW_MODEL:
            begin_model(changed, part[0].step)
        fold_late(changed, part, noted)
    add(changed, Word.RECORDS_LOST, newest - upto - len(fresh))
    changed.ints[Word.FOLDED_UPTO] = newest
    totals.buffer[:SIZE] = changed.buffer
    if found is not None:
        found += noted


def _by_model(records: Sequence[StepRecord]) -> list[Sequence[StepRecord]]:
    """Cut the records so that none but the first of each part begins a model."""
    cuts = [index for index, record in enumerate(records) if index and record.flags & Flag.NEW_MODEL]
    return [records[begin:end] for begin, end in pairwise([0, *cuts, len(records)])] if cuts else [records]


def fold_late(totals: Totals, records: Sequence[StepRecord], found: list[Anomaly]) -> None:
    """Add records whose numbers were passed over, and counted as lost, because they took too long to come."""
    add(totals, Word.TOKENS, sum(record.tokens for record in records))
    add(totals, Word.SAMPLES, sum(record.samples for record in records))
    rates = (record.learning_rate for record in reversed(records) if record.flags & Flag.LEARNING_RATE)
    totals.floats[Word.LEARNING_RATE] = next(filter(isfinite, rates), totals.floats[Word.LEARNING_RATE])
    steps = [record for record in records if record.kind == Kind.STEP]
    if steps:
        _fold_progress(totals, steps)
        _fold_times(totals, steps)
    _fold_losses(totals, [record for record in records if record.flags & Flag.LOSS], found)
    solved = {record.step for record in records if record.flags & Flag.LOSS and not record.loss}
    fold_norms(totals, [record for record in records if record.flags & Flag.GRAD_NORM], found, solved)
    totals.ints[Word.STEPS_SKIPPED] += sum(1 for record in records if record.flags & Flag.SKIPPED)
    _fold_clipped(totals, [record.step for record in records if record.flags & Flag.CLIPPED])


def _fold_clipped(totals: Totals, steps: list[int]) -> None:
    """Count each step once: several parts of its gradient may have been clipped, each with a record of its own."""
    ints = totals.ints
    for step in steps:
        if step > ints[Word.LAST_CLIPPED]:
            ints[Word.LAST_CLIPPED] = step
            ints[Word.CLIPPED_STEPS] += 1


def _fold_progress(totals: Totals, steps: list[StepRecord]) -> None:
    ints, floats, last = totals.ints, totals.floats, steps[-1]
    ints[Word.STEPS] += len(steps)
    ints[Word.LAST_STEP] = last.step
    floats[Word.LAST_STEP_TIMESTAMP] = (last.end_ns + signed(ints[Word.CLOCK_OFFSET])) / 1e9
    durations = [record.duration_s for record in steps if not record.flags & Flag.UNTIMED]
    observe(totals, Word.STEP_DURATION, catalog.SECONDS_BOUNDS, DURATION_SUM, durations)


def _fold_times(totals: Totals, steps: list[StepRecord]) -> None:
    floats = totals.floats
    data, forward, backward, optimizer, other = floats[Word.PHASE_TIME : Word.PHASE_TIME + 5]
    productive, starved, skipped, evaluation, checkpoint, compiling = floats[Word.GOODPUT : Word.GOODPUT + 6]
    owing = any(credited(totals))
    for record in steps:
        data_s, forward_s, backward_s, optimizer_s, other_s, evaluation_s, checkpoint_s, compile_s = record.phase_s
        data += data_s
        forward += forward_s
        backward += backward_s
        optimizer += optimizer_s
        other += other_s
        trained_s = forward_s + backward_s + optimizer_s + other_s
        if owing:
            spent_s = (data_s, evaluation_s, checkpoint_s, compile_s, trained_s)
            data_s, evaluation_s, checkpoint_s, compile_s, trained_s = repay(totals, spent_s)
            owing = any(credited(totals))
        starved += data_s
        evaluation += evaluation_s
        checkpoint += checkpoint_s
        compiling += compile_s
        if record.flags & Flag.SKIPPED:
            skipped += trained_s
        else:
            productive += trained_s
    for index, value in enumerate((data, forward, backward, optimizer, other)):
        floats[Word.PHASE_TIME + index] = value
    for index, value in enumerate((productive, starved, skipped, evaluation, checkpoint, compiling)):
        floats[Word.GOODPUT + index] = value


def _fold_losses(totals: Totals, records: list[StepRecord], found: list[Anomaly]) -> None:
    ints, floats = totals.ints, totals.floats
    newest, last, finite = ints[Word.LOSS_STEP], floats[Word.LOSS], not is_active(totals, NONFINITE_LOSS)
    mean, variance, seen = load_baseline(totals, Word.LOSS_BASELINE)
    usual, start = floats[Word.LOSS_USUAL], floats[Word.LOSS_START]
    spikes = nonfinite = 0
    spike = is_active(totals, LOSS_SPIKE)
    for record in records:
        loss, late = record.loss, record.step < newest
        if not isfinite(loss):
            nonfinite += 1
            note(found, NONFINITE_LOSS, record, loss, usual if spike else last)
            if not late:
                newest, finite, spike = record.step, False, False
            continue
        if late:
            continue  # a device delivered it after a newer step's
        newest, finite, last = record.step, True, loss
        if seen < WARM_UP and leaves_start(loss, start, seen):
            spike, seen, usual = True, seen + 1, min(usual, start)  # no part of what is learned to be usual
        else:
            least = LEAST_LOSS_EXCESS * max(1.0, abs(mean))
            spike, mean, variance, seen = judge(loss, mean, variance, seen, least, skewed=True)
            if seen <= START:
                start = max(start, abs(loss)) if seen > 1 else abs(loss)
        if spike:
            spikes += 1
            note(found, LOSS_SPIKE, record, loss, usual)
        else:
            usual = mean
    if records:
        ints[Word.LOSS_STEP], floats[Word.LOSS] = newest, last
        floats[Word.LOSS_USUAL], floats[Word.LOSS_START] = usual, start
        store_baseline(totals, Word.LOSS_BASELINE, mean, variance, seen)
        count(totals, NONFINITE_LOSS, nonfinite, active=not finite)
        count(totals, LOSS_SPIKE, spikes, active=spike)
