"""The demo to its end, as `make demo` runs it, and the example that it trains: its own figures are right."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests import fork_server
from tests.support import wait_until

pytestmark = pytest.mark.timeout(200)  # the demo itself may take nearly two minutes

STEPS = 80  # a baseline for the loss, then the learning rate is blown up at step 48
SMALL = ("--layers", "2", "--width", "64", "--batch-size", "8", "--characters", "200000")
MARK = "DEMO_OF_THIS_TEST"


@dataclass(frozen=True, slots=True)
class Demo:
    """A running demo, found again by a mark in the environment that its children inherit."""

    process: subprocess.Popen[str]
    log: Path
    mark: str

    @property
    def output(self) -> str:
        """Its output so far."""
        return self.log.read_text()

    @property
    def page(self) -> str:
        """The live page's address, once it is printed; nothing is printed before it."""
        first = self.output.partition("\n")[0] if "\n" in self.output else ""
        return first.removeprefix("Live page: ").strip() if first.startswith("Live page: http://") else ""

    def children(self) -> list[psutil.Process]:
        """Every process that it has started."""
        running = psutil.process_iter(["environ", "pid"])
        marked = [process for process in running if (process.info["environ"] or {}).get(MARK) == self.mark]
        return [process for process in marked if process.pid != self.process.pid]

    def directory(self) -> str:
        """The private directory that it has made; empty before it has started the ranks."""
        found = (child.info["environ"].get("TORCHOBS_DIR") for child in self.children())
        return next((str(Path(flight_dir).parent) for flight_dir in found if flight_dir), "")


def nothing_left_of(demo: Demo, directory: str) -> bool:
    """Whether every process is gone, and so is the directory."""
    arguments = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return not demo.children() and not Path(directory).exists() and not any(directory in line for line in arguments)


@pytest.fixture
def start_demo(checkout: Path, start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    """Start the demo from the checkout, as `make demo` does; a failed test's demo is ended in order, so that its parts are."""
    started: list[Demo] = []

    def start_demo(*options: str, path: str = os.environ["PATH"], terminal: int | None = None) -> Demo:
        mark, output = uuid.uuid4().hex, tmp_path / "demo.log"
        environment = {**os.environ, "PATH": path, MARK: mark}
        argv = [sys.executable, "-m", "examples.demo", *options]
        with output.open("w") as log:
            stdin, stdout = (subprocess.DEVNULL, log) if terminal is None else (terminal, terminal)
            if terminal is not None:
                environment.pop("CI", None)
            process = start(*argv, cwd=checkout, env=environment, stdin=stdin, stdout=stdout)
        started.append(Demo(process, output, mark))
        return started[-1]

    yield start_demo
    for demo in started:
        demo.process.terminate()
        demo.process.wait(timeout=30)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[int]:
    """A terminal for the demo, whose output goes to the demo's log."""
    ours, theirs = pty.openpty()

    def copy() -> None:
        with contextlib.suppress(OSError):  # what Linux raises once nobody holds the other end
            while part := os.read(ours, 65536):
                with (tmp_path / "demo.log").open("ab") as log:
                    log.write(part)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    yield theirs
    os.close(theirs)
    thread.join(timeout=10)
    os.close(ours)


def fetch(url: str) -> str:
    """Read a page."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def run_to_its_end(demo: Demo, disturb: Callable[[], object] = lambda: None, timeout_s: float = 120.0) -> str:
    """Disturb a demo once its ranks are shown, see that it ends and leaves nothing behind, and return its output."""
    directory = wait_until(demo.directory, timeout_s=30)
    # on a fast machine a few steps are over before anybody looks
    wait_until(lambda: re.search("alive|finished", demo.output) or demo.process.poll() is not None, timeout_s=70)
    disturb()
    demo.process.wait(timeout_s)
    wait_until(lambda: nothing_left_of(demo, directory))
    return demo.output


def test_on_a_terminal_the_shipped_alert_fires_and_the_page_is_there_from_before_the_training_until_ctrl_c(
    start_demo: Callable[..., Demo], program: Callable[[str], str], terminal: int
) -> None:
    """By the real rules in a real Prometheus; the page's address is printed first, and in the end it has the finished ranks."""
    program("prometheus")
    demo = start_demo("--steps", str(STEPS), *SMALL, terminal=terminal)
    page = wait_until(lambda: demo.page, timeout_s=60)
    assert "<html" in fetch(page)
    assert "What torchobs saw" not in demo.output

    def leave() -> None:
        wait_until(lambda: "stays open until Ctrl-C" in demo.output or demo.process.poll() is not None, timeout_s=100)
        metrics = fetch(f"{page}metrics")
        for rank in (0, 1):
            assert re.search(rf'torchobs_rank_state\{{[^}}]*rank="{rank}"[^}}]*state="finished"[^}}]*\}} 1', metrics)
        demo.process.send_signal(signal.SIGINT)

    output = run_to_its_end(demo, leave, timeout_s=20)
    assert demo.process.returncode == 0, output
    for rank in (0, 1):
        assert f"rank {rank}: finished after {STEPS} steps, last loss" in output
    assert re.search(r"anomalies: .*loss_spike \d+", output)
    assert re.search(r"alerts: +http://127\.0\.0\.1:\d+/alerts", output)
    assert re.search(r"alert \w+: firing after \d+ s", output)


def test_ctrl_c_ends_everything_at_once(start_demo: Callable[..., Demo]) -> None:
    """In the middle of training: exit code 130 within seconds, no rank, exporter or directory left.

    Without a Prometheus it says how to get one.
    """
    demo = start_demo("--steps", "5000", *SMALL, path=str(Path(sys.executable).parent))
    output = run_to_its_end(demo, lambda: demo.process.send_signal(signal.SIGINT), timeout_s=20)

    assert demo.process.returncode == 130
    assert "Interrupted" in output
    assert "No `prometheus` on PATH" in output
    assert "apt-get install prometheus" in output


PHASES = ["data", "forward", "backward", "optimizer"]
TINY = [
    *("--layers", "1", "--heads", "2", "--width", "32", "--block-size", "32", "--characters", "100000"),
    *("--threads", "1", "--device", "cpu", "--sample", "20", "--workers", "1", "--precision", "bf16"),
]


def test_training_lowers_the_loss_and_every_step_is_accounted_for(checkout: Path, tmp_path: Path) -> None:
    """One line of timings per step, with the loss that is printed; validation agrees; the model writes at the end.

    In bf16, with a worker process for the data.
    """
    timings = tmp_path / "timings.jsonl"
    chosen = ("--steps", "60", "--batch-size", "16", "--log-every", "30", "--eval-every", "60", "--timings", str(timings))
    argv = [sys.executable, "-W", "error", str(checkout / "examples/char_gpt.py"), *TINY, *chosen]
    ended = fork_server.run(argv, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    printed, lines = ended.stdout, [json.loads(line) for line in timings.read_text().splitlines()]

    assert [line["step"] for line in lines] == list(range(1, 61))
    assert lines[0]["loss"] == pytest.approx(math.log(128), rel=0.05)  # at first every character is equally likely
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert all(0 < line[phase] < 5 for line in lines for phase in PHASES)
    steps = [line.split() for line in printed.splitlines() if "gradient norm" in line]
    assert [(int(words[1]), float(words[3])) for words in steps] == [
        (step, round(lines[step - 1]["loss"], 4)) for step in (30, 60)
    ]
    (validation,) = [line for line in printed.splitlines() if "validation" in line]
    assert float(validation.split()[-1]) == pytest.approx(lines[-1]["loss"], rel=0.2)
    assert "def " in printed
