"""The exporter's Unix sockets: whose name it is, who may come in, and who replaces it."""

from __future__ import annotations

import socket
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


def test_what_nobody_listens_on_any_more_is_replaced(bind: Bind, path: Path) -> None:
    """A killed exporter leaves its socket behind."""
    bind(path).close()
    assert path.is_socket()
    assert answers(path, bind(path))


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
