"""The exporter's Unix sockets: whose name it is, who may come in, and who replaces it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchobs.exporter import unix_socket
from torchobs.exporter.unix_socket import UnixSocket, bind_unix, connect

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


def test_it_has_its_name_only_when_it_listens(bind: Bind, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody meets one that does not listen yet, or that everybody may enter."""
    modes: list[int] = []
    require_free = unix_socket._require_free

    def looking(path: Path) -> None:
        assert not path.exists()
        (beside,) = path.parent.iterdir()
        modes.append(stat.S_IMODE(beside.stat().st_mode))
        connect(beside).close()
        require_free(path)

    monkeypatch.setattr(unix_socket, "_require_free", looking)
    bind(path)
    assert modes == [0o660]


@pytest.mark.parametrize("length", [50, 107, 108, 150, 255])
def test_a_path_may_be_long(bind: Bind, flight_dir: Path, length: int) -> None:
    """A socket's address has 107 bytes; a file's name may have 255, and its path any number."""
    deep = flight_dir / ("d" * 200)
    deep.mkdir()
    for path in (flight_dir / ("s" * (length - len(str(flight_dir)) - 1)), deep / ("s" * min(length, 240))):
        made = bind(path)
        assert answers(path, made)
        assert made.is_named
        made.remove()
        assert not path.exists()


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
    assert not old.is_named
    new = bind(path)
    old.remove()
    assert answers(path, new)


def test_a_name_that_is_gone_is_noticed(bind: Bind, path: Path) -> None:
    """Deleted, replaced, or with its directory; where nobody can tell, it is not given up."""
    made = bind(path)
    path.rename(path.with_name("aside"))
    assert not made.is_named
    path.write_text("another's")
    assert not made.is_named
    path.unlink()
    path.with_name("aside").rename(path)
    assert made.is_named
