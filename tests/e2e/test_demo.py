"""`make demo`'s main, to its end: what a newcomer sees first has to work, and to leave nothing behind."""

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support import wait_until

pytestmark = pytest.mark.timeout(200)  # the demo itself may take nearly two minutes

STEPS = 80  # a baseline for the loss, then the learning rate is blown up at step 48
FEW = 20
MARK = "DEMO_OF_THIS_TEST"


@dataclass(frozen=True, slots=True)
class Demo:
    """A running demo, found again by a mark in the environment that its children inherit."""

    process: subprocess.Popen[str]
    log: Path
    mark: str

    @property
    def said(self) -> str:
        """Its output so far."""
        return self.log.read_text()

    def rank(self, number: int) -> psutil.Process:
        """One of the ranks."""
        return next(child for child in self.children() if child.info["environ"].get("RANK") == str(number))

    def children(self) -> list[psutil.Process]:
        """Every process it has started and that has not got rid of its environment."""
        running = psutil.process_iter(["environ", "pid"])
        marked = [process for process in running if (process.info["environ"] or {}).get(MARK) == self.mark]
        return [process for process in marked if process.pid != self.process.pid]

    def directory(self) -> str:
        """The private directory that it has made; empty before it has started the ranks."""
        places = (child.info["environ"].get("TORCHOBS_DIR") for child in self.children())
        return next((str(Path(place).parent) for place in places if place), "")


def nothing_left_of(demo: Demo, directory: str) -> bool:
    """Whether every process is gone, the detached exporter too, and so is the directory."""
    arguments = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return not demo.children() and not Path(directory).exists() and not any(directory in line for line in arguments)


@pytest.fixture
def start_demo(checkout: Path, start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    """Start the demo from the checkout, as `make demo` does; a failed test's demo is ended in order, so that its parts are."""
    started: list[Demo] = []

    def start_demo(*options: str, path: str = os.environ["PATH"]) -> Demo:
        mark = uuid.uuid4().hex
        environment = {**os.environ, "PATH": path, MARK: mark}
        argv = [sys.executable, "-m", "examples.demo", *options]
        with (tmp_path / "demo.log").open("w") as log:
            process = start(*argv, cwd=checkout, env=environment, stdout=log)
        started.append(Demo(process, tmp_path / "demo.log", mark))
        return started[-1]

    yield start_demo
    for demo in started:
        demo.process.terminate()
        demo.process.wait(timeout=30)


def run_to_its_end(demo: Demo, disturb: Callable[[], object] = lambda: None, timeout_s: float = 120.0) -> str:
    """Disturb a demo once its ranks are shown, see that it ends and leaves nothing behind, and return what it said."""
    directory = wait_until(demo.directory, timeout_s=30)
    wait_until(lambda: "alive" in demo.said or demo.process.poll() is not None, timeout_s=70)
    disturb()
    demo.process.wait(timeout_s)
    wait_until(lambda: nothing_left_of(demo, directory), timeout_s=5)
    return demo.said


def test_without_prometheus_it_says_what_is_missing_and_shows_the_run(start_demo: Callable[..., Demo]) -> None:
    """Exit code 0, every step of both ranks, and how to get what was missing."""
    demo = start_demo("--steps", str(FEW), path=str(Path(sys.executable).parent))
    said = run_to_its_end(demo)

    assert demo.process.returncode == 0, said
    assert "No `prometheus` on PATH" in said
    assert "apt-get install prometheus" in said
    assert re.search(r"metrics +http://127\.0\.0\.1:\d+/metrics", said)
    for rank in (0, 1):
        assert f"rank {rank}: finished after {FEW} steps, last loss" in said
    assert "firing" not in said


def test_with_prometheus_the_shipped_alert_fires(start_demo: Callable[..., Demo], program: Callable[[str], str]) -> None:
    """The blown-up learning rate is noticed, and by the real rules in a real Prometheus an alert fires before the end."""
    program("prometheus")
    demo = start_demo("--steps", str(STEPS))
    said = run_to_its_end(demo)

    assert demo.process.returncode == 0, said
    assert re.search(r"anomalies: .*loss_spike \d+", said)
    assert re.search(r"alerts +http://127\.0\.0\.1:\d+/alerts", said)
    assert re.search(r"alert \w+: firing after \d+ s", said)


def test_ctrl_c_ends_everything_at_once(start_demo: Callable[..., Demo]) -> None:
    """In the middle of training: exit code 130 within seconds, no rank, exporter, Prometheus or directory left."""
    demo = start_demo("--steps", "5000")
    said = run_to_its_end(demo, lambda: demo.process.send_signal(signal.SIGINT), timeout_s=20)

    assert demo.process.returncode == 130
    assert "Interrupted" in said


def test_a_killed_rank_fails_the_demo_and_is_shown_as_lost(start_demo: Callable[..., Demo]) -> None:
    """SIGKILL in the middle of training: exit code 1, the rank lost, and the launcher's own words about it."""
    demo = start_demo("--steps", "5000", "--no-prometheus")

    def kill() -> None:
        flight = Path(demo.directory()) / "flight"  # the rank that is shown by now may be the other one
        wait_until(lambda: list(flight.glob("r1-*.flight")))
        demo.rank(1).kill()

    said = run_to_its_end(demo, kill)

    assert demo.process.returncode == 1
    assert re.search(r"rank 1: lost after \d+ steps", said)
    assert "The training failed with exit code 1." in said
    assert "Signal 9" in said
