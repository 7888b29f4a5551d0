"""Ranks that hang or stand still, and those that have left their loop: who is named, by which evidence, and what is left."""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.diagnosis.observing import FedClock, fed_clock
from tests.support import ROOT, clean_environment, free_port, wait_until
from tests.training import Recording, loss_of, mlp, recording
from torchobs import catalog
from torchobs.detect import hangs
from torchobs.diagnosis import health
from torchobs.diagnosis.diagnosis import diagnose_run
from torchobs.exporter import exporter_metrics
from torchobs.exporter.commands import ArtifactStore, CommandService
from torchobs.exporter.config import ExporterConfig
from torchobs.probes import phases
from torchobs.probes.context import _COLLECTIVES_FILE
from torchobs.ranks import state
from torchobs.ranks.live import RunsReader
from torchobs.ranks.runs import load, main_frames
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torchobs.ranks.snapshot import Snapshot


KINDS = ("sleep late", "spin", "worker", "collective")
HANGS = {**dict.fromkeys(KINDS, "hung"), "backtrack": "unresponsive"}
QUIET_AGE_S = 10.0
"""In place of the minute that is the least patience with a rank"""


def environment_of(rank: int, port: int, world: int = 2, /, **variables: str) -> dict[str, str]:
    """The environment of one rank of a job of so many."""
    of_the_job = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    of_the_rank = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1, **of_the_job, **variables}
    return clean_environment() | {name: str(value) for name, value in of_the_rank.items()}


