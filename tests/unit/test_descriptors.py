"""Descriptors that are kept: a number is used only while it is the file that was opened."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
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


class Own:
    """A file of the program, open at its beginning."""

    def __init__(self, directory: Path, number: int) -> None:
        self._path = directory / f"own{number}"
        self._path.write_bytes(b"mine")
        self._fd = os.open(self._path, os.O_RDWR)

    def check(self) -> None:
        """See that it is as it was."""
        assert os.path.samestat(os.fstat(self._fd), self._path.stat())
        assert os.read(self._fd, 9) == b"mine"


def use(kept: Descriptor, done: threading.Event) -> None:
    """Read files of the kernel, and write to the kept one."""
    while not done.is_set():
        for path in ("/proc/self/statm", "/proc/self/mountinfo"):
            with contextlib.suppress(OSError):
                descriptors.content(path)
        with contextlib.suppress(OSError):
            os.pwrite(kept.number(), b"ours", 0)


def close_all_the_time(directory: Path) -> None:
    """Close all descriptors a hundred times, with another number of files each, while threads use kept ones."""
    kept, done = Descriptor("kept", str(directory / "kept"), os.O_RDWR | os.O_CREAT), threading.Event()
    threads = [threading.Thread(target=use, args=(kept, done)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for count in [*range(1, 20)] * 5:
            os.closerange(3, 1024)
            files = [Own(directory, number) for number in range(count)]
            time.sleep(0.002)
            for file in files:
                file.check()
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_a_program_that_closes_all_the_time_keeps_its_files(tmp_path: Path) -> None:
    """Whatever threads of ours do meanwhile: no file of the program is closed, moved in or written to."""
    code = f"from tests.unit import test_descriptors as t; t.close_all_the_time(t.Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_closed_file_is_not_opened_again(kept: Descriptor) -> None:
    """Promise: whoever still uses a file after its end gets an error, and leaves nothing open."""
    kept.close()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  # a number is enough
    with pytest.raises(OSError, match="Bad file descriptor"):
        kept.number()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208  # as above


def test_a_directory_stays_the_same_whatever_its_birth(tmp_path: Path) -> None:
    """Promise: a directory of an image's layer, which overlayfs copies with its number and another birth, is no other one."""
    directory = Descriptor("", str(tmp_path), os.O_RDONLY | os.O_DIRECTORY)
    assert directory.identity.born_ns == 0
    assert directory.identity.inode == tmp_path.stat().st_ino
    directory.close()
