"""Forges flight files: damage by chance, and lies whose CRCs are right."""

import random
import struct
import zlib
from collections.abc import Callable

from torchobs.flight.format.layout import (
    ALIGN,
    HEADER_SIZE,
    LIVE_WORDS,
    RECORD_SIZE,
    SLOT_HEADER,
    SLOT_SIZE,
    Header,
    Region,
    words_crc,
)
from torchobs.flight.metrics.totals import Word

EXTREMES = (0, 1, 2, 7, 8, 63, 64, 255, 4095, 4096, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS = tuple(
    struct.pack("<d", value) for value in (0.0, -0.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
)
STATE = (
    Word.FOLDED_UPTO, Word.CLOCK_OFFSET, Word.STEPS, Word.LAST_STEP_TIMESTAMP, Word.LOSS, Word.TOKENS,
    *range(Word.LOSS_BASELINE, Word.LOSS_BASELINE + 3), *range(Word.NORM_BASELINE, Word.NORM_BASELINE + 3),
)  # fmt: skip
"""Words that the fold computes with."""
SERIES_HEAD = struct.Struct("<IIHHHBB")
FRAME = struct.Struct("<QII")
JSONS = (
    b'["x","","",{},[]]', b'["torchobs.steps","","",{},[]]', b'["x","","",{"a":{"b":1}},[]]', b'["x","","",{"a":[1,null]},[]]',
    b'["x","","",{},[1e400]]', b'["x","","",{},["nan"]]', b'["x","","",{},[' + b"9" * 400 + b"]]", b"[" * 5000, b'"xxxxx"',
    b"{}", b"[]",
    b'["\\ud800","","",{"\\udfff":"\\ud800"},[]]', b'["x","","",{"a":NaN},[]]', b"[1,2,3,{},[]]", b'["x","","",{},[2,1]]',
    b'["x\\n} 1\\n","\\"","\\u0000",{"a":"b"},[]]', b'["x","","",{},[],["s","1","",{}]]', b'["x","","",{},[],7]',
    b"\xff\xfe\x00",
)  # fmt: skip


class Forger:
    """Changes the bytes of one flight file. Every method changes ``raw`` in place and returns the ranges that it touched."""

    def __init__(self, header: Header, whole: bytes, seed: int) -> None:
        self.chance = random.Random(seed)
        self.raw = bytearray(whole)
        self._header, self._whole = header, whole
        self._entries = self._find_entries()
        self._frames = self._find_frames()
        self._lies: tuple[Callable[[], tuple[int, int]], ...] = (
            self._header_lie, self._entry_lie, self._entry_json, self._slot_lie, self._record_lie, self._frame_lie,
            self._live_lie,
        )  # fmt: skip

    def forge(self) -> list[tuple[int, int]]:
        """Damage or lie, once to thrice; return the changed ranges."""
        touched = []
        for _ in range(self.chance.choice((1, 1, 2, 3))):
            act = self.chance.choice((self._damage, self._twin, self.chance.choice(self._lies)))
            touched.append(act())
        return touched

    def undo(self, touched: list[tuple[int, int]]) -> None:
        """Make it the file that it was."""
        for begin, end in touched:
            self.raw[begin:end] = self._whole[begin:end]

    # --- by chance ------------------------------------------------------------------------------------------------------------
    def _damage(self) -> tuple[int, int]:
        """Flip bits, scatter bytes, or wipe a range, somewhere where something stands."""
        offset, length = self.chance.choice(self._places())
        begin = offset + self.chance.randrange(length)
        end = min(begin + self.chance.choice((1, 1, 8, 64, 300)), offset + length)
        kind = self.chance.random()
        if kind < 0.4:
            self.raw[begin] ^= 1 << self.chance.randrange(8)
        elif kind < 0.7:
            self.raw[begin:end] = self.chance.randbytes(end - begin)
        else:
            self.raw[begin:end] = bytes(end - begin)
        return begin, end

    def _twin(self) -> tuple[int, int]:
        """Put a record, a slot, an entry or a frame where another one stands, its CRC still right."""
        kind = self.chance.randrange(4)
        if kind == 0:
            return self._copy(self._record(), self._record(), RECORD_SIZE)
        if kind == 1:
            return self._copy(self._slot(), self._slot(), SLOT_SIZE)
        places, size = (self._entries, 0) if kind == 2 else (self._frames, ALIGN)
        (source, length), (target, _) = self.chance.choice(places), self.chance.choice(places)
        return self._copy(source, target, size or length)

    def _copy(self, source: int, target: int, length: int) -> tuple[int, int]:
        self.raw[target : target + length] = self._whole[source : source + length]
        return target, target + length

    # --- with right CRCs ------------------------------------------------------------------------------------------------------
    def _header_lie(self) -> tuple[int, int]:
        """A size, an offset, a count, a resource, or anything else."""
        if self.chance.random() < 0.2:
            text = self.chance.choice(JSONS)
            self.raw[288 : 288 + len(text)] = text[: HEADER_SIZE - 300]
            self._pack(64 + 20, "<I", self.chance.choice((len(text), 0, 1 << 31)))
        else:
            self._extreme(self.chance.randrange(8, 288 // 4) * 4)
        self._pack(HEADER_SIZE - 4, "<I", zlib.crc32(bytes(self.raw[: HEADER_SIZE - 4])))
        return 0, HEADER_SIZE

    def _entry_lie(self) -> tuple[int, int]:
        """Another block, word, width, kind or type; or another length."""
        offset, length = self.chance.choice(self._entries)
        field, form = self.chance.choice(((8, "<H"), (10, "<H"), (12, "<H"), (14, "<B"), (15, "<B"), (0, "<I")))
        self._pack(offset + field, form, self.chance.choice(EXTREMES))
        return self._seal_entry(offset, length)

    def _entry_json(self) -> tuple[int, int]:
        """Another text."""
        offset, length = self.chance.choice(self._entries)
        text = self.chance.choice(JSONS)
        room = length - SERIES_HEAD.size
        self.raw[offset + SERIES_HEAD.size : offset + length] = text[:room].ljust(room)
        return self._seal_entry(offset, length)

    def _seal_entry(self, offset: int, length: int) -> tuple[int, int]:
        stated, _, *tail = SERIES_HEAD.unpack_from(self.raw, offset)
        payload = bytes(self.raw[offset + SERIES_HEAD.size : offset + min(stated, 2 * length)])
        self._pack(offset + 4, "<I", zlib.crc32(payload, zlib.crc32(SERIES_HEAD.pack(stated, 0, *tail), self._header.seed)))
        return offset, offset + length

    def _slot_lie(self) -> tuple[int, int]:
        """Another generation, length or value in a slot."""
        offset = self._slot()
        generation, length, _ = SLOT_HEADER.unpack_from(self.raw, offset)
        if self.chance.random() < 0.3:
            generation = self.chance.choice((generation, generation + 1, generation + 2, *EXTREMES))
        if self.chance.random() < 0.2:
            length = self.chance.choice((8, 0, length - 8, length + 8, *EXTREMES)) & 0xFFFFFFF8
        for _ in range(self.chance.randrange(4)):
            word = self.chance.choice(
                (self.chance.choice(STATE), self.chance.randrange(max(min(length, SLOT_SIZE - 16) // 8, 1)))
            )
            self._value(offset + SLOT_HEADER.size + 8 * word)
        words = bytes(self.raw[offset + SLOT_HEADER.size : offset + SLOT_HEADER.size + length])[: SLOT_SIZE - SLOT_HEADER.size]
        crc = words_crc(generation, words, self._header.seed) if len(words) == length else 0
        self.raw[offset : offset + SLOT_HEADER.size] = SLOT_HEADER.pack(generation, length, crc)
        return offset, offset + SLOT_SIZE

    def _record_lie(self) -> tuple[int, int]:
        """Another number, step, time, flag or value in a record."""
        offset = self._record()
        if self.chance.random() < 0.3:
            step = self.chance.choice((self._number(offset) + self.chance.randrange(-2, 80), *EXTREMES))
            self._pack(offset, "<Q", step)
        if self.chance.random() < 0.7:
            self._value(offset + 8 * self.chance.randrange(15))
        body = bytes(self.raw[offset : offset + RECORD_SIZE - 4])
        self._pack(offset + RECORD_SIZE - 4, "<I", zlib.crc32(body, self._header.seed))
        return offset, offset + RECORD_SIZE

    def _frame_lie(self) -> tuple[int, int]:
        """Another position, length or text in a frame."""
        offset, length = self.chance.choice(self._frames)
        position, stated, _ = FRAME.unpack_from(self.raw, offset)
        ring = self._header.regions[Region.EVENTS]
        if self.chance.random() < 0.5:
            position = self.chance.choice((position + ring.length, *EXTREMES)) & ((1 << 64) - 1)
        if self.chance.random() < 0.5:
            text = self.chance.choice(JSONS)[: length - FRAME.size]
            self.raw[offset + FRAME.size : offset + FRAME.size + len(text)] = text
            stated = self.chance.choice((len(text), *EXTREMES)) & 0xFFFFFFFF
        payload = bytes(self.raw[offset + FRAME.size : offset + FRAME.size + min(stated, 1 << 16)])
        crc = zlib.crc32(payload, zlib.crc32(FRAME.pack(position, stated, 0), self._header.seed))
        self.raw[offset : offset + FRAME.size] = FRAME.pack(position, stated, crc)
        return offset, offset + length

    def _live_lie(self) -> tuple[int, int]:
        """Any live word."""
        offset = self._header.regions[Region.LIVE].offset + 8 * self.chance.randrange(LIVE_WORDS)
        self._pack(offset, "<Q", self.chance.choice(EXTREMES))
        return offset, offset + 8

    def _extreme(self, offset: int) -> None:
        self._pack(offset, self.chance.choice(("<H", "<I", "<Q")), self.chance.choice(EXTREMES))

    def _value(self, offset: int) -> None:
        if self.chance.random() < 0.5:
            self._pack(offset, "<Q", self.chance.choice(EXTREMES))
        else:
            self.raw[offset : offset + 8] = self.chance.choice(FLOATS)

    def _pack(self, offset: int, form: str, value: int) -> None:
        size = struct.calcsize(form)
        self.raw[offset : offset + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    # --- where what stands ----------------------------------------------------------------------------------------------------
    def _places(self) -> list[tuple[int, int]]:
        regions = self._header.regions
        last_entry, last_length = self._entries[-1]
        return [
            (0, HEADER_SIZE),
            (regions[Region.LIVE].offset, regions[Region.LIVE].length),
            (regions[Region.SERIES].offset, last_entry + last_length - regions[Region.SERIES].offset),
            (regions[Region.BLOCKS].offset, 4 * SLOT_SIZE),
            (regions[Region.STEPS].offset, regions[Region.STEPS].length),
            (regions[Region.EVENTS].offset, 4096),
        ]

    def _record(self) -> int:
        span = self._header.regions[Region.STEPS]
        return span.offset + self.chance.randrange(span.count) * RECORD_SIZE

    def _slot(self) -> int:
        return self._header.regions[Region.BLOCKS].offset + self.chance.randrange(4) * SLOT_SIZE

    def _number(self, offset: int) -> int:
        return int.from_bytes(self.raw[offset : offset + 8], "little")

    def _find_entries(self) -> list[tuple[int, int]]:
        at, found = self._header.regions[Region.SERIES].offset, []
        while length := int.from_bytes(self._whole[at : at + 4], "little"):
            found.append((at, length))
            at += length
        return found

    def _find_frames(self) -> list[tuple[int, int]]:
        at, found = self._header.regions[Region.EVENTS].offset, []
        while length := FRAME.unpack_from(self._whole, at)[1]:
            size = -(-(FRAME.size + length) // ALIGN) * ALIGN
            found.append((at, size))
            at += size
        return found
