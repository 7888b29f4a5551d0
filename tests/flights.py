"""Flight files for tests: writers on scripted memory, files made of bytes, and the fold as an oracle."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchobs import catalog
from torchobs.flight import events, fold, reader
from torchobs.flight.directory import FlightDirectory, open_place
from torchobs.flight.files import new_header
from torchobs.flight.layout import MIN_SIZE, RECORD_SIZE, Extent, Header, Region, encode_header
from torchobs.flight.reader import Distribution
from torchobs.flight.step_record import PLAIN_CODES, RecordKind, StepFlag, StepRecord, pack, unpack
from torchobs.flight.storage import Storage
from torchobs.flight.totals import WORDS, Totals, core_series
from torchobs.flight.writer import FlightWriter
from torchobs.probes.hot_path import plain_steps

NAME = f"r0-{0:032x}.flight"
NATIVE = os.environ.get("TORCHOBS_NATIVE") != "0"
"""Whether writers use their compiled part, as the setting says for those of a training"""
ALL_VALUES = StepFlag.LOSS | StepFlag.GRAD_NORM | StepFlag.LEARNING_RATE
Values = dict[tuple[str, tuple[tuple[str, Any], ...]], Any]


def frames(file: reader.FlightFile) -> list[dict[str, Any]]:
    """The frames of a file's event ring, oldest first, as they are written."""
    return [json.loads(payload) for _, payload in events.scan(file._region(Region.EVENTS), file.header.seed)]


HEADER = Header(1, b"i" * 16, b"b" * 16, 0, 1_700_000_000 * 10**9, 1, 1, {}, {})


def decoded(*written: Mapping[str, object]) -> list[events.Event | events.Span | events.Late]:
    """What readers make of these frames in a file with ``HEADER``."""
    return events.read(((number, json.dumps(frame).encode()) for number, frame in enumerate(written)), HEADER)


class RecordingMemory(Storage):
    """Keeps every store in order: what a killed process may have done."""

    def __init__(self, size: int) -> None:
        self.stores: list[tuple[int, bytes]] = []
        self.content = bytearray(size)
        super().__init__(memoryview(self.content))

    def store(self, offset: int, data: bytes | memoryview) -> None:
        self.stores.append((offset, bytes(data)))
        super().store(offset, data)

    def word(self, index: int, value: int) -> None:
        self.store(index * 8, value.to_bytes(8, "little"))

    def detach(self) -> None:
        self.stores = []


def header(records: int | None = None) -> Header:
    """A new incarnation's header, with a step ring of that many records."""
    new = new_header({"rank": 0}, MIN_SIZE)
    if records is None:
        return new
    ring = new.regions[Region.STEPS]
    return replace(new, regions={**new.regions, Region.STEPS: Extent(ring.offset, records * RECORD_SIZE, RECORD_SIZE)})


def recorded(records: int | None = None) -> tuple[FlightWriter, RecordingMemory]:
    """A writer whose stores are kept."""
    new = header(records)
    memory = RecordingMemory(new.file_size)
    return FlightWriter(new, memory, native=NATIVE), memory


