"""The writer's metrics: series, the words they live in, and their publication as A/B slots.

Any thread may change a cell at any time, a signal handler too: a change is queued, and whoever gets the block's lock without
waiting applies what is queued and publishes the block. Updates go to a private buffer; :meth:`Block.publish` raises the
generation and stores the whole slot of its parity, so that a reader always finds one whole slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from math import inf, isfinite
from threading import Lock
from typing import TYPE_CHECKING, Any

from torchobs.catalog import Kind, Metric
from torchobs.flight.layout import BLOCK_WORDS, SLOT_HEADER, SLOT_SIZE, Live, Region, Span, words_crc
from torchobs.flight.record import ABSENT_BITS, WORDS, Totals
from torchobs.flight.series import INT_ABSENT, Series, ValueType, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchobs.flight.memory import Memory

_MASK = (1 << 64) - 1
CORE, LAYERS, USER = "core", "layers", "user"


class Block:
    """One value block: private words, and the two slots in the map."""

    __slots__ = ("_generation", "_lock", "_memory", "_offset", "_pending", "_raw", "_seed", "totals", "used")

    def __init__(self, memory: Memory, offset: int, seed: int) -> None:
        self._memory, self._offset, self._seed = memory, offset, seed
        self._raw = memoryview(bytearray(SLOT_SIZE))
        start = SLOT_HEADER.size
        self.totals = Totals(self._raw[start : start + BLOCK_WORDS * 8])
        self.used = 0
        self._generation = 0
        self._lock = Lock()
        self._pending: deque[Callable[[Totals], None]] = deque()

    def change(self, update: Callable[[Totals], None]) -> None:
        """Queue a change of the words; the next :meth:`publish` applies it."""
        self._pending.append(update)

    def publish(self, *, force: bool = False) -> None:
        """Apply what is queued and store the block, unless another thread is at it (it will see our changes)."""
        while self._pending or force:
            if not self._lock.acquire(blocking=False):
                return
            force = False
            try:
                for _ in range(len(self._pending)):
                    self._pending.popleft()(self.totals)
                self._store()
            finally:
                self._lock.release()

    def _store(self) -> None:
        generation, end = self._generation + 1, SLOT_HEADER.size + self.used * 8
        words = self._raw[SLOT_HEADER.size : end]
        self._raw[: SLOT_HEADER.size] = SLOT_HEADER.pack(generation, len(words), words_crc(generation, words, self._seed))
        self._memory.store(self._offset + (generation & 1) * SLOT_SIZE, self._raw[:end])
        self._generation = generation


class Cell:
    """One series' value."""

    __slots__ = ("_block", "_bounds", "_type", "_word")

    def __init__(self, block: Block, series: Series) -> None:
        self._block, self._word, self._type, self._bounds = block, series.word, series.value_type, series.bounds

    def add(self, amount: float) -> None:
        """Add to a counter or an up-down counter; visible after the block's next publication."""
        word, either = self._word, self._type == ValueType.EITHER
        if isinstance(amount, int) and self._type != ValueType.FLOAT:
            self._block.change(lambda totals: _add_int(totals, word, amount))
        elif isfinite(amount):
            self._block.change(lambda totals: _add_float(totals, word + either, amount))

    def set(self, value: float) -> None:
        """Set a gauge, or the total of an observed counter. A non-finite value makes it absent."""
        word, kind = self._word, self._type
        self._block.change(lambda totals: _set(totals, word, kind, value))

    def observe(self, value: float) -> None:
        """Add one value to a histogram; a non-finite one is never observed."""
        if isfinite(value):
            word, bounds = self._word, self._bounds
            self._block.change(lambda totals: _observe(totals, word, bounds, value))

    def publish(self) -> None:
        """Make the change visible, whatever happens to the process afterwards."""
        self._block.publish()


def _add_int(totals: Totals, word: int, amount: int) -> None:
    present = totals.ints[word]
    totals.ints[word] = ((0 if present == INT_ABSENT else present) + amount) & _MASK


def _add_float(totals: Totals, word: int, amount: float) -> None:
    present = totals.floats[word]
    totals.floats[word] = amount if present != present else present + amount  # noqa: PLR0124  # the NaN test


def _set(totals: Totals, word: int, kind: int, value: float) -> None:
    if kind == ValueType.EITHER:
        whole = isinstance(value, int)
        totals.ints[word] = int(value) & _MASK if whole else INT_ABSENT
        word += 1
        if whole:
            totals.ints[word] = ABSENT_BITS
            return
    if kind == ValueType.INT:
        totals.ints[word] = int(value) & _MASK
    elif isfinite(value):
        totals.floats[word] = value
    else:
        totals.ints[word] = ABSENT_BITS


