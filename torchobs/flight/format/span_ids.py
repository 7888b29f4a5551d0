"""Identifiers of the spans of a run and its steps, derived from the flight file's header.

Spans are written for few steps only, and long after these ended. A step's span id is a function of the run's and the step's
number, so that the training thread generates none, a span of the application can name the current step as its parent, and an
exporter can attach an exemplar to any step's histogram sample:

* the run's trace id is the launcher's (``TRACEPARENT``; ``trace_id`` in the file's resource), else the incarnation's 16 bytes;
* the span ids of run, step and phase are the first 8 bytes of BLAKE2b of ``<incarnation>/run``, ``<run's span>/<step>`` and
  ``<step's span>/<phase>``, in lower-case hexadecimal and decimal digits.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from torchobs.detect.prefetch import is_forward_before
from torchobs.flight.format.step_record import PLAIN, RecordKind

if TYPE_CHECKING:
    from torchobs.flight.format.layout import Header

TRACE_ID = "trace_id"
"""Key in the resource, present if the launcher set a trace."""


class Part(NamedTuple):
    """One phase of a step; CLOCK_MONOTONIC in ns."""

    phase: str
    begun_ns: int
    ended_ns: int


def trace_id(header: Header) -> str:
    """Return the run's trace id, 32 hexadecimal digits."""
    given = header.resource.get(TRACE_ID)
    return given if isinstance(given, str) else header.incarnation.hex()


def run_span_id(header: Header) -> str:
    """Return the run's span id, 16 hexadecimal digits."""
    return _derived(header.incarnation.hex(), "run")


def step_span_id(run: str, step: int) -> str:
    """Return a step's span id from the run's."""
    return _derived(run, str(step))


def phase_span_id(step: str, phase: str) -> str:
    """Return a phase's span id from the step's."""
    return _derived(step, phase)


def _derived(parent: str, what: str) -> str:
    return blake2b(f"{parent}/{what}".encode(), digest_size=8).hexdigest()


def parts(raw: bytes) -> tuple[int, list[Part]] | None:
    """Return the begin of a plain step and its phases; ``None`` for other records, which hold sums and no boundaries.

    ``raw`` must be a record that ``step_record.unpack`` has accepted. Gaps between the phases are ``other``.
    """
    if raw[24] != RecordKind.PLAIN:
        return None
    _, _, end_ns, _, _, _, fetch, _, _, _, fetched, backward, backward_ends, optimizer, _, _, _, begun_ns, _ = (
        PLAIN.unpack_from(raw)
    )
    boundaries = [begun_ns if not fetched >> 4 else fetched >> 4, backward >> 4, backward_ends >> 4, optimizer >> 4, end_ns]
    found = [Part("data", fetch >> 4, fetched >> 4)] if fetched >> 4 else []
    begun, ended = boundaries[0], boundaries[1]
    if found and is_forward_before((fetch >> 4) - begun_ns, ended - begun, boundaries[2] - ended):
        begun, ended = begun_ns, fetch >> 4  # the fetch was for the next step
    found += [Part("forward", begun, ended), Part("backward", boundaries[1], boundaries[2])]
    return begun_ns, [*found, Part("optimizer", boundaries[3], boundaries[4])]
