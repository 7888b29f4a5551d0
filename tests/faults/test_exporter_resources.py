"""An exporter with little memory, on a full disk, or stopped: it goes on, and says what it left out."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import flights
from tests.cgroups import inside, memory_cgroup
from tests.exporters import EXPORTER, Caller, Program, start_program, state_on
from tests.faults.hostile_clients import HEAD, crowd
from tests.faults.test_flight_files import mounted
from tests.rank_files import Clock, File, live_rank, train
from tests.support import clean_environment, wait_until
from torchobs import catalog
from torchobs.catalog import Kind, Metric
from torchobs.exporter import daemon
from torchobs.exporter.config import ExporterConfig, PushConfig
from torchobs.flight import reader
from torchobs.flight.series import Scope
from torchobs.flight.value_blocks import USER
from torchobs.ranks import scanner as rank_scanner
from torchobs.ranks import snapshot
from torchobs.ranks.snapshot import MOST_SERIES, PUSH_BYTES, PUSHED_SERIES_BYTES, RESERVED_BYTES, series_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchobs.flight.writer import FlightWriter


LIMIT = 96 << 20
RANKS, SERIES = 48, 400
OPENMETRICS = "application/openmetrics-text"


def rank_with_many_series(directory: Path, rank: int) -> FlightWriter:
    """A living rank of an application that has put a path into an attribute."""
    writer = live_rank(directory, rank=rank)
    metric, scope = Metric("requests", Kind.GAUGE, "", "Requests by path."), Scope("application")
    for number in range(SERIES):
        cell = writer.table.open(metric, {"path": f"/{number:04}/{'x' * 60}"}, USER, scope=scope)
        assert cell is not None, number
        cell.set(number)
    train(writer, [1])
    return writer


def shows(program: Program, accept: str, line: str) -> bool:
    """Whether the page in that format has it."""
    return line in program.page(Accept=accept)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A small container's."""
    with memory_cgroup(LIMIT) as path:
        yield path


