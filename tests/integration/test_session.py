"""``init()`` and ``shutdown()``: what they leave behind, where they do nothing, and switching on and off in between."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchobs
from tests import flights, support
from tests.support import ROOT, finish
from tests.training import Recording, StepFlag, has, loss_of, mlp, recording, surface, torch_hooks, train
from torchobs.config.settings import PROBES
from torchobs.flight import control, files, reader
from torchobs.flight.directory import opened
from torchobs.flight.layout import Exit
from torchobs.runtime import session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def test_shutdown_leaves_everything_as_it_was(flight_dir: Path) -> None:
    """Every patched attribute and every hook is identical to before, twice over."""
    before = surface()
    for _ in range(2):
        for run in recording(flight_dir):
            assert surface() != before
            train(2)
            assert len(run.steps()) == 2
        assert surface() | {"threads": before["threads"]} == before
        support.wait_until(lambda: surface() == before)  # its thread is waited for, but not for ever


def test_init_is_idempotent_and_thread_safe(flight_dir: Path) -> None:
    """Sixteen threads at once get one session and one file."""
    sessions: list[torchobs.Session] = []
    finish([threading.Thread(target=lambda: sessions.append(torchobs.init(flight_dir=flight_dir))) for _ in range(16)])
    try:
        assert len({id(session) for session in sessions}) == 1
        assert torchobs.init() is sessions[0]
        assert len(list(flight_dir.glob("*.flight"))) == 1
    finally:
        torchobs.shutdown()


def test_a_second_init_says_what_it_ignores(flight_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Settings that differ from those in force are named once; the same ones are no matter; a typo is an error as at first."""
    session = torchobs.init(flight_dir=flight_dir, level="basic")
    try:
        with caplog.at_level(logging.WARNING, "torchobs"):
            assert torchobs.init(flight_dir=str(flight_dir), level="basic", rank=None) is session
            assert caplog.messages == []
            assert torchobs.init(level="extreme", total_steps=7) is session
        (ignored,) = caplog.messages
        assert "init() was called before: level=extreme, total_steps=7;" in ignored
        with pytest.raises(TypeError, match="'levle' is an unknown setting, did you mean level"):
            torchobs.init(levle="extreme")
    finally:
        torchobs.shutdown()


def test_a_session_says_what_it_records(flight_dir: Path) -> None:
    """Run and step, and after its end where that lies; an inert one that there is nothing."""
    with torchobs.init(flight_dir=flight_dir, job_name="translation", run_id="r7", rank=3) as session:
        train(2)
        assert repr(session) == "<torchobs.Session: job translation, run r7, rank 3, step 2>"
    assert repr(session) == f"<torchobs.Session: job translation, run r7, rank 3, ended, recorded in {session.recorded_in}>"
    with torchobs.init(enabled=False) as session:
        assert repr(session) == "<torchobs.Session: nothing is recorded>"


def test_a_session_is_a_context_manager(flight_dir: Path) -> None:
    """Leaving it shuts down; an exception on its way out is the rank's end."""
    session = torchobs.init(flight_dir=flight_dir)
    assert session.writer is not None
    path = session.writer.path
    with pytest.raises(ZeroDivisionError), session:
        raise ZeroDivisionError
    file = reader.open_path(path)
    view = file.read(final=True)
    events = {fields["name"]: fields for fields in flights.frames(file)}
    file.close()
    assert view.live.exit_reason == Exit.EXCEPTION
    assert events["torchobs.exception"]["attrs"]["exception.type"] == "builtins.ZeroDivisionError"
    assert "test_session.py" in events["torchobs.exception"]["attrs"]["location"]


