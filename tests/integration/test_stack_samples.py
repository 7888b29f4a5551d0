"""The line of the script that most of the time between steps goes to."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from tests.diagnosis_files import row
from tests.training import Recording, train
from torchobs.catalog import EVENT_STEP_BETWEEN, PHASES, STEP_PHASE_TIME
from torchobs.detect.speed import LEAST_SAMPLES
from torchobs.diagnosis import health
from torchobs.ranks.events import Fact
from torchobs.runtime.stack_samples import StackSamples, innermost


class Waiting(torch.nn.Module):
    """A module in whose forward pass a thread stands."""

    def __init__(self, stand: Any) -> None:
        super().__init__()
        self.stand = stand

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.stand()
        return inputs


def get_batch(wait: Any) -> None:
    """What a script does between two steps."""
    wait()


@pytest.mark.parametrize("within_forward", [False, True])
def test_the_innermost_line_of_the_script_is_found(within_forward: bool) -> None:  # noqa: FBT001  # parametrized
    """Not the standard library's, in which it waits; none in a module's call, which is the forward pass."""
    standing, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        standing.set()
        go_on.wait(60)

    target = (lambda: Waiting(stand)(torch.ones(1))) if within_forward else (lambda: get_batch(stand))
    thread = threading.Thread(target=target)
    thread.start()
    standing.wait(60)
    place = innermost(sys._current_frames()[thread.ident or 0])
    go_on.set()
    thread.join()
    if within_forward:
        assert place is None
    else:
        assert place is not None
        assert (place.function, place.location.startswith(f"{__file__}:")) == ("stand", True)


def test_the_line_is_information_where_much_of_the_time_goes_there() -> None:
    """On page, ``top``, ``inspect`` and report alike: one sentence, with the share of the rank that has most of it."""
    event = Fact(EVENT_STEP_BETWEEN.name, 0.0, 3, {"location": "/home/me/train.py:42", "function": "get_batch"})
    for between_s, expected in ((61.0, ["Between steps 61 %: get_batch, train.py:42."]), (11.0, [])):
        phases = dict.fromkeys(PHASES, 0.0) | {"between": between_s, "backward": 100.0 - between_s}
        rank = row(events=[event], values={STEP_PHASE_TIME.name: {(phase,): seconds for phase, seconds in phases.items()}})
        found = list(health.between([rank]))
        assert [one.long for one in found] == expected
        assert all(one.severity == health.INFO for one in found)


def test_the_line_is_reported_once_it_is_clear(run: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some samples outside of the phases of a step, and not again while it is the same."""
    train(3)
    context = run.session.context
    assert context is not None
    samples = StackSamples(context)
    monkeypatch.setattr(context.training, "thread", threading.get_ident())
    for _ in range(LEAST_SAMPLES - 1):
        samples.sample()
    assert run.attributes(EVENT_STEP_BETWEEN.name) == []
    for _ in range(LEAST_SAMPLES):
        samples.sample()
    (attributes,) = run.attributes(EVENT_STEP_BETWEEN.name)
    assert attributes["function"] == "test_the_line_is_reported_once_it_is_clear"
