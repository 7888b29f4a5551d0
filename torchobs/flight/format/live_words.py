"""Decoding of the live words. Each is valid on its own."""

from __future__ import annotations

from dataclasses import dataclass

from torchobs.flight.format.layout import EXIT_SET, NO_STEPS, Live
from torchobs.flight.format.step_record import LIVE_PHASES

FADED_AFTER_S = 0.6
"""A rank with a free lock is dead after this long without a heartbeat. A free lock alone is no proof: a living process that
closes unknown descriptors, as daemons do, loses its lock."""

_MICROSECONDS = (1 << 56) - 1


@dataclass(frozen=True, slots=True)
class LiveWords:
    """The live words; ``None`` where one is absent. Times are CLOCK_MONOTONIC in nanoseconds."""

    heartbeat_ns: int | None
    phase: str | None
    phase_begun_ns: int | None
    exit_reason: int | None
    exit_code: int
    level: int
    event_head: int = 0
    """changes with every event; a hint only"""
    steps_since_ns: int | None = 0
    """since when steps are recorded: 0 = since the start, ``None`` = recording was switched off"""


def decode(raw: bytes) -> LiveWords:
    """Decode the region; missing bytes (of a file that shrank) count as zeros."""
    words = memoryview(raw.ljust(8 * (Live.STEPS_SINCE_NS + 1), b"\0")).cast("Q")
    phase, exit_word, level = words[Live.PHASE], words[Live.EXIT], words[Live.LEVEL]
    heartbeat, code = words[Live.HEARTBEAT_NS], exit_word & 0xFFFFFFFF
    since = words[Live.STEPS_SINCE_NS]
    known, ended = 1 <= phase >> 56 <= len(LIVE_PHASES), bool(exit_word & EXIT_SET)
    return LiveWords(
        heartbeat or None,
        LIVE_PHASES[(phase >> 56) - 1] if known else None,
        (phase & _MICROSECONDS) * 1000 if known else None,
        (exit_word & ~EXIT_SET) >> 32 if ended else None,
        code - (1 << 32) if code >> 31 else code,
        level,
        words[Live.EVENT_HEAD],
        None if since == NO_STEPS else since,
    )
