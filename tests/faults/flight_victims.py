"""A program that makes children that write flight files and are killed: one line asks for one, one line tells of it.

It imports nothing but the flight file: a fork takes a millisecond. A child acknowledges through a shared anonymous map, which
outlives it. Asked `publish <seconds>` or `rank <seconds>` it lets the child live so long and answers `<name> <acknowledged>`.
"""

import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count

from tests import flights
from torchobs.catalog import Kind, Metric
from torchobs.flight.directory import FlightDirectory, open_place
from torchobs.flight.layout import MIN_SIZE
from torchobs.flight.value_blocks import USER
from torchobs.flight.writer import FlightWriter, open_writer

BUCKETS = 150
HISTOGRAMS = [Metric(f"test.{name}", Kind.HISTOGRAM, "", "", bounds=tuple(map(float, range(BUCKETS - 1)))) for name in "ab"]
"""What the block that is only published holds: 306 words."""
FOLD_S = 0.001


def publish(writer: FlightWriter) -> Iterator[int]:
    """Observe the number's remainder in every histogram and publish them, nothing else. The first number is 0: ready."""
    cells = [cell for metric in HISTOGRAMS if (cell := writer.table.cell(metric, {}, USER))]
    for number in count():
        yield number
        for cell in cells:
            cell.observe((number + 1) % BUCKETS)
        writer.table.publish()


def rank(writer: FlightWriter) -> Iterator[int]:
    """Step as a rank does, while a sampler folds a hundred times as often."""
    threading.Thread(target=_sample, args=[writer], daemon=True).start()
    yield 0
    for number in count(1):
        if number % 2:
            flights.step(writer, number, loss=number / 64)
        else:
            flights.plain_step(writer, number, loss=number / 64)
        yield number


def _sample(writer: FlightWriter) -> None:
    while True:
        time.sleep(FOLD_S)
        writer.heartbeat()
        writer.fold()
        writer.publish()


ROLES: dict[str, Callable[[FlightWriter], Iterator[int]]] = {"publish": publish, "rank": rank}


def _live(place: FlightDirectory, role: str, shared: memoryview, ready: int) -> None:
    writer = open_writer(place, {"rank": 0}, MIN_SIZE)
    for number in ROLES[role](writer):
        shared[0] = number
        if not number:
            os.write(ready, f"{writer.name}\n".encode())


def _kill_one(place: FlightDirectory, role: str, life_s: float) -> str:
    acknowledged = mmap.mmap(-1, mmap.PAGESIZE)
    reading, ready = os.pipe()
    child = os.fork()
    if not child:
        try:
            _live(place, role, memoryview(acknowledged).cast("Q"), ready)
        finally:
            os._exit(1)  # no word to the parent's standard output
    os.close(ready)
    with os.fdopen(reading) as pipe:
        name = pipe.readline().strip()
    time.sleep(life_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"{name} {int.from_bytes(acknowledged[:8], 'little')}"


def main(directory: str) -> None:
    """Serve requests until standard input ends."""
    place = open_place(directory, None)
    for line in sys.stdin:
        role, life_s = line.split()
        print(_kill_one(place, role, float(life_s)), flush=True)  # noqa: T201  # the answer


if __name__ == "__main__":
    main(sys.argv[1])
