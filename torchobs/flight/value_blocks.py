"""The writer's series: their table, and the blocks of words that hold their values.

Any thread and any signal handler may change the words at any time: changes are queued, and a thread that gets the block's lock
without waiting applies the queue and publishes the block. :meth:`ValueBlock.publish` increments the generation and stores the
whole slot of its parity, so that a reader always finds one complete slot.

Totals saturate instead of wrapping around, because a reader that sees a counter decrease refuses the file from then on.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, replace
from math import inf, isfinite
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any
from zlib import crc32

from torchobs.catalog import Kind, Metric
from torchobs.flight.layout import BLOCK_WORDS, SLOT_HEADER, SLOT_SIZE, Extent, Live, Region
from torchobs.flight.series import INT_ABSENT, Scope, Series, ValueType, encode
from torchobs.flight.totals import ABSENT_BITS, MAX, TOP, WORDS, Totals, observe
from torchobs.support.after_fork import renew_in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torchobs.flight.storage import Storage


_MASK = (1 << 64) - 1


class ValueBlock:
    """One value block: private words, and the two slots in the map."""

    __slots__ = (
        "__weakref__",
        "_generation",
        "_head",
        "_lock",
        "_memory",
        "_offset",
        "_pending",
        "_raw",
        "_seed",
        "_unstored",
        "totals",
        "used",
    )  # fmt: skip

    def __init__(self, memory: Storage, offset: int, seed: int) -> None:
        self._memory, self._offset, self._seed = memory, offset, seed
        self._raw = memoryview(bytearray(SLOT_SIZE))
        self._head, start = self._raw.cast("Q"), SLOT_HEADER.size
        self.totals = Totals(self._raw[start : start + BLOCK_WORDS * 8])
        self.used = 0
        self._generation = 0
        self._lock = Lock()
        renew_in_child(self, _lock=Lock)
        self._pending: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._unstored = False

    def change(self, update: Callable[..., None], *arguments: Any) -> None:
        """Queue ``update(totals, *arguments)`` for the next :meth:`publish`."""
        self._pending.append((update, arguments))

    @property
    def is_settled(self) -> bool:
        """Whether no change is queued or being applied."""
        return not (self._pending or self._unstored)

    def publish(self, *, force: bool = False) -> None:
        """Apply the queue and store the block, unless another thread is doing so, which will apply our changes too."""
        if force:
            self._pending.append((_nothing, ()))
        while self._pending or self._unstored:
            if self._lock.locked():
                return
            # `with`, because an interrupt between acquire() and `try` would leave the lock taken forever; it waits only for
            # a thread that has just taken it, never for the one that a signal handler has interrupted
            with self._lock:
                self._apply()
                self._store()

    def _apply(self) -> None:
        self._unstored = True  # before applying: an interrupt may come in between
        pending, totals = self._pending, self.totals
        for _ in range(len(pending)):
            update, arguments = pending.popleft()
            update(totals, *arguments)

    def _store(self) -> None:
        # SLOT_HEADER as words, in half the time of packing it; the CRC covers the header with its own field zero
        generation, size = self._generation + 1, self.used * 8
        head, slot = self._head, self._raw[: SLOT_HEADER.size + size]
        head[0], head[1] = generation, size
        head[1] = crc32(slot, self._seed) << 32 | size
        self._memory.store(self._offset + (generation & 1) * SLOT_SIZE, slot)
        self._generation = generation
        self._unstored = False


def _nothing(_: Totals) -> None:
    """The empty change that a forced publication queues."""


def add_int(totals: Totals, word: int, amount: int) -> None:
    """Add to an i64 word."""
    present = totals.ints[word]
    total = present + amount
    if present > TOP or not 0 <= total <= TOP:  # absent, negative, or out of range
        present = 0 if present == INT_ABSENT else present - ((present >> 63) << 64)
        total = min(max(present + amount, -TOP), TOP) & _MASK
    totals.ints[word] = total


def add_float(totals: Totals, word: int, amount: float) -> None:
    """Add a finite number to an f64 word."""
    total = totals.floats[word] + amount
    if total != total:  # noqa: PLR0124  # the NaN test: absent until now
        total = float(amount)
    totals.floats[word] = min(max(total, -MAX), MAX)


def set_value(totals: Totals, word: int, value_type: int, value: float) -> None:
    """Set a gauge, or an observed total. A non-finite value makes it absent."""
    whole = isinstance(value, int)
    if whole:
        value = min(max(value, -TOP), TOP)
    if value_type == ValueType.EITHER:
        totals.ints[word] = int(value) & _MASK if whole else INT_ABSENT
        word += 1
        if whole:
            totals.ints[word] = ABSENT_BITS
            return
    if value_type == ValueType.INT:
        totals.ints[word] = int(value) & _MASK
    elif isfinite(value):
        totals.floats[word] = value
    else:
        totals.ints[word] = ABSENT_BITS


def _observe(totals: Totals, word: int, bounds: tuple[float, ...], value: float) -> None:
    """Add a finite value to the histogram with its first bucket at ``word``."""
    observe(totals, word, bounds, word + len(bounds) + 1, [value])


CORE, LAYERS, USER = "core", "layers", "user"
_MAX_REFUSED = 10_000
"""Most refused series that are remembered, to count each once (at most 1 MiB); beyond, every attempt counts."""


class NoSeriesRoomError(Exception):
    """The file has no room for another series of this group."""


class Cell:
    """The value of one series."""

    __slots__ = ("_block", "_bounds", "_float_word", "_type", "_word", "publish")

    def __init__(self, block: ValueBlock, series: Series) -> None:
        self._block, self._word, self._type, self._bounds = block, series.word, series.value_type, series.bounds
        self._float_word = series.word + (series.value_type == ValueType.EITHER)
        self.publish: Callable[[], None] = block.publish
        """Publish the change, so that it survives the process (off tmpfs: after 100 ms)."""

    def add(self, amount: float) -> None:
        """Add to a counter or an up-down counter; visible after the block's next publication."""
        if isinstance(amount, int) and self._type != ValueType.FLOAT:
            self._block.change(add_int, self._word, amount)
        elif isfinite(amount) and self._type == ValueType.INT:
            self._block.change(add_int, self._word, int(amount))
        elif isfinite(amount):
            self._block.change(add_float, self._float_word, amount)

    def set(self, value: float) -> None:
        """Set a gauge, or the total of an observed counter. A non-finite value makes it absent, unless it is an integer."""
        if self._type == ValueType.INT and not isfinite(value):
            return
        self._block.change(set_value, self._word, self._type, value)

    def read(self) -> float:
        """Return a float gauge's value, which is NaN while it is absent."""
        return float(self._block.totals.floats[self._word])

    def observe(self, value: float) -> None:
        """Add one value to a histogram; non-finite values are ignored."""
        if isfinite(value):
            self._block.change(_observe, self._word, self._bounds, value)


