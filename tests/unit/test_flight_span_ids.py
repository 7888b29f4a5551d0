"""Identifiers that anybody can work out, and the phases of a plain step."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.flights import header, plain_step, recorded, step
from torchobs.flight.format import span_ids


def test_identifiers_are_functions_of_the_file() -> None:
    """The same for whoever asks, another for every run, step and phase; a launcher's trace is kept."""
    one, two = header(), header()
    run, again, other = (span_ids.SpanIds(each).run.span for each in (one, one, two))
    assert run == again != other
    given = replace(one, resource={**one.resource, "trace_id": "0af7651916cd43dd8448eb211c80319c"})
    assert span_ids.trace_id(given) == "0af7651916cd43dd8448eb211c80319c"
    steps = {span_ids.SpanIds(one).step(number).span for number in range(1000)}
    phases = {span_ids.derived(own, phase) for own in steps for phase in ("data", "forward")}
    assert len(steps | phases | {run}) == 3001
    assert all(re.fullmatch("[0-9a-f]{16}", own) for own in (*steps, *phases, run))


def test_known_identifiers() -> None:
    """The derivation is part of the format: ``printf torchobs/1234 | b2sum -l 128`` says the same, and so on."""
    assert span_ids.derived("00f067aa0ba902b7", "17") == "4ffd007c9ccbe63c"
    ids = span_ids.SpanIds(replace(header(), resource={"run_id": "1234", "rank": 5, "restart": 2}))
    assert ids.run.trace == "99b9893a94b1aa0f6437987b4d1022e0"
    assert ids.step(17).trace == "bfb475a693aff9a02a756a9409e7b542"
    assert ids.segment(3, 1).trace == "b2ca9638023d467de1e4c7c8258699d7"


@pytest.mark.parametrize("launcher", [{}, {"trace_id": "0af7651916cd43dd8448eb211c80319c"}])
def test_all_ranks_of_a_run_share_its_traces(launcher: dict[str, str]) -> None:
    """Run, segments and steps; each rank has a span of its own in them, and each restart traces of its own but the run's."""
    made = [
        span_ids.SpanIds(replace(header(), resource={"run_id": run, "rank": rank, "restart": restart, **launcher}))
        for run, restart in (("1", 0), ("1", 1), *(() if launcher else (("2", 0),)))
        for rank in range(3)
    ]
    for found, traces in (
        ([ids.run for ids in made], 1 if launcher else 2),
        ([ids.segment(1, 0) for ids in made], 2 if launcher else 3),
        ([ids.step(7) for ids in made], 2 if launcher else 3),
    ):
        assert len({one.trace for one in found}) == traces
        assert len({one.span for one in found}) == len(made)
    of_one = [
        made[0].run,
        *(made[0].segment(epoch, part) for epoch in range(5) for part in range(5)),
        *map(made[0].step, range(99)),
    ]
    assert len({one.trace for one in of_one}) == len({one.span for one in of_one}) == len(of_one)
    assert all(re.fullmatch("(?!0{32})[0-9a-f]{32}", one.trace) for one in of_one)


def test_a_file_that_names_no_run_has_a_trace() -> None:
    """Of its own: other files without a name are not the same run."""
    for resource in ({}, {"run_id": ""}, {"run_id": 5}):
        one = replace(header(), resource=resource)
        assert span_ids.trace_id(one) == one.incarnation.hex()


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
