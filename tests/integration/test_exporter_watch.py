"""One thread scans, however many ask; and nobody waits for ever."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from tests.support import wait_until
from torchobs.exporter.scan import EMPTY, Snapshot, system_clock
from torchobs.exporter.watch import Watch
from torchobs.flight.reader import FlightFile


class Scanner:
    """Takes snapshots that only have a number, and as long as a test wants."""

    def __init__(self) -> None:
        self.scans = 0
        self.closed = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.fails = False

    def scan(self) -> Snapshot:
        """Count, wait, fail as told."""
        self.scans += 1
        taken_ns = system_clock().monotonic_ns
        assert self.answers.wait(10)
        if self.fails:
            raise ZeroDivisionError("a fault of ours")
        return replace(EMPTY, number=self.scans, taken_ns=taken_ns)

    def flight_file(self, incarnation: str) -> AbstractContextManager[FlightFile]:
        """It has none."""
        raise FileNotFoundError(incarnation)

    def close(self) -> None:
        """Note it."""
        self.closed.set()


@pytest.fixture
def scanner() -> Iterator[Scanner]:
    """A scanner that a test may keep waiting, and that never waits after it."""
    made = Scanner()
    yield made
    made.answers.set()


def test_scrapes_that_come_together_share_a_scan(scanner: Scanner) -> None:
    """A hundred at once, and those of the next 100 ms."""

    async def ask() -> set[int]:
        watch = Watch(scanner)
        got = await asyncio.gather(*(watch.fresh() for _ in range(100)))
        got.append(await watch.fresh())
        await asyncio.sleep(0.11)
        got.append(await watch.fresh())
        watch.close()
        return {snapshot.number for snapshot in got}

    assert asyncio.run(ask()) == {1, 2}
    assert scanner.scans == 2


def test_a_directory_that_does_not_answer_costs_a_scrape_its_deadline(scanner: Scanner) -> None:
    """It gets the last snapshot then; every one that gave up is counted; no second scan is started beside the first."""

    async def ask() -> tuple[list[int], list[int], int, int]:
        watch = Watch(scanner)
        await watch.fresh()
        scanner.answers.clear()
        began = asyncio.get_running_loop().time()
        stale = await asyncio.gather(*(watch.fresh(0.0, 0.05) for _ in range(5)))
        took_s = asyncio.get_running_loop().time() - began
        assert 0.05 <= took_s < 1.0
        during = scanner.scans
        scanner.answers.set()
        fresh = [await watch.fresh(0.0, 5.0)]
        watch.close()
        return [one.number for one in stale], [one.number for one in fresh], watch.timeouts, during

    assert asyncio.run(ask()) == ([1] * 5, [2], 5, 2)


def test_a_scan_that_fails_is_logged_and_the_last_snapshot_served(scanner: Scanner, caplog: pytest.LogCaptureFixture) -> None:
    """A fault of ours costs no scrape, and does not stop the next scan."""

    async def ask() -> list[int]:
        watch = Watch(scanner)
        numbers = []
        for fails in (False, True, True, False):
            scanner.fails = fails
            numbers.append((await watch.fresh(0.0)).number)
        watch.close()
        return numbers

    assert asyncio.run(ask()) == [1, 1, 1, 4]
    assert [record.getMessage() for record in caplog.records] == [
        "a scan failed, the last snapshot is served: ZeroDivisionError('a fault of ours')"
    ] * 2


def test_the_final_snapshot_is_taken_after_it_was_asked_for(scanner: Scanner) -> None:
    """A scan that is under way may have read a rank before its last step."""

    async def ask() -> int:
        watch = Watch(scanner)
        scanner.answers.clear()
        early = asyncio.ensure_future(watch.fresh())
        await asyncio.sleep(0.05)
        final = asyncio.ensure_future(watch.after_now())
        await asyncio.sleep(0.05)
        scanner.answers.set()
        await early
        number = (await final).number
        watch.close()
        return number

    assert asyncio.run(ask()) == 2


def test_closing_lets_go_of_the_files(scanner: Scanner) -> None:
    """In the thread that uses them."""

    async def close() -> None:
        Watch(scanner).close()

    asyncio.run(close())
    wait_until(scanner.closed.is_set)
