"""The format: the header and its regions, and the rule that every other one rests on."""

import ast
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

import torchobs.flight
from tests import flights
from torchobs.flight.format import layout
from torchobs.flight.format.layout import (
    DEFAULT_SIZE,
    HEADER_SIZE,
    MAX_SIZE,
    MIN_SIZE,
    RECORD_SIZE,
    BadFlightFileError,
    Extent,
    Header,
    Region,
    decode_header,
    encode_header,
    plan,
)
from torchobs.flight.writer.writer import open_writer

HEADER = flights.header()
MOVES = ("writer.py", "memory.py")
"""Where `Memory.move` is defined and called: another file, not `mmap.move`."""


def test_nothing_in_the_flight_file_s_code_packs_into_memory() -> None:
    """CPython zeroes the target of pack_into first, and a reader saw those zeros in 3-17 % of its reads."""
    sources = list(Path(torchobs.flight.__file__).parent.rglob("*.py"))
    assert len(sources) > 15
    for path in sources:
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        banned = {"pack_into", "readinto", "memmove", "memset", *(() if path.name in MOVES else ("move",))}
        assert not names & banned, path


def changed(header: Header, offset: int, form: str, value: int) -> bytes:
    """The header with another value somewhere, its CRC right."""
    raw = bytearray(encode_header(header))
    struct.pack_into(form, raw, offset, value)
    struct.pack_into("<I", raw, HEADER_SIZE - 4, zlib.crc32(raw[: HEADER_SIZE - 4]))
    return bytes(raw)


def test_a_header_is_what_was_put_in() -> None:
    """Every field, and the description of the rank."""
    made = replace(HEADER, resource={"rank": 7, "host": "böse\n\"'\\", "n": -5})
    assert decode_header(encode_header(made), made.file_size) == made


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_header_tells_whether_the_file_was_created_in_memory(flight_dir: Path, *, in_memory: bool) -> None:
    """Wherever the file is copied to; padding of earlier versions, and what a later one may add, is unknown."""
    writer = open_writer(flights.place(flight_dir, in_memory=in_memory), {"rank": 0}, MIN_SIZE)
    made = writer.header
    writer.close()
    assert decode_header(encode_header(made), made.file_size).in_memory is in_memory
    for unknown in (0, 3):
        assert decode_header(changed(made, 92, "<I", unknown), made.file_size).in_memory is None


@pytest.mark.parametrize("size", [MIN_SIZE, 300_032, DEFAULT_SIZE, 1_500_032, MAX_SIZE])
def test_a_plan_fills_the_file_and_no_region_lies_in_another(size: int) -> None:
    """Half of it are records, a power of two of them; offsets are multiples of 64."""
    regions = plan(size)
    end = HEADER_SIZE
    for span in regions.values():
        assert span.offset == end
        assert span.offset % 64 == 0
        assert span.count > 0
        end = span.offset + span.length
    assert size - 64 < end <= size
    records = regions[Region.STEPS].count
    assert records & (records - 1) == 0
    assert size // 4 < records * RECORD_SIZE <= size // 2


@pytest.mark.parametrize(
    ("offset", "form", "value", "why"),
    [
        (0, "<Q", 0, "not a flight file"),
        (8, "<H", 2, "format version 2"),
        (12, "<I", 4095, "size"),
        (16, "<Q", MIN_SIZE + 64, "size"),
        (80, "<I", 4, "missing"),
        (84, "<I", 3, "JSON"),
        (96, "<I", 77, "missing"),
        (100, "<I", 16, "items"),
        (104, "<Q", 0, "outside"),
        (112, "<Q", 0, "items"),
        (112, "<Q", (1 << 64) - 8, "outside"),
    ],
)
def test_a_header_that_lies_is_refused_by_name(offset: int, form: str, value: int, why: str) -> None:
    """With a right CRC: every offset and count is checked before use."""
    with pytest.raises(BadFlightFileError, match=why):
        decode_header(changed(HEADER, offset, form, value), HEADER.file_size)


def test_a_later_minor_version_may_add_regions() -> None:
    """What this reader does not know, it does not read; the rest stands where it stood."""
    raw = bytearray(encode_header(HEADER))
    raw[96 + 24 * 7 : 96 + 24 * 8] = struct.pack("<IIQQ", 99, 8, HEADER_SIZE, 1 << 40)
    raw[10:12], raw[80:84] = b"\x07\x00", struct.pack("<I", 8)
    raw[HEADER_SIZE - 4 :] = struct.pack("<I", zlib.crc32(raw[: HEADER_SIZE - 4]))
    assert decode_header(bytes(raw), HEADER.file_size) == replace(HEADER, minor=7)


def test_texts_can_be_put_on_a_page_whatever_they_were() -> None:
    """JSON can spell lone surrogates, UTF-8 cannot."""
    assert layout.encodable("a\ud800b") == "a?b"
    assert layout.encodable("grüße 😀") == "grüße 😀"


def test_wall_time_is_counted_from_birth() -> None:
    """By the pair of clocks taken then."""
    assert HEADER.wall_s(HEADER.monotonic_ns) == pytest.approx(HEADER.wall_ns / 1e9)
    assert HEADER.wall_s(HEADER.monotonic_ns + 5_000_000_000) == pytest.approx(HEADER.wall_ns / 1e9 + 5)


def test_a_file_of_version_1_0_has_neither_details_nor_history() -> None:
    """It is read as ever."""
    regions: dict[Region, Extent] = {
        kind: span for kind, span in HEADER.regions.items() if kind not in {Region.DETAILS, Region.HISTORY}
    }
    older = replace(HEADER, minor=0, regions=regions)
    assert decode_header(encode_header(older), older.file_size) == older
