"""Ranks that hang or stand still, and those that have left their loop: who is named, by which evidence, and what is left."""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import threading
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests import support
from tests.diagnosis_files import row
from tests.support import ROOT, clean_environment, free_port, wait_until
from tests.training import Recording, loss_of, mlp, recording
from torchobs import catalog
from torchobs.catalog import EVENT_STEP_BETWEEN, PHASES, STEP_PHASE_TIME
from torchobs.detect import hangs
from torchobs.diagnosis import health
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.exporter import exporter_metrics
from torchobs.exporter.commands import ArtifactStore, CommandService
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.events import Event
from torchobs.probes import phases
from torchobs.probes.context import _COLLECTIVES_FILE
from torchobs.ranks import state
from torchobs.ranks.live import RunsReader
from torchobs.ranks.runs import load
from torchobs.ranks.scanner import Scanner
from torchobs.runtime import stacks
from torchobs.runtime.stack_samples import innermost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torchobs.ranks.snapshot import Snapshot


HANGS = {
    "sleep-early": "hung", "sleep-late": "hung", "spin-early": "hung", "backtrack-early": "unresponsive",
    "loader-early": "hung", "loader-late": "hung", "worker-early": "hung", "collective-early": "hung",
}  # fmt: skip
STEPS = {"early": 4, "late": 150}
QUIET_AGE_S = 20.0
"""In place of the minute that is the least patience with a rank"""
LONGEST_S = 240
"""For all: that, and the time to get there on a busy machine"""


