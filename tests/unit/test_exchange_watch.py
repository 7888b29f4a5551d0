"""Steps without a collective are counted from the process groups' own counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torchobs.probes.lifecycle.exchange import ExchangeWatch


class Group:
    """A process group as far as it is asked."""

    def __init__(self, calls: int = 0, error: type[Exception] | None = None) -> None:
        self.calls, self.error = calls, error

    def _get_sequence_number_for_group(self) -> int:
        if self.error is not None:
            raise self.error
        return self.calls


class Run:
    """A training whose steps and looks the test makes."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int]] = []
        self.recorder = SimpleNamespace(step=0)
        self.writer = SimpleNamespace(event=lambda _, told, step: self.events.append((step, told["steps"])))
        context: Any = self
        self.watch = ExchangeWatch(context)

    def look(self, step: int, *groups: Group, world_size: int = 2) -> None:
        """The sampler looks in that step."""
        self.recorder.step = step
        self.watch.look(list(groups), world_size)


def test_steps_without_a_collective_are_recorded_at_two_counts() -> None:
    """What the model was broadcast by before the first step does not matter."""
    run, group = Run(), Group(8)
    for step in (0, 10, 100, 209, 211, 500, 1_100, 5_000):
        run.look(step, group)
    assert run.events == [(211, 201), (1_100, 1_090)]


def test_local_sgd_is_recorded_as_that() -> None:
    """A collective every 500 steps, in one of two groups; a long run writes a few events."""
    run, inner, outer = Run(), Group(), Group()
    for step in range(1, 20_000, 100):
        outer.calls = step // 500
        run.look(step, inner, outer)
    assert run.events[:2] == [(201, 200), (501, 0)]
    assert len(run.events) == 8
    assert max(steps for _, steps in run.events) < 1_000


def test_what_does_not_tell_is_left_alone() -> None:
    """A single rank, another backend, a group that was destroyed meanwhile, none at all."""
    for groups, size in (([Group()], 1), ([Group(), Group(error=RuntimeError)], 2), ([object()], 2), ([], 2)):
        run = Run()
        for step in range(1, 3_000, 100):
            run.look(step, *groups, world_size=size)
        assert run.events == []
