"""Commands to a rank: written whole, read once, and never anybody's else."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_bytes

import pytest

from torchobs.flight.files import control
from torchobs.flight.files.control import Command, ControlReader, write_command

TARGET = token_bytes(16)


@pytest.fixture
def reader(flight_dir: Path) -> Iterator[ControlReader]:
    """The rank's side."""
    made = ControlReader(str(flight_dir), TARGET)
    yield made
    made.close()


def path(flight_dir: Path) -> Path:
    """The target's record."""
    return flight_dir / control.file_name(TARGET)


def put(flight_dir: Path, raw: bytes) -> None:
    """Put these bytes in the record's place, as another file."""
    (flight_dir / "temporary").write_bytes(raw)
    (flight_dir / "temporary").rename(path(flight_dir))


def test_a_command_is_read_once(directory_fd: int, reader: ControlReader) -> None:
    """What was acknowledged is not done again."""
    assert reader.poll() is None
    seq = write_command(directory_fd, TARGET, Command(level=2, profile_steps=5, stacks=True))
    assert reader.poll() == Command(2, 5, stacks=True, seq=seq, profile_seq=seq, stacks_seq=seq)
    assert reader.poll() is None


def test_a_level_stays_until_the_next_one_and_requests_do_not(directory_fd: int, reader: ControlReader) -> None:
    """A level is a state, a profile and a dump are requests."""
    write_command(directory_fd, TARGET, Command(stacks=True))
    first = reader.poll()
    assert first
    assert (first.level, first.stacks) == (None, True)
    write_command(directory_fd, TARGET, Command(level=3))
    write_command(directory_fd, TARGET, Command(profile_steps=7))
    second = reader.poll()
    assert second
    assert (second.level, second.profile_steps, second.stacks) == (3, 7, False)
    assert second.seq > first.seq


def test_a_request_survives_a_command_that_came_before_it_was_read(directory_fd: int, reader: ControlReader) -> None:
    """Three commands between two polls: all of them count."""
    profile = write_command(directory_fd, TARGET, Command(profile_steps=9))
    stacks = write_command(directory_fd, TARGET, Command(stacks=True))
    write_command(directory_fd, TARGET, Command(level=0))
    seen = reader.poll()
    assert seen
    assert (seen.level, seen.profile_steps, seen.stacks) == (0, 9, True)
    assert (seen.profile_seq, seen.stacks_seq) == (profile, stacks)


def test_an_exporter_that_restarts_goes_on_counting(directory_fd: int, reader: ControlReader, flight_dir: Path) -> None:
    """It keeps nothing in memory; and where even the record was deleted, numbers go on with the clock."""
    first = write_command(directory_fd, TARGET, Command(level=1))
    assert reader.poll()
    second = write_command(directory_fd, TARGET, Command(level=2))
    assert second > first
    path(flight_dir).unlink()
    assert reader.poll() is None
    time.sleep(0.002)
    write_command(directory_fd, TARGET, Command(level=3))
    seen = reader.poll()
    assert seen
    assert (seen.level, seen.seq > second) == (3, True)


def test_a_command_for_another_rank_does_not_validate(directory_fd: int, reader: ControlReader, flight_dir: Path) -> None:
    """Not even under our name: the CRC is seeded by the incarnation, and the target stands in it."""
    other = TARGET[:4] + token_bytes(12)
    write_command(directory_fd, other, Command(level=1))
    (flight_dir / control.file_name(other)).rename(path(flight_dir))
    assert reader.poll() is None
    write_command(directory_fd, TARGET, Command(level=2))
    assert reader.poll()


def test_a_damaged_record_is_nobody_s_command(directory_fd: int, reader: ControlReader, flight_dir: Path) -> None:
    """Every flipped bit, every shorter or longer file, garbage and zeros: nothing is done, nothing is raised."""
    write_command(directory_fd, TARGET, Command(level=3, profile_steps=10, stacks=True))
    good = path(flight_dir).read_bytes()
    assert len(good) == control.SIZE
    broken = [good[: bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1 :] for bit in range(8 * len(good))]
    broken += [b"", good[:-1], good + b"\0", bytes(len(good)), os.urandom(len(good)), good * 1000]
    for raw in broken:
        put(flight_dir, raw)
        assert reader.poll() is None
    put(flight_dir, good)
    assert reader.poll()


