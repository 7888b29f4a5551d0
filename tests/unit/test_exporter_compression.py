"""A compressed page is one gzip, whatever compresses it and whatever reads it."""

from __future__ import annotations

import gzip
import random
import zlib
from types import ModuleType

import pytest
from isal import isal_zlib

from torchobs.exporter.prometheus import page_cache


def lines(number: int) -> list[bytes]:
    """Pieces of different length that look like a page."""
    dice = random.Random(number)
    text = [f'torchobs_grad_layer_norm{{layer="{index}",rank="{index % 8}"}} {dice.random()}\n' for index in range(number)]
    return ["".join(text[at : at + 300]).encode() for at in range(0, number, 300)]


@pytest.mark.parametrize("compressor", [isal_zlib, zlib], ids=["isal", "zlib"])
@pytest.mark.parametrize(
    "page", [[], [b""], [b"a"], lines(10), lines(20_000), [random.Random(1).randbytes(1 << 19)], [b"x" * (1 << 22), b"y"]]
)
def test_it_is_one_member_with_a_right_checksum(
    page: list[bytes], compressor: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for readers that stop after the first member, and for pages that do not shrink."""
    monkeypatch.setattr(page_cache, "compressor", compressor)
    body, made = b"".join(page), page_cache.gzipped(page)
    assert gzip.decompress(made) == body
    reader = zlib.decompressobj(wbits=31)
    assert reader.decompress(made) + reader.flush() == body
    assert reader.eof
    assert reader.unused_data == b""


def test_it_is_no_larger_than_by_zlib() -> None:
    """Faster, and not at the network's cost."""
    page = lines(20_000)
    assert len(page_cache.gzipped(page)) < 1.02 * len(zlib.compress(b"".join(page), 1))