@pytest.mark.long
def test_hangs_of_all_kinds_are_found(start: Callable[..., object], flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python, in C with the GIL held, at a lock, in a collective; a step that took eight seconds hides none."""
    monkeypatch.setattr(state, "LEAST_HANG_S", QUIET_AGE_S)
    for run in HANGS:
        kind, when = run.split("-")
        world, port = (2 if kind == "collective" else 1), free_port()
        for rank in range(world):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            own = {"TORCHOBS_DIR": os.fspath(flight_dir), "TORCHOBS_RUN_ID": run, "OMP_NUM_THREADS": "1"}
            environment = {**clean_environment(), **own, **{name: str(value) for name, value in place.items()}}
            command = (sys.executable, "-m", "torchobs", "run", "--no-exporter", "-m", "tests.scripts.hanging", kind)
            start(*command, str(STEPS[when]), torch=True, env=environment, cwd=ROOT)
    with closing(Scanner(ExporterConfig(flight_dir=os.fspath(flight_dir)))) as scanner:
        seen: dict[str, str] = {}

        def all_found() -> bool:
            time.sleep(0.5)
            for rank in scanner.scan().ranks:
                aged = (rank.progress_age_s or 0.0) > QUIET_AGE_S  # a GIL hold while a model loads is no hang yet
                seen[f"{rank.run_id}/{rank.rank}"] = rank.state if aged else "young"
            states = {run: {state for name, state in seen.items() if name.startswith(f"{run}/")} for run in HANGS}
            return all(states[run] == {expected} for run, expected in HANGS.items())

        wait_until(all_found, timeout_s=LONGEST_S)


QUIET_S = 1.5


def start_ranks(start: Any, flight_dir: Path, place: str, *often: str, **variables: str) -> None:
    """Start both ranks."""
    port = support.free_port()
    for rank in range(2):
        given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        environment = {**support.clean_environment(), **{name: str(value) for name, value in given.items()}}
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "TORCHOBS_RUN_ID": "hung",
            "TORCHOBS_GRAD_INTERVAL": "1",
            **variables,
        }
        command = (sys.executable, "-m", "tests.distributed_rank", "hang", str(flight_dir), place, *often)
        start(*command, torch=True, env=environment, cwd=support.ROOT)


def positions(snapshot: Snapshot) -> dict[str, tuple[str, float]]:
    """What Prometheus is told of where each rank is."""
    samples = {rank.rank: list(exporter_metrics.of_rank(rank)) for rank in snapshot.ranks}
    return {
        rank: (one.attributes["phase"], round(one.value, 3))
        for rank, found in samples.items()
        for one in found
        if one.metric is catalog.RANK_STALL_POSITION
    }


@pytest.mark.parametrize(
    ("place", "culprit", "told"),
    [
        ("forward", ("forward", 5.4), "Rank 1 stays in forward of step 6, and the other rank waits in backward of step 6."),
        ("skip", ("idle", 20.0), "Rank 1 has left its training loop, and the other rank waits in backward of step 20."),
    ],
)
def test_the_rank_that_sleeps_is_named(
    start: Any, flight_dir: Path, monkeypatch: pytest.MonkeyPatch, place: str, culprit: tuple[str, float], told: str
) -> None:
    """Not rank 0, which waits in backward's all-reduce."""
    monkeypatch.setattr(state, "LEAST_HANG_S", QUIET_S)
    monkeypatch.setattr(state, "PATIENT_PHASES", frozenset({"idle"}))  # who left the loop is waited for half an hour else
    monkeypatch.setattr(state, "FIRST_STEP_S", QUIET_S)
    start_ranks(start, flight_dir, place)
    with closing(Scanner(ExporterConfig(flight_dir=str(flight_dir), hang_timeout_s=QUIET_S))) as scanner:

        def hung() -> list[Snapshot]:
            snapshot = scanner.scan()
            at = positions(snapshot)
            return [snapshot] if at.get("0", ("", 0.0))[0] == "backward" and at.get("1") == culprit else []

        (snapshot,) = support.wait_until(hung, 60.0, 0.2)
        assert positions(snapshot)["0"] == ("backward", culprit[1] - 1 + 0.6 if place == "skip" else 5.6)
        (run,) = RunsReader().runs(snapshot, {})
        assert told in health.health(run).text
    support.wait_until(lambda: any(text.startswith(told) for text in findings(flight_dir)), 30.0, 0.5)
    reports, _ = load(sorted(flight_dir.glob("*.flight")))
    assert reports[diagnose_run(reports).principal].rank == "1"


def findings(flight_dir: Path) -> list[str]:
    """What `torchobs inspect` finds of the ranks together."""
    reports, _ = load(sorted(flight_dir.glob("*.flight")))
    return [one.long for one in diagnose_run(reports).together]


def test_stacks_name_the_rank_that_sleeps_in_the_same_phase(
    start: Any, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in backward of step 6; the exporter asks all ranks of a hung run for stacks, and inspect reads them."""
    monkeypatch.setattr(state, "LEAST_HANG_S", QUIET_S)
    start_ranks(start, flight_dir, "hook", TORCHOBS_DISABLE_PROBES="collectives")  # which would name it after half a minute
    support.wait_until(lambda: len(list(flight_dir.glob("*.flight"))) == 2)
    config = ExporterConfig(flight_dir=str(flight_dir), hang_timeout_s=QUIET_S)
    with closing(Scanner(config)) as scanner:
        places = {"0": ("backward", 5.6), "1": ("backward", 5.6)}
        support.wait_until(lambda: positions(scanner.scan()) == places, 60.0, 0.2)
        assert not any("Rank 1 " in text for text in findings(flight_dir))
        CommandService(config, ArtifactStore(config)).look(scanner.scan())
    (text,) = support.wait_until(lambda: [one for one in findings(flight_dir) if one.startswith("Rank 1 runs")], 30.0, 0.5)
    assert "distributed_rank.py:" in text
    assert text.endswith("in backward of step 6, and the other rank waits in backward of step 6.")


def test_torch_s_flight_recorder_names_the_rank_that_sleeps_in_the_same_phase(
    start: Any, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without stacks: both are in backward of step 6, and rank 1 did not come to the all-reduce of its gradients."""
    monkeypatch.setattr(state, "LEAST_HANG_S", QUIET_S)
    start_ranks(start, flight_dir, "hook", "0.3")
    told = re.compile(
        r"Rank 1 stays in backward of step 6, and the other rank waits in backward of step 6\. Rank 1 has not come to"
        r" all_reduce number (\d+) of group default \(gloo\), in which 1 rank waits \(the last called there is number (\d+)\)\."
    )
    with closing(Scanner(ExporterConfig(flight_dir=str(flight_dir), hang_timeout_s=QUIET_S))) as scanner:

        def named() -> list[re.Match[str]]:
            runs = RunsReader().runs(scanner.scan(), {})
            return [found for run in runs if (found := told.search(health.health(run).text))]

        (found,) = support.wait_until(named, 180.0, 0.2)
        assert int(found[1]) == int(found[2]) + 1
    support.wait_until(lambda: [text for text in findings(flight_dir) if told.fullmatch(text)], 90.0, 0.5)


def test_a_recorder_that_is_off_is_said_once_and_leaves_counts_alone(start: Any, flight_dir: Path) -> None:
    """Process groups count their collectives themselves; the other ways to name a hung rank are at work, too."""
    start_ranks(start, flight_dir, "hook", "0.3", TORCH_FR_BUFFER_SIZE="0")

    def told() -> list[list[str]]:
        reports, _ = load(sorted(flight_dir.glob("*.flight")))
        reasons = [[fact.text("reason") for fact in one.events_named(catalog.EVENT_COLLECTIVES_UNKNOWN)] for one in reports]
        counted = [metric for metric in catalog.METRICS if metric.name.startswith("torchobs.collective.")]
        assert {metric for one in reports for metric in counted if one.of(metric)} <= {catalog.COLLECTIVE_ENQUEUED}
        return reasons if len(reasons) == 2 and all(reasons) else []

    reasons = support.wait_until(told, 180.0, 0.3)
    assert [len(of_one) for of_one in reasons] == [1, 1]
    assert "TORCH_FR_BUFFER_SIZE is 0" in reasons[0][0]


def test_ranks_that_go_around_ddp_are_said_to_disagree(start: Any, flight_dir: Path) -> None:
    """Each trains on its own data from step 6 on, by `model.module`: of two neither is the odd one."""
    start_ranks(start, flight_dir, "bypass")
    support.wait_until(lambda: len(list(flight_dir.glob("*.flight"))) == 2)
    (text,) = support.wait_until(
        lambda: [one for one in findings(flight_dir) if one.startswith("Ranks do not agree")], 60.0, 0.5
    )
    assert "(rank 0: " in text
    assert " 1: " in text


session = contextmanager(recording)


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is long at once: the stack alone decides."""
    monkeypatch.setattr(phases, "idle_from", lambda _: 0.0)


def doing(run: Recording) -> str | None:
    """What the file says that the training thread does."""
    run.look()
    run.look()  # what one round finds out, the next one says
    return run.view().live.phase


def train_loop(steps: int, within: Callable[[], object] = lambda: None) -> None:
    """A loop of one's own; `within` is called in it after every step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index in range(steps):
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        within()


@pytest.mark.usefixtures("no_patience")
def test_who_has_left_the_loop_is_idle(flight_dir: Path) -> None:
    """A notebook between two cells, a server, an upload."""
    with session(flight_dir) as run:
        train_loop(3)
        assert doing(run) == "idle"


@pytest.mark.usefixtures("no_patience")
def test_who_stands_still_in_the_loop_is_not(flight_dir: Path) -> None:
    """However deep: that may be a hang."""
    with session(flight_dir) as run:
        seen: list[str | None] = []
        train_loop(3, lambda: seen.append(doing(run)))
        assert seen == ["other"] * 3


@pytest.mark.usefixtures("no_patience")
def test_who_waits_for_other_ranks_behind_the_loop_is_not_idle(flight_dir: Path) -> None:
    """A last barrier that never ends is a hang like any other."""
    with session(flight_dir) as run:
        train_loop(3)
        assert inspect.getsourcefile(inspect.unwrap(dist.barrier)).endswith(_COLLECTIVES_FILE)  # type: ignore[union-attr]
        found: dict[str, Any] = {}
        exec(compile("def barrier(look):\n    return look()\n", f"/{_COLLECTIVES_FILE}", "exec"), found)  # noqa: S102  # a frame of that file
        assert found["barrier"](lambda: doing(run)) == "other"


@pytest.mark.usefixtures("no_patience")
def test_where_there_is_no_loop_nothing_is_claimed(flight_dir: Path) -> None:
    """Steps made one by one, by hand."""
    with session(flight_dir) as run:
        model = mlp()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        assert doing(run) == "other"


@pytest.mark.usefixtures("no_patience")
def test_before_the_first_step_nobody_is_idle(flight_dir: Path) -> None:
    """Data are read, models made."""
    with session(flight_dir) as run:
        assert doing(run) == "other"


LEAST_S = 1.0


@pytest.fixture
def short_stalls(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
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


def written(short_stalls: Recording) -> list[dict[str, Any]]:
    """The attributes of the events."""
    return [event["attrs"] for event in short_stalls.frames("torchobs.stacks") if event["attrs"]["cause"] == "stalled"]


def test_once_in_a_stall_and_the_next_has_to_be_twice_as_long(short_stalls: Recording, flight_dir: Path) -> None:
    """The file has the line that it stands in; training that goes on is nothing."""
    step = trainer()
    for number in range(2):
        step()
        support.wait_until(lambda: len(written(short_stalls)) == number + 1)  # noqa: B023  # called here
        time.sleep(3 * LEAST_S)
    first, second = written(short_stalls)
    assert second["quiet_s"] >= 2 * LEAST_S > first["quiet_s"] - LEAST_S / 2
    assert first["phase"] == "other"
    step()
    short_stalls.whole_round()
    assert len(written(short_stalls)) == 2
    texts = [path.read_text() for path in sorted(flight_dir.glob("*.stacks-*"))]
    assert len(texts) == 2
    assert all("test_once_in_a_stall" in text and text.endswith("# end of stacks\n") for text in texts)


@pytest.mark.parametrize("what", ["evaluation", "before training", "switched off"])
def test_what_takes_its_time_writes_none(short_stalls: Recording, what: str) -> None:
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
        assert short_stalls.session._commands is not None
        short_stalls.session._commands._probe_manager.switch_off(frozenset({"step"}))
        time.sleep(2.5 * LEAST_S)
    else:
        time.sleep(2.5 * LEAST_S)
    short_stalls.whole_round()
    assert not written(short_stalls)


def test_a_process_that_was_stopped_did_not_stand_still(short_stalls: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended machine, SIGSTOP: the time in which the sampler did not run does not count."""
    monkeypatch.setattr(stacks, "PAUSE_NS", 0)
    trainer()()
    time.sleep(2.5 * LEAST_S)
    assert not written(short_stalls)


STANDING = """
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
    script.write_text(STANDING)
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


WAITING = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

place, seconds = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
rank = dist.get_rank()
model = torch.nn.Linear(4, 1)

def hook(module, inputs, output):
    if place == "hook" and rank == 1 and number == 20:
        output.register_hook(lambda _: time.sleep(600))

model.register_forward_hook(hook)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(30):
    if number == 20 and rank == 1:
        if place in {"sleep", "barrier"}:
            time.sleep(600)
    if number == 20 and place == "barrier":
        dist.monitored_barrier(timeout=timedelta(seconds=seconds))
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)

def save():
    if rank == 0:
        dist.barrier()

def finish():
    dist.barrier()

save()
finish()
time.sleep(600)
"""
TIMEOUT_S = 5.0


def ended(start: Any, flight_dir: Path, tmp_path: Path, place: str) -> list[str]:
    """Run both ranks until rank 0 has ended, end rank 1 as torchrun does, and return what is said of both together."""
    script, port, ranks = tmp_path / "waiting.py", support.free_port(), []
    script.write_text(WAITING)
    for rank in range(2):
        given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        own = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "TORCHOBS_RUN_ID": "waited", "TORCHOBS_DIR": str(flight_dir)}
        environment = {**support.clean_environment(), **own, **{name: str(value) for name, value in given.items()}}
        command = (sys.executable, "-m", "torchobs", "run", "--no-exporter", str(script), place, str(TIMEOUT_S))
        ranks.append(start(*command, torch=True, env=environment, cwd=support.ROOT))
    assert ranks[0].wait(timeout=120) == 1
    ranks[1].terminate()
    ranks[1].wait(timeout=30)
    reports, _ = load(sorted(flight_dir.glob("*.flight")))
    diagnosis = diagnose_run(reports)
    assert reports[diagnosis.principal].rank == "1"
    (of_rank_0,) = (found for report, found in zip(reports, diagnosis.by_rank, strict=True) if report.rank == "0")
    step = 30 if place == "save" else 20
    assert f"after step {step}: it timed out after 5 s waiting for " in of_rank_0[0].long
    return [finding.long for finding in diagnosis.together]


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("sleep", "Rank 1 stays between two phases of step 21, and the other rank waits in backward of step 21. "),
        ("save", ""),
    ],
)
def test_the_rank_that_did_not_come_is_named(start: Any, flight_dir: Path, tmp_path: Path, place: str, told: str) -> None:
    """And not rank 0, whose exception ended the run, as the one that failed first; it has called one collective more."""
    found = ended(start, flight_dir, tmp_path, place)
    begin, _, counts = found[0].partition("Rank 0 called 1 collective more than rank 1 ")
    assert begin == f"A collective timed out after 5 s on rank 0. {told}"
    assert re.match(r"\(\d+ and \d+ of group default \(gloo\)\)", counts)
    assert not any("failed first" in text or "Only rank" in text for text in found)


class Waiting(torch.nn.Module):
    """A module in whose forward pass a thread stands."""

    def __init__(self, stand: Any) -> None:
        super().__init__()
        self.stand = stand

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.stand()
        return inputs


def get_batch(wait: Any) -> None:
    """What a script does between two steps."""
    wait()


@pytest.mark.parametrize("within_forward", [False, True])
def test_the_innermost_line_of_the_script_is_found(within_forward: bool) -> None:  # noqa: FBT001  # parametrized
    """Not the standard library's, in which it waits; none in a module's call, which is the forward pass."""
    standing, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        standing.set()
        go_on.wait(60)

    target = (lambda: Waiting(stand)(torch.ones(1))) if within_forward else (lambda: get_batch(stand))
    thread = threading.Thread(target=target)
    thread.start()
    standing.wait(60)
    place = innermost(sys._current_frames()[thread.ident or 0])
    go_on.set()
    thread.join()
    if within_forward:
        assert place is None
    else:
        assert place is not None
        assert (place.function, place.location.startswith(f"{__file__}:")) == ("stand", True)


def test_the_line_is_information_where_much_of_the_time_goes_there() -> None:
    """On page, ``top``, ``inspect`` and report alike: one sentence, with the share of the rank that has most of it."""
    event = Event(EVENT_STEP_BETWEEN.name, 0, 3, {"location": "/home/me/train.py:42", "function": "get_batch"})
    for between_s, expected in (
        (61.0, ["61 % of the time of steps is between their phases, most often in get_batch, train.py:42."]),
        (11.0, []),
    ):
        phases = dict.fromkeys(PHASES, 0.0) | {"between": between_s, "backward": 100.0 - between_s}
        rank = row(events=[event], values={STEP_PHASE_TIME.name: {(phase,): seconds for phase, seconds in phases.items()}})
        found = list(health.between([rank]))
        assert [one.long for one in found] == expected
        assert all(one.severity == health.INFO for one in found)
