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
from typing import Any

SOFT, CULPRIT = 0.95, 0.95
NAN = "NaN or infinity"
HARD = frozenset({NAN})
PAGE = Path(__file__).parents[2] / "docs" / "diagnosis.md"
BEGIN, END = "<!-- table: python -m tests.diagnosis --write -->\n", "<!-- end of table -->\n"


def _start() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def sick(name: str, seed: int) -> tuple[str, bool, bool | None, int | None, str]:
    """Plant one: its name, whether it was found, with the culprit, after how many steps, and a note."""
    from tests.diagnosis import sicknesses

    setup, verdict = sicknesses.try_one(name, seed)
    return name, verdict.found, verdict.culprit, verdict.steps, f"{name}, seed {seed}: {setup}: {verdict}"


def nan(_name: str, seed: int) -> tuple[str, bool, bool | None, int | None, str]:
    """Plant a NaN or an infinity."""
    from tests.diagnosis.sicknesses import not_finite

    verdict = not_finite(seed)
    return NAN, verdict.found, verdict.culprit, verdict.steps, f"NaN, seed {seed}: {verdict}"


def healthy(name: str, seed: int) -> tuple[str, int, list[str]]:
    """Train a healthy run: its name, steps, and what was said."""
    from tests.diagnosis.healthy_runs import run_healthy

    observed = run_healthy(name, seed)
    return name, observed.reports[0].last_step, observed.said()


def rows(results: list[tuple[str, bool, bool | None, int | None, str]]) -> list[str]:
    """Lines of the table, one for each sickness."""
    lines = ["| sickness | runs | found | culprit named | steps to the verdict: median, longest |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(result[0] for result in results):
        own = [result for result in results if result[0] == name]
        named = [right for _, found, right, _, _ in own if found and right is not None]
        steps = sorted(count for _, found, _, count, _ in own if found and count is not None)
        culprit = f"{sum(named) / len(named):.2f}" if named else ""
        took = f"{median(steps):.0f}, {steps[-1]}" if steps else "by its end"
        lines.append(f"| {name} | {len(own)} | {sum(result[1] for result in own) / len(own):.2f} | {culprit} | {took} |")
    return lines


def main() -> int:
    """Run, print, and return 1 if less was found than is promised."""
    parser = argparse.ArgumentParser(prog="python -m tests.diagnosis", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="runs of each [%(default)s]")
    parser.add_argument("--first", type=int, default=1000, help="first seed [%(default)s]")
    parser.add_argument("--only", default="", help="part of the name of a sickness, or `healthy`")
    parser.add_argument("--processes", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    given = parser.parse_args()
    if given.write and given.only:
        parser.error("the page has the table of all")
    from tests.diagnosis.healthy_runs import HEALTHY
    from tests.diagnosis.sicknesses import SICKNESSES

    seeds = range(given.first, given.first + given.seeds)
    planted: list[tuple[Any, str, int]] = []
    if given.only.lower() in NAN.lower():
        planted += [(nan, NAN, seed) for seed in seeds]
    planted += [(sick, name, seed) for name in SICKNESSES if given.only in name for seed in seeds]
    well = [(name, seed) for name in HEALTHY for seed in seeds[: max(1, given.seeds // 5)]] if given.only in "healthy" else []
    with concurrent.futures.ProcessPoolExecutor(
        given.processes, multiprocessing.get_context("spawn"), initializer=_start
    ) as pool:
        started = [pool.submit(task, name, seed) for task, name, seed in planted]
        trained = [pool.submit(healthy, name, seed) for name, seed in well]
        results, quiet = [each.result() for each in started], [each.result() for each in trained]
    table = rows(results)
    said = [(name, told) for name, _, told in quiet if told]
    steps = sum(count for _, count, _ in quiet)
    summary = (
        f"{len(quiet)} healthy and odd runs of {len(HEALTHY)} kinds, {steps:,} steps: {len(said)} of which anything was said."
    )
    print("\n".join([*table, "", summary]))  # noqa: T201  # the table
    for _, found, right, _, note in results:
        if not found or right is False:
            print(f"missed: {note}", file=sys.stderr)  # noqa: T201
    for name, told in said:
        print(f"cried wolf: {name}: {told}", file=sys.stderr)  # noqa: T201
    if given.write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text("\n".join([head + BEGIN.rstrip(), *table, "", summary, END.rstrip()]) + "\n" + rest.partition(END)[2])
    return int(bool(said) or not enough(results))


def enough(results: list[tuple[str, bool, bool | None, int | None, str]]) -> bool:
    """Return True if of every sickness as many were found and named as promised."""
    for name in {result[0] for result in results}:
        own = [result for result in results if result[0] == name]
        named = [right for _, found, right, _, _ in own if found and right is not None]
        if sum(result[1] for result in own) < (1.0 if name in HARD else SOFT) * len(own):
            return False
        if named and sum(named) < CULPRIT * len(named):
            return False
    return True
