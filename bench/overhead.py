"""How long torchobs's own code runs in a training step: ``python -m bench.overhead``.

Between real steps, where caches are cold; the mean of medians, so that no preemption counts. Beside it stands the *floor*
of the same run, empty hooks at the same places and one bare record a step: the ratio of both hardly depends on the machine.
What is measured now and then, norms and (at level advanced) weights, stands by itself, as a mean over all steps. What the meter
takes is timed in the same run and taken out. How much longer a step is for all this is ``bench.wall``'s.

``--gate`` fails on what our code executes in a step, counted (``tests.gate.operations``), on the ratio to the floor, and on
our share of a long step. It measures on one thread: two that wait for each other on a busy machine make a step of 2 ms one of
100 ms, and our code runs from cold memory then.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

import torch

import torchobs
from bench.meter import EmptyHooks, Floor, Meter
from bench.processes import flight_directory
from bench.workloads import WORKLOADS
from tests.gate.operations import ROOM, count, over_ceiling
from torchobs.flight.native import compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FLOOR_RATIO = 3.2 if compiled() is not None else 4.5
"""Most that the bookkeeping at steps of about 1 ms may be of the floor, norms excluded and the meter's own cost taken out of
both. The median of the rounds is 1.8 to 2.5, in Python alone 2.8 to 3.5, on a machine with more work than processors.
What a step executes is counted, and to a tenth (operations.py); this finds instructions that have become dear."""


class Rounds(NamedTuple):
    """How often the floor and our own code are timed in turn, for so many steps each. What counts is the rounds' median."""

    number: int
    steps: int
    warm_up_s: float
    """With torchobs, until a step is recorded in the short way; where our share of a step is asked for, until also the pace of
    what is measured now and then is found."""


ROUNDS = {
    **dict.fromkeys(("mlp", "mlp-10ms", "compiled", "pinn"), Rounds(11, 60, 0.3)),
    **dict.fromkeys(("mlp-50ms", "cnn"), Rounds(3, 20, 3.0)),
    "gpt": Rounds(3, 16, 3.0),
}
COUNTED_STEPS = {"mlp": 30, "gpt": 6}
"""The workloads with counted operations, and the number of steps of each kind."""
SHARES = {"gpt": 0.005, "cnn": 0.005}
"""Most that all our code may take of a step, norms included, where a step is long enough for that to be ours to decide. The
median of the rounds: a single one on a busy machine has been over it with nothing changed."""


def run(training: Iterator[None], steps: int, after: Callable[[], None] | None = None) -> float:
    """Run ``steps`` steps; return the median step in ms."""
    lengths = []
    begun = perf_counter_ns()
    for _ in range(steps):
        next(training)
        if after is not None:
            after()
        ended = perf_counter_ns()
        lengths.append(ended - begun)
        begun = ended
    return statistics.median(lengths) / 1e6


@dataclass
class Result:
    """One workload."""

    name: str
    step_ms: float
    floor_us: float
    bookkeeping_us: float
    norms_us: float
    interval: float
    ratio: float
    """of the bookkeeping to the floor"""

    @property
    def share(self) -> float:
        """All our code as a part of the step."""
        return (self.bookkeeping_us + self.norms_us) / 1000 / self.step_ms


def measure(name: str, training: Iterator[None], directory: Path, level: str, *, floor: bool = True) -> Result:
    """Measure one workload's self-time; without the floor, with the meter's own time."""
    number, steps, warm_up_s = ROUNDS[name]
    rounds = []
    for _ in range(number):
        nothing_us = meter_alone(training, steps).ours_us if floor else 0.0
        floor_us = meter_alone(training, steps, Floor()).ours_us - nothing_us if floor else math.nan
        meter, step_ms = in_situ(training, steps, directory, level, warm_up_s)
        ours_us = meter.ours_us - nothing_us
        rounds.append((step_ms, floor_us, ours_us, meter.norms_us, meter.interval, ours_us / floor_us))
    step_ms, floor_us, ours_us, norms_us, interval, ratio = map(statistics.median, zip(*rounds, strict=True))
    return Result(name, step_ms, floor_us, ours_us, norms_us, interval, ratio)


