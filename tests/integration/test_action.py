"""What to do after an end, as `inspect --json`, the API and the exit message say it, of real processes that end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.diagnosis_files import fact, facts, steps
from tests.exporters import Caller, Service
from tests.support import ROOT, clean_environment, free_port, wait_until
from torchobs import catalog
from torchobs.cli import __main__ as dispatch
from torchobs.detect.action import ACTIONS, TABLE, End, Ends, decide
from torchobs.diagnosis.action import verdict
from torchobs.exporter.config import ExporterConfig

TRAIN = """
import os, signal, sys, time, torch, torchobs
import torch.distributed as dist
torchobs.init(run_id="run", job_name="job")
how = sys.argv[1]
if how == "pair":
    dist.init_process_group("gloo")
layer = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("ready", flush=True)
if how == "pair":
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
def fail(error):
    raise error
ends = {
    "own": lambda: fail(RuntimeError("the loss is gone")),
    "io": lambda: open("/nowhere/data"),
}
ends[how]()
"""


def environment(flight_dir: Path, **environ: str) -> dict[str, str]:
    """Of a training."""
    return {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT), **environ}


def started(flight_dir: Path, how: str, **environ: str) -> subprocess.Popen[str]:
    """A training that trains and then ends so."""
    script = flight_dir.parent / f"{flight_dir.name}-train.py"
    script.write_text(TRAIN)
    argv = (sys.executable, str(script), how)
    process: subprocess.Popen[str] = fork_server.Python(
        argv, env=environment(flight_dir, **environ), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    script.unlink()
    return process


def ended(flight_dir: Path, how: str, **environ: str) -> int:
    """The status of one that has ended."""
    with started(flight_dir, how, **environ) as process:
        return process.wait(timeout=60)


def inspected(capsys: pytest.CaptureFixture[str], flight_dir: Path) -> dict[str, Any]:
    """What `inspect --json` says."""
    with pytest.raises(SystemExit):
        sys.exit(dispatch.main(["inspect", "--json", str(flight_dir)]))
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {name: document[name] for name in ("action", "cause", "reason", "evidence")}


def test_an_end_has_its_action(capsys: pytest.CaptureFixture[str], flight_dir: Path) -> None:
    """With its reason and the end that proves it."""
    ended(flight_dir, "own")
    answer = inspected(capsys, flight_dir)
    assert (answer["action"], answer["cause"]) == ("do_not_restart", "program")
    assert answer["reason"] == next(row.reason for row in TABLE if row.cause == "program")
    (proof,) = answer["evidence"]
    assert proof["rank"] == "0"
    assert "after step 5" in proof["text"]


RAISED: dict[str, Any] = {"reason": "exception", "of_program": True}
TERMINATED = End(reason="terminated", signal="SIGTERM")
ENDS = (
    (End(**RAISED, errors=(("builtins.KeyError", ""),)), "program"),
    (End(**RAISED, errors=(("builtins.FileNotFoundError", "[Errno 2]"),)), "unknown"),
    (End(**RAISED, errors=(("builtins.RuntimeError", "CUDA error: uncorrectable ECC error encountered"),)), "hardware"),
    (End(reason="exception", errors=(("builtins.RuntimeError", "shapes cannot be multiplied"),)), "unknown"),  # torch's own
    (End(reason="exit_code"), "unknown"),
    (End(reason="finished"), "finished"),
    (End(reason="interrupted"), "interrupted"),
    (End(reason="lost"), "unknown"),
    (TERMINATED, "preempted"),
    (End(up=True), "running"),
)


def test_where_nothing_is_proven_the_action_is_unknown() -> None:
    """A file may have been missing for a moment, a status or a SIGKILL has many reasons.

    On SIGTERM a run may go on, unless ranks are elsewhere: they may have failed before.
    """
    assert [(end, decide(Ends((end,), end))[0].cause) for end, _ in ENDS] == [*ENDS]
    assert decide(Ends((TERMINATED,), TERMINATED, complete=False))[0].cause == "unknown"


def test_the_same_step_and_line_twice_is_not_tried_a_third_time(capsys: pytest.CaptureFixture[str], flight_dir: Path) -> None:
    """Once a file may have been missing for a moment; the exporter has seen both attempts, and says the same as the files."""
    with Service(ExporterConfig(flight_dir=str(flight_dir))) as service:
        web = Caller(service.address)
        for restart, action, cause in (("0", "unknown", "unknown"), ("1", "do_not_restart", "repeated")):
            ended(flight_dir, "io", TORCHOBS_RESTART=restart)
            answer = inspected(capsys, flight_dir)
            assert (answer["action"], answer["cause"]) == (action, cause)

            def served(wanted: dict[str, Any] = answer) -> bool:
                runs = web.get("/ranks")["ended"]
                return bool(runs == [{"job_name": "job", "run_id": "run", **wanted}])

            wait_until(served)


def test_ranks_that_waited_for_one_that_was_killed_may_go_on(capsys: pytest.CaptureFixture[str], flight_dir: Path) -> None:
    """Real gloo: rank 1 is killed, rank 0 fails in the collective, and both are the evidence."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environs = [environment(flight_dir, **place, RANK=rank) for rank in "01"]
    argv = (sys.executable, "-c", TRAIN, "pair")
    ranks = [fork_server.Python(argv, env=environ, stderr=subprocess.DEVNULL) for environ in environs]
    assert [process.wait(timeout=60) for process in ranks] == [1, -signal.SIGKILL]
    answer = inspected(capsys, flight_dir)
    assert (answer["action"], answer["cause"]) == ("restart", "peer_died")
    assert [proof["rank"] for proof in answer["evidence"]] == ["1", "0"]


def test_hardware_goes_before_all_else() -> None:
    """Of any rank, shortly before its end; an XID that a program causes is none, nor one of an hour before."""

    def cause(**end: Any) -> str:
        result = verdict([facts(steps(100), **{"state": "failed", "reason": "terminated", "exit_code": 143, **end})], 0)
        assert result.action in ACTIONS
        return result.cause

    def xid(number: int, seconds: float = 9.0) -> Any:
        return fact(catalog.EVENT_GPU_XID, seconds, 90, hw__id="GPU-1", xid=number)

    assert (
        cause(events=[xid(79)]) == cause(events=[fact(catalog.EVENT_GPU_LOST, 9.0, hw__id="GPU-1", reason="x")]) == "hardware"
    )
    alone: dict[str, Any] = {"resource": {"world_size": 1}}
    assert cause(events=[xid(31)], **alone) == cause(events=[xid(79, -3600.0)], **alone) == "preempted"
    gone: dict[str, Any] = {"reason": "lost", "state": "lost", "exit_code": 0, "same_boot": False}
    assert cause(**gone, rebooted=True) == "node_lost"
    assert cause(**gone) == cause(**gone, rebooted=True, copied=True) == "unknown"
    (proof,) = verdict([facts(steps(100), state="failed", reason="lost", events=[xid(79)])], 0).evidence
    assert "XID 79" in proof.text


def test_every_cause_is_documented(checkout: Path) -> None:
    """With its action, in the order in which they are asked."""
    page = (checkout / "docs" / "diagnosis.md").read_text()
    rows = [f"| `{row.cause}` | `{row.action}` |" for row in TABLE]
    assert [row for row in rows if row not in page] == []
    assert sorted(rows, key=page.index) == rows
