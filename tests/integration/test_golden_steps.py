"""What is recorded of each step of many loops, as golden columns; `pytest -n 0 --update-golden` writes them again.

They were first recorded by a recorder that watched parameters from one backward pass to the next and learned cycles of
optimizers. What the rules of `step_recorder` record otherwise:

- *generator twice* a critic: its second update is a step (rule 1). It was a part of the critic's next step.
- *gradients given anew*: without a backward pass an optimizer goes on with its last step (rule 3), up to 256 times. Another
  gradient in `p.grad` counted as if there had been one.
- *sharpness-aware*: both passes' losses are the step's, as of an accumulation. The first one's alone was, since the parameters
  had changed in between.
- *updates by hand*: they are no steps; `torchobs.step()` says where these end. They were guessed from gradients that were gone.
"""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.diagnosis import test_healthy_zoo as zoo
from tests.diagnosis.observing import Look
from tests.golden_steps import LOOPS, EventLoop, assert_alike, columns
from tests.training import recording
from torchobs.flight import reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchobs.flight.step_record import StepRecord

    Compare = Callable[[str, list[StepRecord]], None]

GOLDEN = Path(__file__).parent / "golden" / "steps.json"
UNUSUAL = {
    "gradual_unfreezing": 280, "wasserstein_gan": 60,
    **dict.fromkeys(("momentum_contrast", "actor_critic", "averaged_weights", "meta_learning", "half_precision"), 45),
    **dict.fromkeys(("line_search", "several_tasks", "physics", "sparse_embeddings", "sharpness_aware"), 45),
}  # fmt: skip
"""Trainings of the zoo that are more than one backward pass and one optimizer, and how many of their steps are done"""


class Enough(Exception):  # noqa: N818  # it is no error
    """So many steps have been done."""


class Counted(Look):
    """Ends the training after some steps."""

    left = 45

    def stepped(self) -> None:
        """Do a round if it is time."""
        super().stepped()
        self.left -= 1
        if not self.left:
            raise Enough


@pytest.fixture
def compare(pytestconfig: pytest.Config) -> Compare:
    """Compare the records of a loop with the golden ones of that name, or write these."""

    def compare(name: str, records: list[StepRecord]) -> None:
        golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        recorded = columns(records)
        if pytestconfig.getoption("--update-golden"):
            golden[name] = recorded
            GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
        assert_alike(recorded, golden[name])

    return compare


def steps_of(flight_dir: Path, train: Callable[[Counted], object], count: int = 45) -> list[StepRecord]:
    """Train so many steps under a session of its own; return all records of the file that it leaves."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    for run in recording(flight_dir):
        look = Counted(run.session)
        look.left = count
        with contextlib.suppress(Enough):
            train(look)
        look.observe()
    (path,) = flight_dir.glob("*.flight")
    file = reader.open_path(str(path))
    try:
        return file.steps()
    finally:
        file.close()


@pytest.mark.parametrize("loop", LOOPS)
def test_steps_of_events(flight_dir: Path, compare: Compare, loop: str) -> None:
    """Each way in which optimizers and backward passes follow each other."""
    compare(f"events: {loop}", steps_of(flight_dir, lambda _: EventLoop(LOOPS[loop]).run()))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)` before:UserWarning")
@pytest.mark.parametrize("name", UNUSUAL)
def test_steps_of_healthy_trainings(flight_dir: Path, compare: Compare, name: str) -> None:
    """Whatever people train."""
    compare(f"zoo: {name}", steps_of(flight_dir, getattr(zoo, name), UNUSUAL[name]))