@pytest.mark.long
def test_hangs_of_all_kinds_are_found(start: Callable[..., object], flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python, in C with the GIL held, at a lock, in a collective; a slow step hides none."""
    monkeypatch.setattr(state, "LEAST_HANG_S", QUIET_AGE_S)
    for run in HANGS:
        kind, _, late = run.partition(" ")
        world, port = (2 if kind == "collective" else 1), free_port()
        for rank in range(world):
            environment = environment_of(rank, port, world, TORCHOBS_DIR=os.fspath(flight_dir), TORCHOBS_RUN_ID=run)
            command = (sys.executable, "-m", "torchobs", "run", "--no-exporter", "-m", "tests.scripts.hanging", kind)
            start(*command, "150" if late else "4", torch=True, env=environment, cwd=ROOT)
    with closing(Scanner(ExporterConfig(flight_dir=os.fspath(flight_dir)))) as scanner:
        states_seen: dict[str, str] = {}

        def all_found() -> bool:
            time.sleep(0.5)
            for rank in scanner.scan().ranks:
                aged = (rank.progress_age_s or 0.0) > QUIET_AGE_S  # a GIL hold while a model loads is no hang yet
                states_seen[f"{rank.run_id}/{rank.rank}"] = rank.state if aged else "young"
            states = {run: {state for name, state in states_seen.items() if name.startswith(f"{run}/")} for run in HANGS}
            return all(states[run] == {expected} for run, expected in HANGS.items())

        wait_until(all_found, timeout_s=240)  # on a busy machine


QUIET_S = 1.5


def start_ranks(start: Any, flight_dir: Path, place: str, *often: str, **variables: str) -> None:
    """Start both ranks."""
    port = free_port()
    for rank in range(2):
        environment = environment_of(rank, port, TORCHOBS_RUN_ID="hung", TORCHOBS_GRAD_INTERVAL="1", **variables)
        command = (sys.executable, "-m", "tests.distributed_rank", "hang", str(flight_dir), place, *often)
        start(*command, torch=True, env=environment, cwd=ROOT)


def positions(snapshot: Snapshot) -> dict[str, tuple[str, float]]:
    """The place of each rank, as Prometheus gets it."""
    samples = {rank.rank: list(exporter_metrics.of_rank(rank)) for rank in snapshot.ranks}
    return {
        rank: (sample.attributes["phase"], round(sample.value, 3))
        for rank, rank_samples in samples.items()
        for sample in rank_samples
        if sample.metric is catalog.RANK_STALL_POSITION
    }


def test_the_rank_that_sleeps_is_named(start: Any, flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not rank 0, which waits in backward's all-reduce."""
    monkeypatch.setattr(state, "LEAST_HANG_S", QUIET_S)
    start_ranks(start, flight_dir, "forward")
    words = "Rank 1 stays in forward of step 6, and the other rank waits in backward of step 6."
    with closing(Scanner(ExporterConfig(flight_dir=str(flight_dir), hang_timeout_s=QUIET_S))) as scanner:

        def hung() -> list[Snapshot]:
            snapshot = scanner.scan()
            return [snapshot] if positions(snapshot) == {"0": ("backward", 5.6), "1": ("forward", 5.4)} else []

        (snapshot,) = wait_until(hung, 60.0, 0.2)
        (run,) = RunsReader().runs(snapshot, {})
        assert words in health.health(run).text
    wait_until(lambda: any(text.startswith(words) for text in findings(flight_dir)), 30.0, 0.5)
    reports, _ = load(sorted(flight_dir.glob("*.flight")))
    assert reports[diagnose_run(reports).principal].rank == "1"


def findings(flight_dir: Path) -> list[str]:
    """What `torchobs inspect` finds of the ranks together."""
    reports, _ = load(sorted(flight_dir.glob("*.flight")))
    return [finding.long for finding in diagnose_run(reports).together]


def test_stacks_name_the_rank_that_sleeps_in_the_same_phase(
    start: Any, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in backward of step 6; the exporter asks all ranks of a hung run for stacks, and inspect reads them."""
    monkeypatch.setattr(state, "LEAST_HANG_S", QUIET_S)
    start_ranks(start, flight_dir, "hook", TORCHOBS_DISABLE_PROBES="collectives")  # which would name it after half a minute
    wait_until(lambda: len(list(flight_dir.glob("*.flight"))) == 2)
    config = ExporterConfig(flight_dir=str(flight_dir), hang_timeout_s=QUIET_S)
    with closing(Scanner(config)) as scanner:
        places = {"0": ("backward", 5.6), "1": ("backward", 5.6)}
        wait_until(lambda: positions(scanner.scan()) == places, 60.0, 0.2)
        assert not any("Rank 1 " in text for text in findings(flight_dir))
        CommandService(config, ArtifactStore(config)).review(scanner.scan())
    (text,) = wait_until(lambda: [finding for finding in findings(flight_dir) if finding.startswith("Rank 1 runs")], 30.0, 0.5)
    assert "distributed_rank.py:" in text
    assert text.endswith("in backward of step 6, and the other rank waits in backward of step 6.")


def test_torch_s_flight_recorder_names_the_rank_that_sleeps_in_the_same_phase(
    start: Any, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without stacks: both are in backward of step 6, and rank 1 did not come to the all-reduce of its gradients."""
    monkeypatch.setattr(state, "LEAST_HANG_S", QUIET_S)
    start_ranks(start, flight_dir, "hook", "0.3")
    words = re.compile(
        r"Rank 1 stays in backward of step 6, and the other rank waits in backward of step 6\. Rank 1 has not come to"
        r" all_reduce number (\d+) of group default \(gloo\), in which 1 rank waits \(the last called there is number (\d+)\)\."
    )
    with closing(Scanner(ExporterConfig(flight_dir=str(flight_dir), hang_timeout_s=QUIET_S))) as scanner:

        def named() -> list[re.Match[str]]:
            runs = RunsReader().runs(scanner.scan(), {})
            return [match for run in runs if (match := words.search(health.health(run).text))]

        (match,) = wait_until(named, 180.0, 0.2)
        assert int(match[1]) == int(match[2]) + 1
    wait_until(lambda: [text for text in findings(flight_dir) if words.fullmatch(text)], 90.0, 0.5)


def test_ranks_that_go_around_ddp_are_said_to_disagree(start: Any, flight_dir: Path) -> None:
    """Each trains on its own data from step 6 on, by `model.module`: of two neither is the odd one.

    A flight recorder that is off is said once, and leaves the counts alone: process groups count their collectives themselves.
    """
    start_ranks(start, flight_dir, "bypass", "0.3", TORCH_FR_BUFFER_SIZE="0")
    wait_until(lambda: len(list(flight_dir.glob("*.flight"))) == 2)
    (text,) = wait_until(lambda: [text for text in findings(flight_dir) if text.startswith("Ranks do not agree")], 60.0, 0.5)
    assert "(rank 0: " in text
    assert " 1: " in text

    def reasons_given() -> list[list[str]]:
        reports, _ = load(sorted(flight_dir.glob("*.flight")))
        unknown = [report.events_named(catalog.EVENT_COLLECTIVES_UNKNOWN) for report in reports]
        reasons = [[event.text("reason") for event in events] for events in unknown]
        counted = [metric for metric in catalog.METRICS if metric.name.startswith("torchobs.collective.")]
        assert {metric for report in reports for metric in counted if report.values(metric)} <= {catalog.COLLECTIVE_ENQUEUED}
        return reasons if all(reasons) else []

    reasons = wait_until(reasons_given, 180.0, 0.3)
    assert [len(of_one) for of_one in reasons] == [1, 1]
    assert "TORCH_FR_BUFFER_SIZE is 0" in reasons[0][0]


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


def test_who_has_left_the_loop_is_idle(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook between two cells, a server, an upload; whoever stands still elsewhere may hang, however deep in the loop."""
    monkeypatch.setattr(phases, "idle_from", lambda _: 0.0)  # silence is long at once: the stack alone decides
    assert doing(run) == "other", "data are read, models made"
    model = mlp()
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert doing(run) == "other", "a step that is made by hand, and no loop"
    within: list[str | None] = []
    train_loop(2, lambda: within.append(doing(run)))
    assert within == ["other"] * 2
    assert doing(run) == "idle"
    assert inspect.getsourcefile(inspect.unwrap(dist.barrier)).endswith(_COLLECTIVES_FILE)  # type: ignore[union-attr]
    namespace: dict[str, Any] = {}
    exec(compile("def barrier(look):\n    return look()\n", f"/{_COLLECTIVES_FILE}", "exec"), namespace)  # noqa: S102  # a frame of that file
    assert namespace["barrier"](lambda: doing(run)) == "other", "a last barrier that never ends is a hang like any other"
    train_loop(1, lambda: run.writer.exit(1, 1))
    assert doing(run) == "other", "an exception that unwinds the loop has not left it"


class Stalls:
    def __init__(self, run: Recording, clock: FedClock) -> None:
        run.look()  # and the sampler's thread is gone, which would look, too
        assert run.session._commands is not None
        self.run, self._clock, self.commands = run, clock, run.session._commands

    def stand(self, seconds: int, each_s: int = 1) -> list[dict[str, Any]]:
        """Let so much time pass, with a look every so often; return the attributes of what has been written by then."""
        for _ in range(0, seconds, each_s):
            self._clock.sleep(each_s)
            self.commands.sample()
        return [event for event in self.run.attributes(catalog.EVENT_STACKS.name) if event["cause"] == "stalled"]

    def train(self) -> None:
        """Some steps."""
        train_loop(5)
        self.run.look()
        self.commands.sample()


@pytest.fixture
def stalls(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stalls]:
    """Those of a recording; the length of a step, which is a stall's, has no part in it."""
    monkeypatch.setattr(hangs, "LONG_FACTOR", 0.0)
    monkeypatch.setattr(hangs, "EARLY_FACTOR", 0.0)
    with fed_clock() as clock:  # which the compiled module does not read
        for run in recording(flight_dir, native=False):
            yield Stalls(run, clock)


def test_once_in_a_stall_and_the_next_has_to_be_twice_as_long(stalls: Stalls, flight_dir: Path) -> None:
    """The file has the line that it stands in, shown of a run that is killed there; training that goes on is nothing."""
    stalls.train()
    assert stalls.stand(int(hangs.LEAST_S) - 1) == []
    (first,) = stalls.stand(60)
    assert (first["phase"], round(first["quiet_s"])) == ("other", hangs.LEAST_S)
    stalls.train()
    assert len(stalls.stand(int(hangs.LEAST_S) + 2)) == 1
    _, second = stalls.stand(60)
    assert round(second["quiet_s"]) == 2 * hangs.LEAST_S
    texts = [path.read_text() for path in flight_dir.glob("*.stacks-*")]
    assert len(texts) == 2
    assert all(text.endswith("# end of stacks\n") for text in texts)
    assert any(f"{__file__}:" in frame and "test_once_in_a_stall" in frame for frame in main_frames(texts[0]))


def test_what_takes_its_time_writes_none(stalls: Stalls) -> None:
    """No step yet, an evaluation, steps that are not recorded; and time without the sampler (SIGSTOP) does not count."""
    assert stalls.stand(60) == []
    stalls.train()
    model = mlp()
    model.eval()
    assert stalls.stand(60) == []
    model.train()
    stalls.train()
    assert stalls.stand(60, each_s=60) == []
    stalls.train()
    stalls.commands._probe_manager.switch_off(frozenset({"step"}))
    assert stalls.stand(60) == []


WAITING = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

place, seconds = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(30):
    if number == 20 and rank == 1 and place == "sleep":
        time.sleep(600)
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


TOLD = {"sleep": "Rank 1 stays between two phases of step 21, and the other rank waits in backward of step 21. ", "save": ""}
"""What is said of where the ranks stood, by where rank 1 did not come; nothing, where it waits for the other one as well"""


def test_the_rank_that_did_not_come_is_named(start: Any, flight_dir: Path, tmp_path: Path) -> None:
    """And not rank 0 as the one that failed first, though its exception ended the run; it has called one collective more."""
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    runs: dict[str, list[Any]] = {}
    for place in TOLD:
        port, runs[place] = free_port(), []
        for rank in range(2):
            environment = environment_of(rank, port, TORCHOBS_RUN_ID=place, TORCHOBS_DIR=str(flight_dir))
            command = (sys.executable, "-m", "torchobs", "run", "--no-exporter", str(script), place, str(TIMEOUT_S))
            runs[place].append(start(*command, torch=True, env=environment, cwd=ROOT))
    for first, second in runs.values():
        assert first.wait(timeout=120) == 1
        second.terminate()  # as torchrun does
        second.wait(timeout=30)
    for place, words in TOLD.items():
        reports = [report for report in load(sorted(flight_dir.glob("*.flight")))[0] if report.run_id == place]
        diagnosis = diagnose_run(reports)
        assert reports[diagnosis.principal].rank == "1"
        (of_rank_0,) = (texts for report, texts in zip(reports, diagnosis.by_rank, strict=True) if report.rank == "0")
        step = 30 if place == "save" else 20
        assert f"after step {step}: it timed out after 5 s waiting for " in of_rank_0[0].long
        texts = [finding.long for finding in diagnosis.together]
        begin, _, counts = texts[0].partition("Rank 0 called 1 collective more than rank 1 ")
        assert begin == f"A collective timed out after 5 s on rank 0. {words}"
        assert re.match(r"\(\d+ and \d+ of group default \(gloo\)\)", counts)
        assert not any("failed first" in text or "Only rank" in text for text in texts)
