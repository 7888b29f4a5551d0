"""Half an hour of ranks that start, die and come back: ``python -m tests.long.soak --minutes 30``.

Ranks are processes with the real writer, and one real training at a time. They are killed by SIGKILL, or end in order, and come
back as new incarnations; dead files go, as trainers remove them. A real exporter is scraped all the while in both formats, and
its live page is looked at. Its memory, descriptors, threads and series are sampled. After the warm-up none of them may grow:
the exit status is 1 if one does, if a scrape fails, or if the exporter ends.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.processes import MIB, exit_on_sigterm, exporter, flight_directory, rss
from bench.scraping import ACCEPT
from tests.support import clean_environment
from torchobs.flight.cleanup import clean

if TYPE_CHECKING:
    from tests.exporters import Program

RANKS = 6
LIFE_S = (8.0, 40.0)
PAUSE_S = (0.0, 40.0)
"""before half of the restarts; the others are at once"""
STEPS = (200, 4000)
"""of a real training"""
KILLED = 0.6
"""Share of the trainings that do not come to their end."""
GRACE = "20s"
SAMPLE_S = 2.0
FILES_BYTES = 24 * MIB
"""Dead files that trainers would leave; theirs is 256 MiB, which half an hour would not fill."""
WARM_UP = 1 / 3
"""Share of the time before memory, which grows with the most that was ever alive at once, is expected to stay."""
ALLOWED = {"memory": 3 * MIB, "descriptors": 1.0, "threads": 0.5, "series": 100.0}
"""Growth over the rest that is none. Memory: an allocator's arenas are 1 MiB, and a leak of one rank's series for each of the
restarts of half an hour is 50 MiB. Series: how many of the dead are within their grace changes all the time; a rank has 110 at
least, and there are hundreds of restarts."""


def growth(points: Sequence[tuple[float, float]]) -> float:
    """Return what a quantity grew in all, of its (seconds, value) points in order.

    The slope is the median of those between all pairs of points (Theil 1950; Sen 1968), of which three in ten may be wild: a
    scrape that was just being answered, ranks that were just being replaced.
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0]]
    return median(slopes) * (points[-1][0] - points[0][0])


class Life:
    """One rank that is started again whenever it is gone."""

    def __init__(self, directory: Path, number: int, dice: random.Random, *, trains: bool = False) -> None:
        self._argv = [sys.executable, "-m", "tests.rank_files", str(directory), str(number)]
        self._training = [sys.executable, "-m", "tests.long.soak", "--train", str(directory)] if trains else []
        self._environ = {**clean_environment(), **({"TORCHOBS_RUN_ID": "soak", "RANK": str(number)} if trains else {})}
        self._dice = dice
        self._process: subprocess.Popen[bytes] | None = None
        self._until_s = self._again_s = 0.0
        self.starts = 0

    def look(self, now_s: float) -> None:
        """Kill it if its time has come; start it again, at once or when its grace may be over."""
        if self._process is not None and (self._process.poll() is not None or now_s >= self._until_s):
            self.end()
            self._again_s = now_s + self._dice.choice((0.0, self._dice.uniform(*PAUSE_S)))
        if self._process is None and now_s >= self._again_s:
            argv = [*self._training, str(self._dice.randrange(*STEPS))] if self._training else self._argv
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=self._environ)
            comes_to_its_end = self._training and self._dice.random() >= KILLED
            self._until_s = now_s + (300.0 if comes_to_its_end else self._dice.uniform(*LIFE_S))
            self.starts += 1

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@dataclass
class Record:
    """What was seen, as (seconds, value) points."""

    points: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {name: [] for name in ALLOWED})
    scrapes: int = 0
    looks: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, seconds: float, program: Program, series: int) -> None:
        home = Path("/proc", str(program.process.pid))
        descriptors, threads = (len(list((home / folder).iterdir())) for folder in ("fd", "task"))
        values = (rss(program.process.pid), descriptors, threads, series)
        for name, value in zip(ALLOWED, values, strict=True):
            self.points[name].append((seconds, value))

    def grown(self) -> dict[str, float]:
        """Return what each quantity grew after the warm-up."""
        return {name: growth(points[int(len(points) * WARM_UP) :]) for name, points in self.points.items()}


