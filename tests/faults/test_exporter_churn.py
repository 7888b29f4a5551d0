"""A directory in which everything happens at once: no scrape fails, and no counter of a sound rank steps back."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.exporters import Service
from tests.rank_files import BOOT, Clock, File, live_rank, train
from tests.scanners import scanner_of
from tests.support import wait_until
from torchobs.exporter import daemon
from torchobs.exporter.config import ExporterConfig

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
            self._copy, self._garbage, self._truncate, self._scribble, self._remove, self._replace, self._odd_kind, self._lock,
        )  # fmt: skip
        try:
            # whoever opens a FIFO to write into it waits for a reader
            (self._remove if path.is_symlink() or (path.exists() and not path.is_file()) else self._random.choice(deeds))(path)
        except OSError:
            return  # it is something else by now
        self.acts += 1

    def _copy(self, path: Path) -> None:
        path.write_bytes(File(self._directory, rank=int(path.name[1:].split("-")[0]), seed=self._seed_of(path)).buffer)

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

    def _lock(self, path: Path) -> None:
        self._random.choice((Path.touch, Path.unlink, os.mkfifo))(path.with_suffix(".lock"))

    @staticmethod
    def _seed_of(path: Path) -> int:
        return int(path.stem.split("-")[1][:8], 16)


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


def test_the_rank_of_a_full_scan_is_not_crowded_out_by_garbage(flight_dir: Path) -> None:
    """Bad files are tried again, and the sound one is served whatever their number."""
    for number in range(500):
        (flight_dir / f"r{number}-{number:032x}.flight").touch()
    file = File(flight_dir, rank=0, seed=1, boot=BOOT).save().hold()
    clock = Clock(0.1)
    scanner = scanner_of(flight_dir, clock)
    snapshot = scanner.scan()
    assert (len(snapshot.ranks), snapshot.files["bad"], snapshot.errors["header"]) == (1, 500, 500)
    clock.seconds = 6.0
    assert len(scanner.scan().ranks) == 1
    file.release()
    scanner.close()
