"""Plants sicknesses, trains healthy runs, and prints what was said of them: `python -m tests.diagnosis --seeds 20`.

``--write`` makes the table of docs/diagnosis.md. Its seeds begin where nothing was tuned on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
import warnings
from pathlib import Path
from statistics import median

import torch

from tests.diagnosis.healthy_runs import HEALTHY, run_healthy
from tests.diagnosis.planting import Verdict
from tests.diagnosis.sicknesses import SICKNESSES, try_one

SOFT, CULPRIT = 0.95, 0.95
HARD = frozenset({"NaN or infinity"})
PAGE = Path(__file__).parents[2] / "docs" / "diagnosis.md"
BEGIN, END = "<!-- table: python -m tests.diagnosis --write -->\n", "<!-- end of table -->\n"
Result = tuple[str, Verdict, str]
"""A sickness, the verdict on one that was planted, and a note"""


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def sick(name: str, seed: int) -> Result:
    """Plant one."""
    setup, verdict = try_one(name, seed)
    return name, verdict, f"{name}, seed {seed}: {setup}: {verdict}"


def healthy(name: str, seed: int) -> tuple[str, int, list[str]]:
    """Train a healthy run: its name, steps, and what was said."""
    observed = run_healthy(name, seed)
    return name, observed.reports[0].last_step, observed.said()


def by_name(results: list[Result]) -> dict[str, list[Verdict]]:
    """The verdicts on each sickness."""
    verdicts: dict[str, list[Verdict]] = {}
    for name, verdict, _ in results:
        verdicts.setdefault(name, []).append(verdict)
    return verdicts


def rows(results: list[Result]) -> list[str]:
    """Lines of the table, one for each sickness."""
    lines = ["| sickness | runs | found | culprit named | steps to the verdict: median, longest |", "|---|---|---|---|---|"]
    for name, verdicts in by_name(results).items():
        named = [verdict.culprit for verdict in verdicts if verdict.found and verdict.culprit is not None]
        steps = sorted(verdict.steps for verdict in verdicts if verdict.found and verdict.steps is not None)
        culprit = f"{sum(named) / len(named):.2f}" if named else ""
        took = f"{median(steps):.0f}, {steps[-1]}" if steps else "by its end"
        share = sum(verdict.found for verdict in verdicts) / len(verdicts)
        lines.append(f"| {name} | {len(verdicts)} | {share:.2f} | {culprit} | {took} |")
    return lines


def main() -> int:
    """Run, print, and return 1 if less was found than is promised."""
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each [%(default)s]")
    parser.add_argument("--first", type=int, default=1000, help="first seed [%(default)s]")
    parser.add_argument("--only", default="", help="part of the name of a sickness, or `healthy`")
    parser.add_argument("--processes", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("the page has the table of all")
    seeds = range(options.first, options.first + options.seeds)
    planted = [(name, seed) for name in SICKNESSES if options.only.lower() in name.lower() for seed in seeds]
    kinds = HEALTHY if options.only in "healthy" else ()
    well = [(name, seed) for name in kinds for seed in seeds[: max(1, options.seeds // 5)]]
    with concurrent.futures.ProcessPoolExecutor(
        options.processes, multiprocessing.get_context("spawn"), initializer=_start
    ) as pool:
        started = [pool.submit(sick, name, seed) for name, seed in planted]
        trained = [pool.submit(healthy, name, seed) for name, seed in well]
        results, quiet = [task.result() for task in started], [task.result() for task in trained]
    table = rows(results)
    said = [(name, told) for name, _, told in quiet if told]
    steps = sum(count for _, count, _ in quiet)
    summary = (
        f"{len(quiet)} healthy and odd runs of {len(HEALTHY)} kinds, {steps:,} steps: {len(said)} of which anything was said."
    )
    print("\n".join([*table, "", summary]))  # noqa: T201  # the table
    for _, verdict, note in results:
        if not verdict.found or verdict.culprit is False:
            print(f"missed: {note}", file=sys.stderr)  # noqa: T201
    for name, told in said:
        print(f"cried wolf: {name}: {told}", file=sys.stderr)  # noqa: T201
    if options.write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text("\n".join([head + BEGIN.rstrip(), *table, "", summary, END.rstrip()]) + "\n" + rest.partition(END)[2])
    return int(bool(said) or not enough(results))


def enough(results: list[Result]) -> bool:
    """Return whether of every sickness as many were found and named as promised."""
    for name, verdicts in by_name(results).items():
        named = [verdict.culprit for verdict in verdicts if verdict.found and verdict.culprit is not None]
        if sum(verdict.found for verdict in verdicts) < (1.0 if name in HARD else SOFT) * len(verdicts):
            return False
        if named and sum(named) < CULPRIT * len(named):
            return False
    return True
