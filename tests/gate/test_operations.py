"""The count of what a step executes: one call more is seen, and so is what C calls of the compiled part."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.ranks import LINES_WITHOUT_LAYERS, Rank
from tests.gate.operations import OperationCounter, Operations
from tests.step_hooks import OPTIMIZERS, ready
from tests.support import NEEDS_COMPILER
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.exposition import Exposition
from torchobs.exporter.text_format import TEXT
from torchobs.flight.native import compiled
from torchobs.ranks.scanner import Scanner


def hypotenuse(a: float, b: float) -> float:
    """One call of a function of C's, one frame."""
    return math.sqrt(a * a + b * b)


def counted(times: int) -> Operations:
    """What so many calls of it are counted as, made from a frame that was there before."""
    counter = OperationCounter(__file__)
    with counter:
        counter.step()
        for _ in range(times):
            hypotenuse(3.0, 4.0)
        counter.step()
    return counter.plain[1]


def test_every_call_and_instruction_more_is_counted() -> None:
    """Each call is its own and that of ``sqrt``, and the same number of instructions every time."""
    counted(1)  # Python 3.12 and later trace no instruction of the first call; of steps the median counts
    none, one, three = counted(0), counted(1), counted(3)
    assert (one.calls - none.calls, three.calls - none.calls) == (2, 6)
    assert one.instructions - none.instructions > 5
    assert three.instructions - none.instructions == 3 * (one.instructions - none.instructions)
    assert counted(3) == three


def test_what_is_called_of_the_compiled_part_counts_whoever_calls_it() -> None:
    """A hook of torch's list is called by torch."""
    if compiled() is None:
        pytest.skip(NEEDS_COMPILER)
    hooks, counter = ready(native=True), OperationCounter("/nowhere")
    with counter:
        hooks.plain(OPTIMIZERS[0])
        counter.step()
    assert counter.plain[0] == (4, 0), "one of the loader, one of the backward pass, two of the optimizer"


def test_a_rank_of_the_benchmark_has_the_lines_that_are_said(flight_dir: Path) -> None:
    """Of a rank without series of layers, which fill it up to the number of series that a table is about."""
    rank, scanner = Rank(flight_dir, 0, 0, 1), Scanner(ExporterConfig(flight_dir=str(flight_dir)))
    page = "".join(Exposition().families(ScrapeInput(scanner.scan()), TEXT))
    scanner.close()
    rank._writer.close()
    assert sum('rank="0"' in line for line in page.splitlines()) == LINES_WITHOUT_LAYERS