@pytest.mark.parametrize("overrides", [{"enabled": False}, {"flight_dir": "/dev/null"}], ids=str)
def test_where_it_cannot_or_shall_not_record_it_is_inert(
    overrides: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on without us; what is off leaves no hook; at most one warning."""
    before = surface()
    with caplog.at_level(logging.WARNING, "torchobs"), torchobs.init(**overrides) as session:
        assert not session.active
        assert surface() == before
        torchobs.log(loss=1.0, tokens=3)
        torchobs.step()
        with torchobs.phase("data"):
            train(1)
    assert len(caplog.records) == ("flight_dir" in overrides)


def test_extra_numbers_are_gauges_up_to_sixty_four(run: Recording) -> None:
    """The 65th name is dropped and counted; a tensor is as good as a number; a name may be given again and again."""
    for number in range(66):
        extra: dict[str, Any] = {f"value_{number}": torch.tensor(float(number)) if number % 2 else number}
        torchobs.log(**extra)
    torchobs.log(value_0=7)
    values = support.wait_until(lambda: run.values() if run.values().get(("torchobs.scalar", "value_0")) == 7.0 else None)
    assert values is not None
    assert values[("torchobs.scalar", "value_63")] == 63.0
    assert ("torchobs.scalar", "value_64") not in values
    support.wait_until(lambda: run.values()[("torchobs.flight.dropped", "series")] == 2)


@contextlib.contextmanager
def commanding(run: Recording, flight_dir: Path) -> Iterator[Callable[[control.Command], None]]:
    """Yield what gives the rank a command and waits until it has been read."""
    incarnation = run.writer.header.incarnation
    (flight_dir / "control").mkdir()
    with opened(flight_dir / "control") as directory_fd:

        def give(command: control.Command) -> None:
            control.write_command(directory_fd, incarnation, command)
            run.whole_round()

        yield give


def test_the_control_file_switches_recording_off_and_on(flight_dir: Path) -> None:
    """Off leaves no hook, the heartbeat goes on. On again: the first step has no duration, the others have."""
    before = torch_hooks()
    for run in recording(flight_dir):
        with commanding(run, flight_dir) as give:
            train(3)
            give(control.Command(level=0))
            train(4)
            assert run.view().live.level == 0
            assert torch_hooks() == before
            torchobs.log(loss=1.0, tokens=3)
            torchobs.step()
            assert len(run.steps()) == 3
            give(control.Command(level=1))
            train(5)
            assert len(run.steps()) == 3 + 5
        assert [has(record, StepFlag.UNTIMED) for record in run.steps()[3:]] == [True, False, False, False, False]
        assert run.values()[("torchobs.tokens",)] == 0


def test_a_rank_says_whether_it_records_steps(flight_dir: Path) -> None:
    """So that the exporter calls no rank hung while nobody counts its steps: by the level, or by the probe alone."""
    for run in recording(flight_dir, level="off"):
        assert run.view().live.steps_since_ns is None
        with commanding(run, flight_dir) as give:
            give(control.Command(level=1))
            train(3)
            since_ns = run.view().live.steps_since_ns
            assert since_ns
            assert run.view().header.monotonic_ns < since_ns
            give(control.Command(probes_off=1 << PROBES.index("loss")))
            assert run.view().live.steps_since_ns == since_ns
            give(control.Command(probes_off=1 << PROBES.index("step")))
            assert run.view().live.steps_since_ns is None
    for run in recording(flight_dir):
        assert run.view().live.steps_since_ns == 0


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


def test_dataloader_workers_leave_no_trace(run: Recording, flight_dir: Path) -> None:
    """0 extra files, threads and series; the worker's own init() is inert."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(
        Squares(), batch_size=4, num_workers=1, multiprocessing_context="spawn", worker_init_fn=init_in_worker
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


def test_an_end_while_a_round_hangs_is_written_with_all_steps_and_makes_no_round_beside_it(flight_dir: Path) -> None:
    """A file system that does not answer, for one: the process does not wait for it."""
    here, gate, callers = threading.Event(), threading.Event(), list[str]()

    def hang() -> None:
        callers.append(threading.current_thread().name)
        here.set()
        gate.wait(30)

    session = torchobs.init(flight_dir=flight_dir)
    assert session.writer is not None
    assert session._sampler is not None
    path = session.writer.path
    session._samples.append(("hanging", hang))
    assert here.wait(30)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torchobs.shutdown()
    gate.set()
    session._sampler._thread.join()
    assert callers == ["torchobs-sampler"]
    view = reader.open_path(path).read(final=True)
    assert view.live.exit_reason == Exit.FINISHED
    steps = {point.series.name: point.value for point in view.points}["torchobs.steps"]
    assert steps == 3


def warned(caplog: pytest.LogCaptureFixture, flight_dir: Path, rank: int, world_size: int = 8) -> list[str]:
    """Warnings of a rank about a setting that is wrong, of gradients that explode, of its own loss and of its own file."""
    caplog.clear()
    told: dict[str, Any] = {"rank": rank, "local_rank": rank % 4, "world_size": world_size, "run_id": "x", "total_steps": -1}
    with torchobs.init(flight_dir=flight_dir, **told) as running:
        assert running.context is not None
        say = running.context.warn_limited
        assert say is not None
        say("layers", "7 of 8 layers learn nothing")
        say("memory", "memory grows", rank_only=True)
    assert session.logger.filters == []
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("rank", "world_size", "named"), [(4, 8, "rank 4: "), (0, 1, "")])
def test_the_first_rank_of_a_node_speaks_for_it(
    caplog: pytest.LogCaptureFixture, flight_dir: Path, rank: int, world_size: int, named: str
) -> None:
    """All that it has to say, with its rank where there are several."""
    setting, layers, memory = warned(caplog, flight_dir, rank, world_size)
    assert setting.startswith(f"torchobs: {named}")
    assert "total_steps" in setting.lower()
    assert layers == f"torchobs: {named}7 of 8 layers learn nothing"
    assert memory == f"torchobs: {named}memory grows"


