"""Ranks without training: a few processes write many flight files with the real writer, and keep them alive.

``python -m bench.ranks DIRECTORY FIRST RANKS SERIES STEP_S WORLD`` makes the files, says "ready" when they are there, moves
heartbeats and takes steps. On the line "change" it gives every series another value and says "changed"; it leaves when its
input ends, and the files stay.
"""

from __future__ import annotations

import contextlib
import resource
import select
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING

from tests.rank_files import RESOURCE, train
from tests.support import clean_environment
from torchobs import catalog
from torchobs.flight.directory import open_place
from torchobs.flight.layout import DEFAULT_SIZE, MAX_SIZE
from torchobs.flight.value_blocks import LAYERS
from torchobs.flight.writer import open_writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LINES_WITHOUT_LAYERS = 76
"""What the page has of such a rank. The tables count the lines of the page itself."""
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
        self._cells = []
        for index in range(gauges):
            layer, metric = divmod(index, len(_METRICS))
            name = f"transformer.h.{layer // len(_PARTS)}.{_PARTS[layer % len(_PARTS)]}.weight"
            cell = self._writer.table.cell(_METRICS[metric], {"layer": name}, LAYERS)
            if cell is None:
                sys.exit(f"a flight file has no room for {index + 1} series of layers")
            self._cells.append(cell)
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


@contextlib.contextmanager
def fleet(directory: Path, ranks: int, series: int, *, processes: int = 1, step_s: float = 0.5) -> Iterator[Callable[[], None]]:
    """Keep ranks alive, each with ``series`` lines on the page of Prometheus; give what changes all of these."""
    share = -(-ranks // processes)
    with contextlib.ExitStack() as stack:
        children = []
        for first in range(0, ranks, share):
            options = (directory, first, min(share, ranks - first), series, step_s, ranks)
            argv = [sys.executable, "-m", "bench.ranks", *map(str, options)]
            child = subprocess.Popen(argv, stdin=PIPE, stdout=PIPE, text=True, env=clean_environment())
            children.append(stack.enter_context(child))  # which ends with its input

        def expect(word: str) -> None:
            for child in children:
                assert child.stdout is not None
                if (answer := child.stdout.readline().strip()) != word:
                    sys.exit(f"the ranks' process said {answer!r} instead of {word!r}")

        def change() -> None:
            for child in children:
                assert child.stdin is not None
                child.stdin.write("change\n")
                child.stdin.flush()
            expect("changed")

        expect("ready")
        yield change


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
    gauges = max(0, int(series) - LINES_WITHOUT_LAYERS)
    ranks: list[Rank] = []
    for index in range(int(count)):
        ranks.append(Rank(Path(directory), int(first) + index, gauges, int(world)))
        for rank in ranks if index % 16 == 0 else ():
            rank.heartbeat()  # making many takes longer than a heartbeat may
    print("ready", flush=True)
    _keep_alive(ranks, float(step_s))


if __name__ == "__main__":
    main()
