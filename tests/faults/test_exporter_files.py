"""The flight directory under the exporter's hands: deleted, replaced, shut, vandalised; a clock that jumps."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.exporters import Client, Service
from tests.rank_files import BOOT, BORN_WALL_NS, Clock, File, live_rank, scanner_of, train
from tests.support import wait_until
from torchobs import catalog
from torchobs.exporter import daemon, text_format
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.exposition import Exposition
from torchobs.exporter.text_format import Style

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchobs.ranks.scanner import Scanner
    from torchobs.ranks.snapshot import Snapshot


@pytest.fixture
def clock() -> Clock:
    """Just after the files' birth."""
    return Clock(0.1)


@pytest.fixture
def file(flight_dir: Path) -> Iterator[File]:
    """A living rank's, after one step."""
    made = File(flight_dir)
    made.step(1, 0.05)
    made.writer.fold()
    yield made.save().hold()
    made.release()


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
                (steps,) = (one.value for one in families["torchobs_steps"].samples if one.labels["rank"] == "0")
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
JUMPS = pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
GRACE_S = 300.0


@pytest.fixture
def late_clock() -> Clock:
    """The exporter's."""
    return Clock(1.0)


@pytest.fixture
def grace_scanner(flight_dir: Path, late_clock: Clock) -> Iterator[Scanner]:
    """Of the flight directory."""
    with closing(scanner_of(flight_dir, late_clock, grace_s=GRACE_S)) as made:
        yield made


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
    style = Style(openmetrics=False)
    page = b"".join(text_format.pieces(style, b"", Exposition().families(ScrapeInput(snapshot), style)))
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name != "torchobs_exporter_scan_duration_seconds"
    }


@JUMPS
def test_a_page_is_the_same_after_a_jump(
    grace_scanner: Scanner, ranks: tuple[File, File], late_clock: Clock, jump_s: float
) -> None:
    """Every age, duration and timestamp, of the living and of the dead; none is below zero."""
    assert ranks
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


@JUMPS
def test_a_grace_is_as_long_as_it_was(
    grace_scanner: Scanner, ranks: tuple[File, File], late_clock: Clock, jump_s: float
) -> None:
    """A rank that is dead when the clock jumps is there to the end of its grace, and not longer."""
    living, _ = ranks

    def served() -> list[str]:
        living.beat(late_clock.seconds)
        living.save()
        return [rank.rank for rank in grace_scanner.scan().ranks]

    assert served() == ["0", "1"]
    late_clock.wall_jump_s = jump_s
    late_clock.seconds = GRACE_S - 1
    assert served() == ["0", "1"]
    late_clock.seconds = GRACE_S + 1
    assert served() == ["0"]


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
