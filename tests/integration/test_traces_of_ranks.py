"""Traces of a run of two ranks, by the real Collector: shared by the ranks, ended with their epochs, linked to the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.exporters import start_program
from tests.otlp import Collector, pairs_of_json
from tests.support import free_port, wait_until

SCRIPT = """
import os, signal, sys, time, torch, torchobs
from torch.utils.data import DataLoader
from torchobs.runtime import root_spans

root_spans._SHORT_S = 0.0  # epochs of less than a minute, too, are segments
torchobs.init()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(torch.ones(8, 8), batch_size=1)
for epoch in range(3):
    for number, batch in enumerate(loader):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02 + 0.005 * torchobs.init().identity.rank)
        if epoch == 2 and number == 4:
            print("there", flush=True)
            sys.stdin.readline()
torchobs.shutdown()
"""


class Sent(NamedTuple):
    """A span that the Collector got, and whose it is."""

    rank: int
    name: str
    ids: tuple[str, str]
    attributes: dict[str, Any]
    links: dict[str, tuple[str, str]]
    """by relation"""
    raw: dict[str, Any]


def sent(collector: Collector) -> list[Sent]:
    """Every span, in order."""
    return [
        Sent(
            pairs_of_json(of["resource"]["attributes"])["torchobs.rank"],
            span["name"],
            (span["traceId"], span["spanId"]),
            pairs_of_json(span.get("attributes", [])),
            {
                pairs_of_json(link["attributes"])["torchobs.link.relation"]: (link["traceId"], link["spanId"])
                for link in span.get("links", [])
            },
            span,
        )
        for of in collector.resources("spans")
        for scope in of["scopeSpans"]
        for span in scope["spans"]
    ]


def test_two_ranks_share_traces_without_a_launcher_s(
    program: Callable[[str], str], start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path
) -> None:
    """One trace of the run, one for each epoch, one for each sampled step; also for the epoch in which a rank was killed."""
    collector = Collector(program("otelcol"), start, tmp_path)
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, "OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_METRICS_EXPORTER": "none"}
    start_program(start, tmp_path / "log", free_port(), "--flight-dir", str(flight_dir), **environ)
    own = {name: value for name, value in os.environ.items() if name != "TRACEPARENT"}
    own |= {"TORCHOBS_DIR": str(flight_dir), "TORCHOBS_RUN_ID": "trained-twice", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    finishing, killed = (
        start(sys.executable, "-c", SCRIPT, torch=True, env=own | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **streams)
        for rank in range(2)
    )
    for child in (finishing, killed):
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
    third = blake2b(f"{run_trace()}/0/segment/3/0".encode(), digest_size=16).hexdigest()
    announced = f'"span_start","name":"torchobs.segment","trace_id":"{third}"'.encode()
    wait_until(lambda: all(announced in path.read_bytes() for path in flight_dir.glob("*.flight")))
    killed.send_signal(signal.SIGKILL)
    assert finishing.stdin is not None
    finishing.stdin.write("\n")
    finishing.stdin.flush()
    assert finishing.wait(timeout=60) == 0
    wait_until(lambda: len([one for one in sent(collector) if one.name == "torchobs.segment"]) == 6, timeout_s=30)
    found = sent(collector)
    check_run(found)
    check_segments(found)
    check_steps(found)
    assert len({one.ids for one in found}) == len(found), "each once"


def run_trace() -> str:
    """The trace that anybody can derive from the run's id."""
    return blake2b(b"torchobs/trained-twice", digest_size=16).hexdigest()


def check_run(found: list[Sent]) -> None:
    """One trace, a root span of each rank, sent once training had begun."""
    runs = {one.rank: one for one in found if one.name == "torchobs.run"}
    assert runs.keys() == {0, 1}
    assert {one.ids[0] for one in runs.values()} == {run_trace()}
    assert not any(one.raw.get("parentSpanId") for one in runs.values())
    assert {one.raw["status"].get("code", 0) for one in runs.values()} == {0}


def check_segments(found: list[Sent]) -> None:
    """One for each epoch; on both ranks in the same trace; ended, linked to the run and to the one before."""
    runs = {one.rank: one for one in found if one.name == "torchobs.run"}
    for rank in range(2):
        segments = [one for one in found if one.name == "torchobs.segment" and one.rank == rank]
        assert [one.attributes["torchobs.segment.epoch"] for one in segments] == [1, 2, 3]
        assert {one.links["run"] for one in segments} == {runs[rank].ids}
        assert [one.links.get("previous") for one in segments] == [None, segments[0].ids, segments[1].ids]
        ends = [(int(one.raw["startTimeUnixNano"]), int(one.raw["endTimeUnixNano"])) for one in (runs[rank], *segments)]
        assert all(ended == begun for (_, ended), (begun, _) in pairwise(ends))
        assert all(begun < ended for begun, ended in ends)
        last = segments[-1]
        code, reason = last.raw["status"].get("code", 0), last.attributes.get("torchobs.segment.reason")
        assert (code, reason) == ((1, None) if rank == 0 else (2, "lost"))
        assert [one.attributes["torchobs.segment.steps"] for one in segments[:2]] == [8, 8]
    traces = {one.attributes["torchobs.segment.epoch"]: one.ids[0] for one in found if one.name == "torchobs.segment"}
    shared = {(one.attributes["torchobs.segment.epoch"], one.ids[0]) for one in found if one.name == "torchobs.segment"}
    assert shared == set(traces.items())
    assert len({*traces.values(), run_trace()}) == 4


def check_steps(found: list[Sent]) -> None:
    """The same ones on both ranks, in the same traces, beneath their own phases; linked to what was sent."""
    number, known = "torchobs.step.number", {one.ids: one for one in found}
    steps = [one for one in found if one.name == "torchobs.step"]
    first, second = ({one.attributes[number]: one.ids for one in steps if one.rank == rank} for rank in range(2))
    both = first.keys() & second.keys()  # one that was slow on one of them is recorded there alone
    assert both >= {2, 4, 8, 16}
    assert all(first[step][0] == second[step][0] for step in both)
    assert len({trace for trace, _ in first.values()}) == len(first)
    assert not {span for _, span in first.values()} & {span for _, span in second.values()}
    for step in steps:
        segment = known[step.links["segment"]]
        assert (segment.rank, known[step.links["run"]].name) == (step.rank, "torchobs.run")
        assert segment.attributes["torchobs.segment.epoch"] == (step.attributes[number] - 1) // 8 + 1
        assert int(segment.raw["startTimeUnixNano"]) <= int(step.raw["startTimeUnixNano"])
        if step.attributes[number] == 1:
            continue  # which has no known begin, and no phases
        phases = [one for one in found if one.raw.get("parentSpanId") == step.ids[1]]
        assert [one.attributes for one in phases] == [
            {"torchobs.step_phase.phase": phase} for phase in ("data", "forward", "backward", "optimizer")
        ]
        assert {one.ids[0] for one in phases} == {step.ids[0]}
