"""Identifiers that anybody can work out, and the phases of a plain step."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.flights import header, plain_step, recorded, step
from torchobs.flight.format import span_ids


def test_identifiers_are_functions_of_the_file() -> None:
    """The same for whoever asks, another for every run, step and phase; a launcher's trace is kept."""
    one, two = header(), header()
    assert span_ids.run_span_id(one) == span_ids.run_span_id(one) != span_ids.run_span_id(two)
    assert span_ids.trace_id(one) == one.incarnation.hex()
    given = replace(one, resource={**one.resource, "trace_id": "0af7651916cd43dd8448eb211c80319c"})
    assert span_ids.trace_id(given) == "0af7651916cd43dd8448eb211c80319c"
    run = span_ids.run_span_id(one)
    steps = {span_ids.step_span_id(run, number) for number in range(1000)}
    phases = {span_ids.phase_span_id(own, phase) for own in steps for phase in ("data", "forward")}
    assert len(steps | phases | {run}) == 3001
    assert all(re.fullmatch("[0-9a-f]{16}", own) for own in (*steps, *phases, run))


def test_a_known_identifier() -> None:
    """The derivation is part of the format: ``printf 00f067aa0ba902b7/17 | b2sum -l 64`` says the same."""
    assert span_ids.step_span_id("00f067aa0ba902b7", 17) == "4ffd007c9ccbe63c"


def test_a_plain_step_s_phases_are_where_they_were() -> None:
    """Fetch, forward, backward and optimizer, each from its boundary to the next; the rest lies between."""
    writer, memory = recorded()
    begun = writer.header.monotonic_ns
    for number, loader in ((1, True), (2, False)):
        plain_step(writer, number, loader=loader)
    at = writer._steps_at
    first, second = (span_ids.parts(bytes(memory.content[at + 128 * index : at + 128 * (index + 1)])) for index in range(2))
    ms = 50_000_000
    assert first == (
        begun,
        [
            ("data", begun, begun + ms),
            ("forward", begun + ms, begun + 2 * ms),
            ("backward", begun + 2 * ms, begun + 3 * ms),
            ("optimizer", begun + 4 * ms, begun + 5 * ms),
        ],
    )
    assert second is not None
    assert [part.phase for part in second[1]] == ["forward", "backward", "optimizer"]
    assert second[1][0].begun_ns == second[0]


def test_another_step_has_sums_and_no_boundaries() -> None:
    """An accumulation's four backwards are one number."""
    writer, memory = recorded()
    step(writer, 1)
    at = writer._steps_at
    assert span_ids.parts(bytes(memory.content[at : at + 128])) is None
