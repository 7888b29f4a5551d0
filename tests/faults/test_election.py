"""The election of a node's exporter, step by step: whatever the order, a living rank is left with exactly one.

The exporter is a process that stops before each step until the test says go; what it serves is a stand-in. The rank is the
test itself: it publishes a real flight file and looks at the real lock.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest

from torchobs.flight.directory import open_place
from torchobs.flight.writer import FlightWriter, open_writer
from torchobs.node import election

STEPPED = """
import sys
from types import SimpleNamespace
from torchobs.flight.directory import open_directory
from torchobs.node import election, lifetime

def pause(step):
    print(step, flush=True)
    return sys.stdin.readline().strip()

class Stepped(election.Election):
    def release(self):
        if self.holds():
            pause("leaving")
            super().release()
            pause("released")

def serve(flight_dir, address, *, announce, finished):
    announce(address, False)
    while pause("serving") != "stop":
        if finished(SimpleNamespace(ranks=1, alive=0, last_scrape_age_s=1.0, unscraped_final=0, viewers=0)):
            return

directory_fd = open_directory(sys.argv[1])
candidate = Stepped(directory_fd)
if candidate.win():
    lifetime.run(sys.argv[1], "127.0.0.1:1", 60.0, candidate, directory_fd, serve)
print("gone", flush=True)
"""

Start = Callable[[], subprocess.Popen[str]]


@pytest.fixture
def process(start: Callable[..., subprocess.Popen[str]], flight_dir: Path) -> Start:
    """Start the script above, talking by lines."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return lambda: start(sys.executable, "-c", STEPPED, flight_dir, **pipes)


@pytest.fixture
def rank(flight_dir: Path) -> Iterator[Callable[[], FlightWriter]]:
    """Publish the flight file of a living rank."""
    writers: list[FlightWriter] = []

    def publish() -> FlightWriter:
        writers.append(open_writer(open_place(str(flight_dir), None), {"rank": len(writers)}))
        return writers[-1]

    yield publish
    for writer in writers:
        writer.close()


def said(child: subprocess.Popen[str]) -> str:
    """The next line of a child."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def go(child: subprocess.Popen[str], word: str = "go") -> None:
    """Let a child take its next step."""
    assert child.stdin is not None
    child.stdin.write(f"{word}\n")
    child.stdin.flush()


EXPORTER = {"decide": "leaving", "release": "released", "rescan": ""}
"""Its steps, and what it says after each of them"""
RANK = ("publish", "look")


def orders() -> Iterator[tuple[str, ...]]:
    """The ten ways in which the exporter's three steps and the rank's two can follow each other."""
    for places in combinations(range(5), 2):
        steps = iter(EXPORTER)
        ranks = iter(RANK)
        yield tuple(next(ranks) if place in places else next(steps) for place in range(5))


@pytest.mark.parametrize("order", list(orders()), ids="-".join)
def test_no_order_leaves_a_rank_without_an_exporter_or_with_two(
    order: tuple[str, ...], process: Start, rank: Callable[[], FlightWriter], directory_fd: int
) -> None:
    """An exporter leaves while a rank arrives: afterwards the rank has one, which has announced itself."""
    leaving = process()
    assert said(leaving) == "serving"
    answers: dict[str, str] = {}
    started: list[subprocess.Popen[str]] = []

    def look() -> None:
        if not election.is_decided(directory_fd):
            started.append(process())
            assert said(started[0]) == "serving"

    for step in order:
        if step == "publish":
            rank()
        elif step == "look":
            look()
        else:
            go(leaving)
            answers[step] = said(leaving)
    stayed = answers["rescan"] == "serving"
    assert answers == EXPORTER | {"rescan": "serving" if stayed else "gone"}
    assert stayed != bool(started), "exactly one serves"
    serving = started[0] if started else leaving
    assert election.is_decided(directory_fd)
    announcement = election.read(directory_fd)
    assert announcement is not None
    assert announcement.pid == serving.pid


def test_a_rank_that_looked_between_release_and_return_starts_one_that_loses(
    process: Start, rank: Callable[[], FlightWriter], directory_fd: int
) -> None:
    """The rank saw a free lock, but the leaving exporter was quicker to take it again: the one that was started ends."""
    leaving = process()
    assert said(leaving) == "serving"
    for step in ("leaving", "released"):
        go(leaving)
        assert said(leaving) == step
    rank()
    assert not election.is_decided(directory_fd)
    go(leaving)
    assert said(leaving) == "serving"
    late = process()
    assert said(late) == "gone"
    assert late.wait(10) == 0


def test_whoever_was_told_to_end_does_not_look_back(
    process: Start, rank: Callable[[], FlightWriter], directory_fd: int, flight_dir: Path
) -> None:
    """A person who stops the exporter of a running training wants it stopped; its announcement goes with it."""
    rank()
    exporter = process()
    assert said(exporter) == "serving"
    for word, step in (("stop", "leaving"), ("go", "released"), ("go", "gone")):
        go(exporter, word)
        assert said(exporter) == step
    assert not election.is_decided(directory_fd)
    assert not (flight_dir / election.NAME).exists()


def test_a_killed_exporter_leaves_its_place_free(process: Start, directory_fd: int) -> None:
    """The kernel lets go of the lock, and the next one takes over the stale announcement."""
    exporter = process()
    assert said(exporter) == "serving"
    exporter.send_signal(signal.SIGKILL)
    exporter.wait(10)
    assert not election.is_decided(directory_fd)
    assert election.read(directory_fd) is None
    successor = process()
    assert said(successor) == "serving"
    announcement = election.read(directory_fd)
    assert announcement is not None
    assert announcement.pid == successor.pid
