"""Identifiers of a run's traces and spans, derived from the flight file's header.

Spans are written for few steps only, and long after these ended. An identifier is a function of the run and of what the span is
about, so that the training thread generates none, a span of the application can name the current step as its parent, an
exporter can attach an exemplar to any step's histogram sample, and all ranks name a trace alike without a word between them.

Traces, 16 bytes, equal on all ranks of a run:

* the run's is the launcher's (``TRACEPARENT``; ``trace_id`` in the file's resource), else BLAKE2b of ``torchobs/<run id>``;
* that of a segment (an epoch, or an hour of one) is BLAKE2b of ``<run's trace>/<restart>/segment/<epoch>/<part>``;
* that of a step is BLAKE2b of ``<run's trace>/<restart>/step/<number>``.

Spans, 8 bytes, different on each rank: BLAKE2b of ``<incarnation>/run``, ``<run's span>/segment/<epoch>/<part>``,
``<run's span>/<step>`` and ``<step's span>/<phase>``.

All in lower-case hexadecimal and decimal digits; ``printf torchobs/1234 | b2sum -l 128`` is the trace of run ``1234``.
OpenTelemetry allows no identifier of zeros alone: the last digit of such a hash is 1. ``restart`` is the launcher's count.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from torchobs.flight.format.step_record import PLAIN, RecordKind

if TYPE_CHECKING:
    from torchobs.flight.format.layout import Header

TRACE_ID = "trace_id"
"""Key in the resource, present if the launcher set a trace."""


class SpanId(NamedTuple):
    """A span and its trace, in hexadecimal digits."""

    trace: str
    span: str


class Part(NamedTuple):
    """One phase of a step; CLOCK_MONOTONIC in ns."""

    phase: str
    begun_ns: int
    ended_ns: int


class SpanIds:
    """Identifiers of one incarnation's spans."""

    __slots__ = ("_life", "run")

    def __init__(self, header: Header) -> None:
        self.run = SpanId(trace_id(header), derived(header.incarnation.hex(), "run"))
        restart = header.resource.get("restart")
        self._life = f"{self.run.trace}/{restart if isinstance(restart, int) else 0}"

    def segment(self, epoch: int, part: int) -> SpanId:
        """Return the identifiers of the part (from 0) of an epoch (0: before the first, or without any)."""
        what = f"segment/{epoch}/{part}"
        return SpanId(derived(self._life, what, 16), derived(self.run.span, what))

    def step(self, number: int) -> SpanId:
        """Return the identifiers of a step."""
        return SpanId(self.step_trace(number), derived(self.run.span, str(number)))

    def step_trace(self, number: int) -> str:
        """Return the trace of a step, the same on all ranks."""
        return derived(self._life, f"step/{number}", 16)


def trace_id(header: Header) -> str:
    """Return the run's trace id, 32 hexadecimal digits; the incarnation's in a file that names no run."""
    given, run_id = header.resource.get(TRACE_ID), header.resource.get("run_id")
    if isinstance(given, str):
        return given
    return derived("torchobs", run_id, 16) if isinstance(run_id, str) and run_id else header.incarnation.hex()


def derived(parent: str, what: str, size: int = 8) -> str:
    """Return the identifier, of ``size`` bytes, of what is called so within the parent: of a phase within its step's span."""
    digits = blake2b(f"{parent}/{what}".encode(errors="replace"), digest_size=size).hexdigest()
    return digits if digits.strip("0") else f"{digits[:-1]}1"


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
    found += [Part("forward", boundaries[0], boundaries[1]), Part("backward", boundaries[1], boundaries[2])]
    return begun_ns, [*found, Part("optimizer", boundaries[3], boundaries[4])]
