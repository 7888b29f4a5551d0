"""The texts of `top`, `inspect` and a report in Markdown on runs of every kind of ending and finding, as golden files.

Each run is written by the real writer into flight files at moments that it chooses. `pytest --update-golden` writes the texts
again, to be read aloud.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.rank_files import BORN_NS, BORN_WALL_NS, Clock, File, S, scanner_of
from torchobs import catalog
from torchobs.catalog import Event
from torchobs.cli import __main__ as dispatch
from torchobs.cli.top import Watch, screen
from torchobs.document import files
from torchobs.document.text import TerminalStyle
from torchobs.flight.artifacts import named
from torchobs.flight.layout import LIVE_PHASES, PHASE_NAMES, Exit
from torchobs.flight.step_record import RecordKind, StepFlag
from torchobs.ranks import runs

GOLDEN = Path(__file__).parent / "golden"
_VALUES = StepFlag.LOSS | StepFlag.GRAD_NORM | StepFlag.LEARNING_RATE
_USUAL = {"data": 0.02, "forward": 0.15, "backward": 0.25, "optimizer": 0.05, "other": 0.03}
GIB = 2.0**30


def _loss(step: int) -> float:
    return 0.6 + 2.4 * math.exp(-step / 80) + 0.02 * math.sin(step)


class Rank(File):
    """A rank's file, written in the order of time; `at_s` is now, in seconds since its birth."""

    def __init__(self, directory: Path, rank: int = 0, ranks: int = 1, **resource: str | int) -> None:
        place: dict[str, Any] = {"world_size": ranks, "local_world_size": ranks, "run_id": "4711", **resource}
        super().__init__(directory, seed=rank + 1, rank=rank, **place)
        self.at_s, self.steps, self._reported = 3.0, 0, set[str]()

    def train(
        self, steps: int, *, loss: Callable[[int], float] = _loss, norm: Callable[[int], float] = lambda _: 1.2,
        rate: float = 1e-3, flags: int = 0, **phases: float,
    ) -> Rank:  # fmt: skip
        """Take steps, with the seconds of each phase."""
        spent = {**_USUAL, **phases}
        for _ in range(steps):
            self.steps += 1
            self.at_s += sum(spent.values())
            times = tuple(spent.get(name, 0.0) for name in PHASE_NAMES)
            took, kind, bits = sum(spent[name] for name in catalog.PHASES if name in spent), RecordKind.STEP, _VALUES | flags
            values = took, loss(self.steps), norm(self.steps), rate
            self.writer.append(self.steps, BORN_NS + round(self.at_s * S), kind, bits, 1, *values, times, 4096, 8)
            self.writer.fold()
            for anomaly in self.writer.anomalies:
                if anomaly.kind not in self._reported:
                    numbers = {"value": anomaly.value, "baseline": anomaly.baseline}
                    self.event(catalog.EVENT_ANOMALY, anomaly.step, kind=anomaly.kind, **numbers)
                self._reported.add(anomaly.kind)
            self.writer.anomalies.clear()
        return self.reach(self.at_s, "forward")

    def event(self, event: Event, step: int | None = None, **attributes: Any) -> Rank:
        """Write an event; `exception__type` is `exception.type`."""
        attrs = {name.replace("__", "."): value for name, value in attributes.items()}
        number = step if step is not None else self.steps or None
        self.writer.events.append(
            {"k": "event", "t": BORN_NS + round(self.at_s * S), "name": event.name, "attrs": attrs, "step": number}
        )
        return self

    def aside(self, name: str, seconds: float, **attributes: object) -> Rank:
        """Spend time beside the training, with a span of its own."""
        begun_ns, self.at_s = BORN_WALL_NS + round(self.at_s * S), self.at_s + seconds
        span = {"t0": begun_ns, "t1": BORN_WALL_NS + round(self.at_s * S), "scope": ["torchobs", None, None, {}]}
        self.writer.events.append({"k": "span", "name": name, "trace_id": "1", "span_id": "2", "attrs": attributes, **span})
        return self

    def reach(self, seconds: float, phase: str, begun_s: float | None = None) -> Rank:
        """Go on to that moment, in that phase since another, or since now."""
        self.writer.phase(1 + LIVE_PHASES.index(phase), BORN_NS + round((self.at_s if begun_s is None else begun_s) * S))
        self.at_s = seconds
        self.beat(seconds)
        return self

    def living(self) -> Rank:
        """Hold the lock."""
        self.hold()
        return self

    def end(self, reason: int, code: int = 0) -> Rank:
        """Leave a word."""
        self.writer.exit(reason, code)
        return self

    def failed(self, kind: str, message: str, location: str, **more: Any) -> Rank:
        """End by an exception."""
        words: dict[str, Any] = {"exception__type": kind, "exception__message": message, "location": location}
        return self.event(catalog.EVENT_EXCEPTION, **words, **more).end(Exit.EXCEPTION, 1)