def meter_alone(training: Iterator[None], steps: int, hooks: EmptyHooks | None = None) -> Meter:
    """Time these hooks, or empty ones, between real steps: the meter itself takes a fifth of what it shows of a short step."""
    meter, hooks = Meter(), hooks or EmptyHooks()
    meter.inner()
    hooks.install()
    meter.outer()
    run(training, max(3, steps // 4))
    meter.steps.clear()
    run(training, steps, meter.step)
    meter.remove_outer()
    hooks.remove()
    meter.remove()
    return meter


def in_situ(training: Iterator[None], steps: int, directory: Path, level: str, warm_up_s: float) -> tuple[Meter, float]:
    """Time our own code between real steps; return the meter and the median step in ms."""
    meter = Meter()
    meter.inner()
    torchobs.init(flight_dir=directory, level=level)
    meter.outer()
    warm_at = perf_counter_ns() + warm_up_s * 1e9
    while perf_counter_ns() < warm_at:
        run(training, 4, meter.step)
    meter.steps.clear()
    step_ms = run(training, steps, meter.step)
    meter.remove_outer()
    torchobs.shutdown()
    meter.remove()
    return meter, step_ms


def table(results: list[Result]) -> str:
    """Render the results as a Markdown table."""
    lines = [
        "| workload | step | floor | bookkeeping | ratio | now and then | norms, every | share of the step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        times = f"{r.step_ms:.2f} ms | {r.floor_us:.1f} µs | {r.bookkeeping_us:.1f} µs"
        lines.append(f"| {r.name} | {times} | {r.ratio:.2f} | {r.norms_us:.1f} µs | {r.interval:.1f} | {r.share:.2%} |")
    return "\n".join(lines)


def over_budget(results: list[Result]) -> list[str]:
    """Say which self-times are over their budget."""
    problems = [
        f"{r.name}: self-time {r.share:.2%} of the step, {SHARES[r.name]:.1%} allowed"
        for r in results
        if r.share > SHARES.get(r.name, 1.0)
    ]
    problems += [
        f"mlp: bookkeeping is {r.ratio:.2f} times the floor, {FLOOR_RATIO:g} times is allowed"
        for r in results
        if r.name == "mlp" and r.ratio > FLOOR_RATIO
    ]
    return problems


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = f"of {', '.join(WORKLOADS)} (default: mlp, cnn, gpt)"
    parser.add_argument("workloads", nargs="*", default=["mlp", "cnn", "gpt"], help=names)
    parser.add_argument("--level", default="basic", help="debug level (default: basic)")
    parser.add_argument("--gate", action="store_true", help="exit 1 when something is over its budget")
    options = parser.parse_args()
    if unknown := sorted(set(options.workloads) - set(WORKLOADS)):
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    problems = []
    with flight_directory() as directory:
        if options.gate:
            torch.set_num_threads(1)
        results = []
        for name in options.workloads:
            training = WORKLOADS[name][0]()
            run(training, 5)
            if options.gate and name in COUNTED_STEPS:
                for native in (False, True) if compiled() is not None else (False,):
                    counts = count(training, COUNTED_STEPS[name], directory, native=native)
                    how = "compiled" if native else "in Python"
                    print(f"{name}, {how}: {counts.plain}, where norms are measured {counts.measuring}")
                    problems += over_ceiling(name, counts, native=native, room=ROOM)
            floor = name == "mlp" or not options.gate  # its ratio alone has a ceiling
            results.append(measure(name, training, directory, options.level, floor=floor))
        print(table(results))
    problems += over_budget(results) if options.gate else []
    for problem in problems:
        print(f"over budget: {problem}", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
