"""An exporter whose directory is vandalised, whose clock jumps, with little memory, or on a full disk: it goes on."""

from __future__ import annotations

import http.client
import os
import random
import shutil
import subprocess
import threading
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cgroups import inside, memory_cgroup
from tests.exporters import EXPORTER, Caller, Client, Program, Service
from tests.faults.hostile_clients import HEAD, crowd
from tests.faults.test_flight_files import mounted
from tests.rank_files import BOOT, BORN_WALL_NS, Clock, File, live_rank, scanner_of, train
from tests.support import clean_environment, wait_until
from torchobs import catalog
from torchobs.catalog import Kind, Metric
from torchobs.exporter import daemon, text_format
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.exposition import Exposition
from torchobs.exporter.text_format import TEXT
from torchobs.flight import reader
from torchobs.flight.series import Scope
from torchobs.flight.value_blocks import USER
from torchobs.ranks import scanner as rank_scanner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchobs.flight.writer import FlightWriter
    from torchobs.ranks.scanner import Scanner
    from torchobs.ranks.snapshot import Snapshot


def steps(client: Client) -> float | None:
    """The steps of rank 0."""
    return client.value("torchobs_steps_total", rank="0")


def test_a_directory_that_is_made_again_is_followed(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted, a file in its place, made again by its rank: no scrape fails, and the rank goes on where it was."""
    monkeypatch.setattr(daemon, "TICK_S", 0.05)
    home = flight_dir / "run"
    home.mkdir(mode=0o700)
    writer = live_rank(home)
    train(writer, [1, 2, 3])

    def is_alive() -> bool:
        writer.heartbeat()
        writer.publish()
        return exporter.state() == "alive"

    with Service(ExporterConfig(flight_dir=str(home))) as exporter:
        assert steps(exporter) == 3
        shutil.rmtree(home)
        wait_until(lambda: exporter.value("torchobs_exporter_config_ok") == 0)
        home.write_text("a file")
        assert exporter.value("torchobs_exporter_config_ok") == 0
        home.unlink()
        writer.check_name()
        train(writer, [4])
        wait_until(lambda: steps(exporter) == 4)
        assert exporter.value("torchobs_exporter_config_ok") == 1
        wait_until(is_alive)
    writer.close()


CHURN_S = 3.0


class Vandal:
    """Does something to a directory of flight files, at random, again and again."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._random, self._spared = directory, random.Random(seed), set(directory.iterdir())
        self._sound = bytes(File(directory, rank=3, seed=3).buffer)
        self.acts = 0

    def act(self) -> None:
        """One deed."""
        number = self._random.randrange(2, 20)
        path = self._directory / f"r{number}-{number.to_bytes(4, 'big').hex() * 4}.flight"
        deeds: tuple[Callable[[Path], object], ...] = (
            self._garbage, self._truncate, self._scribble, self._remove, self._replace, self._odd_kind,
        )  # fmt: skip
        try:
            # whoever opens a FIFO to write into it waits for a reader
            (self._remove if path.is_symlink() or (path.exists() and not path.is_file()) else self._random.choice(deeds))(path)
        except OSError:
            return  # it is something else by now
        self.acts += 1

    def _garbage(self, path: Path) -> None:
        path.write_bytes(self._random.randbytes(self._random.choice((0, 1, 4096, 5000, 1 << 20))))

    def _truncate(self, path: Path) -> None:
        os.truncate(path, self._random.randrange(1 << 20))

    def _scribble(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(self._random.randrange(1 << 20))
            file.write(self._random.randbytes(64))

    def _remove(self, path: Path) -> None:
        path.rmdir() if path.is_dir() else path.unlink()

    def _replace(self, path: Path) -> None:
        other = path.with_suffix(".new")
        other.write_bytes(self._sound[: self._random.randrange(1 << 20)])
        other.rename(path)

    def _odd_kind(self, path: Path) -> None:
        self._random.choice((Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")))(path)


@pytest.fixture
def steady(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """A rank that trains all the while; returns how many steps it has written so far."""
    monkeypatch.setattr(daemon, "TICK_S", 0.1)
    writer, done, steps = live_rank(flight_dir), threading.Event(), [0]

    def work() -> None:
        while not done.wait(0.01):
            train(writer, [steps[0] + 1])
            steps[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    yield lambda: steps[0]
    done.set()
    thread.join()
    writer.close()


def test_no_scrape_fails_while_the_directory_is_vandalised(flight_dir: Path, steady: Callable[[], int]) -> None:
    """Files that appear, grow, shrink, vanish, are replaced, are no files: 200 each time, and the sound rank is exact."""
    vandal, done = Vandal(flight_dir, 1), threading.Event()

    def vandalise() -> None:
        while not done.is_set():
            vandal.act()
            time.sleep(0.0005)

    thread = threading.Thread(target=vandalise)
    with Service(ExporterConfig(flight_dir=str(flight_dir), mode="sidecar")) as exporter:
        thread.start()
        try:
            served = [0.0]

            def serves(least: int) -> bool:  # a page may be of a scan that had begun before: then the next one has them
                families = {family.name: family for family in text_string_to_metric_families(exporter.page())}
                (steps,) = (sample.value for sample in families["torchobs_steps"].samples if sample.labels["rank"] == "0")
                assert steps >= served[-1]
                served.append(steps)
                return steps >= least

            until = time.monotonic() + CHURN_S
            while time.monotonic() < until or len(served) < 7 or vandal.acts <= 100:
                wait_until(partial(serves, steady()), interval_s=0.11)
        finally:
            done.set()
            thread.join()


DAY_S = 86_400.0
GRACE_S = 300.0


@pytest.fixture
def late_clock() -> Clock:
    """The exporter's."""
    return Clock(1.0)


@pytest.fixture
def grace_scanner(flight_dir: Path, late_clock: Clock) -> Iterator[Scanner]:
    """Of the flight directory."""
    with closing(scanner_of(flight_dir, late_clock, grace_s=GRACE_S)) as scanner:
        yield scanner


@pytest.fixture
def ranks(flight_dir: Path) -> Iterator[tuple[File, File]]:
    """One that trains, and one that is dead."""
    files = File(flight_dir), File(flight_dir, rank=1, seed=2)
    for file in files:
        file.set(catalog.CHECKPOINT_DURATION, 0.5)
        file.step(1, 0.5)
        file.beat(0.9)
        file.save()
    yield files[0].hold(), files[1]
    files[0].release()


def samples(snapshot: Snapshot) -> dict[tuple[str, str], float]:
    """What a page of it says, by name and labels."""
    style = TEXT
    page = b"".join(text_format.pieces(style, b"", Exposition().families(ScrapeInput(snapshot), style)))
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name != "torchobs_exporter_scan_duration_seconds"
    }


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_neither_page_nor_grace_are_another_after_a_jump(
    grace_scanner: Scanner, ranks: tuple[File, File], late_clock: Clock, jump_s: float
) -> None:
    """Every age, duration and timestamp, of the living and of the dead, who is there to the end of its grace, not longer."""
    grace_scanner.scan()
    late_clock.seconds = 2.0
    before = samples(grace_scanner.scan())
    late_clock.wall_jump_s = jump_s
    after = samples(grace_scanner.scan())
    assert after == before
    assert min(after.values()) >= 0
    born_s = BORN_WALL_NS / 1e9
    moments = {name: value for (name, _), value in after.items() if name.endswith("_timestamp_seconds")}
    assert len(moments) >= 2
    assert all(born_s <= value <= born_s + 2 for value in moments.values()), moments
    for seconds, served in ((GRACE_S - 1, ["0", "1"]), (GRACE_S + 1, ["0"])):
        late_clock.seconds = seconds
        ranks[0].beat(seconds)
        ranks[0].save()
        assert [rank.rank for rank in grace_scanner.scan().ranks] == served


@pytest.mark.parametrize(("jump_s", "shown_s"), [(DAY_S, 0.0), (-DAY_S, GRACE_S)])
def test_what_an_earlier_boot_left_does_not_stay_for_ever(
    grace_scanner: Scanner, flight_dir: Path, late_clock: Clock, jump_s: float, shown_s: float
) -> None:
    """Only the wall clock shows how old it is: ahead it is over, behind (it is of tomorrow then) its grace begins now."""
    File(flight_dir, boot=BOOT[::-1]).save()
    late_clock.wall_jump_s = jump_s
    begun = late_clock.seconds
    assert len(grace_scanner.scan().ranks) == (1 if shown_s else 0)
    late_clock.seconds = begun + shown_s - 1
    assert len(grace_scanner.scan().ranks) == (1 if shown_s else 0)
    late_clock.seconds = begun + shown_s + 1
    assert not grace_scanner.scan().ranks


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
def three_files(flight_dir: Path) -> list[File]:
    """Three ranks."""
    return [File(flight_dir, seed=1 + rank, rank=rank).save() for rank in range(3)]


def test_beyond_the_limit_no_further_file_is_read(flight_dir: Path, three_files: list[File]) -> None:
    """It is counted as bad for want of memory, and served once there is room."""
    clock, first = Clock(0.1), reader.open_path(str(three_files[0].path))
    first.read()
    scanner = rank_scanner.Scanner(ExporterConfig(flight_dir=str(flight_dir)), clock, series_limit=first.size)
    first.close()
    snapshot = scanner.scan()
    (served,) = (rank.rank for rank in snapshot.ranks)
    assert (snapshot.errors["memory"], snapshot.files["bad"]) == (2, 2)
    assert [rank.rank for rank in scanner.scan().ranks] == [served]
    three_files[int(served)].path.unlink()
    clock.seconds = 6.0
    (now,) = (rank.rank for rank in scanner.scan().ranks)
    assert now != served
    scanner.close()


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
