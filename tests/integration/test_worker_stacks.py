"""Stacks of a rank that waits for a batch have the states and, with py-spy, the stacks of its loader's workers."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support import wait_until
from torchobs import catalog
from torchobs.runtime import worker_stacks
from torchobs.runtime.stack_dump import write_stacks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.training import Recording

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

SPY = """#!/bin/sh
echo started >> "$(dirname "$0")/calls"
{}
"""
DUMPS = """for pid in "$@"; do :; done
echo "Process $pid: python train.py --token secret"
echo 'Thread 1 (idle): "MainThread"'
echo '    __getitem__ (/home/me/data.py:31)'"""


class Waiting(Dataset[torch.Tensor]):
    """Samples that come when they are let go."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.begun, self.go = context.Semaphore(0), context.Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.begun.release()
        self.go.wait()
        return torch.ones(1)


@pytest.fixture
def worker(run: Recording) -> Iterator[int]:
    """The process id of a worker that the next batch is awaited from; it sleeps, as the other one does."""
    data, context = Waiting(), run.session.context
    assert context is not None
    batches = iter(DataLoader(data, num_workers=2, multiprocessing_context="fork"))
    wait_until(lambda: [worker for find in context.loader_workers for worker in find()])
    first, second = (worker for find in context.loader_workers for worker in find())
    assert (first.number, first.awaited, second.awaited) == (0, True, False)
    assert all(data.begun.acquire(timeout=60) for _ in range(2))
    wait_until(lambda: all(psutil.Process(one.pid).status() == psutil.STATUS_SLEEPING for one in (first, second)))
    yield first.pid
    data.go.set()
    del batches


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """Put a program named py-spy, and nothing else of that name, on the path."""
    (folder / "py-spy").write_text(SPY.format(body))
    (folder / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def dumped(run: Recording, flight_dir: Path, cause: str, said: str) -> tuple[dict[str, Any], str]:
    """The event and the file of stacks that are written now, once the file has what is ``said``."""
    context = run.session.context
    assert context is not None
    write_stacks(context, 7, cause)

    def written() -> str:
        texts = [path.read_text() for path in flight_dir.glob("*.stacks-7.txt")]
        return next((text for text in texts if said in text), "")

    text = wait_until(written)
    assert text.endswith("# end of stacks\n")
    (event,) = wait_until(lambda: run.attributes(catalog.EVENT_STACKS.name))
    return event, text


@pytest.mark.parametrize("cause", ["asked", "stalled"])
def test_states_of_workers_need_nothing(
    run: Recording, flight_dir: Path, worker: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cause: str
) -> None:
    """Promise: who waits for a batch sees which worker's it is, and that it sleeps."""
    monkeypatch.setenv("PATH", str(tmp_path))
    event, text = dumped(run, flight_dir, cause, "MainThread")
    assert event["awaited"] == f"worker 0 (pid {worker})"
    assert event["workers"][0].startswith(f"worker 0 (pid {worker}): sleeping")
    assert len(event["workers"]) == 2
    assert f"# worker 0 (pid {worker}): sleeping" in text


@pytest.mark.parametrize("cause", ["asked", "stalled"])
@pytest.mark.usefixtures("worker")
def test_stacks_of_workers_are_py_spy_s(
    run: Recording, flight_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cause: str
) -> None:
    """Promise: where it is installed its stacks stand in the same file, without the workers' command lines."""
    install(monkeypatch, tmp_path, DUMPS)
    _, text = dumped(run, flight_dir, cause, "__getitem__ (/home/me/data.py:31)")
    assert "MainThread" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("body", "said"),
    [("exec sleep 60", "# py-spy: TimeoutExpired"), ("echo Permission denied >&2; exit 1", "# py-spy: Permission denied")],
)
@pytest.mark.usefixtures("worker")
def test_a_py_spy_that_fails_costs_its_own_stacks_only(
    run: Recording, flight_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, said: str
) -> None:
    """Promise: one that may not look, or never answers, is given up, and said so."""
    monkeypatch.setattr(worker_stacks, "PATIENCE_S", 0.2)
    install(monkeypatch, tmp_path, body)
    _, text = dumped(run, flight_dir, "asked", said)
    assert "MainThread" in text


@pytest.mark.usefixtures("worker")
def test_no_process_is_started_whose_end_a_handler_would_see(
    run: Recording, flight_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Promise: a script's own handler of SIGCHLD hears of its own children alone."""
    install(monkeypatch, tmp_path, DUMPS)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        dumped(run, flight_dir, "asked", "MainThread")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert not (tmp_path / "calls").exists()