def _observe(totals: Totals, word: int, bounds: tuple[float, ...], value: float) -> None:
    totals.ints[word + bisect_left(bounds, value)] += 1
    total = word + len(bounds) + 1
    floats = totals.floats
    floats[total] += value
    floats[total + 1] = min(floats[total + 1], value)
    floats[total + 2] = max(floats[total + 2], value)


class Table:
    """All series of a flight file. Block 0 is the core, whose first words belong to the fold."""

    __slots__ = (
        "_at", "_blocks", "_cells", "_count", "_groups", "_live_at", "_lock", "_memory", "_offset",
        "_room", "_seed", "_span", "dropped",
    )  # fmt: skip

    def __init__(self, memory: Memory, regions: Mapping[Region, Span], seed: int) -> None:
        self._memory, self._seed, self._span = memory, seed, regions[Region.BLOCKS]
        self._offset, self._room = regions[Region.SERIES].offset, regions[Region.SERIES].length
        self._live_at = regions[Region.LIVE].offset // 8
        self._at = self._count = 0
        self._lock = Lock()
        self._cells: dict[tuple[str, tuple[tuple[str, Any], ...]], Cell] = {}
        self._blocks: list[Block] = []
        self._groups: dict[str, Block] = {}
        self.dropped = 0
        core = self._new_block()
        core.used = WORDS
        self._groups[CORE] = core

    @property
    def core(self) -> Block:
        """Block 0."""
        return self._blocks[0]

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks in use."""
        return tuple(self._blocks)

    def __len__(self) -> int:
        return self._count

    def cell(self, metric: Metric, attributes: Mapping[str, Any], group: str = CORE, *, either: bool = False) -> Cell | None:
        """Return the cell of that series, made at first sight; ``None`` when there is no room, which is counted.

        ``either``: values may be ints and floats (a user's instrument). Also ``None``, uncounted, when another thread is
        just making a series and does not finish within 50 ms, or this is a signal handler that interrupted one.
        """
        key = (metric.name, tuple(sorted(attributes.items())))
        found = self._cells.get(key)
        if found is not None or not self._lock.acquire(timeout=0.05):
            return found
        try:
            return self._cells.get(key) or self._make(key, metric, group, either=either)
        finally:
            self._lock.release()

    def claim(self, metric: Metric, attributes: Mapping[str, Any], word: int) -> None:
        """Name a word of the core that the fold fills."""
        self._enter(_series(metric, tuple(sorted(attributes.items())), 0, word, either=False))

    def publish(self) -> None:
        """Publish every block in which something changed."""
        for block in self._blocks:
            block.publish()

    def _make(self, key: tuple[str, tuple[tuple[str, Any], ...]], metric: Metric, group: str, *, either: bool) -> Cell | None:
        width = _series(metric, key[1], 0, 0, either=either).width
        block = self._groups.get(group)
        if block is None or block.used + width > BLOCK_WORDS:
            block = self._new_block() if len(self._blocks) < self._span.count and width <= BLOCK_WORDS else None
        if block is None:
            self.dropped += 1
            return None
        self._groups[group] = block
        series = _series(metric, key[1], self._blocks.index(block), block.used, either=either)
        self._clear(block, series)
        block.used += width
        if not self._enter(series):
            self.dropped += 1
            return None
        cell = self._cells[key] = Cell(block, series)
        block.publish(force=True)  # counters exist at 0 before their first increment
        return cell

    def _new_block(self) -> Block:
        index = len(self._blocks)
        block = Block(self._memory, self._span.offset + index * 2 * SLOT_SIZE, self._seed)
        self._blocks.append(block)
        return block

    @staticmethod
    def _clear(block: Block, series: Series) -> None:
        totals, word = block.totals, series.word
        gauge = series.kind is Kind.GAUGE
        if series.value_type == ValueType.HISTOGRAM:
            total = word + len(series.bounds) + 1
            totals.floats[total + 1], totals.floats[total + 2] = inf, -inf
        elif series.value_type == ValueType.EITHER:
            totals.ints[word], totals.ints[word + 1] = INT_ABSENT, ABSENT_BITS
        elif gauge:
            totals.ints[word] = ABSENT_BITS

    def _enter(self, series: Series) -> bool:
        try:
            entry = encode(series, self._seed)
        except ValueError:
            return False
        if self._at + len(entry) > self._room:
            return False
        self._memory.store(self._offset + self._at, entry)
        self._at += len(entry)
        self._count += 1
        self._memory.word(self._live_at + Live.SERIES_COUNT, self._count)
        return True


def _series(metric: Metric, attributes: tuple[tuple[str, Any], ...], block: int, word: int, *, either: bool) -> Series:
    if metric.kind is Kind.HISTOGRAM:
        value_type = ValueType.HISTOGRAM
    elif either:
        value_type = ValueType.EITHER
    else:
        value_type = ValueType.INT if metric.integer else ValueType.FLOAT
    return Series(metric.name, metric.kind, metric.unit, metric.brief, attributes, metric.bounds, value_type, block, word)