def test_a_record_with_a_right_crc_and_wrong_values_is_refused(reader: ControlReader, flight_dir: Path) -> None:
    """A level that there is not, a profile of a million steps, a request from the future, another version."""
    wrong = [
        control._Record(level=4, seq=5),
        control._Record(level=1, seq=5, profile_steps=control.MAX_PROFILE_STEPS + 1),
        control._Record(level=1, seq=5, profile_seq=6),
        control._Record(level=1, seq=5, stacks_seq=6),
    ]
    for record in wrong:
        put(flight_dir, control._encode(record, TARGET))
        assert reader.poll() is None
    put(flight_dir, control._encode(control._Record(level=1, seq=5), TARGET))
    assert reader.poll() == Command(1, seq=5)


@pytest.mark.parametrize(
    "wrong", [Command(level=4), Command(level=-1), Command(profile_steps=-1), Command(profile_steps=10**6)]
)
def test_a_command_that_there_is_not_is_not_written(directory_fd: int, flight_dir: Path, wrong: Command) -> None:
    """ValueError, and no file."""
    with pytest.raises(ValueError, match=r"not|none"):
        write_command(directory_fd, TARGET, wrong)
    assert list(flight_dir.iterdir()) == []


def test_links_pipes_and_directories_are_no_commands(directory_fd: int, reader: ControlReader, flight_dir: Path) -> None:
    """Whatever has the record's name: no wait, no exception."""
    write_command(directory_fd, TARGET, Command(level=1))
    elsewhere = path(flight_dir).rename(flight_dir / "elsewhere")
    path(flight_dir).symlink_to(elsewhere)
    assert reader.poll() is None
    path(flight_dir).unlink()
    path(flight_dir).hardlink_to(elsewhere)
    assert reader.poll() is None
    path(flight_dir).unlink()
    os.mkfifo(path(flight_dir))
    assert reader.poll() is None
    path(flight_dir).unlink()
    path(flight_dir).mkdir()
    assert reader.poll() is None


def test_the_directory_may_come_later_and_may_be_made_anew(flight_dir: Path) -> None:
    """The exporter makes it when it starts; what was told before the directory was deleted is not told again."""
    later = flight_dir / "control"
    reader = ControlReader(str(later), TARGET)
    assert reader.poll() is None
    for level in (1, 2):
        later.mkdir()
        fd = os.open(later, os.O_RDONLY)
        time.sleep(0.002)
        write_command(fd, TARGET, Command(level=level))
        os.close(fd)
        seen = [reader.poll(), reader.poll()]
        assert [command.level for command in seen if command] == [level]
        (later / control.file_name(TARGET)).unlink()
        later.rmdir()
        assert reader.poll() is None
    reader.close()


def test_a_command_is_there_whole_or_not_at_all(directory_fd: int, flight_dir: Path) -> None:
    """By rename; nothing temporary stays, not even when it fails; another user may read it, whatever the umask."""
    before = os.umask(0o077)
    write_command(directory_fd, TARGET, Command(level=1))
    os.umask(before)
    assert [entry.name for entry in flight_dir.iterdir()] == [control.file_name(TARGET)]
    assert path(flight_dir).stat().st_mode & 0o777 == 0o644
    path(flight_dir).unlink()
    path(flight_dir).mkdir()
    with pytest.raises(OSError, match="irectory"):
        control._replace(directory_fd, control.file_name(TARGET), b"x")
    assert [entry.name for entry in flight_dir.iterdir()] == [control.file_name(TARGET)]


def test_what_a_dead_rank_was_told_can_be_removed(directory_fd: int, flight_dir: Path) -> None:
    """Once, or twice."""
    write_command(directory_fd, TARGET, Command(level=1))
    control.remove(directory_fd, TARGET)
    control.remove(directory_fd, TARGET)
    assert list(flight_dir.iterdir()) == []
