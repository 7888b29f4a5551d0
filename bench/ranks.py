"""Ranks without training: a few processes write many flight files with the real writer, and keep them alive.

``python -m bench.ranks DIRECTORY FIRST RANKS SERIES STEP_S WORLD`` makes the files, says "ready" when they are there, moves
heartbeats and takes steps. On the line "change" it gives every series another value and says "changed"; it leaves when its
input ends, and the files stay.
"""

from __future__ import annotations

import contextlib
import resource
import select
import sys
import time
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from bench.processes import Answering, flight_directory
from tests.rank_files import RESOURCE, train
from torchobs import catalog
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.exposition import Exposition
from torchobs.exporter.text_format import TEXT
from torchobs.flight.directory import open_place
from torchobs.flight.layout import DEFAULT_SIZE, MAX_SIZE
from torchobs.flight.value_blocks import LAYERS, Cell
from torchobs.flight.writer import open_writer
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from typing_extensions import Self

HEARTBEAT_S = 0.4
"""A heartbeat is due every 0.5 s."""
MAX_USUAL_LAYERS = 900
"""Series of layers that have room in a file of the usual size; a file for more is twice as large."""
_PARTS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj", "ln_1", "ln_2")
_METRICS = (catalog.GRAD_LAYER_NORM, catalog.PARAM_LAYER_NORM, catalog.UPDATE_LAYER_RATIO)


class Rank:
    """A flight file with ``gauges`` series of layers beside those that every rank has."""

    def __init__(self, directory: Path, number: int, gauges: int, world: int) -> None:
        identity = {"rank": number, "local_rank": number, "world_size": world, "local_world_size": world}
        size = DEFAULT_SIZE if gauges < MAX_USUAL_LAYERS else MAX_SIZE
        self._writer = open_writer(open_place(str(directory), None), {**RESOURCE, **identity}, size)
        self._cells = [self._cell(index) for index in range(gauges)]
        self._step = self._changes = 0
        self.change()

    def heartbeat(self) -> None:
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

    def close(self) -> None:
        """Leave the file as a killed process does."""
        self._writer.close()

    def _cell(self, index: int) -> Cell:
        layer, metric = divmod(index, len(_METRICS))
        name = f"transformer.h.{layer // len(_PARTS)}.{_PARTS[layer % len(_PARTS)]}.weight"
        cell = self._writer.table.cell(_METRICS[metric], {"layer": name}, LAYERS)
        if cell is None:
            sys.exit(f"a flight file has no room for {index + 1} series of layers")
        return cell


@cache
def lines_without_layers() -> int:
    """Return the number of lines on the page of a rank that has no series of layers."""
    with flight_directory() as path:
        rank = Rank(path, 0, 0, 1)
        scanner = Scanner(ExporterConfig(flight_dir=str(path)))
        families = Exposition().families(ScrapeInput(scanner.scan()), TEXT)
        lines = "".join(families).splitlines()
        scanner.close()
        rank.close()
    return sum('rank="0"' in line for line in lines)


class Fleet:
    """The ranks of a directory, alive within a ``with`` block, each of ``series`` lines on the page of Prometheus."""

    def __init__(self, directory: Path, ranks: int, series: int, *, processes: int = 1, step_s: float = 0.5) -> None:
        share = -(-ranks // processes)
        self._commands = [
            [str(directory), *map(str, (first, min(share, ranks - first), series, step_s, ranks))]
            for first in range(0, ranks, share)
        ]
        self._children: list[Answering] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            self._children = [Answering("bench.ranks", *arguments) for arguments in self._commands]
            self._wait("ready")
            undo.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def change(self) -> None:
        """Have every series change; return when the files say so."""
        for child in self._children:
            child.tell("change")
        self._wait("changed")

    def _wait(self, word: str) -> None:
        for child in self._children:
            if (answer := child.answer()) != word:
                sys.exit(f"the ranks' process said {answer!r} instead of {word!r}")

    def _end(self) -> None:
        for child in self._children:
            child.end()


def _keep_alive(ranks: list[Rank], step_s: float) -> None:
    """Move the ranks until the input ends."""
    next_heartbeat_s = next_step_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        if now_s >= next_heartbeat_s:
            next_heartbeat_s = now_s + HEARTBEAT_S
            for rank in ranks:
                rank.heartbeat()
        if now_s >= next_step_s:
            next_step_s = now_s + step_s
            for rank in ranks:
                rank.step()
        ready, _, _ = select.select([sys.stdin], [], [], max(0.0, min(next_heartbeat_s, next_step_s) - time.monotonic()))
        if ready and not sys.stdin.readline():
            return
        if ready:
            for rank in ranks:
                rank.change()
                rank.heartbeat()
            print("changed", flush=True)


def main() -> None:
    """See the module."""
    directory, first, count, series, step_s, world = sys.argv[1:]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
    gauges = max(0, int(series) - lines_without_layers())
    ranks: list[Rank] = []
    for index in range(int(count)):
        ranks.append(Rank(Path(directory), int(first) + index, gauges, int(world)))
        for rank in ranks if index % 16 == 0 else ():
            rank.heartbeat()  # making many takes longer than a heartbeat may
    print("ready", flush=True)
    _keep_alive(ranks, float(step_s))


if __name__ == "__main__":
    main()
