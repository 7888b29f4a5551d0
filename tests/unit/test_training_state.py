"""Captures of CUDA graphs: the sampler rests meanwhile, not for ever, and a capture waits for its round."""

from __future__ import annotations

import pytest

from torchobs.probes import context as training_state
from torchobs.probes.context import LONGEST_S, Captures


class Clock:
    """A time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the module."""
    made = Clock()
    monkeypatch.setattr(training_state, "time", made)
    return made


def test_a_capture_without_an_end_is_forgotten(clock: Clock) -> None:
    """The sampler would rest for ever."""
    found = Captures()
    found.begin(1)
    clock.now += LONGEST_S + 1
    assert not found.in_progress()
    found.begin(2)
    assert found.in_progress()


def test_a_round_that_hangs_holds_up_no_later_capture(clock: Clock) -> None:
    """A driver that does not answer: twenty captures wait together for as long as the first one."""
    found = Captures()
    assert found.begin_round("gpu")
    begun_s = clock.now
    for graph in range(20):
        found.begin(graph)
        found.end(graph)
    assert clock.now - begun_s == pytest.approx(training_state._PATIENCE_S, rel=0.1)
