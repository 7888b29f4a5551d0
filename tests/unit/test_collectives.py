"""Collectives by torch's flight recorder: what its dumps say, what is counted and shown, and groups destroyed meanwhile."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.training import Recording, loss_of, mlp, recording
from torchobs import catalog
from torchobs.probes import collectives
from torchobs.probes.collectives import Dump, GroupStatus, decode

GLOO: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "flight_recorder" / "gloo-2.10.json").read_text())
"""Recorded by rank 0 of two with torch 2.13 on a CPU: it waits in an all-reduce and a broadcast of the default group."""


def nccl_entry(number: int, **changes: Any) -> dict[str, Any]:
    """An entry as NCCL's recorder writes it, by torch/csrc/distributed/c10d/FlightRecorder.hpp of torch 2.5 (version 2.4)."""
    return {
        "record_id": number, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": number, "p2p_seq_id": 0,
        "op_id": number, "profiling_name": "nccl:all_reduce", "time_created_ns": 1_730_000_000_000_000_000 + number,
        "input_sizes": [[3, 4]], "input_dtypes": ["Float"], "output_sizes": [[3, 4]], "output_dtypes": ["Float"],
        "state": "completed", "time_discovered_started_ns": 1, "time_discovered_completed_ns": 2, "retired": True,
        "timeout_ms": 600_000, "is_p2p": False, "duration_ms": 0.25, **changes,
    }  # fmt: skip


NCCL: dict[str, Any] = {
    "version": "2.4",
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "pg_status": {"0": {"last_enqueued_collective": "3", "last_started_collective": "3", "last_completed_collective": "2"}},
    "entries": [
        nccl_entry(1),
        nccl_entry(2, profiling_name="nccl:_all_gather_base"),
        nccl_entry(3, state="started", retired=False, profiling_name="nccl:recv 0<-1", input_dtypes=["Float8_e5m2"]),
    ],
    "nccl_comm_state": {},
}


def understood(dumped: bytes) -> Dump:
    """What a dump says that is understood."""
    dump = decode(dumped)
    assert dump is not None
    return dump


def test_dumps_of_gloo_and_nccl_are_understood() -> None:
    """Gloo's state stays at scheduled for ever: what has come back is retired. Of NCCL the state counts."""
    dump = understood(pickle.dumps(GLOO))
    assert dump.groups == {0: GroupStatus(4, 2), 1: GroupStatus(1, 1)}
    assert [(operation.group.name, operation.kind, operation.pending, operation.size) for operation in dump.operations] == [
        ("0", "all_reduce", False, 4000),
        ("1", "all_gather", False, 12),
        ("0", "barrier", False, 0),
        ("0", "all_reduce", True, 4000),
        ("0", "broadcast", True, 4000),
    ]
    assert [operation.record for operation in dump.operations] == [0, 1, 2, 3, 4]
    assert {operation.duration_s for operation in dump.operations} == {None}
    assert {operation.group.attributes["group"].partition(":")[0] for operation in dump.operations} == {"default", "mesh_tp"}
    dump = understood(pickle.dumps(NCCL))
    assert dump.groups == {0: GroupStatus(3, 2)}
    assert [(operation.kind, operation.pending, operation.size) for operation in dump.operations] == [
        ("all_reduce", False, 48), ("all_gather", False, 48), ("recv", True, 12),
    ]  # fmt: skip
    assert dump.operations[0].duration_s == 0.25e-3


def dump_of(entry: dict[str, Any]) -> bytes:
    """A dump of one operation."""
    return pickle.dumps({"version": "2.10", "pg_status": {}, "entries": [entry]})


def test_operations_have_the_lines_that_called_them() -> None:
    """Point-to-point operations have no number of their group's; those known here are in the catalog."""
    frames = [{"name": "barrier", "filename": "/torch/d.py", "line": 7}, {"name": "save", "filename": "a.py", "line": 3}]
    (operation,) = understood(dump_of(nccl_entry(5, profiling_name="gloo:barrier", frames=frames))).operations
    assert (operation.number, operation.kind) == (5, "barrier")
    assert operation.frames == (("/torch/d.py", 7, "barrier"), ("a.py", 3, "save"))
    assert understood(dump_of(nccl_entry(5, is_p2p=True))).operations[0].number is None
    operations = {*collectives._OPERATIONS.values(), *collectives._FAMILIES, *collectives._PLAIN, "other"}
    assert operations == set(catalog.COLLECTIVE_OPERATIONS) - {"none"}


def test_what_is_not_understood_is_refused() -> None:
    """Other versions changed fields that are relied on."""
    cases: list[bytes] = [
        b"", b"\x80", pickle.dumps([]), pickle.dumps(GLOO)[:-9],
        pickle.dumps({"version": "3.0", "pg_status": {}}),
        pickle.dumps({"version": "2.10"}),
        pickle.dumps({"version": "2.10", "pg_status": {}, "entries": {"a": 1}}),
        pickle.dumps({"version": "2.10", "pg_status": {}, "entries": [Path()]}),
        dump_of({name: value for name, value in nccl_entry(1).items() if name != "pg_id"}),
    ]  # fmt: skip
    for dumped in cases:
        assert decode(dumped) is None


SIZE = ("torchobs.collective.size",)


def look(run: Recording) -> dict[tuple[str, ...], Any]:
    """The series about collectives after a look: the slow sensors are asked, and the next backward pass reads."""
    run.look()
    loss_of(mlp()).backward()  # type: ignore[no-untyped-call]
    return {key: value for key, value in run.look().items() if key[0].startswith("torchobs.collective.")}


@pytest.mark.usefixtures("group")
def test_sizes_are_counted_once_each_from_level_advanced_on(flight_dir: Path) -> None:
    """What came before the first reading is still in the recorder, and so counted, too; gloo has no durations."""
    read = []
    for run in recording(flight_dir, level="advanced"):
        for number in (2, 3):
            for _ in range(number):
                dist.all_reduce(torch.ones(1000))
            read.append(look(run))
    first, second = ([series["torchobs.collective.input", "all_reduce"], sum(series[SIZE].counts)] for series in read)
    assert [after - before for before, after in zip(first, second, strict=True)] == [3 * 4000, 3]
    assert first[0] >= 2 * 4000
    assert {key[0] for key in read[1]} == {SIZE[0], "torchobs.collective.input"}


@pytest.mark.usefixtures("group")
def test_a_group_of_one_has_no_series_at_level_basic(flight_dir: Path) -> None:
    """It waits for nobody."""
    for run in recording(flight_dir):
        dist.all_reduce(torch.ones(8))
        assert look(run) == {}
