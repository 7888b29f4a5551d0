"""An exporter with the memory of a small container: what does not fit is left out and counted, and the kernel kills nobody."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.api import Caller
from tests.cgroups import inside, memory_cgroup
from tests.exporters import EXPORTER, Program
from tests.faults.hostile_clients import HEAD, crowd
from tests.rank_files import Clock, File, live_rank, train
from tests.support import clean_environment, wait_until
from torchobs.catalog import Kind, Metric
from torchobs.exporter import daemon
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.otlp.options import PushConfig
from torchobs.flight.format.series import Scope
from torchobs.flight.reader import reader
from torchobs.flight.writer.series_table import USER
from torchobs.ranks import memory_budget
from torchobs.ranks import scanner as rank_scanner
from torchobs.ranks.memory_budget import MOST, PUSH, PUSHED_SERIES, RESERVED, derived

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torchobs.flight.writer.writer import FlightWriter

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


def test_new_files_are_opened_some_at_a_time(flight_dir: Path, files: list[File], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come, no scan takes longer than it may; at the end all are there."""
    monkeypatch.setattr(rank_scanner, "OPENING_S", 0.0)
    scanner = rank_scanner.Scanner(ExporterConfig(flight_dir=str(flight_dir)), Clock(0.1))
    assert [len(scanner.scan().ranks) for _ in files] == [1, 2, 3]
    scanner.close()


def test_the_limit_follows_from_the_memory() -> None:
    """By the formula of the documentation. Less than what is kept back is still the ranks' own series, and not none at all."""
    large, push = ExporterConfig(memory_limit=1 << 30), PushConfig()
    assert derived(large) == ((1 << 30) - RESERVED) // memory_budget.SERIES
    assert derived(replace(large, push=push)) == ((1 << 30) - RESERVED - PUSH) // PUSHED_SERIES
    assert derived(ExporterConfig(memory_limit=48 << 20)) == (8 << 20) // memory_budget.SERIES
    assert derived(ExporterConfig(memory_limit=1 << 50)) == MOST


def test_a_container_s_own_limit_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another one is given; where there is none there is the limit of any page."""
    monkeypatch.setattr(memory_budget, "cgroup_limit", lambda: 128 << 20)
    assert derived(ExporterConfig()) == (80 << 20) // memory_budget.SERIES
    assert derived(ExporterConfig(memory_limit=1 << 30)) == ((1 << 30) - RESERVED) // memory_budget.SERIES
    monkeypatch.setattr(memory_budget, "cgroup_limit", lambda: None)
    assert derived(ExporterConfig()) == MOST


class Stopped:
    """Ends the service before it serves."""

    def __init__(self, *_: object) -> None:
        raise StopIteration


@pytest.mark.parametrize(("given", "page", "files"), [(10, 10, 54_000), (50_000, 50_000, 75_000), (None, 36_000, 54_000)])
def test_a_number_that_is_given_overrides_it(
    given: int | None, page: int, files: int, monkeypatch: pytest.MonkeyPatch, flight_dir: Path
) -> None:
    """A smaller one keeps no file from being read: it is the page's; a larger one holds for the files as well."""
    monkeypatch.setattr(memory_budget, "derived", lambda _: 36_000)
    config = ExporterConfig(flight_dir=str(flight_dir), series_limit_total=given)
    limits: list[int] = []
    monkeypatch.setattr(daemon, "PageCache", lambda _, most: limits.append(most))
    monkeypatch.setattr(daemon, "Scanner", lambda _, series_limit: limits.append(series_limit))
    monkeypatch.setattr(daemon, "SnapshotCache", lambda _: None)
    monkeypatch.setattr(daemon, "Site", Stopped)
    with pytest.raises(StopIteration):
        daemon.serve(config)
    assert limits == [files, page]
