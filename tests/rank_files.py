"""Ranks' files for tests of the exporter, written by the real writer at times that a test chooses, and their scanners.

`python -m tests.rank_files DIRECTORY [RANK]` is a rank as a process of its own, for tests that stop and kill it: it takes ten
steps a second and prints each one's number once it is in the file.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torchobs import catalog
from torchobs.catalog import SPAN_RUN, SPAN_STEP, Kind, Metric
from torchobs.exporter.config import ExporterConfig
from torchobs.flight import files
from torchobs.flight.directory import open_place
from torchobs.flight.events import SpanIds
from torchobs.flight.files import file_name, lock_name
from torchobs.flight.layout import DEFAULT_SIZE, HEADER_SIZE, Header, Live, encode_header, plan
from torchobs.flight.step_record import RecordKind, StepFlag
from torchobs.flight.storage import Storage
from torchobs.flight.value_blocks import CORE, USER
from torchobs.flight.writer import FlightWriter, open_writer
from torchobs.ranks.rank_file import Now
from torchobs.ranks.scanner import Scanner
from torchobs.support.descriptors import Descriptor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchobs.flight.series import Scope
    from torchobs.ranks.snapshot import Snapshot

S = 1_000_000_000
BOOT = bytes(range(16))
BORN_NS, BORN_WALL_NS = 1_000 * S, 1_700_000_000 * S
_PLACE = {"rank": 0, "local_rank": 0, "world_size": 2, "local_world_size": 2, "restart": 0}
_SURROUNDINGS = {"launcher": "torchrun", "host": "node-1", "script": "train.py"}
_VERSIONS = {"torch_version": "2.13.0", "python_version": "3.11.7", "torchobs_version": "0.1.0"}
RESOURCE: Mapping[str, str | int] = {"job_name": "gpt", "run_id": "run-1", **_PLACE, **_SURROUNDINGS, **_VERSIONS}
PHASES_S = (0.01, 0.02, 0.03, 0.01, 0.005, 0.0, 0.0, 0.0, 0.0)
_FLAGS = StepFlag.LOSS | StepFlag.GRAD_NORM | StepFlag.LEARNING_RATE


class Clock:
    """The exporter's clocks, moved by hand; `seconds` since the files of this module are born."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.wall_jump_s = 0.0

    def __call__(self) -> Now:
        since_ns = round(self.seconds * S)
        return Now(BORN_NS + since_ns, BORN_WALL_NS + since_ns + round(self.wall_jump_s * S), BOOT)


