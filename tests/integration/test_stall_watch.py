"""Stacks that a rank writes of itself early in a stall, and what `inspect` makes of them if it is killed there."""

from __future__ import annotations

import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import support
from tests.training import Recording, loss_of, mlp, recording
from torchobs.detect import hangs
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.ranks.runs import load
from torchobs.runtime import stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LEAST_S = 1.0


@pytest.fixture
def run(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    """A recording whose stalls are short; its steps are fast, in which few of a busy machine are not."""
    monkeypatch.setattr(hangs, "LEAST_S", LEAST_S)
    monkeypatch.setattr(hangs, "LONG_FACTOR", 0.0)
    monkeypatch.setattr(hangs, "EARLY_FACTOR", 0.0)
    monkeypatch.setattr(stacks, "PAUSE_NS", 60_000_000_000)
    yield from recording(flight_dir)


def trainer() -> Callable[[], None]:
    """Take training steps."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def take() -> None:
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return take


def written(run: Recording) -> list[dict[str, Any]]:
    """The attributes of the events."""
    return [event["attrs"] for event in run.frames("torchobs.stacks") if event["attrs"]["cause"] == "stalled"]


def test_once_in_a_stall_and_the_next_has_to_be_twice_as_long(run: Recording, flight_dir: Path) -> None:
    """The file has the line that it stands in; training that goes on is nothing."""
    step = trainer()
    for number in range(2):
        step()
        support.wait_until(lambda: len(written(run)) == number + 1)  # noqa: B023  # called here
        time.sleep(3 * LEAST_S)
    first, second = written(run)
    assert second["quiet_s"] >= 2 * LEAST_S > first["quiet_s"] - LEAST_S / 2
    assert first["phase"] == "other"
    step()
    run.whole_round()
    assert len(written(run)) == 2
    texts = [path.read_text() for path in sorted(flight_dir.glob("*.stacks-*"))]
    assert len(texts) == 2
    assert all("test_once_in_a_stall" in text and text.endswith("# end of stacks\n") for text in texts)


@pytest.mark.parametrize("what", ["evaluation", "before training", "switched off"])
def test_what_takes_its_time_writes_none(run: Recording, what: str) -> None:
    """Who evaluates, has not begun, or whose steps are not recorded."""
    step = trainer()
    if what != "before training":
        step()
    if what == "evaluation":
        model = mlp()
        model.eval()
        time.sleep(3 * LEAST_S)
        model.train()
    elif what == "switched off":
        assert run.session._commands is not None
        run.session._commands._probe_manager.switch_off(frozenset({"step"}))
        time.sleep(2.5 * LEAST_S)
    else:
        time.sleep(2.5 * LEAST_S)
    run.whole_round()
    assert not written(run)


def test_a_process_that_was_stopped_did_not_stand_still(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended machine, SIGSTOP: the time in which the sampler did not run does not count."""
    monkeypatch.setattr(stacks, "PAUSE_NS", 0)
    trainer()()
    time.sleep(2.5 * LEAST_S)
    assert not written(run)


SCRIPT = """
import sys, threading, time, torch
from torchobs.detect import hangs
hangs.LEAST_S, hangs.LONG_FACTOR = 1.0, 0.0
def load(lock):
    lock.acquire()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(50):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
    if number == 40:
        lock = threading.Lock()
        lock.acquire()
        load(lock)
"""


def test_a_run_that_is_killed_in_a_stall_shows_where_it_stood(start: Any, flight_dir: Path, tmp_path: Path) -> None:
    """By SIGKILL, seconds after its last step, without an exporter or a person who asked for stacks."""
    script = tmp_path / "standing.py"
    script.write_text(SCRIPT)
    process = start(
        sys.executable, "-m", "torchobs", "run", "--no-exporter", str(script), torch=True,
        env={**support.clean_environment(), "TORCHOBS_DIR": str(flight_dir)}, cwd=support.ROOT,
    )  # fmt: skip
    # a machine that holds a step up for a second makes stacks, too
    support.wait_until(lambda: any(" in load" in path.read_text() for path in flight_dir.glob("*.stacks-*")), 60.0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (report,), _ = load(list(flight_dir.glob("*.flight")))
    texts = [finding.long for finding in diagnose_run([report]).by_rank[0]]
    assert any(f"main thread was at {script}:6 in load" in text for text in texts), texts