def test_another_rank_says_what_is_its_own(caplog: pytest.LogCaptureFixture, flight_dir: Path) -> None:
    """And nothing that the first one says, too; at DEBUG all of it can be had."""
    assert warned(caplog, flight_dir, 7) == ["torchobs: rank 7: memory grows"]
    with caplog.at_level(logging.DEBUG, "torchobs"):
        warned(caplog, flight_dir, 7)
        quiet = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
    assert "torchobs: rank 7: 7 of 8 layers learn nothing" in quiet


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        (PermissionError(13, "Permission denied"), "make it writable for this user, or set TORCHOBS_DIR"),
        (OSError(24, "Too many open files"), "allow more open files (ulimit -n), or set TORCHOBS_DIR"),
        (files.NoRoomError("the file system has 3 bytes left"), "make room there, or set TORCHOBS_DIR"),
    ],
)
def test_a_file_that_cannot_be_made_is_named_with_what_to_do(
    caplog: pytest.LogCaptureFixture, flight_dir: Path, monkeypatch: pytest.MonkeyPatch, problem: OSError, remedy: str
) -> None:
    """By path; and by every rank, for another one's may have been made."""

    def refuse(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(session, "open_writer", refuse)
    assert not torchobs.init(flight_dir=flight_dir, rank=3, local_rank=3, world_size=8).active
    torchobs.shutdown()
    (message,) = [record.message for record in caplog.records if "off" in record.message]
    assert message.startswith("torchobs: rank 3: off, ")
    assert str(flight_dir) in message
    assert remedy in message
    assert message.endswith("training is not affected")
    assert session.logger.filters == []


SCRIPT = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}]
{{system}}
import torchobs
for _ in range(2):
    with torchobs.init(exporter=True) as session:
        assert not session.active
        with torchobs.phase("data"):
            torchobs.log(loss=1.0, tokens=3, extra=2)
        torchobs.step(); torchobs.event("x", y=1); torchobs.watch(None)
    torchobs.shutdown()
"""


WINDOWS = 'sys.platform = "win32"; sys.modules["fcntl"] = None; del os.register_at_fork'
WITHOUT_GIL = "sys._is_gil_enabled = lambda: False"
"""As a free-threaded build has it"""


@pytest.mark.parametrize(
    ("system", "said"),
    [
        (WINDOWS, "does nothing on win32; Linux and macOS are supported"),
        (WITHOUT_GIL, "needs the GIL and does nothing in a free-threaded Python; PYTHON_GIL=1 turns the GIL on"),
    ],
)
def test_init_says_once_that_it_does_nothing(system: str, said: str) -> None:
    """Without fcntl and fork, as on Windows, and without the interpreter's lock: no exception, one line."""
    script = SCRIPT.format(system=system)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == [f"torchobs: {said}; training is not affected"]
