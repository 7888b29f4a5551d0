"""Encode phase boundaries as integers, ``ns << 4 | code``; they are interpreted when the step ends.

Between real steps caches are cold, and a hook costs what it touches: the same arithmetic took ten times longer spread over
five hooks than in one place. So a hook appends one integer. The boundaries of a plain step (``StepRecorder.end_plainly``) go
into the record as they are; any others are replayed through :class:`~torchobs.probes.core.timeline.PhaseTimeline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.probes.core.timeline import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PhaseTimeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

(
    FETCH, FETCHED, FETCHED_NO_GRAD, EXHAUSTED, EXHAUSTED_NO_GRAD, BACKWARD_BEGINS, BACKWARD_ENDS, STEP_BEGINS,
    CLOSURE_BEGINS, CLOSURE_GOES_ON, STEP_ENDS, EVAL, TRAIN, PIN, UNPIN, LOADER_STARTS,
) = range(16)  # fmt: skip
"""Those of a plain step are a part of the flight file's format (``step_record.PLAIN_CODES``). Each NO_GRAD code is its plain
code + 1. FETCH, EVAL, TRAIN and PIN have an argument, in a separate list, in order."""
ARGUED = frozenset({FETCH, EVAL, TRAIN, PIN})

PHASE_OF = (
    DATA, FORWARD, FORWARD, OTHER, OTHER, BACKWARD, OTHER, OPTIMIZER, FORWARD, OPTIMIZER, OTHER, OTHER, OTHER, OTHER,
    OTHER, DATA,
)  # fmt: skip
"""The phase that begins at each code."""

LONG_TRACE = 4096
"""Boundaries kept until the step ends. A longer trace (an evaluation, serving) is replayed early."""

_CODE = 15


def replay(timeline: PhaseTimeline, trace: Iterable[int], arguments: Sequence[int]) -> None:
    """Apply a trace to the timeline."""
    following = iter(arguments)
    for stamp in trace:
        code, now_ns = stamp & _CODE, stamp >> 4
        if code == FETCH:
            timeline.fetch_begins(next(following), now_ns)
        elif FETCHED <= code <= EXHAUSTED_NO_GRAD:
            exhausted, gradients = code >= EXHAUSTED, code in (FETCHED, EXHAUSTED)
            timeline.fetch_ends(now_ns, exhausted=exhausted, gradients=gradients)
        elif code == BACKWARD_BEGINS:
            timeline.backward_begins(now_ns)
        elif code == EVAL:
            timeline.evaluation_begins(next(following), now_ns)
        elif code == TRAIN:
            timeline.evaluation_ends(next(following), now_ns)
        elif code == PIN:
            timeline.pin(next(following), now_ns)
        elif code == UNPIN:
            timeline.unpin(now_ns)
        else:
            timeline.turn(PHASE_OF[code], now_ns)


def exhausted(trace: Iterable[int], arguments: Sequence[int], since_ns: int) -> set[int]:
    """Return the arguments of the fetches since ``since_ns`` that found their loader exhausted."""
    following, fetching, found = iter(arguments), 0, set[int]()
    for stamp in trace:
        code = stamp & _CODE
        if code in ARGUED:
            fetching = next(following)
        elif code in (EXHAUSTED, EXHAUSTED_NO_GRAD) and stamp >> 4 >= since_ns:
            found.add(fetching)
    return found
