"""No room: a full file system, a file size limit, a memory cgroup at its limit. Training goes on, nothing is left behind."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cgroups import inside, memory_cgroup
from tests.support import NEEDS_MOUNT

MIB = 1 << 20
LIMIT = 96 * MIB
TRY = f"""
import errno, os, sys
from torchobs.flight.format.layout import MIN_SIZE
from torchobs.flight.files.location import open_place
from torchobs.flight.writer.writer import open_writer

def attempt(directory, size=MIN_SIZE):
    place = open_place(directory, None)
    try:
        open_writer(place, {{"rank": 0}}, size)
    except OSError as error:
        print(type(error).__name__, errno.errorcode.get(error.errno, "none"), len(os.listdir(directory)), flush=True)
    else:
        print("made", "none", len(os.listdir(directory)), flush=True)

def grow(usage_file, to_free):
    with open(usage_file) as usage:
        return b"x" * ({LIMIT} - to_free - int(usage.read()))
"""

Run = Callable[..., list[str]]


@pytest.fixture
def run(start: Callable[..., subprocess.Popen[str]]) -> Run:
    """Run Python code after `prefix`; return what it printed. It must end in order: no SIGBUS, no OOM kill."""

    def one(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> list[str]:
        command = [*prefix, sys.executable, "-c", TRY + code, *map(str, arguments)]
        process = start(*command, stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return output.splitlines()

    return one


def mounted(options: str, then: str, directory: Path) -> tuple[str, ...]:
    """The prefix of a command that sees a small tmpfs on `directory`, alone."""
    script = f'mount -t tmpfs -o {options},mode=700 none "$DIRECTORY" && {then} && exec "$@"'
    user = () if os.getuid() == 0 else ("--user", "--map-root-user")
    if subprocess.run(("unshare", *user, "--mount", "true"), check=False, capture_output=True).returncode:
        pytest.skip(NEEDS_MOUNT)  # an unprivileged container, a chroot
    return ("env", f"DIRECTORY={directory}", "unshare", *user, "--mount", "sh", "-c", script, "sh")


@pytest.mark.parametrize(
    ("options", "then", "expected"),
    [
        ("size=128k", "true", "NoRoomError none 0"),
        ("size=1m", 'head -c 900k /dev/zero > "$DIRECTORY"/x', "NoRoomError none 1"),
        ("size=4m,nr_inodes=1", "true", "OSError ENOSPC 0"),
        ("size=4m,nr_inodes=2", "true", "OSError ENOSPC 0"),
        ("size=4m,nr_inodes=3", "true", "made none 2"),
    ],
)
def test_a_full_tmpfs_is_an_error_at_birth_and_nothing_is_left(
    run: Run, flight_dir: Path, options: str, then: str, expected: str
) -> None:
    """No bytes, or no inode for the file or for its lock: an OSError at once, and never a SIGBUS in a later step."""
    assert run("attempt(sys.argv[1])", flight_dir, prefix=mounted(options, then, flight_dir)) == [expected]


def test_a_file_system_that_fills_up_while_the_file_is_allocated_leaves_nothing(run: Run, flight_dir: Path) -> None:
    """Allocation fails although there was room a moment before, here by a limit on the file's size."""
    limit = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
    assert run(limit + "attempt(sys.argv[1])", flight_dir) == ["OSError EFBIG 0"]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup with a limit of 96 MiB, v1 or v2."""
    with memory_cgroup(LIMIT) as path:
        yield path


def test_a_cgroup_at_its_limit_is_refused_and_nobody_is_killed(run: Run, flight_dir: Path, cgroup: Path) -> None:
    """With less than sixteen times the file's size left, allocating could be the trainer's end; with more, it is done."""
    code = "attempt(sys.argv[1])\nheld = grow(sys.argv[2], 3 << 20)\nattempt(sys.argv[1])\n"
    first, second = run(code, flight_dir, _file(cgroup, "memory.usage_in_bytes", "memory.current"), prefix=inside(cgroup))
    assert first == "made none 2"
    assert second == "NoRoomError none 2"


def test_a_cgroup_full_of_page_cache_has_room(run: Run, flight_dir: Path, tmp_path: Path, cgroup: Path) -> None:
    """Whoever has read a data set larger than the limit has used it up, with pages that the kernel takes back."""
    data = tmp_path / "data"
    with data.open("wb") as file:
        file.write(bytes(2 * LIMIT))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    code = "with open(sys.argv[2], 'rb') as data:\n    while data.read(1 << 20): pass\nattempt(sys.argv[1], 1 << 20)\n"
    assert run(code, flight_dir, data, prefix=inside(cgroup)) == ["made none 2"]
    assert int(_file(cgroup, "memory.max_usage_in_bytes", "memory.peak", "memory.current").read_text()) > LIMIT - 16 * MIB


def _file(cgroup: Path, *names: str) -> Path:
    return next(cgroup / name for name in names if (cgroup / name).exists())
