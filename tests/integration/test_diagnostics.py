"""Stacks and profiles in the training process: by request, by itself where it is stuck, and beside a profiler of the script."""

from __future__ import annotations

import ctypes
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch import profiler
from torch.utils.data import DataLoader, Dataset

from tests import fork_server, support
from tests.support import clean_environment, wait_until
from tests.training import Recording, loss_of, mlp, recording
from torchobs import catalog
from torchobs.flight import artifacts, control, endings
from torchobs.flight.artifacts import PROFILE, STACKS, STUCK, ArtifactName
from torchobs.flight.directory import open_directory
from torchobs.runtime import profiler as torch_profiler
from torchobs.runtime import stacks
from torchobs.runtime.stacks import write_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """A recording."""
    (flight_dir / "control").mkdir()
    yield from recording(flight_dir)


@pytest.fixture
def ask(flight_dir: Path, run: Recording) -> Iterator[Callable[..., int]]:
    """Give the session a command; return its number."""
    fd = open_directory(str(flight_dir / "control"))
    context = run.session.context
    assert context is not None
    yield lambda **what: control.write_command(fd, context.writer.header.incarnation, control.Command(**what))
    os.close(fd)


@pytest.fixture
def step() -> Callable[[], None]:
    """Take one training step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def take() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return take


def evidence_of(directory: Path, kind: str) -> list[ArtifactName]:
    """The evidence of that kind in which there is something."""
    fd = open_directory(str(directory))
    try:
        return [
            artifact for artifact in artifacts.names(fd) if artifact.kind == kind and (directory / artifact.name).stat().st_size
        ]
    finally:
        os.close(fd)


def soon(directory: Path, kind: str, step: Callable[[], None] = lambda: None) -> ArtifactName:
    """The one there is in a moment, while training goes on."""

    def look() -> list[ArtifactName]:
        step()
        return evidence_of(directory, kind)

    (artifact,) = support.wait_until(look)
    return artifact


def test_stacks_on_request(run: Recording, flight_dir: Path, ask: Callable[..., int]) -> None:
    """All threads with their names and no value of a variable, under the number of the command; an event says so."""
    local_secret = "do not " + "show"
    number = ask(stacks=True)
    artifact = soon(flight_dir, STACKS)
    text = (flight_dir / artifact.name).read_text()
    assert artifact.number == number
    assert "test_stacks_on_request" in text
    assert "is 'MainThread'" in text
    assert local_secret not in text
    assert (flight_dir / artifact.name).stat().st_mode & 0o777 == 0o600
    (event,) = support.wait_until(lambda: run.frames("torchobs.stacks"))  # sent after the file is there
    assert event["attrs"] == {"cause": "asked", "evidence": artifact.id}


def training(run: Recording, step: Callable[[], None], event: str) -> None:
    """Train until there is an event of that name."""

    def look() -> list[dict[str, Any]]:
        step()
        return run.frames(event)

    support.wait_until(look)


def trace(path: Path) -> list[dict[str, Any]]:
    """The events of a Chrome trace."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def test_a_profile_of_three_steps(run: Recording, flight_dir: Path, ask: Callable[..., int], step: Callable[[], None]) -> None:
    """It has three of what a step has, and is over after them; no profiler runs then."""
    step()
    number = ask(profile_steps=3)
    profile = soon(flight_dir, PROFILE, step)
    assert profile.number == number
    names = [event.get("name") for event in trace(flight_dir / profile.name)]
    assert names.count("Optimizer.step#SGD.step") == 3
    assert names.count("autograd::engine::evaluate_function: MseLossBackward0") == 3
    assert not torch.autograd.profiler._is_profiler_enabled
    support.wait_until(lambda: run.frames("torchobs.profile.end"))  # sent after the file is there
    (begun,), (ended,) = run.frames("torchobs.profile.start"), run.frames("torchobs.profile.end")
    assert begun["attrs"] == {"steps": 3, "evidence": profile.id}
    size = (flight_dir / profile.name).stat().st_size
    assert ended["attrs"] == {"reason": "complete", "steps": 3, "evidence": profile.id, "size": size}


def test_ours_makes_way_for_the_application_s_own(
    run: Recording, flight_dir: Path, ask: Callable[..., int], step: Callable[[], None]
) -> None:
    """The application's begins as if there were no other, and has all its steps; ours is what it saw by then."""
    step()
    ask(profile_steps=1000)
    training(run, step, "torchobs.profile.start")
    with profiler.profile() as theirs:
        step()
    assert "aten::mse_loss" in {event.name for event in theirs.events() or ()}
    profile = soon(flight_dir, PROFILE, step)
    assert trace(flight_dir / profile.name)
    (ended,) = support.wait_until(lambda: run.frames("torchobs.profile.end"))  # sent after the file is there
    assert ended["attrs"]["reason"] == "interrupted"


