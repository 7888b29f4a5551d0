"""The exporter's Unix sockets: whose name it is, who may come in, and who replaces it."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchobs.exporter.http import UnixSocket, bind_unix

Bind = Callable[[Path], UnixSocket]


@pytest.fixture
def bind() -> Iterator[Bind]:
    """Listen on a path until the test ends."""
    made: list[UnixSocket] = []

    def listen(path: Path) -> UnixSocket:
        made.append(bind_unix(path))
        return made[-1]

    yield listen
    for one in made:
        one.close()


@pytest.fixture
def path(flight_dir: Path) -> Path:
    """A name for a socket."""
    return flight_dir / "exporter.sock"


def connect(path: Path) -> socket.socket:
    """A connection to what listens there."""
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(str(path))
    return connected


def answers(path: Path, listening: UnixSocket) -> bool:
    """Whether that path leads to that socket."""
    with connect(path):
        listening.settimeout(0)
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return False
        return True


def test_it_is_for_its_owner_and_the_group(bind: Bind, path: Path) -> None:
    """0660 whatever the umask, and no other name is left."""
    before = os.umask(0)
    try:
        made = bind(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert answers(path, made)


def test_what_nobody_listens_on_any_more_is_replaced(bind: Bind, path: Path) -> None:
    """A killed exporter leaves its socket behind."""
    bind(path).close()
    assert path.is_socket()
    assert answers(path, bind(path))


def test_who_listens_is_never_replaced(bind: Bind, path: Path) -> None:
    """Not even one that accepts nobody, because it is stopped and its queue is full; and nothing is left behind."""
    first = bind(path)
    first.listen(0)
    waiting = [connect(path)]
    with pytest.raises(OSError, match="another process listens there") as caught:
        bind_unix(path)
    assert caught.value.errno == errno.EADDRINUSE
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    for one in waiting:
        one.close()


def test_a_successor_keeps_its_name_in_whatever_order(bind: Bind, path: Path) -> None:
    """Who leaves gives its name up while it listens still; what has the name by then is not removed."""
    old = bind(path)
    with pytest.raises(OSError, match="another process listens there"):
        bind_unix(path)
    old.remove()
    assert not path.exists()
    new = bind(path)
    old.remove()
    assert answers(path, new)
