"""A program that closes all descriptors while threads use kept ones: `python -m tests.unit.closing_threads DIRECTORY`.

It fails if one of its own files is closed, moved in or written to.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from torchobs.support import descriptors
from torchobs.support.descriptors import Descriptor


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


def main(directory: Path) -> None:
    """Close a hundred times, with another number of files each."""
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