class File:
    """A flight file whose header and live words are the test's; this process holds its lock if it is told to."""

    def __init__(
        self, directory: Path, *, born_s: float = 0.0, boot: bytes = BOOT, seed: int = 1, in_memory: bool | None = None,
        pid: int = 4321, **resource: str | int,
    ) -> None:  # fmt: skip
        born_ns = round(born_s * S)
        self.header = Header(
            file_size=DEFAULT_SIZE,
            incarnation=seed.to_bytes(4, "big") * 4,
            boot_id=boot,
            monotonic_ns=BORN_NS + born_ns,
            wall_ns=BORN_WALL_NS + born_ns,
            pid=pid,
            uid=os.getuid(),
            regions=plan(DEFAULT_SIZE),
            resource={**RESOURCE, **resource},
            in_memory=in_memory,
        )
        self.buffer = bytearray(DEFAULT_SIZE)
        self.buffer[:HEADER_SIZE] = encode_header(self.header)
        self.memory = Storage(memoryview(self.buffer))
        self.writer = FlightWriter(self.header, self.memory)
        self.path = directory / file_name(self.header)
        self.lock_path = directory / lock_name(self.path.name)
        self._lock: Descriptor | None = None
        self.beat(born_s)

    def beat(self, seconds: float) -> None:
        self.memory.word(HEADER_SIZE // 8 + Live.HEARTBEAT_NS, BORN_NS + round(seconds * S))

    def step(self, number: int, seconds: float, *, loss: float = 2.0, norm: float = 1.0, duration_s: float = 0.1) -> None:
        """Write the record of a step that ended at a moment of the clock, not folded yet."""
        end_ns = BORN_NS + round(seconds * S)
        self.writer.append(number, end_ns, RecordKind.STEP, _FLAGS, 1, duration_s, loss, norm, 1e-3, PHASES_S, 1024, 8)

    def span(self, number: int, seconds: float, attrs: object = None, **more: object) -> None:
        """Write the span of a step that ended at a moment of the clock; its number is added to its attributes."""
        header, attrs = self.header, {"duration_s": 0.1, "grad_norm": 1.0} if attrs is None else attrs
        attributes = {"step": number, **attrs} if isinstance(attrs, dict) else attrs
        end_ns = header.wall_ns - header.monotonic_ns + BORN_NS + round(seconds * S)
        ids = SpanIds(header).step(number)
        scope: dict[str, object] = {"kind": "internal", "scope": ["torchobs", None, None, {}]}
        identity = {"trace_id": ids.trace, "span_id": ids.span, **scope}
        times = {"flags": 1, "t0": end_ns - S, "t1": end_ns, "status": "unset"}
        self.writer.events.append({"k": "span", "name": SPAN_STEP.name, **identity, **times, "attrs": attributes, **more})

    def set(self, metric: Metric, value: float, scope: Scope | None = None, /, **attributes: object) -> None:
        """Set, add to or observe a series, as its kind wants it; with a scope it is a user's."""
        cell = self.writer.table.open(metric, attributes, USER if scope else CORE, either=scope is not None, scope=scope)
        assert cell is not None, "another thread is making a series"
        change = {Kind.GAUGE: cell.set, Kind.HISTOGRAM: cell.observe}.get(metric.kind, cell.add)
        change(value)

    def save(self) -> File:
        self.writer.publish()
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.write(self.buffer)
        return self

    def hold(self) -> File:
        self._lock = Descriptor("lock", str(self.lock_path), os.O_RDWR | os.O_CREAT)
        files.lock(self._lock)
        return self

    def release(self) -> None:
        """Let go of the lock, as the kernel does for a process that is gone. Idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            files.unlock(lock)


def live_rank(directory: Path, **resource: str | int) -> FlightWriter:
    """A flight file of this process, by the machine's clocks; the caller beats and closes it."""
    return open_writer(open_place(str(directory), None), {**RESOURCE, **resource})


def train(writer: FlightWriter, steps: Sequence[int], *, loss: float | None = None) -> None:
    """Write steps that end now, and everything else that the sampler thread would."""
    for step in steps:
        now_ns = time.monotonic_ns()
        value = 1.0 / step if loss is None else loss
        writer.append(step, now_ns, RecordKind.STEP, _FLAGS, 1, 0.1, value, 1.0, 1e-3, PHASES_S, 1024, 8)
    writer.heartbeat()
    writer.fold()
    writer.publish()


def begin_run(writer: FlightWriter) -> None:
    """Announce the run's span, as a session does."""
    run = SpanIds(writer.header).run
    identity = {"trace_id": run.trace, "span_id": run.span, "flags": 1, "scope": ["torchobs", None, None, {}]}
    begun = {"t0": writer.header.wall_ns, "kind": "internal", "attrs": {}}
    writer.events.append({"k": "span_start", "name": SPAN_RUN.name, **begun, **identity})


def live_span(writer: FlightWriter, step: int, reason: str = "slow") -> dict[str, Any]:
    """Write the span of a step of :func:`train` that ended now, as the sampler thread does; return its frame."""
    header, now_ns = writer.header, time.time_ns()
    ids = SpanIds(header)
    step_id, run = ids.step(step), ids.run
    frame = {
        "k": "span", "name": SPAN_STEP.name, "trace_id": step_id.trace, "span_id": step_id.span, "flags": 1, "kind": "internal",
        "t0": now_ns - S // 10, "t1": now_ns, "status": "unset",
        "attrs": {"step": step, "reason": reason, "duration_s": 0.1, "grad_norm": 1.0},
        "links": [[run.trace, run.span, 1, "", {"torchobs.link.relation": "run"}, 0]],
        "scope": ["torchobs", "1.2", None, {"s": 1}],
    }  # fmt: skip
    writer.events.append(frame)
    return frame


def scanner_of(directory: Path | str, clock: Clock, **options: Any) -> Scanner:
    """A scanner of a directory; the options are `ExporterConfig`'s."""
    return Scanner(ExporterConfig(flight_dir=str(directory), **options), clock)


@pytest.fixture
def clock() -> Clock:
    """The exporter's clocks: `clock.seconds` after the files are born. A module whose tests begin later has its own."""
    return Clock()


@pytest.fixture
def scanner(flight_dir: Path, clock: Clock) -> Iterator[Scanner]:
    """A scanner of the flight directory."""
    with closing(scanner_of(flight_dir, clock)) as directory_scanner:
        yield directory_scanner


@pytest.fixture
def file(flight_dir: Path) -> Iterator[File]:
    """A living rank's file, not written yet."""
    rank_file = File(flight_dir).hold()
    rank_file.beat(1.0)
    yield rank_file
    rank_file.release()


def states(snapshot: Snapshot) -> dict[str, str]:
    """State by rank."""
    return {rank.rank: rank.state for rank in snapshot.ranks}


def steps(snapshot: Snapshot) -> dict[str, Any]:
    """Steps by rank."""
    return {
        rank.rank: next(value for series, value in rank.view.points if series.name == catalog.STEPS.name)
        for rank in snapshot.ranks
    }


if __name__ == "__main__":
    writer = live_rank(Path(sys.argv[1]), rank=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for step in count(1):
        train(writer, [step])
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        time.sleep(0.1)