def fields(of: Header, number: int, **changes: float) -> dict[str, Any]:
    """What :meth:`FlightWriter.append` takes for step ``number``: functions of the number, except for what is given."""
    return {
        "step": number,
        "end_ns": of.monotonic_ns + number * 250_000_000,
        "kind": RecordKind.STEP,
        "flags": ALL_VALUES,
        "losses": 1,
        "duration_s": 0.25,
        "loss": 2.0 + number % 7 / 64,
        "grad_norm": 1.0 + number % 5 / 64,
        "learning_rate": 1 / number,
        "phase_s": (0.0625, 0.0625, 0.125, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        "tokens": 16,
        "samples": 2,
        "norm_scale": 1.0,
        **changes,
    }


def step(writer: FlightWriter, number: int, **changes: float) -> int:
    """Append step ``number``."""
    return writer.append(**fields(writer.header, number, **changes))


def plain_step(writer: FlightWriter, number: int, loss: float = 2.0) -> None:
    """Append step ``number`` as nearly every step is written: by its boundaries, each 50 ms after the last."""
    begun_ns = writer.header.monotonic_ns + (number - 1) * 250_000_000
    stamps = [begun_ns + part * 50_000_000 << 4 | code for part, code in enumerate(PLAIN_CODES)]
    steps = plain_steps(writer)
    steps.clean, steps.timed, steps.expected, steps.step, steps.begun_ns = True, True, [], number - 1, begun_ns
    steps.flags, steps.losses, steps.loss_sum, steps.norm_squared, steps.learning_rate = ALL_VALUES, 1, loss, 1.0, 0.5
    steps.tokens, steps.samples = 16, 2
    steps.trace[:] = stamps
    assert steps.append(begun_ns + 250_000_000)


def step_record(of: Header, number: int, **changes: float) -> StepRecord:
    """The record that :func:`step` appends, if it is the one of that number."""
    record = unpack(pack(number, **fields(of, number, **changes), seed=of.seed), of.seed)
    assert record
    return record


def place(directory: Path, *, in_memory: bool = True) -> FlightDirectory:
    """The directory, opened as a rank opens it, and taken for tmpfs or not."""
    return replace(open_place(str(directory), None), in_memory=in_memory)


class Image:
    """A flight file that is bytes in a directory, to be written over at will."""

    def __init__(self, directory: Path, of: Header) -> None:
        self.directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self.name, self.header = NAME, of
        self.fd = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self.clear()

    def store(self, offset: int, data: bytes) -> None:
        os.pwrite(self.fd, data, offset)

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self.fd, length, offset)

    def clear(self) -> None:
        """Make it a file that nothing but the header has been stored into."""
        os.ftruncate(self.fd, 0)
        os.ftruncate(self.fd, self.header.file_size)
        os.pwrite(self.fd, encode_header(self.header), 0)

    def open(self) -> reader.FlightFile:
        return reader.open_file(self.directory_fd, self.name)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.directory_fd)


class ImageMemory(RecordingMemory):
    """Stores into a file that is also read. ``before``: called with every store's offset."""

    def __init__(self, image: Image) -> None:
        super().__init__(image.header.file_size)
        self._image = image
        self.before: Callable[[int], None] = lambda _: None

    def store(self, offset: int, data: bytes | memoryview) -> None:
        self.before(offset)
        raw = bytes(data)
        self.content[offset : offset + len(raw)] = raw
        self._image.store(offset, raw)


def written(image: Image) -> tuple[FlightWriter, ImageMemory]:
    """A writer into that file."""
    memory = ImageMemory(image)
    return FlightWriter(image.header, memory, native=NATIVE), memory


def values(view: reader.View, *, folded: bool = False) -> Values:
    """The points of a view by name and attributes; ``folded``: only those of the fold."""
    keys = {(metric.name, tuple(sorted(attributes.items()))) for metric, attributes, _ in core_series()}
    points: Values = {(point.series.name, point.series.attributes): point.value for point in view.points}
    return {key: value for key, value in points.items() if not folded or key in keys}


def value(view: reader.View, metric: catalog.Metric, **attributes: str) -> object:
    """One value of a view; None if the series has none."""
    return values(view).get((metric.name, tuple(sorted(attributes.items()))))


def whole(value: object) -> int:
    """A counter's value; 0 for None."""
    assert value is None or isinstance(value, int)
    return value or 0


def totals(of: Header) -> Totals:
    """The fold's state before the first step."""
    state = Totals(bytearray(WORDS * 8))
    state.clear(of.wall_ns - of.monotonic_ns)
    return state


def folded_states(of: Header, records: Sequence[StepRecord]) -> Iterator[Values]:
    """The points after no record, after one, after two …: every state that ever existed."""
    state = totals(of)
    yield _fold_values(state)
    for record in records:
        fold.fold(state, [record])
        yield _fold_values(state)


def _fold_values(state: Totals) -> Values:
    points: Values = {}
    for metric, attributes, word in core_series():
        if metric.kind is catalog.Kind.HISTOGRAM:
            total = word + len(metric.bounds) + 1
            counts, (sum_, least, greatest) = tuple(state.ints[word:total]), state.floats[total : total + 3]
            some = any(counts)
            value: object = Distribution(counts, sum_, least if some else None, greatest if some else None)
        elif metric.integer:
            value = state.ints[word]
        elif state.floats[word] != state.floats[word]:  # absent
            continue
        else:
            value = state.floats[word]
        points[metric.name, tuple(sorted(attributes.items()))] = value
    return points
