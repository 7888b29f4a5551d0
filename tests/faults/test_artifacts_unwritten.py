"""Stacks and traces that cannot be written: training goes on, no half of one is taken for it, and whoever asked is told why."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.exporters import Answer, Caller, Service
from tests.faults.test_flight_files import mounted
from tests.support import NEEDS_MOUNT, ROOT, clean_environment, wait_until
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.artifacts import END

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534
TRAINS = 5
"""Steps by which it is seen that training goes on."""


class Rank:
    """One that trains, with its flight file on a small tmpfs of its own, and the exporter's API for it."""

    def __init__(self, process: subprocess.Popen[str], directory: Path, caller: Caller) -> None:
        self._process, self._caller = process, caller
        self.directory = directory

    def say(self, *words: object) -> None:
        """Have it do something, to its end, and let it train."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{' '.join(map(str, words))}\n")
        self._process.stdin.flush()
        assert f"{words[0]}\n" in self._process.stdout, "it ended"
        self.trains()

    def lives(self) -> None:
        """See that it has not ended."""
        assert self._process.poll() is None

    def steps(self) -> int:
        """How many it has taken."""
        self.lives()
        return int(self._caller.get("/ranks")["ranks"][0]["steps"] or 0)

    def trains(self) -> None:
        """See that it does."""
        before = self.steps()
        wait_until(lambda: self.steps() > before + TRAINS, timeout_s=60)

    def ask(self, what: str, content: object = None) -> Answer:
        """Ask for evidence, and for the end of it: the file, or why there is none."""

        def asked() -> dict[str, Any]:
            self.lives()
            reply = self._caller.post(what, content).json
            return (reply["ranks"][0] if "ranks" in reply else reply).get("evidence") or {}

        link = wait_until(asked, timeout_s=60)  # one that has just been stuck, or a busy machine's, may not respond at first

        def answer() -> Answer | None:
            self.lives()
            reply = self._caller.ask("GET", link["href"], prefix="")
            return None if reply.status == 404 else reply

        return wait_until(answer, timeout_s=60)  # type: ignore[return-value]  # not None then

    def events(self, name: str) -> list[dict[str, Any]]:
        """Attributes of the events of that name, newest first."""
        return [event["attributes"] for event in self._caller.get(f"/events?kind={name}")["events"]]

    def kept(self) -> list[str]:
        """The kinds of the evidence that it lists."""
        return sorted(evidence["kind"] for evidence in self._caller.get("/evidence")["evidence"])

    def unfinished(self) -> list[str]:
        """What has no name yet."""
        return [path.name for path in self.directory.glob(".tmp*")]


@pytest.fixture(scope="module")
def rank() -> Iterator[Rank]:
    """One for all of them: to import torch takes seconds."""
    if os.getuid():
        pytest.skip(NEEDS_MOUNT)  # in which another user's rights can be taken
    with tempfile.TemporaryDirectory() as home:
        small, control = Path(home) / "flight", Path(home) / "control"
        for path in (small, control):
            path.mkdir()
        argv = (*mounted("size=4m", "true", small), sys.executable, "-m", "tests.stuck_rank", str(small))
        environ = {**clean_environment(), "TORCHOBS_CONTROL_DIR": str(control)}
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, cwd=ROOT, env=environ, text=True) as process:
            try:
                inside = Path(f"/proc/{process.pid}/root{small}")
                wait_until(lambda: list(inside.glob("*.flight")), timeout_s=60)
                socket = Path(home) / "api.sock"
                config = ExporterConfig(flight_dir=str(inside), control_dir=str(control), api_socket=str(socket))
                with Service(config):
                    trainer = Rank(process, inside, Caller(socket))
                    wait_until(trainer.steps, timeout_s=60)
                    yield trainer
            finally:
                process.kill()


@pytest.fixture(autouse=True)
def _whole(rank: Rank) -> Iterator[None]:
    """Before and after each, stacks come to their end, and nothing lies about."""
    assert rank.ask("/stacks").body.endswith(END)
    yield
    assert rank.ask("/stacks").body.endswith(END)
    assert rank.unfinished() == []


def test_a_full_file_system(rank: Rank) -> None:
    """Stacks, a trace, stacks of a rank that is stuck: each request is told what to do; with room again all is as before."""
    kept = rank.kept()
    with (rank.directory / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(4096))
    for what, content in (("/stacks", None), ("/profile", {"steps": 2})):
        refused = rank.ask(what, content)
        assert refused.status == 410
        assert "make room where its flight file is" in refused.json["detail"]
        assert "the file system has 0 bytes left" in refused.json["detail"]
    rank.say("hold", 4)
    failure, *_ = wait_until(lambda: [event for event in rank.events("torchobs.stacks_failed") if event["cause"] == "stuck"])
    assert (failure["reason"], failure["detail"]) == ("no_room", "No space left on device")
    assert rank.kept() == kept
    assert rank.unfinished() == []
    (rank.directory / "ballast").unlink()
    assert json.loads(gzip.decompress(rank.ask("/profile", {"steps": 2}).body))["traceEvents"]
    for _ in range(8):
        rank.ask("/stacks")
    assert rank.kept().count("stacks") == 8


def test_a_directory_that_is_not_the_rank_s_any_more(rank: Rank) -> None:
    """What has gone wrong with its rights is said, and mended without a restart."""
    rank.directory.chmod(0o555)
    rank.say("become", NOBODY)
    for what, content in (("/stacks", None), ("/profile", {"steps": 2})):
        refused = rank.ask(what, content)
        assert (refused.status, "make that directory writable" in refused.json["detail"]) == (410, True)
    rank.say("become", 0)
    rank.directory.chmod(0o700)
