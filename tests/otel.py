"""What the tests of the OpenTelemetry API share: a flight file, and what a reader finds in it."""

import json
import signal
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from tests import flights
from torchobs.flight.directory import open_place
from torchobs.flight.reader import Distribution, open_path
from torchobs.flight.writer import FlightWriter, open_writer
from torchobs.otel.attributes import flat


class Seen(NamedTuple):
    """A data point, from a flight file or from the SDK; attributes as JSON, so that 1, 1.0 and True differ."""

    scope: tuple[str, str, str]
    name: str
    unit: str
    description: str
    kind: str
    attributes: str
    value: Any


def new_file(directory: Path, size: int = 256 * 1024) -> FlightWriter:
    """A flight file of this process."""
    return open_writer(open_place(str(directory), None), {"rank": 0}, size)


def text(attributes: Mapping[str, Any]) -> str:
    """Attributes as JSON, in order."""
    return json.dumps(flat(attributes))


def points(writer: FlightWriter) -> list[Seen]:
    """What a reader of the file finds of the user's instruments."""
    with closing(open_path(writer.path)) as file:
        every = file.read().points
    return [
        Seen(
            (point.series.scope.name, point.series.scope.version, point.series.scope.schema_url),
            point.series.name,
            point.series.unit,
            point.series.brief,
            point.series.kind.name,
            text(dict(point.series.attributes)),
            (*point.value, point.series.bounds) if isinstance(point.value, Distribution) else point.value,
        )
        for point in every
        if point.series.scope is not None
    ]


def values(writer: FlightWriter) -> dict[tuple[str, str], Any]:
    """The same by name and attributes, values only."""
    return {(point.name, point.attributes): point.value for point in points(writer)}


def frames(writer: FlightWriter) -> list[dict[str, Any]]:
    """The spans in the file, oldest first."""
    with closing(open_path(writer.path)) as file:
        return [fields for fields in flights.frames(file) if fields["k"] in {"span", "span_start"}]


def interrupted(work: Callable[[], object], handle: Callable[[], object], times: int) -> None:
    """Do the work again and again until a signal handler has broken into it so often."""
    handled = 0

    def handler(*_: object) -> None:
        nonlocal handled
        handled += 1
        handle()
        if handled < times:
            signal.setitimer(signal.ITIMER_REAL, 0.001)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    try:
        while handled < times:
            work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