Made = Sequence[Rank]
RUNS: list[Callable[[Path], Made]] = []


def recorded(make: Callable[[Path], Made]) -> Callable[[Path], Made]:
    """Add a run to those whose texts are golden; a rank that holds its lock at the end is alive."""
    RUNS.append(make)
    return make


@recorded
def healthy(directory: Path) -> Made:
    """It trains, with an evaluation, checkpoints and what the script logs."""
    rank = Rank(directory, job_name="vit").train(120).aside(catalog.SPAN_EVALUATION.name, 6.0)
    rank.train(60).aside(catalog.SPAN_CHECKPOINT.name, 2.0, size=3 * GIB)
    rank.event(catalog.EVENT_SCALARS, names=["accuracy", "accuracy"], steps=[60, 120], values=[0.71, 0.84])
    rank.set(catalog.SCALAR_VALUE, 0.84, name="accuracy")
    rank.set(catalog.CHECKPOINTS, 1, result="saved")
    rank.set(catalog.CHECKPOINT_TIMESTAMP, BORN_WALL_NS / S + rank.at_s)
    rank.set(catalog.CHECKPOINT_SIZE, 3 * GIB)
    rank.set(catalog.STEPS_PLANNED, 1000)
    rank.set(catalog.MEMORY_HOST_RSS, 3.5 * GIB)
    rank.set(catalog.MEMORY_DEVICE_RESERVED, 42 * GIB, device="cuda:0")
    rank.set(catalog.MEMORY_DEVICE_LIMIT, 80 * GIB, device="cuda:0")
    rank.set(catalog.MFU, 0.41)
    return [rank.train(60).living()]


@recorded
def finished(directory: Path) -> Made:
    """Two ranks, in order."""
    return [Rank(directory, rank, 2).train(200).end(Exit.FINISHED) for rank in range(2)]


@recorded
def raised(directory: Path) -> Made:
    """An exception of the script's own in one of two ranks; the launcher ends the other."""
    first = Rank(directory, 0, 2).train(90).end(Exit.TERMINATED, 143)
    second = Rank(directory, 1, 2).train(88)
    return [first, second.failed("builtins.ValueError", "no label for sample 7", "data.py:31 in label")]


@recorded
def killed(directory: Path) -> Made:
    """SIGKILL, ten steps after a checkpoint."""
    rank = Rank(directory).train(150)
    rank.set(catalog.CHECKPOINT_TIMESTAMP, BORN_WALL_NS / S + rank.at_s + 0.1)
    return [rank.train(10)]


@recorded
def killed_soon(directory: Path) -> Made:
    """SIGKILL after two steps: too few to say how fast it was."""
    return [Rank(directory).train(2)]


@recorded
def killed_for_memory(directory: Path) -> Made:
    """By the kernel, in a container that was full; memory had been growing."""
    rank = Rank(directory).train(100)
    rank.event(catalog.EVENT_MEMORY_GROWTH, space="host", per_step=30e6, time_to_limit=900.0)
    rank.set(catalog.MEMORY_HOST_UTILIZATION, 0.99, limit="cgroup")
    rank.set(catalog.CGROUP_MEMORY_LIMIT, 16 * GIB)
    rank.set(catalog.CGROUP_MEMORY_WORKING_SET, 15.9 * GIB)
    rank.set(catalog.MEMORY_HOST_RSS, 14 * GIB)
    return [rank.train(50)]


