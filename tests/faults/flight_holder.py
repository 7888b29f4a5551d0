"""A program that holds a flight file's lock, does what might drop it, and says so each time: `<what was done> <name>`."""

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from torchobs.flight import files, reader
from torchobs.flight.directory import FlightDirectory, open_place
from torchobs.flight.files import lock_name
from torchobs.flight.layout import MIN_SIZE
from torchobs.flight.writer import FlightWriter, open_writer

C = ctypes.PyDLL(None)
"""The C library, called with the GIL held: its fork runs none of Python's hooks."""


def open_and_close_others(place: FlightDirectory, writer: FlightWriter) -> None:
    """Open and close every other file in the directory, the flight file itself among them."""
    (Path(place.path) / "other.lock").write_text("")
    for name in sorted(entry.name for entry in Path(place.path).iterdir()):
        if name != lock_name(writer.name):
            os.close(os.open(name, os.O_RDWR, dir_fd=place.fd))


def read_own_file(place: FlightDirectory, writer: FlightWriter) -> None:
    """Be a reader, too, and ask who lives."""
    for name in reader.names(place.fd):
        file = reader.open_file(place.fd, name)
        file.read()
        file.close()
        assert files.is_locked(place.fd, lock_name(name))
        assert files.is_locked_here(place.fd, lock_name(writer.name))


def unmap_another(place: FlightDirectory, _: FlightWriter) -> None:
    """Close another map and another writer."""
    mmap.mmap(-1, 4096).close()
    other = open_writer(open_place(place.path, None), {"rank": 1}, MIN_SIZE)
    other.close()


def fork_and_exit(_: FlightDirectory, __: FlightWriter) -> None:
    """A worker that ends."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def fork_in_c_and_exec(_: FlightDirectory, __: FlightWriter) -> None:
    """As a C library that starts a helper does: Python knows nothing of it."""
    child = C.fork()
    if not child:
        C.execlp(b"true", b"true", None)
        C._exit(1)
    os.waitpid(child, 0)


def leave_a_child(_: FlightDirectory, __: FlightWriter) -> None:
    """A worker that outlives us; an OFD lock would live on in it."""
    if not os.fork():
        os.setsid()
        time.sleep(10)
        os._exit(0)


def become_another_program(_: FlightDirectory, writer: FlightWriter) -> None:
    """Exec: the trainer is gone, though its process lives."""
    say("become_another_program", writer)
    os.execvp("sleep", ["sleep", "60"])  # noqa: S606  # this is the test


KEEPING: tuple[Callable[[FlightDirectory, FlightWriter], None], ...] = (
    open_and_close_others, read_own_file, unmap_another, fork_and_exit, fork_in_c_and_exec, leave_a_child,
)  # fmt: skip
"""Those after which the lock is held"""


def say(what: str, writer: FlightWriter) -> None:
    """Say that it is done."""
    print(what, writer.name, flush=True)  # noqa: T201  # the answer


def main(directory: str, *scenes: str) -> None:
    """Play the scenes, each after another line of standard input, and hold the lock until that ends."""
    place = open_place(directory, None)
    writer = open_writer(place, {"rank": 0}, MIN_SIZE)
    for scene in (play for play in (*KEEPING, become_another_program) if play.__name__ in scenes):
        sys.stdin.readline()
        scene(place, writer)
        say(scene.__name__, writer)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
