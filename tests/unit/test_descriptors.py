"""Descriptors that are kept: a number is used only while it is the file that was opened."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchobs.support import descriptors
from torchobs.support.descriptors import Descriptor

FLAGS = os.O_RDWR | os.O_NOFOLLOW


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Descriptor]:
    """A file that is kept, and what was lost before forgotten."""
    descriptors.take_lost()
    file = Descriptor("kept", str(tmp_path / "kept"), FLAGS | os.O_CREAT)
    yield file
    file.close()
    descriptors.take_lost()


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[int]:
    """The program's own file."""
    fd = os.open(tmp_path / "foreign", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def close(number: int, _: int) -> None:
    """As `os.closerange` does."""
    os.close(number)


def put_another_there(number: int, foreign: int) -> None:
    """Closed and taken by another file, in one call."""
    os.dup2(foreign, number)


LOSSES: list[Callable[[int, int], None]] = [close, put_another_there]


@pytest.mark.parametrize("lose", LOSSES)
def test_a_lost_file_is_opened_again(kept: Descriptor, foreign: int, lose: Callable[[int, int], None]) -> None:
    """By its name, under another number than that of the program's file; it is reported once."""
    number = kept.number()
    lose(number, foreign)
    assert not kept.is_intact()
    os.write(kept.number(), b"ours")
    assert os.pread(kept.number(), 9, 0) == b"ours"
    assert os.fstat(foreign).st_size == 0
    assert descriptors.take_lost() == [("kept", "")]
    assert kept.restore() is False
    if lose is put_another_there:
        os.fstat(number)  # still the program's
        os.close(number)


def test_a_lost_file_whose_name_has_another_file_stays_lost(kept: Descriptor, tmp_path: Path, foreign: int) -> None:
    """A copy in its place is not the file; nothing is left open, and it is reported once."""
    number = kept.number()
    (tmp_path / "kept").rename(tmp_path / "moved")
    (tmp_path / "kept").write_text("another")
    os.dup2(foreign, number)
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            kept.number()
    assert len(list(Path("/dev/fd").iterdir())) == before
    assert descriptors.take_lost() == [("kept", os.strerror(2))]
    (tmp_path / "moved").rename(tmp_path / "kept")
    assert kept.restore(), "it is back"
    os.close(number)


def test_a_closed_file_is_not_opened_again(kept: Descriptor) -> None:
    """Promise: whoever still uses a file after its end gets an error, and leaves nothing open."""
    kept.close()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a number is enough
    with pytest.raises(OSError, match="Bad file descriptor"):
        kept.number()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  # as above
