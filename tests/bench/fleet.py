"""Ranks without training, for the benchmarks of the exporter: a few processes write many flight files and keep them alive.

``python -m tests.bench.fleet DIRECTORY FIRST RANKS LINES STEP_S WORLD HERE QUIET RESTARTS`` makes the files of one node with
the real writer, says "ready" when they are there, moves heartbeats and takes steps. On the line "change" it gives every series
another value and says "changed"; it leaves when its input ends, and the files stay. RESTARTS is the share of the ranks that are
started again every five minutes, one after the other: their old files stay as those of killed processes do.
"""

from __future__ import annotations

import contextlib
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

from tests.rank_files import RESOURCE, train
from tests.support import clean_environment
from torchobs import catalog
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.prometheus.exposition import Exposition
from torchobs.exporter.prometheus.text_format import Style
from torchobs.flight.files import location
from torchobs.flight.format.layout import DEFAULT_SIZE, MAX_SIZE
from torchobs.flight.writer.series_table import LAYERS, Cell
from torchobs.flight.writer.writer import open_writer
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

BEAT_S = 0.4
"""A heartbeat is due every 0.5 s."""
RESTART_S = 300.0
"""The time in which the share of ranks that a fleet is given starts again."""
FIT = 900
"""Series of layers that have room in a file of the usual size; one for more is twice as large."""
_PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")
_METRICS = (catalog.GRAD_LAYER_NORM, catalog.PARAM_LAYER_NORM, catalog.UPDATE_LAYER_RATIO)


class Rank:
    """One file. ``gauges`` series of layers stand beside what every rank says; together they are its lines on the page.

    ``quiet`` series more are in the file, and not on the page: counters that have not counted.
    """

    def __init__(self, directory: Path, number: int, gauges: int, world: int, here: int, quiet: int = 0) -> None:
        who = {"rank": number, "local_rank": number % here, "world_size": world, "local_world_size": here}
        size = DEFAULT_SIZE if gauges < FIT else MAX_SIZE
        self._writer = open_writer(location.open_place(str(directory), None), {**RESOURCE, **who}, size)
        self._cells = [self._cell(index) for index in range(gauges)]
        for index in range(quiet):
            if self._writer.table.cell(catalog.PROBE_ERRORS, {"probe": f"probe {index}"}) is None:
                sys.exit(f"a flight file has no room for {index + 1} quiet series")
        self._step = self._changes = 0
        self.change()

    def abandon(self) -> None:
        """Leave the file as a killed process does: closed by the kernel, with no exit in it."""
        self._writer.close()

    def beat(self) -> None:
        """Show that the process lives."""
        self._writer.heartbeat()

    def step(self) -> None:
        """Take a step, as a rank shows it: record, fold, core."""
        self._step += 1
        train(self._writer, [self._step])

    def change(self) -> None:
        """Give every series another value, of as many digits as a norm has."""
        self._changes += 1
        for index, cell in enumerate(self._cells):
            cell.set(1.0 / (index + 1.7 * self._changes))
        self.step()

    def _cell(self, index: int) -> Cell:
        layer, metric = divmod(index, len(_METRICS))
        name = f"transformer.h.{layer // len(_PARTS)}.{_PARTS[layer % len(_PARTS)]}.weight"
        found = self._writer.table.cell(_METRICS[metric], {"layer": name}, LAYERS)
        if found is None:
            sys.exit(f"a flight file has no room for {index + 1} series of layers")
        return found


@cache
def bare_lines() -> int:
    """How many lines the page has of a rank that has nothing but what its writer makes."""
    with flight_directory() as path:
        rank = Rank(path, 0, 0, 1, 1)
        scanner = Scanner(ExporterConfig(flight_dir=str(path)))
        families = Exposition().families(ScrapeInput(scanner.scan()), Style(openmetrics=False))
        lines = "".join(families).splitlines()
        scanner.close()
        rank.abandon()
    return sum('rank="0"' in line for line in lines)