def test_a_profile_takes_no_more_memory_and_time_than_it_may(
    run: Recording, ask: Callable[..., int], step: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank that does not train there is none, and the next request is taken; where memory grows, it ends early."""
    with monkeypatch.context() as patched:
        patched.setattr(torch_profiler, "NO_STEP_S", 0.0)
        ask(profile_steps=1)
        training(run, lambda: None, "torchobs.profile.failed")
    assert run.attributes("torchobs.profile.failed")[0]["reason"] == "no_step"
    monkeypatch.setattr(torch_profiler, "MAX_GROWTH", -(1 << 40))
    step()
    ask(profile_steps=1000)
    training(run, step, "torchobs.profile.end")
    assert run.attributes("torchobs.profile.end")[0]["reason"] == "memory"


def test_a_profiler_that_raises_hurts_nobody(
    run: Recording, ask: Callable[..., int], step: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on, the event has the exception's class, and the next profile works."""
    step()
    with monkeypatch.context() as patched:
        patched.setattr(profiler.profile, "start_trace", lambda _: 1 / 0)
        ask(profile_steps=1)
        training(run, step, "torchobs.profile.failed")
    assert run.frames("torchobs.profile.failed")[0]["attrs"]["exception.type"] == "ZeroDivisionError"
    ask(profile_steps=1)
    training(run, step, "torchobs.profile.end")


def test_a_rank_that_holds_python_s_lock_writes_its_stacks_down(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a file that is there beforehand, while it is stuck; no system call of the application is interrupted by it."""
    monkeypatch.setattr(stacks, "SILENCE_S", 0.5)

    def sleep_with_the_lock() -> None:
        assert ctypes.PyDLL(None).usleep(900_000) == 0  # it would be -1 had a signal come

    for run in recording(flight_dir):

        def told(run: Recording = run) -> list[dict[str, Any]]:
            """The events, but for those of a machine that was slow."""
            return [event for event in run.attributes("torchobs.stacks") if event["silent_s"] >= 0.9]

        support.wait_until(lambda: list(flight_dir.glob("*.stuck-0.txt")))
        begun = time.monotonic()
        run.whole_round()  # the timer is set
        sleep_with_the_lock()
        (event,) = support.wait_until(told)
        silent_s = time.monotonic() - begun
        (artifact,) = (artifact for artifact in evidence_of(flight_dir, STUCK) if artifact.id == event["evidence"])
        text = (flight_dir / artifact.name).read_text()
        assert "test_a_rank_that_holds_python_s_lock" in text
        assert event["cause"] == "stuck"
        assert event["silent_s"] < silent_s


def test_a_process_that_was_stopped_writes_nothing_down_as_it_goes_on(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its timer is overdue, but its threads run: a stack that changes while it is read can crash the process."""
    monkeypatch.setattr(stacks, "SILENCE_S", 1.0)
    for run in recording(flight_dir):
        registered(run)
        run.whole_round()
        subprocess.run(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 1.5; kill -CONT {os.getpid()}"], check=True)
        run.whole_round()
        assert run.attributes("torchobs.stacks") == []


def caught() -> int:
    """The signals for which this process has a handler, as a mask.

    But for SIGTERM and other ends, which are test_endings' subject, and those below SIGRTMIN, which glibc takes for its
    threads.
    """
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    mask = int(line.split()[1], 16)
    for number in (signal.SIGTERM, *endings.EXIT_SIGNALS, *range(32, signal.SIGRTMIN)):
        mask &= ~(1 << (number - 1))
    return mask


def registered(run: Recording) -> stacks.Watchdog:
    """The run's watchdog, once it has its handler; one of a session before this may have another signal still."""
    (dog,) = support.wait_until(lambda: [watchdog for watchdog in stacks._registered if watchdog._writer is run.session.writer])
    return dog


def test_the_signal_is_one_that_nobody_uses_and_is_given_back(flight_dir: Path) -> None:
    """No handler of the application's is replaced; afterwards there is none, and no empty file."""
    highest = signal.SIGRTMAX - 1
    before = signal.signal(highest, lambda *_: None)
    try:
        mask = caught()
        for run in recording(flight_dir):
            ours = registered(run)._signal
            assert caught() == mask | 1 << (ours - 1) != mask
            assert callable(signal.getsignal(highest))
            assert run.session._sampler is not None
            run.session._sampler.stop()
            run.session._sampler._thread.join()  # the end waits a second for it, and leaves it the handler then
        assert caught() == mask
        assert not list(flight_dir.glob("*.stuck-*"))
    finally:
        signal.signal(highest, before)


def test_a_handler_that_somebody_installs_later_is_theirs(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never sees a signal of ours, and stays when we go."""
    monkeypatch.setattr(stacks, "SILENCE_S", 1.0)
    signals, ours = [], signal.SIGRTMAX - 1
    try:
        for run in recording(flight_dir):
            ours = registered(run)._signal
            run.whole_round()
            signal.signal(ours, lambda *_: signals.append(1))
            run.whole_round()  # it is seen before the time is up
            ctypes.PyDLL(None).usleep(1_500_000)
            run.whole_round()
        assert signals == []
        assert callable(signal.getsignal(ours))
    finally:
        signal.signal(ours, signal.SIG_DFL)
    for run in recording(flight_dir):  # and once theirs is gone, the next session has a handler again
        assert registered(run)._signal == ours
        assert caught() & 1 << (ours - 1)


def test_a_forked_child_has_no_handler(run: Recording) -> None:
    """Nor a timer, which POSIX does not inherit."""
    ours = 1 << (registered(run)._signal - 1)
    assert caught() & ours
    child = os.fork()
    if not child:
        os._exit(1 if caught() & ours or stacks._registered else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert caught() & ours


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
    wait_until(lambda: any(context.hooks.loader_workers.ask()))
    first, second = (worker for workers in context.hooks.loader_workers.ask() for worker in workers)
    assert (first.number, first.awaited, second.awaited) == (0, True, False)
    assert all(data.begun.acquire(timeout=60) for _ in range(2))
    wait_until(lambda: all(psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING for process in (first, second)))
    yield first.pid
    data.go.set()
    del batches


def test_states_of_workers_need_nothing(run: Recording, flight_dir: Path, worker: int) -> None:
    """Promise: who waits for a batch sees which worker's it is, and that it sleeps."""
    context = run.session.context
    assert context is not None
    write_stacks(context, 7, "stalled")

    def written() -> str:
        texts = [path.read_text() for path in flight_dir.glob("*.stacks-7.txt")]
        return next((text for text in texts if "MainThread" in text), "")

    text = wait_until(written)
    assert text.endswith("# end of stacks\n")
    assert f"# worker 0 (pid {worker}): sleeping" in text
    (event,) = wait_until(lambda: run.attributes(catalog.EVENT_STACKS.name))
    assert event["awaited"] == f"worker 0 (pid {worker})"
    assert event["workers"][0].startswith(f"worker 0 (pid {worker}): sleeping")
    assert len(event["workers"]) == 2


TRAINING = """
import threading
import torch
from torch import nn
from torchobs import debug

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def step():
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def names(profiler):
    return {event.name for event in profiler.events() or ()}

def last(switch):
    return next(row for row in debug.status().switches if row.name == switch).last
"""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are written below the working directory."""
    monkeypatch.chdir(tmp_path)


def ends_well(code: str) -> None:
    """Run a script to the interpreter's own end, where torch crashes if a profiler is left."""
    command = [sys.executable, "-c", TRAINING + code + "\nprint('ok')"]
    environ = {**clean_environment(), "TORCHOBS_DIR": str(Path.cwd()), "TORCHOBS_EXPORTER": "false"}
    done = fork_server.run(command, capture_output=True, text=True, timeout=300, env=environ, finalized=True, cwd=Path.cwd())
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stderr[-3000:]
    assert "Traceback" not in done.stderr


def test_a_script_profiles_itself_under_switches() -> None:
    """Its profiler sees what it would see without ours, and the interpreter exits with 0, with the switches on or off."""
    ends_well("""
debug.enable("full", profile_every=2)
schedule = torch.profiler.schedule(wait=1, warmup=2, active=2, repeat=2)
traces = []
with torch.profiler.profile(schedule=schedule, on_trace_ready=lambda own: traces.append(names(own))) as own:
    for _ in range(11):
        step()
        own.step()
assert len(traces) == 2, len(traces)
assert all("aten::addmm" in trace for trace in traces)
for _ in range(3): step()
debug.disable()
""")


def test_threads_that_train_under_switches() -> None:
    """Where several threads train no step is profiled, which the switch says: another thread's step would crash it."""
    ends_well("""
def train():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(20):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
debug.enable("full", profile_every=1)
threads = [threading.Thread(target=train) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for _ in range(3): step()
assert "steps come from several threads" in last("autograd_profiler"), last("autograd_profiler")
assert not [row.error for row in debug.status().switches if row.error]
""")


def test_the_script_s_profiler_within_ours() -> None:
    """Ours ends, with nothing kept, and says why."""
    ends_well("""
def take():
    with torch.profiler.profile() as own:
        model(torch.randn(4, 8))
    assert "aten::addmm" in names(own)
result = debug.profile(take, wait=0, warmup=0, active=2)
assert result.steps is None and 'own profiler began' in result.problems[0].text, result
""")


def test_a_profile_in_progress_at_the_exit() -> None:
    """A thread that still profiles with ours when the interpreter exits does not crash it."""
    ends_well("""
begun = threading.Event()
def forever():
    with debug.profile("forever"):
        begun.set()
        threading.Event().wait()
threading.Thread(target=forever, daemon=True).start()
begun.wait()
print('ok', flush=True)
threading.Thread(target=step).start()
""")
