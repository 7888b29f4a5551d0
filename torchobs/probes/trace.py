"""Boundaries as the hooks note them: one integer each, ``ns << 4 | code``. What they mean is worked out at the step's end.

Between real steps caches are cold, and a hook costs what it touches: the same arithmetic took ten times longer spread over
five hooks than in one place. So a hook appends one integer; most steps have one of two plain shapes, whose times
are six subtractions (:func:`plain_times`); any other is replayed through :class:`~torchobs.probes.segments.Segments`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchobs.probes.segments import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, Segments

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

(
    FETCH, FETCHED, FETCHED_NO_GRAD, EXHAUSTED, EXHAUSTED_NO_GRAD, BACKWARD_BEGINS, BACKWARD_ENDS, STEP_BEGINS,
    CLOSURE_BEGINS, CLOSURE_GOES_ON, STEP_ENDS, EVAL, TRAIN, PIN, UNPIN, LOADER_STARTS,
) = range(16)  # fmt: skip
"""A code's NO_GRAD follows it. FETCH, EVAL, TRAIN and PIN have an argument, in a list beside the trace, in order."""

PHASE_OF = (
    DATA, FORWARD, FORWARD, OTHER, OTHER, BACKWARD, OTHER, OPTIMIZER, FORWARD, OPTIMIZER, OTHER, OTHER, OTHER, OTHER,
    OTHER, DATA,
)  # fmt: skip
"""What the training thread is doing after each code."""

_WITH_LOADER = (FETCH, FETCHED, BACKWARD_BEGINS, BACKWARD_ENDS, STEP_BEGINS)
_WITHOUT = (BACKWARD_BEGINS, BACKWARD_ENDS, STEP_BEGINS)
_CODE = 15


def plain_times(trace: Sequence[int], begun_ns: int, now_ns: int) -> tuple[int, int, int, int, int] | None:
    """Return ns of data, forward, backward, optimizer and other of a plain step, ``None`` for one that is not.

    Plain is one fetch (or none), one backward, one optimizer, in this order, from the last step's end (``begun_ns``) to now.
    """
    count = len(trace)
    if count == 5:  # noqa: PLR2004  # the length of _WITH_LOADER
        fetch, fetched, backward, backward_ends, step = trace
        if (fetch & 15, fetched & 15, backward & 15, backward_ends & 15, step & 15) != _WITH_LOADER:
            return None
        fetch >>= 4
        fetched >>= 4
        backward >>= 4
        backward_ends >>= 4
        step >>= 4
        other = fetch - begun_ns + step - backward_ends
        return fetched - fetch, backward - fetched, backward_ends - backward, now_ns - step, other
    if count == 3:  # noqa: PLR2004  # the length of _WITHOUT
        backward, backward_ends, step = trace
        if (backward & 15, backward_ends & 15, step & 15) != _WITHOUT:
            return None
        backward >>= 4
        backward_ends >>= 4
        step >>= 4
        return 0, backward - begun_ns, backward_ends - backward, now_ns - step, step - backward_ends
    return None


def replay(segments: Segments, trace: Iterable[int], arguments: Sequence[int]) -> None:
    """Apply a trace to the timeline."""
    following = iter(arguments)
    for stamp in trace:
        code, now_ns = stamp & _CODE, stamp >> 4
        if code == FETCH:
            segments.fetch_begins(next(following), now_ns)
        elif FETCHED <= code <= EXHAUSTED_NO_GRAD:
            exhausted, gradients = code >= EXHAUSTED, code in (FETCHED, EXHAUSTED)
            segments.fetch_ends(now_ns, exhausted=exhausted, gradients=gradients)
        elif code == BACKWARD_BEGINS:
            segments.backward_begins(now_ns)
        elif code == EVAL:
            segments.evaluation_begins(next(following), now_ns)
        elif code == TRAIN:
            segments.evaluation_ends(next(following), now_ns)
        elif code == PIN:
            segments.pin(next(following), now_ns)
        elif code == UNPIN:
            segments.unpin(now_ns)
        else:
            segments.turn(PHASE_OF[code], now_ns)
