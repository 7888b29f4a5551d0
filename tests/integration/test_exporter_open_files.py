"""The files that the exporter has open, lent to whoever wants more of them than a snapshot has."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.rank_files import BOOT, Clock, File
from torchobs.exporter.snapshot_cache import Scan, SnapshotCache
from torchobs.flight.format.layout import Region
from torchobs.ranks.scanner import Scanner


@pytest.fixture
def clock() -> Clock:
    """Ten seconds after the files are born."""
    return Clock(10.0)


def latest(scanner: Scan, incarnation: str, limit: int) -> list[int]:
    """The numbers of a rank's latest records."""
    with scanner.flight_file(incarnation) as file:
        return [record.seq for record in file.latest(limit)]


def test_the_latest_records_are_those_of_the_snapshot(flight_dir: Path, scanner: Scanner) -> None:
    """Oldest first, as many as asked for, also where the ring ends; what came after the scan is not among them."""
    file = File(flight_dir)
    incarnation = file.header.incarnation.hex()
    count = file.header.regions[Region.STEPS].count
    for number in range(1, 4):
        file.step(number, 9.0)
    file.save()
    scanner.scan()
    assert (latest(scanner, incarnation, 2), latest(scanner, incarnation, 100)) == ([2, 3], [1, 2, 3])
    for number in range(4, count + 3):
        file.step(number, 9.5)
        if number % 1000 == 0:
            file.writer.fold()
    file.save()
    assert latest(scanner, incarnation, 2) == [3]  # 2 was lapped
    scanner.scan()
    assert latest(scanner, incarnation, 5) == list(range(count - 2, count + 3))
    assert len(latest(scanner, incarnation, 10 * count)) == count


@pytest.mark.parametrize("boot", [BOOT, bytes(16)])
def test_the_file_of_a_dead_rank_is_opened_again(flight_dir: Path, scanner: Scanner, clock: Clock, boot: bytes) -> None:
    """The exporter lets go of it after ten seconds; one that is gone is an error that says so."""
    file = File(flight_dir, boot=boot)
    file.step(1, 1.0)
    file.writer.event("torchobs.run.start", {"launcher": "python"})
    file.save()
    clock.seconds = 60.0
    (rank,) = scanner.scan().ranks
    assert not rank.up
    assert latest(scanner, rank.incarnation, 5) == [1]
    with scanner.flight_file(rank.incarnation) as lent:
        assert [fields["name"] for _, fields in lent.events()] == ["torchobs.run.start"]
    file.path.unlink()
    with pytest.raises(FileNotFoundError):
        latest(scanner, rank.incarnation, 5)
    with pytest.raises(FileNotFoundError):
        latest(scanner, "0" * 32, 5)


def test_a_question_is_answered_in_the_thread_that_scans(flight_dir: Path, scanner: Scanner) -> None:
    """So that nobody reads a file while it is being read."""
    file = File(flight_dir).save()

    async def ask() -> list[int]:
        watch = SnapshotCache(scanner)
        await watch.fresh()
        found = await watch.ask(lambda scan: latest(scan, file.header.incarnation.hex(), 5))
        watch.close()
        watch._thread.shutdown()  # the fixture closes the scanner, too
        return found

    assert asyncio.run(ask()) == []