@dataclass(slots=True)
class _Share:
    """Quota of one group of series in the file, its spare part, and its present use."""

    blocks: int
    room: int
    spare_words: int = 0
    spare_room: int = 0
    block: ValueBlock | None = None
    blocks_taken: int = 0
    room_taken: int = 0

    def has_words(self, width: int) -> bool:
        """Return whether the block in use has that many words left."""
        return self.block is not None and self.block.used + width <= BLOCK_WORDS

    def words_left(self) -> int:
        """Number of words left to the group; the unused rest of a full block counts as taken."""
        return (self.blocks - self.blocks_taken) * BLOCK_WORDS + (BLOCK_WORDS - self.block.used if self.block else 0)


class Table:
    """All series of a flight file. Block 0 is the core; its first words belong to the fold.

    A user's instruments may take half of the series table and half of the blocks, so that they cannot displace torchobs' own
    series; the last eighth of that is spare, for overflow series.
    """

    def __init__(self, memory: Storage, regions: Mapping[Region, Extent], seed: int) -> None:
        self._memory, self._seed, self._span = memory, seed, regions[Region.BLOCKS]
        self._offset, self._room = regions[Region.SERIES].offset, regions[Region.SERIES].length
        self._live_at = regions[Region.LIVE].offset // 8
        self._at = self._count = 0
        self._maker = 0
        self._lock = Lock()
        renew_in_child(self, _lock=Lock)
        self._cells: dict[tuple[Metric, Scope | None, str], Cell] = {}
        self._refused: set[int] = set()
        self._blocks: list[ValueBlock] = []
        blocks, room = self._span.count // 2, self._room // 2
        self._shares = {USER: _Share(blocks, room, blocks * BLOCK_WORDS // 8, room // 8)}
        self.dropped = 0
        """number of series that did not fit"""
        core = self._new_block(self._share(CORE))
        core.used = WORDS

    @property
    def core(self) -> ValueBlock:
        """Block 0."""
        return self._blocks[0]

    @property
    def blocks(self) -> Sequence[ValueBlock]:
        """The blocks in use."""
        return tuple(self._blocks)

    def __len__(self) -> int:
        return self._count

    def cells_of(self, metric: Metric) -> dict[str, Cell]:
        """Return a metric's cells by the value of their single attribute; ``""`` where it has none."""
        pairs_and_cells = [(json.loads(text), cell) for (other, _, text), cell in list(self._cells.items()) if other is metric]
        return {str(pairs[0][1]) if pairs else "": cell for pairs, cell in pairs_and_cells if len(pairs) < 2}  # noqa: PLR2004

    def cell(self, metric: Metric, attributes: Mapping[str, Any], group: str = CORE) -> Cell | None:
        """Return the cell of a series, created on first use; ``None`` when there is no room, which is counted.

        Also ``None``, uncounted, when another thread is creating a series for more than 50 ms, or the caller is a signal
        handler that interrupted this thread while doing so.
        """
        try:
            return self.open(metric, attributes, group)
        except NoSeriesRoomError:
            return None

    def open(
        self, metric: Metric, attributes: Mapping[str, Any], group: str, *,
        either: bool = False, scope: Scope | None = None, spare: bool = False,
    ) -> Cell | None:  # fmt: skip
        """Return the cell like :meth:`cell`; ``None`` only for a temporary failure: try again.

        ``either``: values may be ints and floats (a user's instrument). ``scope`` separates series of one name from different
        instrumentations; ``spare``: the group's spare part may be used.
        Raises :class:`NoSeriesRoomError`, counted once per series.
        """
        pairs = tuple(sorted(attributes.items()))
        key = (metric, scope, json.dumps(pairs, separators=(",", ":"), default=str))  # as text: 1 must differ from True and 1.0
        cell = self._cells.get(key)
        if cell is not None or self._maker == get_ident() or not self._lock.acquire(timeout=0.05):
            return cell
        try:
            self._maker = get_ident()
            cell = self._cells.get(key)
            if cell is None:
                cell = self._cells[key] = self._make(_series(metric, pairs, scope, either=either), group, spare=spare)
        except NoSeriesRoomError:
            self.refuse(hash(key))
            raise
        finally:
            self._maker = 0
            self._lock.release()
        return cell

    def refuse(self, key: int) -> None:
        """Count a series that did not fit, once for each ``key`` among the first 10,000."""
        if key not in self._refused:
            self.dropped += 1
            if len(self._refused) < _MAX_REFUSED:
                self._refused.add(key)

    def claim(self, metric: Metric, attributes: Mapping[str, Any], word: int) -> None:
        """Register a word of the core that the fold maintains."""
        series = _series(metric, tuple(sorted(attributes.items())), None, either=False)
        self._enter(encode(replace(series, word=word), self._seed))

    def publish(self) -> None:
        """Publish every changed block."""
        for block in self._blocks:
            block.publish()

    def _make(self, series: Series, group: str, *, spare: bool) -> Cell:
        share = self._share(group)
        block = self._find_block(share, series.width, 0 if spare else share.spare_words)
        series = replace(series, block=self._blocks.index(block), word=block.used)
        entry = self._entry(series, share.room - share.room_taken - (0 if spare else share.spare_room))
        self._clear(block, series)
        block.used += series.width
        share.room_taken += len(entry)
        self._enter(entry)
        block.publish(force=True)  # counters exist at 0 before their first increment
        return Cell(block, series)

    def _share(self, group: str) -> _Share:
        return self._shares.setdefault(group, _Share(self._span.count, self._room))

    def _find_block(self, share: _Share, width: int, spare_words: int) -> ValueBlock:
        if width <= BLOCK_WORDS and width + spare_words <= share.words_left():
            if share.block is not None and share.has_words(width):
                return share.block
            if share.blocks_taken < share.blocks and len(self._blocks) < self._span.count:
                return self._new_block(share)
        raise NoSeriesRoomError

    def _new_block(self, share: _Share) -> ValueBlock:
        block = ValueBlock(self._memory, self._span.offset + len(self._blocks) * 2 * SLOT_SIZE, self._seed)
        self._blocks.append(block)
        share.block = block
        share.blocks_taken += 1
        return block

    def _entry(self, series: Series, room: int) -> bytes:
        try:
            entry = encode(series, self._seed)
        except ValueError as error:
            raise NoSeriesRoomError from error
        if len(entry) > min(room, self._room - self._at):
            raise NoSeriesRoomError
        return entry

    @staticmethod
    def _clear(block: ValueBlock, series: Series) -> None:
        totals, word = block.totals, series.word
        if series.value_type == ValueType.HISTOGRAM:
            total = word + len(series.bounds) + 1
            totals.floats[total + 1], totals.floats[total + 2] = inf, -inf
        elif series.value_type == ValueType.EITHER:
            totals.ints[word], totals.ints[word + 1] = INT_ABSENT, ABSENT_BITS
        elif series.kind is Kind.GAUGE:
            totals.ints[word] = ABSENT_BITS

    def _enter(self, entry: bytes) -> None:
        self._memory.store(self._offset + self._at, entry)
        self._at += len(entry)
        self._count += 1
        self._memory.word(self._live_at + Live.SERIES_COUNT, self._count)


def _series(metric: Metric, attributes: tuple[tuple[str, Any], ...], scope: Scope | None, *, either: bool) -> Series:
    if metric.kind is Kind.HISTOGRAM:
        value_type = ValueType.HISTOGRAM
    elif either:
        value_type = ValueType.EITHER
    else:
        value_type = ValueType.INT if metric.integer else ValueType.FLOAT
    return Series(metric.name, metric.kind, metric.unit, metric.brief, attributes, metric.bounds, value_type, 0, 0, scope)
