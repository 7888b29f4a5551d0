"""How much longer a step is with torchobs's hooks, and with the floor's: ``python -m bench.wall``.

Blocks of steps with the hooks and without, in turn, in one process: the machine is the same for both, so that a hundred pairs
of blocks resolve microseconds. The session, and its sampler thread, goes on in both. A step is longer by more than the hooks
take (``bench.overhead``): they displace the training's code and data from the processor's caches, and so does the floor.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

import torchobs
from bench.meter import HOOKS, Floor
from bench.peers import interval_of_median
from bench.processes import flight_directory
from bench.workloads import WORKLOADS
from torchobs.taps import patch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEFT_OUT = 5
"""What part of a block's steps comes first and does not count: the processor and Python's interpreter get used to the change"""


class Switch:
    """Takes patches and optimizer hooks away, and puts them back."""

    def __init__(self, patches: list[patch.Patch]) -> None:
        self._patches, self._hooks = patches, [dict(hooks) for hooks in HOOKS]

    def turn(self, *, on: bool) -> None:
        """Have the training call them, or not."""
        for replaced in self._patches:
            setattr(replaced.owner, replaced.attribute, replaced.replacement if on else replaced.original)
        for hooks, kept in zip(HOOKS, self._hooks, strict=True):
            hooks.clear()
            if on:
                hooks.update(kept)


@contextmanager
def floor() -> Iterator[Switch]:
    """The least that any such tool does."""
    installed = Floor()
    installed.install()
    switch = Switch(installed.patches)
    try:
        yield switch
    finally:
        switch.turn(on=True)
        installed.remove()


@contextmanager
def watched(directory: Path, level: str) -> Iterator[Switch]:
    """A session of torchobs, with a sampler thread that does not put hooks back."""
    torchobs.init(flight_dir=directory, level=level)
    switch, active = Switch(patch.active()), patch._active[:]
    patch._active.clear()
    try:
        yield switch
    finally:
        switch.turn(on=True)
        patch._active[:] = active
        torchobs.shutdown()


def longer_us(training: Iterator[None], switch: Switch, steps: int, pairs: int) -> tuple[float, list[float]]:
    """Return the median step without the hooks and how much longer it is with them, of each pair of blocks, sorted; in µs."""
    plain, differences = [], []
    for pair in range(pairs):
        medians = {}
        for on in (pair % 2 == 0, pair % 2 == 1):
            switch.turn(on=on)
            lengths = []
            for _ in range(steps):
                begun = perf_counter_ns()
                next(training)
                lengths.append(perf_counter_ns() - begun)
            medians[on] = statistics.median(lengths[steps // LEFT_OUT :]) / 1000
        plain.append(medians[False])
        differences.append(medians[True] - medians[False])
    return statistics.median(plain), sorted(differences)


def rows(name: str, directory: Path, level: str, pairs: int | None) -> Iterator[str]:
    """Measure one training; yield the lines of the table."""
    make, steps, pairs_by_default = WORKLOADS[name]
    training = make()
    for kind, observed in (("floor", floor()), ("torchobs", watched(directory, level))):
        with observed as switch:
            for _ in range(steps * 4):  # the session learns the cycle
                next(training)
            plain_us, differences = longer_us(training, switch, steps, pairs or pairs_by_default)
        median, (least, most) = statistics.median(differences), interval_of_median(differences)
        longer = f"{median:.1f} µs | {least:.1f} to {most:.1f} µs | {median / plain_us:.2%}"
        yield f"| {name} | {kind} | {plain_us / 1000:.2f} ms | {longer} |"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["mlp"], help=f"which ones: {', '.join(WORKLOADS)} (default: mlp)")
    parser.add_argument("--level", default="basic", help="debug level (default: basic)")
    parser.add_argument("--pairs", type=int, help="of blocks of steps, with and without the hooks")
    options = parser.parse_args()
    if unknown := sorted(set(options.workloads) - set(WORKLOADS)):
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    torch.set_num_threads(1)
    print("| training | with | step | longer by | 95 % interval | of the step |\n|---|---|---|---|---|---|")
    with flight_directory() as directory:
        for name in options.workloads:
            for row in rows(name, directory, options.level, options.pairs):
                print(row, flush=True)


if __name__ == "__main__":
    main()
