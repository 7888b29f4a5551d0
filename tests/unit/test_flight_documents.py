"""The two regions without metrics: details and history. A version is read whole or not at all."""

from __future__ import annotations

from math import nan
from pathlib import Path

from tests.rank_files import File
from torchobs.flight.format.documents import Document, decode_history, encode_history, newest
from torchobs.flight.format.layout import Extent
from torchobs.flight.reader.reader import open_path
from torchobs.flight.writer.storage import Storage

SPAN = Extent(0, 1024, 64)


def test_the_newest_version_is_read_and_a_torn_one_is_not() -> None:
    """Damage to the newest leaves the one before; a version too long for its slot is refused."""
    raw = bytearray(1024)
    document = Document(Storage(memoryview(raw)), SPAN, 7)
    assert newest(bytes(raw), 7) == b""
    assert document.replace(b"one")
    assert document.replace(b"two")
    assert not document.replace(b"x" * (document.room + 1))
    assert newest(bytes(raw), 7) == b"two"
    assert newest(bytes(raw), 8) == b""
    raw[raw.index(b"two")] ^= 1
    assert newest(bytes(raw), 7) == b"one"


def test_a_file_without_the_regions() -> None:
    """As version 1.0 has none: nothing is stored, nothing is read."""
    assert not Document(Storage(memoryview(bytearray(1024))), None, 7).replace(b"")


def test_history_there_and_back() -> None:
    """Names that came later have no value in earlier rows; a value that is not finite, or not in an f32, is none."""
    packed = encode_history(["a", "b{x}"], [(0.5, 1, (1.0,)), (1.0, 2, (nan, 3.0)), (1.5, 3, (1e39, -1e39))])
    history = decode_history(packed)
    assert [(row.time_s, row.step, row.values) for row in history.rows] == [
        (0.5, 1, (1.0, None)), (1.0, 2, (None, 3.0)), (1.5, 3, (None, None)),
    ]  # fmt: skip
    assert [(name, [(row.step, value) for row, value in points]) for name, points in history.of("b").items()] == [
        ("x", [(2, 3.0)])
    ]
    assert list(history.of("a")) == [""]


def test_both_through_a_file(flight_dir: Path) -> None:
    """Written by a rank, read by its name."""
    file = File(flight_dir)
    assert file.writer.details.replace(b'{"command":["train.py"]}')
    assert file.writer.history.replace(encode_history(["a"], [(0.5, 1, (1.0,))]))
    found = open_path(str(file.save().path))
    assert found.details() == {"command": ["train.py"]}
    assert found.history().rows[0].values == (1.0,)
    found.close()
