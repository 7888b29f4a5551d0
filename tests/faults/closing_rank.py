"""A training that closes descriptors which it has not opened: `python -m tests.faults.closing_rank DIRECTORY OWN HOW`.

It trains as `tests.stuck_rank` does, and reads words from its standard input; it prints each when it has obeyed. `close`
closes as `HOW` says, and opens files of its own in `OWN` under the numbers. `hold` holds Python's lock in C until the watchdog
has written, `damaged` prints the names of its files that are not as it left them, `shutdown` ends the recording, and `crash`
the process. How: `range` closes all above standard error, `numbers` puts a file of its own in place of each file of torchobs,
and `at once` does that before a round of the sampler.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

import torch

import torchobs
from tests.stuck_rank import hold, tell, train

MINE = b"mine" * 100
HOLD_S = 4
files: dict[int, Path] = {}
"""Its own, by their numbers"""


def write(folder: Path) -> tuple[int, Path]:
    """A new file, open at its end."""
    path = folder / f"{len(list(folder.iterdir()))}.bin"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.write(fd, MINE)
    return fd, path


def numbers_below(directory: str, process: str = "self") -> list[int]:
    """The numbers under which a process has the directory or a file in it open."""
    numbers = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, as the one that lists them
            if str(link.readlink()).startswith(directory):
                numbers.append(int(link.name))
    return numbers


def close(directory: str, folder: Path, how: str) -> None:
    """Close what is not its own."""
    if how in {"numbers", "at once"}:
        for number in numbers_below(directory):
            fd, path = write(folder)
            os.dup2(fd, number, inheritable=False)
            os.close(fd)
            files[number] = path
        return
    os.closerange(3, 4096)
    files.clear()
    for _ in range(20):
        fd, path = write(folder)
        files[fd] = path


def damaged() -> list[str]:
    """The files that somebody has closed, moved in or written to."""
    return [path.name for fd, path in files.items() if not is_sound(fd, path)]


def is_sound(fd: int, path: Path) -> bool:
    """Whether a file is as it was left."""
    try:
        at_end = os.lseek(fd, 0, os.SEEK_CUR) == len(MINE)
        return at_end and path.read_bytes() == MINE and os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def obey(word: str, directory: str, folder: Path, how: str) -> None:
    """Do what was said."""
    if word == "close":
        close(directory, folder, how)
    elif word == "hold":
        hold(str(HOLD_S))
    elif word == "damaged":
        tell(" ".join(damaged()))
    elif word == "shutdown":
        torchobs.shutdown()
    elif word == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)


def main(directory: str, folder: str, how: str) -> None:
    """See the module."""
    torch.set_num_threads(1)
    torchobs.init(flight_dir=directory, exporter=False)
    if how == "at once":
        obey("close", directory, Path(folder), how)
    train(lambda words: obey(words[0], directory, Path(folder), how))


if __name__ == "__main__":
    main(*sys.argv[1:])
