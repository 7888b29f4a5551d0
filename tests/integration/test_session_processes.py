"""Processes around a session: loader workers, children of every start method, ranks that a script spawns, how a rank ends."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchobs
from tests import fork_server, support
from tests.training import Recording, mlp, train
from torchobs.flight.format.layout import Exit
from torchobs.flight.reader import reader

if TYPE_CHECKING:
    from pathlib import Path


class Squares(Dataset[torch.Tensor]):
    """A dataset that can be sent to a spawned worker."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8,), float(index))


def init_in_worker(index: int) -> None:
    """A worker that calls init(), as a script without a main guard does."""
    del index
    assert not torchobs.init().active


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_dataloader_workers_leave_no_trace(run: Recording, flight_dir: Path, method: str) -> None:
    """0 extra files, threads and series; the worker's own init() is inert."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(
        Squares(), batch_size=4, num_workers=2, multiprocessing_context=method, worker_init_fn=init_in_worker,
        persistent_workers=False,
    )  # fmt: skip
    series = len(run.view().points)
    for inputs in loader:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    assert len(run.steps()) == 4
    assert len(list(flight_dir.glob("*.flight"))) == 1
    assert len(run.view().points) >= series
    assert run.errors() == []


def test_a_forked_child_is_inert(run: Recording) -> None:
    """It trains, logs, exits: nothing of that reaches the parent's file, and the parent goes on."""
    train(2)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=child_trains)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    train(1)
    assert len(run.steps()) == 3
    assert run.values()[("torchobs.tokens",)] == 0


def child_trains() -> None:
    """What the child does."""
    torchobs.log(tokens=1000)
    torchobs.event("from the child")
    train(3)
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]


SCRIPT = """
import sys, torch
sys.path[:0] = {path!r}
import torchobs
with_ = torchobs.init(flight_dir={directory!r})
from tests.training import loss_of, mlp
model = mlp(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for index in range(3):
    loss_of(model, index).backward(); optimizer.step()
{end}
"""


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("", 0, Exit.FINISHED),
        ("raise KeyError('secret')", 1, Exit.EXCEPTION),
        ("import os; os._exit(3)", 3, None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, None),
        ("import threading; t = threading.Thread(target=lambda: 1 // 0); t.start(); t.join()", 0, Exit.FINISHED),
    ],
)
def test_how_a_rank_ends(flight_dir: Path, end: str, status: int, reason: int | None) -> None:
    """In order, by an exception, or without a word; steps are never lost, and of the exception the message's line is kept."""
    script = SCRIPT.format(path=[str(support.ROOT)], directory=str(flight_dir), end=end)
    child = fork_server.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert child.returncode == status, child.stderr
    (path,) = flight_dir.glob("*.flight")
    file = reader.open_path(str(path))
    view = file.read(final=True)
    events = [fields for _, fields in file.events()]
    file.close()
    assert view.live.exit_reason == reason
    # the first cycle's end is provisional until it is known whether another optimizer steps, so the third is at stake
    assert {point.series.name: point.value for point in view.points}["torchobs.steps"] == 3
    messages = [event["attrs"]["exception.message"] for event in events if event["name"] == "torchobs.exception"]
    assert messages == ["'secret'"] * ("KeyError" in end) + ["integer division or modulo by zero"] * ("threading" in end)
    assert ("threading" in end or "KeyError" in end) == any(event["name"] == "torchobs.exception" for event in events)


SPAWNED = """
import os, sys, torch
sys.path[:0] = {path!r}
import torchobs

def rank(index):
    torch.distributed.init_process_group("gloo", init_method="file://{store}", rank=index, world_size=2)
    with torchobs.init(flight_dir={directory!r}):
        from tests.training import loss_of, mlp
        model = mlp(); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss_of(model, step).backward(); optimizer.step()
    torch.distributed.destroy_process_group()

torchobs.init(flight_dir={directory!r})
if __name__ == "__main__":
    torchobs.shutdown()
    torch.multiprocessing.spawn(rank, nprocs=2)
"""


def test_ranks_that_a_script_spawns_itself_are_ranks(flight_dir: Path, tmp_path: Path) -> None:
    """``torch.multiprocessing.spawn``: each is known by its process group, of one run; importing the script starts none."""
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED.format(path=[str(support.ROOT)], directory=str(flight_dir), store=tmp_path / "store"))
    child = fork_server.run([sys.executable, str(script)], capture_output=True, text=True, timeout=110)
    assert child.returncode == 0, child.stderr
    found = []
    for path in flight_dir.glob("*.flight"):
        file = reader.open_path(str(path))
        steps = {point.series.name: point.value for point in file.read(final=True).points}["torchobs.steps"]
        resource = file.header.resource
        found.append((resource["rank"], resource.get("world_size"), steps, resource["run_id"]))
        file.close()
    parent, *ranks = sorted(found, key=lambda entry: (entry[1], entry[0]))
    assert parent[:3] == (0, 1, 0)
    assert [rank[:3] for rank in ranks] == [(0, 2, 3), (1, 2, 3)]
    assert ranks[0][3] == ranks[1][3]


def test_dead_files_of_ours_are_cleaned_and_others_are_not(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """init() removes what a dead rank left longer than a day ago; a living rank's file and foreign names stay."""
    torchobs.init(flight_dir=flight_dir)
    torchobs.shutdown()
    (old,) = flight_dir.glob("*.flight")
    (flight_dir / "notes.txt").write_text("mine")
    later = time.monotonic_ns() + 2 * 86_400 * 10**9
    monkeypatch.setattr(time, "monotonic_ns", lambda: later)
    torchobs.init(flight_dir=flight_dir)
    monkeypatch.undo()
    try:
        assert not old.exists()
        assert (flight_dir / "notes.txt").exists()
        assert len(list(flight_dir.glob("*.flight"))) == 1
    finally:
        torchobs.shutdown()
