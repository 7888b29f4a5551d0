"""Identifiers of the run's and its steps' spans, which can be worked out by whoever has the flight file.

A step's span is written for few steps, and for those long after they ended. Its identifier is a function of the run's and of
the step's number, so that the training thread makes none, a span of the application's can name the step under way as its
parent, and an exporter can give any step's histogram sample its exemplar:

* the run's trace is the launcher's (``TRACEPARENT``; ``trace_id`` in the file's resource), else the incarnation's 16 bytes;
* the run's span, a step's and a phase's are the first 8 bytes of BLAKE2b of ``<incarnation>/run``, ``<run's span>/<step>`` and
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
"""In the resource, where the launcher gave one"""


class Part(NamedTuple):
    """One phase of a step; CLOCK_MONOTONIC in ns."""

    phase: str
    begun_ns: int
    ended_ns: int


def trace_id(header: Header) -> str:
    """Return the trace of the run, 32 hexadecimal digits."""
    given = header.resource.get(TRACE_ID)
    return given if isinstance(given, str) else header.incarnation.hex()


def run_span_id(header: Header) -> str:
    """Return the run's span, 16 hexadecimal digits."""
    return _derived(header.incarnation.hex(), "run")


def step_span_id(run: str, step: int) -> str:
    """Return a step's span, given the run's."""
    return _derived(run, str(step))


def phase_span_id(step: str, phase: str) -> str:
    """Return a phase's span, given the step's."""
    return _derived(step, phase)


def _derived(parent: str, what: str) -> str:
    return blake2b(f"{parent}/{what}".encode(), digest_size=8).hexdigest()


def parts(raw: bytes) -> tuple[int, list[Part]] | None:
    """Return when a plain step began, and its phases; ``None`` for another record, which holds sums and no boundaries.

    ``raw`` must be a record that ``record.unpack`` has accepted. What lies between the phases is ``other``.
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
        begun, ended = begun_ns, fetch >> 4  # what was fetched is the next step's batch
    found += [Part("forward", begun, ended), Part("backward", boundaries[1], boundaries[2])]
    return begun_ns, [*found, Part("optimizer", boundaries[3], boundaries[4])]