@recorded
def device_full(directory: Path) -> Made:
    """The allocator's error, with what took the memory."""
    rank = Rank(directory).train(12)
    rank.event(
        catalog.EVENT_OUT_OF_MEMORY, device="cuda:0", requested=2 * GIB, free=GIB, limit=80 * GIB, allocated=70 * GIB,
        reserved=78 * GIB, parameters=14 * GIB, gradients=14 * GIB, optimizer_state=28 * GIB, modules=["model.layers, 50 GiB"],
    )  # fmt: skip
    place: dict[str, Any] = {"location": "torch/nn/functional.py:2400 in linear", "caller": "model.py:88 in forward"}
    return [rank.failed("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", **place)]


@recorded
def crashed(directory: Path) -> Made:
    """A segmentation fault in a library's code."""
    rank = Rank(directory).train(40)
    frames = ['  File "/app/train.py", line 51 in augment', '  File "/app/train.py", line 90 in <module>']
    stack = "\n".join(["Fatal Python error: Segmentation fault", "", "Stack (most recent call first):", *frames])
    rank.lock_path.write_text(f"{stack}\n")
    return [rank]


@recorded
def interrupted(directory: Path) -> Made:
    """Ctrl-C."""
    return [Rank(directory).train(70).end(Exit.INTERRUPTED, 128 + signal.SIGINT)]


@recorded
def never_stepped(directory: Path) -> Made:
    """It left with an exit status, without a step of its optimizer."""
    rank = Rank(directory)
    rank.event(catalog.EVENT_LOOP_MISTAKE, kind="never_stepped", backward_passes=64, optimizer="AdamW")
    return [rank.reach(40.0, "other").end(Exit.EXIT_CODE, 3)]


@recorded
def not_a_number(directory: Path) -> Made:
    """A learning rate that rose, a gradient that exploded, and a loss that was NaN to the end."""
    rank = Rank(directory).train(100).train(3, rate=0.1, norm=lambda _: 60.0)
    origin: dict[str, Any] = {"operator": "sqrt", "module": "head.scale", "location": "model.py:24", "origin": "backward"}
    rank.event(catalog.EVENT_NONFINITE_ORIGIN, 104, **origin)
    rank.event(catalog.EVENT_NONFINITE_GRADIENT, 104, layers=["head", "body.1"], layers_affected=2, kinds="nan")
    nan = math.nan
    return [rank.train(40, rate=0.1, loss=lambda _: nan, norm=lambda _: nan).end(Exit.FINISHED)]


@recorded
def recovered(directory: Path) -> Made:
    """Spikes and a loss that was not finite, long ago."""
    rank = Rank(directory).train(150).train(1, loss=lambda _: 50.0, norm=lambda _: 30.0).train(50)
    return [rank.train(1, loss=lambda _: math.inf).train(400).living()]


@recorded
def diverged(directory: Path) -> Made:
    """The loss left its start for good."""
    rank = Rank(directory).train(3, rate=3.0)
    return [rank.train(100, loss=lambda step: 2e6 + step % 7, norm=lambda _: 4e3, rate=3.0).living()]


@recorded
def scaler_stuck(directory: Path) -> Made:
    """Every step is skipped, in float16."""
    rank = Rank(directory).train(50)
    rank.train(60, flags=StepFlag.SKIPPED, norm=lambda _: math.inf)
    rank.set(catalog.AMP_SCALE, 0.125, scaler="0")
    rank.set(catalog.AMP_SKIP_STREAK, 60)
    rank.event(catalog.EVENT_AMP_SCALE_COLLAPSED, scaler="0", scale=0.125)
    return [rank.living()]


def _waiting(rank: Rank, seconds: float, phase: str, called: int) -> Rank:
    begun_s = rank.at_s
    for metric, number in ((catalog.COLLECTIVE_ENQUEUED, called), (catalog.COLLECTIVE_COMPLETED, called - 1)):
        rank.set(metric, number, backend="nccl", group="default")
    wait = {"backend": "nccl", "group": "default", "operation": "all_reduce"}
    rank.set(catalog.COLLECTIVE_PENDING_AGE, seconds, **wait)
    return rank.reach(begun_s + seconds, phase, begun_s)


