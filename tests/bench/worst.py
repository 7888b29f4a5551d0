"""The longest that torchobs may hold up a single step: ``python -m tests.bench.worst``.

Two things can: our hooks, and the sampler thread while it has the GIL. Both are given as *processor time*, which nothing else
on the machine prolongs: of all hooks in one step, and of what the sampler does between two releases of the GIL (``sampler``).
A step is late by no more than their sum. Beside them stand the steps of whole trainings with and without torchobs, each in a
process of its own and in turn: where others use the machine, too, the longest step is theirs, and the quantiles tell more than
it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torchobs
from tests.bench import meter
from tests.bench.workloads import WORKLOADS
from torchobs.probes.core.patch import Patch
from torchobs.runtime.sampler import SamplerPauses

QUANTILES = (0.5, 0.99, 0.999, 1.0)


class Stretches:
    """The sampler's work between two releases of the GIL: ``found`` holds their processor time in ns, and where they ended."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._begun_ns = 0
        original = SamplerPauses.yield_gil

        def yield_gil(pauses: SamplerPauses) -> None:
            before_ns, last = thread_time_ns(), pauses.yielded
            original(pauses)
            if pauses.yielded != last:
                caller = sys._getframe(1)
                where = caller.f_locals.get("probe") or caller.f_code.co_name
                self.found.append((before_ns - self._begun_ns, f"{where}, line {caller.f_lineno}"))
                self._begun_ns = thread_time_ns()

        self._patch = Patch(SamplerPauses, "yield_gil", lambda _: yield_gil)

    def remove(self) -> None:
        """Restore what was wrapped."""
        self._patch.undo()


def work(workload: str, *, observed: bool, seconds: float) -> dict[str, Any]:
    """Train for that long; return the quantiles of the steps in ms and, if observed, our longest stretches in ms."""
    stretches, session = Stretches(), None
    with tempfile.TemporaryDirectory() as directory:
        if observed:
            session = torchobs.init(flight_dir=directory)  # before the model is made, as the README has it
        training = WORKLOADS[workload][0]()
        for _ in range(10):
            next(training)
        lengths, end = list[int](), perf_counter_ns() + int(seconds * 1e9)
        while (begun := perf_counter_ns()) < end:
            next(training)
            lengths.append(perf_counter_ns() - begun)
        if session is not None:
            torchobs.shutdown()
        stretches.remove()
    lengths.sort()
    steps_ms = [lengths[min(int(len(lengths) * q), len(lengths) - 1)] / 1e6 for q in QUANTILES]
    longest = sorted(stretches.found, reverse=True)[:3]
    return {"steps": len(lengths), "ms": steps_ms, "longest": [[ns / 1e6, what] for ns, what in longest]}


def hooks_ms(workload: str, steps: int) -> list[float]:
    """Return our hooks' processor time, in ms, in each of that many steps."""
    with tempfile.TemporaryDirectory() as directory:
        timer = meter.Meter(thread_time_ns)
        timer.inner()
        torchobs.init(flight_dir=directory)
        timer.outer()
        training = WORKLOADS[workload][0]()
        for number in range(steps + 10):
            next(training)
            timer.step()
            if number < 10:  # torch's own first steps
                timer.steps.clear()
        timer.remove_outer()
        torchobs.shutdown()
        timer.remove()
    return [(step.ours + step.norms) / 1e6 for step in timer.steps]


def child(*arguments: str) -> Any:
    """Run a part in a process of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.worst", "--part", *arguments], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(workload: str, rounds: int, seconds: float) -> list[str]:
    """Return a workload's rows."""
    plain, observed = [], []
    for number in range(rounds):
        print(f"{workload}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        plain.append(child(workload, "plain", str(seconds)))
        observed.append(child(workload, "observed", str(seconds)))
    hooks = sorted(child(workload, "hooks", str(max(20, observed[0]["steps"] // 2))))
    rows = []
    for what, made in (("nothing", plain), ("torchobs", observed)):
        cells = " | ".join(f"{statistics.median(one['ms'][k] for one in made):.2f} ms" for k in range(len(QUANTILES)))
        rows.append(f"| {workload} | {what} | {cells} |")
    slowest, by = max(tuple(longest) for one in observed for longest in one["longest"])
    at = f"at most {hooks[-1]:.2f} ms, 99.9 % of the steps {hooks[int(len(hooks) * 0.999)]:.2f} ms"
    rows.append(f"| | *our hooks in a step* | {at} | | | |")
    rows.append(f"| | *the sampler at a stretch* | at most {slowest:.2f} ms, by {by} | | | |")
    return rows


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.worst", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=["mlp", "gpt"], help="what to train (default: both)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs of processes, with and without (default: 3)")
    parser.add_argument("--seconds", type=float, default=25.0, help="of training in each (default: 25)")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        workload, what, much = options.part
        made = (
            hooks_ms(workload, int(much))
            if what == "hooks"
            else work(workload, observed=what == "observed", seconds=float(much))
        )
        print(json.dumps(made))
        return 0
    print("| training | with | median step | p99 | p99.9 | longest |\n|---|---|---|---|---|---|")
    for workload in options.workloads:
        print("\n".join(compare(workload, options.rounds, options.seconds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
