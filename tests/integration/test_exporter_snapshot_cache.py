"""One thread scans, however many ask; and nobody waits for ever."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest

from tests.rank_files import Clock
from tests.support import wait_until
from torchobs.exporter.snapshot_cache import SnapshotCache
from torchobs.flight.reader import FlightFile
from torchobs.ranks.rank_file import Now
from torchobs.ranks.scanner import system_clock
from torchobs.ranks.snapshot import EMPTY, Snapshot


class Scanner:
    """Takes snapshots that only have a number, and as long as a test wants."""

    def __init__(self) -> None:
        self.scans = 0
        self.closed = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.fails = False
        self.clock: Callable[[], Now] = system_clock

    def scan(self) -> Snapshot:
        """Count, wait, fail as told."""
        self.scans += 1
        taken_ns = self.clock().monotonic_ns
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
    scanner.clock = clock = Clock()

    async def ask() -> set[int]:
        watch = SnapshotCache(scanner, clock)
        got = await asyncio.gather(*(watch.fresh(deadline_s=30.0) for _ in range(100)))
        clock.seconds += 0.1
        got.append(await watch.fresh(deadline_s=30.0))
        clock.seconds += 0.01
        got.append(await watch.fresh(deadline_s=30.0))
        watch.close()
        return {snapshot.number for snapshot in got}

    assert asyncio.run(ask()) == {1, 2}
    assert scanner.scans == 2


def test_a_directory_that_does_not_answer_costs_a_scrape_its_deadline(scanner: Scanner) -> None:
    """It gets the last snapshot then; every one that gave up is counted; no second scan is started beside the first."""

    async def ask() -> tuple[list[int], list[int], int, int]:
        watch = SnapshotCache(scanner)
        await watch.fresh(deadline_s=30.0)
        scanner.answers.clear()

        async def scrape() -> Snapshot:
            got = await watch.fresh(0.0, 0.05)
            assert not late.done()
            return got

        began = asyncio.get_running_loop().time()
        scrapes = [asyncio.ensure_future(scrape()) for _ in range(5)]
        late = asyncio.ensure_future(asyncio.sleep(1.0))  # later, however late the loop is
        stale = await asyncio.gather(*scrapes)
        late.cancel()
        assert asyncio.get_running_loop().time() - began >= 0.05
        wait_until(lambda: scanner.scans > 1)
        during = scanner.scans
        scanner.answers.set()
        fresh = [await watch.fresh(0.0, 30.0)]
        watch.close()
        return [one.number for one in stale], [one.number for one in fresh], watch.timeouts, during

    assert asyncio.run(ask()) == ([1] * 5, [2], 5, 2)


def test_a_scan_that_fails_is_logged_and_the_last_snapshot_served(scanner: Scanner, caplog: pytest.LogCaptureFixture) -> None:
    """A fault of ours costs no scrape, and does not stop the next scan."""

    async def ask() -> list[int]:
        watch = SnapshotCache(scanner)
        numbers = []
        for fails in (False, True, True, False):
            scanner.fails = fails
            numbers.append((await watch.fresh(0.0, 30.0)).number)
        watch.close()
        return numbers

    assert asyncio.run(ask()) == [1, 1, 1, 4]
    assert [record.getMessage() for record in caplog.records] == [
        "a scan failed, the last snapshot is served: ZeroDivisionError('a fault of ours')"
    ] * 2


def test_the_final_snapshot_is_taken_after_it_was_asked_for(scanner: Scanner) -> None:
    """A scan that is under way may have read a rank before its last step."""

    async def ask() -> int:
        watch = SnapshotCache(scanner)
        scanner.answers.clear()
        early = asyncio.ensure_future(watch.fresh(deadline_s=30.0))
        await asyncio.sleep(0.05)
        final = asyncio.ensure_future(watch.after_now(30.0))
        await asyncio.sleep(0.05)
        scanner.answers.set()
        await early
        number = (await final).number
        watch.close()
        return number

    assert asyncio.run(ask()) == 2
