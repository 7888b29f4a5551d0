"""Evidence: names, ids, and what an exporter opens of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests import flights
from torchobs.flight.files import artifacts
from torchobs.flight.files.artifacts import KINDS, LIMITS, PROFILE, STACKS, STUCK, NoEvidenceError, named, parse
from torchobs.flight.files.cleanup import STALE_S, clean
from torchobs.flight.files.create import file_name, lock_name
from torchobs.flight.files.location import open_place

if TYPE_CHECKING:
    from pathlib import Path

FLIGHT = f"r7-{'ab' * 16}.flight"


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_says_whose_it_is(kind: str) -> None:
    """And is found again from what it says."""
    made = named(FLIGHT, kind, 12)
    assert parse(made.name) == made
    assert (made.flight, made.rank, made.incarnation, made.kind, made.number) == (FLIGHT, "7", "ab" * 16, kind, 12)
    assert len(made.id) == 16


@pytest.mark.parametrize(
    "name",
    ["", FLIGHT, f"r7-{'ab' * 16}.stacks-12.json.gz", f"r7-{'ab' * 16}.stacks-.txt", f"r7-{'AB' * 16}.stacks-1.txt",
     f"../r7-{'ab' * 16}.stacks-1.txt", f"r7-{'ab' * 16}.stacks-1.txt\n", f"r7-{'ab' * 16}.passwd-1.txt"],
)  # fmt: skip
def test_other_names_are_no_evidence(name: str) -> None:
    """Whatever they look like."""
    assert parse(name) is None


def test_only_a_regular_file_of_the_right_owner_and_size_is_opened(flight_dir: Path, directory_fd: int) -> None:
    """No link, no FIFO (which would hold the opener), nothing empty, nothing too large, nothing of another user."""
    one = named(FLIGHT, STACKS, 1)
    path = flight_dir / one.name
    (flight_dir / "secret").write_text("secret")

    def refused(owner: int | None = None) -> bool:
        try:
            artifacts.look(directory_fd, one, owner)
        except OSError:
            with pytest.raises(OSError):  # noqa: PT011  # ELOOP, ENOENT, NoEvidenceError: none is opened
                artifacts.open_checked(directory_fd, one, owner)
            return True
        fd, size = artifacts.open_checked(directory_fd, one, owner)
        os.close(fd)
        assert size == path.stat().st_size
        return False

    assert refused()
    path.symlink_to(flight_dir / "secret")
    assert refused()
    path.unlink()
    path.hardlink_to(flight_dir / "secret")
    assert refused()
    path.unlink()
    os.mkfifo(path)
    assert refused()
    path.unlink()
    path.touch()
    assert refused()
    os.truncate(path, LIMITS[STACKS] + 1)
    assert refused()
    path.write_text("stacks")
    assert refused(os.getuid() + 1)
    assert not refused(os.getuid())


def test_a_rank_keeps_its_newest(flight_dir: Path) -> None:
    """Of each kind by itself, and nothing of another rank's is touched."""
    place = open_place(str(flight_dir), None)
    other = named(f"r8-{'cd' * 16}.flight", PROFILE, 1)
    for one in [other, *(named(FLIGHT, PROFILE, number) for number in (3, 10, 20)), named(FLIGHT, STUCK, 0)]:
        with artifacts.new(place, one):
            pass
    assert sorted(one.number for one in artifacts.names(place.fd) if one.flight == FLIGHT) == [0, 10, 20]
    assert other in artifacts.names(place.fd)
    assert not list(flight_dir.glob(".tmp*"))
    os.close(place.fd)


def test_evidence_goes_with_its_flight_file(flight_dir: Path, directory_fd: int) -> None:
    """What is left without one goes after an hour."""
    header = flights.header()
    (flight_dir / file_name(header)).write_bytes(bytes(header.file_size))
    (flight_dir / lock_name(file_name(header))).touch()
    beside, lone, new = named(file_name(header), STACKS, 1), named(FLIGHT, STACKS, 2), named(FLIGHT, STACKS, 3)
    for one in (beside, lone, new):
        (flight_dir / one.name).write_text("x")
    for name in (file_name(header), beside.name, lone.name):
        os.utime(flight_dir / name, (1.0, 1.0))
    removed = clean(directory_fd, now=1, min_age_s=STALE_S)
    assert sorted(removed) == sorted([file_name(header), beside.name, lone.name])
    assert [path.name for path in flight_dir.iterdir()] == [new.name]


def test_what_is_wrong_with_it_is_an_os_error() -> None:
    """So that whoever serves it has one thing to catch."""
    assert issubclass(NoEvidenceError, OSError)
