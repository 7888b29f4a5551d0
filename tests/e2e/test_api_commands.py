"""Commands from the exporter's API to real training processes and back: two ranks, one of which misbehaves."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.exporters import Caller, start_program
from tests.support import ROOT, clean_environment, wait_until
from torchobs.exporter.access import SOCKET_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.exporters import Program


class Rank:
    """One of them, and its ears."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log

    def said(self, word: str) -> bool:
        """Whether it has told that."""
        return word in self._log.read_text().splitlines()

    def say(self, *words: str, told: str) -> None:
        """Have it do something, and wait until it has told so."""
        assert self.process.stdin
        self.process.stdin.write(f"{' '.join(words)}\n")
        self.process.stdin.flush()
        wait_until(lambda: self.said(told))


@pytest.fixture
def ranks(start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path) -> list[Rank]:
    """Two that train."""
    environ = {**clean_environment(), "TORCHOBS_RUN_ID": "api", "PYTHONPATH": str(ROOT)}

    def rank(number: int) -> Rank:
        argv, log = (sys.executable, "-m", "tests.stuck_rank", str(flight_dir), str(number)), tmp_path / f"rank-{number}.log"
        with log.open("w") as out:
            return Rank(start(*argv, torch=True, stdin=subprocess.PIPE, stdout=out, env=environ, cwd=ROOT), log)

    return [rank(0), rank(1)]


@pytest.fixture
def local(
    start: Callable[..., subprocess.Popen[str]],
    flight_dir: Path,
    free_port: Callable[[], int],
    tmp_path: Path,
    ranks: list[Rank],
) -> Caller:
    """The exporter, over its socket, once both ranks take steps."""
    exporter: Program = start_program(
        start, tmp_path / "exporter.log", free_port(), "--mode", "node", "--flight-dir", str(flight_dir)
    )
    assert exporter.is_ready()
    assert len(ranks) == 2
    caller = Caller(flight_dir / SOCKET_NAME)
    wait_until(lambda: [rank["steps"] or 0 for rank in caller.get("/ranks")["ranks"] if rank["steps"]][1:], timeout_s=120)
    return caller


def fetched(local: Caller, link: dict[str, str], timeout_s: float = 60) -> bytes:
    """The evidence, as soon as it is there."""

    def look() -> bytes | None:
        reply = local.ask("GET", link["href"], prefix="")
        assert reply.status in {200, 404}
        return reply.body if reply.status == 200 else None

    body = wait_until(look, timeout_s)
    assert body is not None
    return body


def shown(local: Caller, rank: int) -> dict[str, Any]:
    """A rank as it is."""
    state: dict[str, Any] = local.get("/ranks")["ranks"][rank]
    return state


def test_a_rank_that_is_stuck_or_stopped(local: Caller, ranks: list[Rank], tmp_path: Path) -> None:
    """With Python's lock held it has written its stacks down itself; stopped it cannot, and the answer says why."""
    release = tmp_path / "release"
    os.mkfifo(release)
    ranks[0].say("hold", str(release), told="holds")
    wait_until(lambda: shown(local, 0)["state"] == "unresponsive")

    def look() -> dict[str, Any] | None:
        reply = local.post("/stacks?rank=0")
        return reply.json["ranks"][0] if reply.status == 202 else None

    stuck = wait_until(look)
    assert stuck is not None
    assert not ranks[0].said("hold"), "it holds the lock all the while"
    assert "in hold" in fetched(local, stuck["evidence"]).decode()
    assert stuck["command"] is None
    release.open("w").close()
    wait_until(lambda: shown(local, 0)["state"] == "alive", timeout_s=60)
    (event,) = wait_until(lambda: local.get("/events?rank=0&kind=torchobs.stacks")["events"])
    assert event["attributes"]["cause"] == "stuck"

    os.kill(ranks[1].process.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(ranks[1].process.pid).status() == psutil.STATUS_STOPPED)
    wait_until(lambda: shown(local, 1)["state"] == "unresponsive")
    refused = local.post("/stacks?rank=1")
    assert (refused.status, refused.json["type"]) == (409, "urn:torchobs:problem:rank-unresponsive")
    assert "SIGCONT" in refused.json["detail"]
    assert local.post("/profile?rank=1", {"steps": 1}).status == 409
    both = wait_until(lambda: local.post("/stacks").json.get("ranks"))  # a busy machine's rank 0 may not respond at first
    assert both[0]["evidence"]
    assert "SIGCONT" in both[1]["refused"]
    os.kill(ranks[1].process.pid, signal.SIGCONT)
    wait_until(lambda: shown(local, 1)["state"] == "alive")


def test_a_person_s_commands(local: Caller, flight_dir: Path, tmp_path: Path) -> None:
    """`torchobs level`, `stacks` and `profile`, which find the exporter by the directory; what is refused says why."""

    def torchobs(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "torchobs", *arguments]
        environ = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}
        return subprocess.run(argv, capture_output=True, text=True, check=False, env=environ, cwd=tmp_path, timeout=60)

    def obeyed(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = torchobs(*arguments)
        for _ in range(5):  # a rank of a busy machine may not respond at first
            if "does not respond" not in done.stderr and "has not written them down" not in done.stderr:
                break
            done = torchobs(*arguments)
        return done

    changed = torchobs("level", "extreme", "--rank", "1")
    assert (changed.returncode, changed.stdout) == (0, "extreme from now on: rank 1\n")
    wait_until(lambda: shown(local, 1)["level"] == "extreme")
    stacks = obeyed("stacks")
    assert stacks.returncode == 0, stacks.stderr
    assert stacks.stdout.count("in main") == 2
    assert "==> rank 1 of api <==" in stacks.stdout
    profile = obeyed("profile", "1", "--steps", "2")
    assert profile.returncode == 0, profile.stderr
    trace = json.loads(gzip.decompress((tmp_path / "trace-rank1.json.gz").read_bytes()))
    assert [event.get("name") for event in trace["traceEvents"]].count("Optimizer.step#SGD.step") == 2
    ambiguous = torchobs("profile")
    assert (ambiguous.returncode, ambiguous.stdout) == (1, "")
    assert "name one by its incarnation" in ambiguous.stderr
    assert (
        "there is no such rank on this machine: `torchobs top --once` shows those there are" in torchobs("stacks", "7").stderr
    )
    nobody = torchobs("stacks", "--dir", str(tmp_path))
    assert nobody.returncode == 1
    assert "no exporter answers" in nobody.stderr