@recorded
def hung(directory: Path) -> Made:
    """Two ranks wait in backward for a third, which is in its data."""
    ranks = [Rank(directory, rank, 3).train(80) for rank in range(3)]
    at_s = ranks[0].at_s
    for rank in (ranks[0], ranks[2]):
        _waiting(rank, 200.0, "backward", 240).living()
    ranks[1].reach(at_s + 200.0, "data", at_s).living()
    stacks = named(ranks[1].path.name, "stacks", round(1e3 * (BORN_WALL_NS / S + at_s + 60)))
    frames = ['  File "/app/data.py", line 12 in __getitem__', '  File "/app/train.py", line 30 in <module>']
    dump = "\n".join(["Thread 0x01 (most recent call first):", *frames])
    (directory / stacks.name).write_text(f"{dump}\n")
    return ranks


@recorded
def timed_out(directory: Path) -> Made:
    """A collective's timeout ended two of three ranks; the third evaluated alone."""
    ranks = [Rank(directory, rank, 3).train(80) for rank in range(3)]
    begun_s = ranks[0].at_s
    ranks[1].reach(begun_s + 31.0, "evaluation", begun_s).end(Exit.TERMINATED, 143)
    for rank in (ranks[0], ranks[2]):
        rank.reach(begun_s + 30.0, "backward", begun_s)
        words: dict[str, Any] = {"timeout": "collective", "timeout_s": 30.0, "absent_ranks": [1]}
        place = "torch/autograd/graph.py:979 in _engine_run_backward"
        rank.failed("torch.distributed.DistBackendError", "Timed out waiting 30000ms", place, caller="train.py:40", **words)
    return ranks


@recorded
def straggler(directory: Path) -> Made:
    """One of three ranks is slow in its data."""
    ranks = [
        Rank(directory, rank, 3).train(80, data=0.02 + 0.3 * (rank == 1), backward=0.55 - 0.3 * (rank == 1))
        for rank in range(3)
    ]
    return [rank.living() for rank in ranks]


@recorded
def apart(directory: Path) -> Made:
    """One of two ranks is slow, but the time that the other waits is not what that one spends more."""
    ranks = [Rank(directory, rank, 2).train(80, forward=0.15 + 0.3 * rank, backward=0.55 - 0.3 * rank) for rank in range(2)]
    return [rank.living() for rank in ranks]


@recorded
def starved(directory: Path) -> Made:
    """It waits for its data, a worker died, and what it makes between the phases has a line."""
    rank = Rank(directory).train(100, data=0.9, other=1.2)
    rank.event(catalog.EVENT_WORKER_DIED, pid=4711, signal="SIGKILL", code=0)
    rank.set(catalog.DATA_WORKERS_DIED, 1)
    rank.set(catalog.DATA_STARVED, 1)
    rank.event(catalog.EVENT_STEP_BETWEEN, function="get_batch", location="/app/train.py:42")
    return [rank.train(10, data=0.9, other=1.2).living()]


@recorded
def leaking(directory: Path) -> Made:
    """Tensors are never freed, and memory is full in half an hour."""
    rank = Rank(directory).train(200)
    rank.event(catalog.EVENT_MEMORY_GROWTH, space="host", per_step=30e6, time_to_limit=1800.0)
    leak: dict[str, Any] = {"tensors": ["200 more of float32 (64, 1000), 49 MiB"], "lines": ["train.py:33 200 more, 49 MiB"]}
    rank.event(catalog.EVENT_MEMORY_LEAK, space="host", grown=80e6, steps=20, seconds=10.0, **leak)
    rank.set(catalog.MEMORY_TIME_TO_LIMIT, 1800.0, space="host")
    rank.event(catalog.EVENT_LOOP_MISTAKE, kind="losses_kept")
    return [rank.train(20).living()]


@recorded
def unmoved(directory: Path) -> Made:
    """Layers that learn nothing, one that is unused, a scheduler that is never stepped, gradients never set to zero."""
    rank = Rank(directory).train(100)
    rank.set(catalog.GRAD_UNMOVED_LAYERS, 2)
    stuck: dict[str, Any] = {"layers": ["body.0", "body.2"], "layers_affected": 2, "layers_total": 9, "at": "body.2"}
    rank.event(catalog.EVENT_UNMOVED_LAYERS, cause="dead_units", **stuck)
    unused: dict[str, Any] = {"layers": ["head.old"], "layers_affected": 1, "layers_total": 9, "at": "head.old"}
    rank.event(catalog.EVENT_UNMOVED_LAYERS, cause="unused", **unused)
    rank.event(catalog.EVENT_SCHEDULER_MISUSED, kind="never_stepped", scheduler="CosineAnnealingLR")
    rank.event(catalog.EVENT_LOOP_MISTAKE, kind="gradients_kept")
    return [rank.train(20).end(Exit.FINISHED)]


