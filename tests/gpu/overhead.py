"""What torchobs costs on a CUDA device: ``python -m tests.gpu.overhead``.

For each training and level: the device's time for a step with and without torchobs, by CUDA events around blocks of steps
taken in turn; our own code's time in the training thread (as ``bench.overhead`` takes it); and what the norms take of the
device's memory at its peak. The steps with torchobs run under ``set_sync_debug_mode("error")``, as do ``init()`` and
``shutdown()``: a synchronisation of ours, in any thread, switches a probe off, and that ends the benchmark. Two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import platform
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

import torchobs
from bench.overhead import in_situ, meter_alone
from bench.processes import flight_directory
from bench.workloads import cnn, gpt, mlp
from tests.gpu import no_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORKLOADS: dict[str, tuple[Callable[..., Iterator[None]], int]] = {
    "mlp": (mlp, 1000),
    "cnn": (cnn, 300),
    "gpt": (gpt, 100),
    "gpt-85m": (functools.partial(gpt, large=True), 30),
    "compiled": (functools.partial(mlp, compiled=True), 1000),
}
"""Name → (training, steps per block)."""
LEVELS = ("basic", "advanced", "extreme")
BLOCKS = 5
WARM_UP = 10
WARM_UP_S = 3.0
"""Until the sampler has chosen layers, and the pace of what is measured now and then is found."""


class Block(NamedTuple):
    """Some steps: their mean, by the device's clock and by the host's, and the most memory that was allocated."""

    device_ms: float
    host_ms: float
    peak: int


def block_of(training: Iterator[None], steps: int, *, watched: bool = False) -> Block:
    """Run so many steps; wait for the device before and after, and if ``watched`` at no other time."""
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with no_waiting() if watched else contextlib.nullcontext():
        begun_s = perf_counter()
        begun.record()
        for _ in range(steps):
            next(training)
        done.record()
    torch.cuda.synchronize()
    host_ms = (perf_counter() - begun_s) * 1000 / steps
    return Block(begun.elapsed_time(done) / steps, host_ms, torch.cuda.max_memory_allocated())


class Result(NamedTuple):
    """One training at one level."""

    plain: list[Block]
    observed: list[Block]
    bookkeeping_us: float
    norms_us: float
    interval: float

    def ratio(self, which: str) -> float:
        """The median of the blocks' ratios, each with its neighbour."""
        pairs = zip(self.observed, self.plain, strict=True)
        return float(statistics.median(getattr(block, which) / getattr(neighbour, which) for block, neighbour in pairs))

    def row(self, name: str, level: str) -> str:
        """Render it as a row of the table."""
        step_ms = statistics.median(block.host_ms for block in self.plain)
        share = (self.bookkeeping_us + self.norms_us) / 1000 / step_ms
        more = max(block.peak for block in self.observed) - max(block.peak for block in self.plain)
        ours = f"{self.bookkeeping_us:.0f} µs | {self.norms_us:.0f} µs | {self.interval:.0f}"
        return (
            f"| {name} | {level} | {step_ms:.2f} ms | {ours} | {share:.2%} "
            f"| {self.ratio('device_ms') - 1:+.2%} | {self.ratio('host_ms') - 1:+.2%} | {more / 2**20:+.1f} MiB |"
        )


def measure(training: Iterator[None], steps: int, blocks: int, level: str, directory: Path) -> Result:
    """Measure one training at one level."""
    plain, observed = [], []
    for _ in range(blocks):
        plain.append(block_of(training, steps))
        with no_waiting():
            session = torchobs.init(flight_dir=directory, level=level)
            for _ in range(max(WARM_UP, steps // 4)):  # learns the cycle and the interval
                next(training)
        observed.append(block_of(training, steps, watched=True))
        breakers = {} if session.context is None else session.context.breakers
        failed = [probe for probe, breaker in breakers.items() if breaker.errors] if breakers else ["init"]
        with no_waiting():
            torchobs.shutdown()
        if failed:
            sys.exit(f"switched off: {', '.join(failed)}")
    alone, (meter, _) = meter_alone(training, steps), in_situ(training, steps, directory, level, WARM_UP_S)
    return Result(plain, observed, meter.ours_us - alone.ours_us, meter.norms_us, meter.interval)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help=f"which ones: {', '.join(WORKLOADS)} (default: all)")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS, help="debug levels (default: all)")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"blocks with and without torchobs (default: {BLOCKS})")
    parser.add_argument("--steps", type=int, help="steps in a block (default: the workload's)")
    options = parser.parse_args()
    if unknown := sorted(set(options.workloads) - set(WORKLOADS)):
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if not torch.cuda.is_available():
        sys.exit(f"no CUDA device, or no build of torch for one: this is torch {torch.__version__}")
    builds = f"CUDA {torch.version.cuda}, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{torch.cuda.get_device_name()}, {builds}\n")
    columns = "step | bookkeeping | norms, mean | every n-th | all, of the step | device | wall | peak memory"
    print(f"| training | level | {columns} |\n{'|---' * 10}|", flush=True)
    for name in options.workloads or WORKLOADS:
        make, default_steps = WORKLOADS[name]
        training, steps = make(device="cuda"), options.steps or default_steps
        with flight_directory() as directory:
            block_of(training, max(WARM_UP, steps // 4))
            for level in options.levels:
                print(measure(training, steps, options.blocks, level, directory).row(name, level), flush=True)


if __name__ == "__main__":
    main()
