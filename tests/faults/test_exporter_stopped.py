"""An exporter that is stopped, and a rank that is: each goes on afterwards as if nothing had been."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import flights
from tests.exporters import Program, start_program, state_on
from tests.support import clean_environment, wait_until
from torchobs import catalog
from torchobs.flight.reader import reader

STOPPED_S = 2.5
ANSWER_S = 5.0


@pytest.fixture
def rank(start: Callable[..., subprocess.Popen[str]], flight_dir: Path) -> subprocess.Popen[str]:
    """A training with everything on, a step every 10 ms."""
    return start(
        sys.executable, "-m", "tests.stuck_rank", str(flight_dir), torch=True, stdin=subprocess.PIPE, env=clean_environment()
    )


def values(page: str) -> dict[tuple[str, str], float]:
    """What only grows on a page, by name and labels."""
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        if family.type in {"counter", "histogram"} and not family.name.startswith(("python", "process"))
        for sample in family.samples
        if sample.name.endswith(("_total", "_bucket", "_count"))
    }


def steps(page: str) -> float:
    """The steps of rank 0."""
    return next((value for (name, _), value in values(page).items() if name == "torchobs_steps_total"), 0.0)


def test_a_stop_of_either_is_a_pause_and_nothing_else(
    start: Callable[..., subprocess.Popen[str]],
    rank: subprocess.Popen[str],
    flight_dir: Path,
    tmp_path: Path,
    free_port: Callable[[], int],
) -> None:
    """SIGSTOP and SIGCONT: of the exporter, whose ranks train on and which is up to date at once; of a rank, which is back."""
    program = start_program(start, tmp_path / "log", free_port(), "--flight-dir", str(flight_dir))
    wait_until(lambda: steps(program.page()) > 50, timeout_s=120)
    before = program.page()
    after = _page_after_a_stop(program, lambda: _written(flight_dir) > steps(before) + 20)
    assert steps(after) - steps(before) > 20, "it trained on"
    assert state_on(after) == "alive"
    _only_grows(before, after)

    states = _states_of_a_stop(program, rank)
    assert states == ["alive", "unresponsive", "alive"]
    wait_until(lambda: steps(program.page()) > steps(after))
    last = program.page()
    _only_grows(after, last)
    assert not [key for key, value in values(last).items() if key[0] == "torchobs_anomalies_total" and value], "a pause is none"
    assert "warn" not in program.log


def _written(flight_dir: Path) -> float:
    """The steps of the rank by its own file."""
    (path,) = flight_dir.glob("*.flight")
    with closing(reader.open_path(str(path))) as file:
        return flights.whole(flights.value(file.read(), catalog.STEPS))


def _page_after_a_stop(program: Program, trained: Callable[[], bool]) -> str:
    """The first page after the exporter was stopped, which was asked for meanwhile."""
    program.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(program.page)
        time.sleep(STOPPED_S)
        try:
            wait_until(trained)
        finally:
            program.process.send_signal(signal.SIGCONT)
        return asked.result(ANSWER_S)


def _states_of_a_stop(program: Program, rank: subprocess.Popen[str]) -> list[str]:
    """The states that a rank goes through, from before it is stopped until it is itself again."""
    wait_until(lambda: program.state() == "alive")
    seen = ["alive"]
    rank.send_signal(signal.SIGSTOP)
    stopped, resumed = time.monotonic() + STOPPED_S, False

    def is_back() -> bool:
        nonlocal resumed
        if (state := program.state()) != seen[-1]:
            seen.append(state)
        if not resumed and state == "unresponsive" and time.monotonic() > stopped:
            rank.send_signal(signal.SIGCONT)
            resumed = True
        return resumed and state == "alive"

    wait_until(is_back)
    return seen


def _only_grows(before: str, after: str) -> None:
    late, early = values(after), values(before)
    assert not [key for key, value in early.items() if late.get(key, -1.0) < value]
