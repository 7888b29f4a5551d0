"""Format of the step record: one per step in the ring of the flight file, from which every metric is derived.

A record is 128 bytes, little-endian:

====== ====== ================ =============================================================================================
offset type   field            meaning
====== ====== ================ =============================================================================================
0      u64    seq              position in the ring, from 1; valid iff the CRC matches and ``seq`` is the one expected there
8      u64    step             the step's number, from 1
16     u64    end_ns           CLOCK_MONOTONIC at the step's end
24     u16    kind             1 *step*; 2 *late*: values of an earlier step, delivered after its end; 3 *plain* (below)
26     u16    flags            :class:`StepFlag`
28     u32    losses           backward passes that the loss sums over
32     f64    duration_s       from the last step's end to this one's, without evaluation, checkpoints and compilation
40     f64    loss             sum over the step's backward passes, or the logged value
48     f64    grad_norm        total L2 norm, unscaled
56     f64    learning_rate    of the first parameter group
64     8×f32  phase_s          seconds in each of ``layout.PHASE_NAMES``, but the last one
96     u64    tokens
104    u32    samples
108    f32    between          seconds in the last one
112    f64    norm_scale       the loss scale that grad_norm was divided by, 1 without
120    u32    zero
124    u32    crc              CRC-32 of the 124 bytes before, seeded (see ``layout``)
====== ====== ================ =============================================================================================

A *plain* step (kind 3), as nearly all are, holds time stamps of its boundaries instead of durations, so that the training
thread computes nothing: ``fetch`` u64 at 32; ``fetched``, ``backward``, ``backward_ends``, ``optimizer`` u64 at 64, each
CLOCK_MONOTONIC in ns << 4, the low bits the hook's code; ``norm_scale`` f32 at 108; ``begun_ns`` u64, the last step's end,
at 112; ``called`` u32 at 120, when the first module was called after ``begun_ns``, in units of 100 ns, 0 where unmeasured.
Without a DataLoader ``fetch`` and ``fetched`` are 0 ns. :func:`unpack` decodes both kinds to :class:`StepRecord`.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from torchobs.flight.layout import RECORD_SIZE

_BODY = struct.Struct("<QQQHHIdddd8fQIfdI")
PLAIN = struct.Struct("<QQQHHIQddd4QQIfQI")
"""A plain step's record, without its CRC: seq, step, end_ns, kind, flags, losses, fetch, loss, grad_norm, learning_rate,
fetched, backward, backward_ends, optimizer, tokens, samples, norm_scale, begun_ns, called."""
CALLED_UNIT_NS = 100
CRC = struct.Struct("<I")
PLAIN_CODES = (0, 1, 5, 6, 7)
"""Codes of a plain step's stamps: ``fetch``, ``fetched``, ``backward``, ``backward_ends``, ``optimizer``"""
NO_FETCH = PLAIN_CODES[:2]
"""The first two at 0 ns, for a step without a fetch"""


class RecordKind:
    """Kinds of record (plain integers, here and below: an ``IntFlag`` made the fold twelve times slower)."""

    STEP = 1
    LATE = 2
    PLAIN = 3
    """on disk only: decoded, it is a *step*"""


class StepFlag:
    """Values that a record has, and events of its step."""

    LOSS = 1
    GRAD_NORM = 2
    LEARNING_RATE = 4
    SKIPPED = 8
    """the loss scaler skipped the optimizer"""
    UNTIMED = 16
    """the step's start is unknown (the first one): no duration"""
    DIRECT = 32
    """the step was ended by torchobs.step()"""
    CLOSURE = 64
    """the optimizer was called with a closure"""
    CLIPPED = 128
    """the gradient was clipped"""
    NEW_MODEL = 256
    """first step of parameters never stepped before: baselines of earlier steps do not apply"""


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
    gap_s: tuple[float, float, float] | None = None
    """of a plain step: the time before its fetch, that from there to the backward pass, and from its begin to the first call
    of a module, 0 if unknown"""
    stamps: tuple[int, ...] | None = None
    """of a plain step, on CLOCK_MONOTONIC in ns: its begin, that and the end of its fetch (both its begin without one), those
    of its backward pass, and the begin of the optimizer's step"""


def pack(  # noqa: PLR0913, PLR0917  # the record's fields, once a step: a tuple around them would cost as much as packing
    seq: int, step: int, end_ns: int, kind: int, flags: int, losses: int, duration_s: float, loss: float, grad_norm: float,
    learning_rate: float, phase_s: tuple[float, ...], tokens: int, samples: int, norm_scale: float, seed: int,
) -> bytes:  # fmt: skip
    """Return the record's 128 bytes. Raises ``struct.error`` for a value that its field cannot hold."""
    body = _BODY.pack(
        seq, step, end_ns, kind, flags, losses, duration_s, loss, grad_norm, learning_rate, *phase_s[:-1], tokens, samples,
        phase_s[-1], norm_scale, 0,
    )  # fmt: skip
    return body + CRC.pack(zlib.crc32(body, seed))


def unpack(raw: bytes | memoryview, seed: int) -> StepRecord | None:
    """Decode a record of 128 bytes; ``None`` when the CRC does not match."""
    if len(raw) != RECORD_SIZE or CRC.unpack_from(raw, RECORD_SIZE - 4)[0] != zlib.crc32(raw[: RECORD_SIZE - 4], seed):
        return None
    if raw[24] == RecordKind.PLAIN:
        return _unpack_plain(raw)
    seq, step, end_ns, kind, flags, losses, duration_s, loss, norm, rate, *phases, tokens, samples, between, scale, _ = (
        _BODY.unpack_from(raw)
    )
    return StepRecord(
        seq, step, end_ns, kind, flags, losses, duration_s, loss, norm, rate, (*phases, between), tokens, samples, scale
    )


def _unpack_plain(raw: bytes | memoryview) -> StepRecord:
    """Compute the durations of a plain step."""
    seq, step, end_ns, _, flags, losses, *stamps, tokens, samples, scale, begun_ns, called = PLAIN.unpack_from(raw)
    fetch, loss, norm, rate, fetched, backward, backward_ends, optimizer = stamps
    has_fetch = fetched >> 4 > 0
    fetch, fetched = (fetch >> 4, fetched >> 4) if has_fetch else (begun_ns, begun_ns)
    backward, backward_ends, optimizer = backward >> 4, backward_ends >> 4, optimizer >> 4
    other, before = fetch - begun_ns + optimizer - backward_ends, backward - fetched
    forward, between = (before, 0) if has_fetch else (0, before)
    phases = (fetched - fetch, forward, backward_ends - backward, end_ns - optimizer, other, 0, 0, 0, between)
    seconds = tuple([length / 1e9 for length in phases])
    length_s = (end_ns - begun_ns) / 1e9
    gap = ((fetch - begun_ns) / 1e9, before / 1e9, called * CALLED_UNIT_NS / 1e9)
    return StepRecord(
        seq, step, end_ns, RecordKind.STEP, flags, losses, length_s, loss, norm, rate, seconds, tokens, samples, scale, gap,
        (begun_ns, fetch, fetched, backward, backward_ends, optimizer),
    )  # fmt: skip