@contextlib.contextmanager
def flight_directory() -> Iterator[Path]:
    """A directory on tmpfs, where there is one, as a rank would choose it; removed at the end of the ``with`` block."""
    path = Path(tempfile.mkdtemp(prefix="torchobs-bench-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Node:
    """The ranks of one directory. ``lines``: series of each as Prometheus counts them; ``world``: ranks of the whole run.

    ``quiet``: series of each that are not on the page.
    """

    directory: Path
    ranks: int = 8
    lines: int = 1250
    first: int = 0
    world: int = 8
    quiet: int = 0


class Fleet:
    """The ranks of some nodes, alive within a ``with`` block; ``processes`` keep their files, of each node at least one.

    ``restarts``: the share of the ranks that is started again every :data:`RESTART_S`.
    """

    def __init__(self, *nodes: Node, processes: int = 1, step_s: float = 0.5, restarts: float = 0.0) -> None:
        self._jobs = [part for node in nodes for part in _parts(node, max(1, processes // len(nodes)))]
        self._step_s, self._restarts = step_s, restarts
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            self._children = [self._start(*job) for job in self._jobs]
            self._wait("ready")
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def change(self) -> None:
        """Have every series change; return when the files say so."""
        for child in self._children:
            _pipe(child.stdin).write("change\n")
            _pipe(child.stdin).flush()
        self._wait("changed")

    def _start(self, part: Node, here: int) -> subprocess.Popen[str]:
        of_node = (part.directory, part.first, part.ranks, part.lines)
        arguments = (*of_node, self._step_s, part.world, here, part.quiet, self._restarts)
        command = [sys.executable, "-m", "tests.bench.fleet", *map(str, arguments)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=clean_environment())

    def _wait(self, word: str) -> None:
        for child in self._children:
            said = _pipe(child.stdout).readline().strip()
            if said != word:
                sys.exit(f"the ranks' process ended, or said {said!r} instead of {word!r}")

    def _end(self) -> None:
        for child in self._children:
            _pipe(child.stdin).close()
        for child in self._children:
            child.wait(timeout=60)
            _pipe(child.stdout).close()


def _parts(node: Node, processes: int) -> list[tuple[Node, int]]:
    share = -(-node.ranks // processes)
    starts = range(0, node.ranks, share)
    return [(replace(node, ranks=min(share, node.ranks - at), first=node.first + at), node.ranks) for at in starts]


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _keep(ranks: list[Rank], start: Callable[[int], Rank], step_s: float, restarts: float) -> None:
    """Keep the ranks alive until the input ends; ``start`` makes the one with that index again."""
    next_beat_s = next_step_s = began_s = time.monotonic()
    restarted = 0
    while True:
        now_s = time.monotonic()
        if now_s >= next_beat_s:
            next_beat_s = now_s + BEAT_S
            for rank in ranks:
                rank.beat()
        if now_s >= next_step_s:
            next_step_s = now_s + step_s
            for rank in ranks:
                rank.step()
        if restarted < int((now_s - began_s) / RESTART_S * restarts * len(ranks)):
            index = restarted % len(ranks)
            ranks[index].abandon()
            ranks[index] = start(index)
            restarted += 1
        ready, _, _ = select.select([sys.stdin], [], [], max(0.0, min(next_beat_s, next_step_s) - time.monotonic()))
        if ready and not sys.stdin.readline():
            return
        if ready:
            for rank in ranks:
                rank.change()
                rank.beat()
            _say("changed")


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    """See the module."""
    directory, first, count, lines, step_s, world, here, quiet, restarts = sys.argv[1:]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
    gauges = max(0, int(lines) - bare_lines())
    ranks: list[Rank] = []

    def start(index: int) -> Rank:
        return Rank(Path(directory), int(first) + index, gauges, int(world), int(here), int(quiet))

    for index in range(int(count)):
        ranks.append(start(index))
        for rank in ranks if index % 16 == 0 else ():
            rank.beat()  # making many takes longer than a heartbeat may
    _say("ready")
    _keep(ranks, start, float(step_s), float(restarts))


if __name__ == "__main__":
    main()