@recorded
def recompiled(directory: Path) -> Made:
    """torch.compile compiles again and again, and the last steps are slow."""
    rank = Rank(directory).train(100)
    storm: dict[str, Any] = {"location": "model.py:12", "recompiles": 9, "guard": "shape", "expression": "x.size(0) == 32"}
    rank.event(catalog.EVENT_RECOMPILE_STORM, **storm)
    rank.event(catalog.EVENT_GRAPH_BREAK, location="model.py:30", reason="call", message="call to print")
    rank.set(catalog.COMPILE_TIME, 42.0, stage="backend")
    rank.set(catalog.COMPILE_COMPILATIONS, 1, cause="first")
    rank.set(catalog.COMPILE_COMPILATIONS, 9, cause="recompile")
    rank.set(catalog.COMPILE_GRAPH_BREAKS, 1, reason="call")
    return [rank.train(30, compile=0.9).end(Exit.FINISHED)]


@recorded
def not_one_model(directory: Path) -> Made:
    """With DDP: another gradient norm on one of three ranks, and the same batches on all."""
    ranks = [Rank(directory, rank, 3) for rank in range(3)]
    for number, rank in enumerate(ranks):
        rank.set(catalog.DISTRIBUTED_INFO, 1, backend="nccl", parallelism="ddp", mesh="")
        rank.event(catalog.EVENT_REPLICA_BATCHES, 1, values=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
        rank.train(60, norm=lambda _, number=number: 1.9 if number == 2 else 1.2)  # type: ignore[misc]
        rank.end(Exit.FINISHED)
    return ranks


@recorded
def saves_fail(directory: Path) -> Made:
    """Checkpoints cannot be saved: the file system is full."""
    rank = Rank(directory).train(100)
    full: dict[str, Any] = {"free": GIB, "needed": 3 * GIB, "saved_step": 50, "format": "torch.save"}
    rank.event(catalog.EVENT_CHECKPOINT_FAILED, exception__type="builtins.OSError", **full)
    rank.set(catalog.CHECKPOINTS, 2, result="failed")
    rank.set(catalog.CHECKPOINTS, 1, result="saved")
    rank.set(catalog.CHECKPOINT_FAILURE_STREAK, 2)
    return [rank.train(20).living()]


@pytest.fixture
def at_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that a moment reads the same everywhere."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def texts(directory: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What each command prints."""
    with closing(scanner_of(directory, clock)) as scanner:
        scanner.scan()
        shown, _ = Watch(scanner).look()
        top = screen(shown, TerminalStyle(120), 40).lines
    dispatch.main(["inspect", "--steps", "3", str(directory)])
    return {
        "top": re.sub(r"\d\d:\d\d:\d\d\n", "12:00:00\n", "\n".join(top), count=1),
        "inspect": capsys.readouterr().out,
        "report": files.report_text(runs.choose([directory], None), ".md"),
    }


@pytest.mark.parametrize("make", RUNS, ids=lambda make: make.__name__)
@pytest.mark.usefixtures("at_utc")
def test_the_texts_of_a_run(
    make: Callable[[Path], Made], flight_dir: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """They are the golden ones."""
    ranks = make(flight_dir)
    clock = Clock(max(rank.at_s for rank in ranks) + 0.2)
    for rank in ranks:
        rank.save().lock_path.touch(mode=0o600)
    if all(rank._lock is None for rank in ranks):
        clock.seconds += 30
    monkeypatch.setattr(runs, "system_clock", clock)
    monkeypatch.setenv("COLUMNS", "120")
    printed = texts(flight_dir, clock, capsys)
    for rank in ranks:
        rank.release()
    text = "\n".join(f"=== {name} ===\n{words}" for name, words in printed.items())
    path = GOLDEN / f"{make.__name__}.txt"
    if pytestconfig.getoption("--update-golden"):
        path.write_text(text)
    assert text == path.read_text(), "`pytest --update-golden` writes it again"
