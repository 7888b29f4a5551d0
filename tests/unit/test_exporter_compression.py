"""A page that two threads compress is one gzip, whatever reads it."""

from __future__ import annotations

import gzip
import io
import random
import zlib
from collections.abc import Iterator

import pytest

from torchobs.exporter.compression import Compressor


@pytest.fixture
def compressor() -> Iterator[Compressor]:
    """One, closed afterwards."""
    made = Compressor()
    yield made
    made.close()


def lines(number: int) -> list[bytes]:
    """Pieces of different length that look like a page."""
    dice = random.Random(number)
    text = [f'torchobs_grad_layer_norm{{layer="{index}",rank="{index % 8}"}} {dice.random()}\n' for index in range(number)]
    return ["".join(text[at : at + 300]).encode() for at in range(0, number, 300)]


@pytest.mark.parametrize(
    "page",
    [[], [b""], [b"a"], lines(10), lines(1999), lines(20_000), [random.Random(1).randbytes(1 << 19)], [b"x" * (1 << 22), b"y"]],
)
def test_it_is_one_member_with_a_right_checksum(compressor: Compressor, page: list[bytes]) -> None:
    """Also for readers that stop after the first member, and for pages that do not shrink."""
    body = b"".join(page)
    made = compressor.gzip(page)
    assert gzip.decompress(made) == body
    reader = zlib.decompressobj(wbits=31)
    assert reader.decompress(made) + reader.flush() == body
    assert reader.eof
    assert reader.unused_data == b""
    assert gzip.GzipFile(fileobj=io.BytesIO(made)).read() == body


def test_two_threads_take_no_more_bytes_than_one(compressor: Compressor) -> None:
    """The second half knows nothing of the first: that costs a window, of thousands."""
    page = lines(20_000)
    alone = zlib.compress(b"".join(page), 1)
    assert len(compressor.gzip(page)) < 1.02 * len(alone)