def train(directory: str, steps: int) -> None:
    """Train; who this is stands in the environment."""
    import torch

    import torchobs
    from bench.workloads import mlp

    torch.set_num_threads(1)
    with torchobs.init(flight_dir=directory):
        for _ in itertools.islice(mlp(), steps):
            pass


def soak(seconds: float, directory: Path, program: Program, lives: list[Life]) -> Record:
    """Let it run."""
    record, began_s, directory_fd = Record(), time.monotonic(), os.open(directory, os.O_RDONLY)
    formats, number = itertools.cycle(ACCEPT.values()), 0
    try:
        while (now_s := time.monotonic()) - began_s < seconds and program.process.poll() is None:
            for life in lives:
                life.look(now_s)
            clean(directory_fd, now=time.monotonic_ns(), max_total_bytes=FILES_BYTES)
            series = _scrape(program, next(formats), record)
            if number % 5 == 0:
                _look(program, record)
            record.add(now_s - began_s, program, series)
            time.sleep(max(0.0, SAMPLE_S - (time.monotonic() - now_s)))
            number += 1
    finally:
        os.close(directory_fd)
    return record


def _scrape(program: Program, accept: str, record: Record) -> int:
    with _told(record):
        answer = program.get(Accept=accept, Accept_Encoding="identity", User_Agent="Prometheus/3.0")
        record.scrapes += 1
        if answer.status == 200:
            return sum(not line.startswith(b"#") for line in answer.body.splitlines())
        record.failures.append(f"a scrape was answered with {answer.status}")
    return 0


def _look(program: Program, record: Record) -> None:
    """Open the live page, and its stream for a moment."""
    with _told(record):
        record.looks += 1
        if program.get("/").status != 200:
            record.failures.append("the live page was not there")
        connection = http.client.HTTPConnection(program.address, timeout=10)
        connection.request("GET", "/live/stream")
        if b"data:" not in connection.getresponse().read(2000):
            record.failures.append("the live stream said nothing")
        connection.close()


@contextlib.contextmanager
def _told(record: Record) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        record.failures.append(repr(problem))


def table(record: Record) -> str:
    """Render what each quantity was and grew as a Markdown table."""
    lines = ["| after the first third | median | grown | allowed |", "|---|---|---|---|"]
    for name, grown in record.grown().items():
        unit, form = (MIB, "{:.1f} MiB") if name == "memory" else (1, "{:.1f}")
        level = median(value for _, value in record.points[name][int(len(record.points[name]) * WARM_UP) :])
        lines.append(f"| {name} | {' | '.join(form.format(value / unit) for value in (level, grown, ALLOWED[name]))} |")
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    if sys.argv[1:2] == ["--train"]:
        return train(sys.argv[2], int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of who dies when (default: 1)")
    options = parser.parse_args()
    exit_on_sigterm()
    dice = random.Random(options.seed)
    with flight_directory() as path, exporter(path, "--grace", GRACE) as program:
        lives = [Life(path, number, dice, trains=number == RANKS) for number in range(RANKS + 1)]
        try:
            record = soak(options.minutes * 60, path, program, lives)
        finally:
            for life in lives:
                life.end()
        if program.process.poll() is not None:
            record.failures.append(f"the exporter ended with {program.process.returncode}:\n{program.log}")
    starts = sum(life.starts for life in lives)
    print(f"{starts} starts of {len(lives)} ranks, {record.scrapes} scrapes, {record.looks} looks at the live page\n")
    print(table(record), flush=True)
    record.failures += [f"{name} grew by {grown}" for name, grown in record.grown().items() if grown > ALLOWED[name]]
    for failure in record.failures[:20]:
        print(f"failure: {failure}", file=sys.stderr)
    sys.exit(bool(record.failures))


if __name__ == "__main__":
    main()