def test_a_small_container_is_enough_for_any_ranks(
    cgroup: Path, start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """19,000 series with long labels, 4,000 files that are none, a crowd, and bodies without end."""
    writers = [rank_with_many_series(flight_dir, rank) for rank in range(RANKS)]
    for number in range(4_000):
        os.close(os.open(flight_dir / f"r9-{number:032x}.flight", os.O_CREAT | os.O_WRONLY))
    port, log = free_port(), tmp_path / "log"
    argv = (*EXPORTER, "--web.listen-address", f"127.0.0.1:{port}")
    with log.open("w") as error:
        process = start(*inside(cgroup), *argv, "--flight-dir", flight_dir, stderr=error, env=clean_environment())
    program = Program(process, f"127.0.0.1:{port}", log)
    wait_until(lambda: process.poll() is None and program.is_ready(), timeout_s=60)
    with crowd(program.address) as slow:
        slow.come(300, HEAD + b"X-Slow: ")
        for step in (2, 3):
            for writer in writers:
                train(writer, [step])
            refused = Caller(program.address).ask("POST", "/stacks", b"x" * (1 << 20))
            assert refused.status in {401, 403, 413}
            for accept in ("text/plain", OPENMETRICS):
                newest = f'torchobs_steps_total{{job_name="gpt",rank="{RANKS - 1}",run_id="run-1"}} {step}'
                wait_until(partial(shows, program, accept, newest), timeout_s=60)
    assert sum(program.value("torchobs_rank_up", rank=str(rank)) or 0 for rank in range(RANKS)) == RANKS
    assert (program.value("torchobs_exporter_series_dropped_total", reason="total_limit") or 0) > 0
    assert process.poll() is None
    for writer in writers:
        writer.close()


@pytest.fixture
def files(flight_dir: Path) -> list[File]:
    """Three ranks."""
    return [File(flight_dir, seed=1 + rank, rank=rank).save() for rank in range(3)]


def test_beyond_the_limit_no_further_file_is_read(flight_dir: Path, files: list[File]) -> None:
    """It is counted as bad for want of memory, and served once there is room."""
    clock, one = Clock(0.1), reader.open_path(str(files[0].path))
    one.read()
    scanner = rank_scanner.Scanner(ExporterConfig(flight_dir=str(flight_dir)), clock, series_limit=one.size)
    one.close()
    snapshot = scanner.scan()
    (served,) = (rank.rank for rank in snapshot.ranks)
    assert (snapshot.errors["memory"], snapshot.files["bad"]) == (2, 2)
    assert [rank.rank for rank in scanner.scan().ranks] == [served]
    files[int(served)].path.unlink()
    clock.seconds = 6.0
    (now,) = (rank.rank for rank in scanner.scan().ranks)
    assert now != served
    scanner.close()


def test_the_limit_follows_from_the_memory() -> None:
    """By the formula of the documentation. Less than what is kept back is still the ranks' own series, and not none at all."""
    large, push = ExporterConfig(memory_limit=1 << 30), PushConfig()
    assert series_limit(large) == ((1 << 30) - RESERVED_BYTES) // snapshot.SERIES_BYTES
    assert series_limit(replace(large, push=push)) == ((1 << 30) - RESERVED_BYTES - PUSH_BYTES) // PUSHED_SERIES_BYTES
    assert series_limit(ExporterConfig(memory_limit=48 << 20)) == (8 << 20) // snapshot.SERIES_BYTES
    assert series_limit(ExporterConfig(memory_limit=1 << 50)) == MOST_SERIES


class Stopped:
    """Ends the service before it serves."""

    def __init__(self, *_: object) -> None:
        raise StopIteration


@pytest.mark.parametrize(("given", "page", "files"), [(10, 10, 54_000), (50_000, 50_000, 75_000), (None, 36_000, 54_000)])
def test_a_number_that_is_given_overrides_it(
    given: int | None, page: int, files: int, monkeypatch: pytest.MonkeyPatch, flight_dir: Path
) -> None:
    """A smaller one keeps no file from being read: it is the page's; a larger one holds for the files as well."""
    monkeypatch.setattr(snapshot, "series_limit", lambda _: 36_000)
    config = ExporterConfig(flight_dir=str(flight_dir), series_limit_total=given)
    limits: list[int] = []
    monkeypatch.setattr(daemon, "PageCache", lambda _, most: limits.append(most))
    monkeypatch.setattr(daemon, "Scanner", lambda _, series_limit: limits.append(series_limit))
    monkeypatch.setattr(daemon, "SnapshotCache", lambda _: None)
    monkeypatch.setattr(daemon, "Site", Stopped)
    with pytest.raises(StopIteration):
        daemon.serve(config)
    assert limits == [files, page]


def errors(program: Program, what: str) -> float:
    """How many writes of that failed."""
    return program.value("torchobs_exporter_write_errors_total", what=what) or 0


def test_a_full_disk_costs_no_scrape(
    start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """The log, the address for Prometheus, and commands on a full tmpfs."""
    full, port, socket = tmp_path / "full", free_port(), flight_dir / "api.sock"
    full.mkdir()
    writer = live_rank(flight_dir)
    train(writer, [1, 2, 3])
    prefix = mounted("size=64k", f'{{ cat /dev/zero > "{full}"/ballast 2> /dev/null || true; }}', full)
    arguments = ("--web.listen-address", f"127.0.0.1:{port}", "--flight-dir", flight_dir, "--api.socket", socket,
                 "--web.file-sd", full / "sd.json", "--control.dir", full / "control")  # fmt: skip
    logging = ("sh", "-c", f'exec "$@" 2> "{full}"/log', "sh")
    process = start(*prefix, *logging, *EXPORTER, *arguments, env=clean_environment())
    program = Program(process, f"127.0.0.1:{port}", tmp_path / "nothing")
    wait_until(lambda: process.poll() is None and program.is_ready(), timeout_s=60)
    wait_until(lambda: errors(program, "log") >= 1 and errors(program, "file_sd") >= 1)
    refused = Caller(socket).post("/debug/level/basic")
    assert (refused.status, "No space left" in refused.json["detail"]) == (503, True)
    wait_until(lambda: errors(program, "control") == 1)
    train(writer, [4])
    wait_until(lambda: program.value("torchobs_steps_total") == 4)
    assert program.value("torchobs_exporter_config_ok") == 0

    inside = Path(f"/proc/{process.pid}/root{full}")
    (inside / "ballast").unlink()
    wait_until((inside / "sd.json").exists)
    assert Caller(socket).post("/debug/level/basic").status == http.client.ACCEPTED
    wait_until(lambda: program.value("torchobs_exporter_config_ok") == 1)
    assert program.get().status == http.client.OK
    writer.close()


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


def test_a_stop_of_the_exporter_is_a_pause_and_nothing_else(
    start: Callable[..., subprocess.Popen[str]],
    rank: subprocess.Popen[str],
    flight_dir: Path,
    tmp_path: Path,
    free_port: Callable[[], int],
) -> None:
    """SIGSTOP and SIGCONT: its ranks train on, and it is up to date at once."""
    assert rank.pid
    program = start_program(start, tmp_path / "log", free_port(), "--flight-dir", str(flight_dir))
    wait_until(lambda: steps(program.page()) > 50, timeout_s=120)
    before = program.page()
    after = _page_after_a_stop(program, lambda: _written(flight_dir) > steps(before) + 20)
    assert steps(after) - steps(before) > 20, "it trained on"
    assert state_on(after) == "alive"
    late = values(after)
    assert not [key for key, value in values(before).items() if late.get(key, -1.0) < value]
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
