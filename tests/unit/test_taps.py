"""Taps: one place for each seam of torch, other tools' patches in any order, tasks for a backward pass; captures of graphs."""

# mypy: disable-error-code="no-untyped-call"
# Tensor.backward has no annotations

from __future__ import annotations

import functools
import itertools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchobs.probes import context as training_state
from torchobs.probes.context import LONGEST_S, Captures, TrainingState
from torchobs.taps import taps
from torchobs.taps.taps import SafePoint

if TYPE_CHECKING:
    from pathlib import Path


def backward() -> None:
    """One pass."""
    torch.ones(2, requires_grad=True).sum().backward()


def test_a_task_waits_for_a_backward_that_is_not_being_captured() -> None:
    """NCCL's flight recorder queries CUDA events, which would end a capture with an error."""
    training, done, original = TrainingState(), list[str](), torch.autograd.backward
    point = SafePoint(training)
    point.arm(lambda: done.append("asked"))
    training.captures.begin(1)
    backward()
    assert done == []
    training.captures.end(1)
    backward()
    backward()
    assert done == ["asked"]
    assert torch.autograd.backward is original


def test_nothing_is_armed_after_the_end() -> None:
    """The sampler's last round comes after all hooks are removed: torch stays as it was."""
    done, original = list[int](), torch.autograd.backward
    point = SafePoint(TrainingState())
    point.arm(lambda: done.append(1))
    point.close()
    point.arm(lambda: done.append(2))
    assert torch.autograd.backward is original
    backward()
    assert done == []


def test_a_pass_within_another_one_is_not_waited_for() -> None:
    """Of a hook, or of reentrant checkpointing: hooks cannot be changed there."""
    done, x = list[str](), torch.ones(2, requires_grad=True)
    point = SafePoint(TrainingState())

    def within(_: torch.Tensor) -> None:
        point.arm(lambda: done.append("asked"))
        with torch.enable_grad():
            backward()
        assert done == []

    x.register_hook(within)
    x.sum().backward()
    assert done == []
    backward()
    assert done == ["asked"]


SEAMS = (
    'autograd, "backward"', '_execution_engine"', "_BaseDataLoaderIter", "register_optimizer_step_p", '"_get_total_norm"',
    '"_clip_grads_with_norm_"', '"clip_grad_value_"', "grad_scaler.GradScaler",
)  # fmt: skip


def test_each_seam_of_torch_is_touched_in_one_place(checkout: Path) -> None:
    """Whoever needs one subscribes to it."""
    touching = {
        str(path.relative_to(checkout))
        for path in (checkout / "torchobs").rglob("*.py")
        if any(seam in path.read_text() for seam in SEAMS)
    }
    assert touching == {"torchobs/taps/taps.py"}


def patch(library: Any, calls: list[str]) -> None:
    """What another tool does."""
    theirs = library.work

    @functools.wraps(theirs)
    def wrapper(number: int) -> Any:
        calls.append("theirs")
        return theirs(number)

    library.work = wrapper


def doubled(number: int) -> int:
    """A function of somebody's library."""
    return 2 * number


@pytest.mark.parametrize("order", list(itertools.permutations(("lead", "subscribe", "subscribe too", "their patch"))))
def test_everybody_is_called_once_in_whatever_order_they_come_and_go(order: tuple[str, ...]) -> None:
    """Another tool's patch stays in force, before, after and in between."""
    calls, leaving = list[str](), list[Any]()
    library: Any = ModuleType("library")
    library.work = doubled
    tap = taps.SharedTap(lambda: [(library, "work")])

    def lead(original: Any, busy: Any, divert: Any) -> Any:
        @functools.wraps(original)
        def work(*args: Any, **kwargs: Any) -> Any:
            if busy:
                return divert(*args, **kwargs)
            calls.append("leader")
            return original(*args, **kwargs)

        return work

    def surround(name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return call(*args, **kwargs)

    expected = list[str]()
    for what in order:
        if what == "lead":
            tap.lead_shared(lead, "")
            leaving.append(tap.leave)
        elif what == "their patch":
            patch(library, calls)
        else:
            leaving.append(tap.subscribe(functools.partial(surround, what)))
        expected.append({"lead": "leader", "their patch": "theirs"}.get(what, what))
        assert library.work(4) == 8
        assert sorted(calls) == sorted(expected)
        calls.clear()
    for leave in leaving:
        leave()
        assert library.work(4) == 8
    calls.clear()
    assert library.work(4) == 8
    assert [call for call in calls if call != "leader"] == ["theirs"]  # a leader that theirs calls does nothing by its breaker


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
    clock = Clock()
    monkeypatch.setattr(training_state, "time", clock)
    return clock


def test_a_capture_without_an_end_is_forgotten(clock: Clock) -> None:
    """The sampler would rest for ever."""
    captures = Captures()
    captures.begin(1)
    clock.now += LONGEST_S + 1
    assert not captures.in_progress()
    captures.begin(2)
    assert captures.in_progress()


def test_a_round_that_hangs_holds_up_no_later_capture(clock: Clock) -> None:
    """A driver that does not answer: twenty captures wait together for as long as the first one."""
    captures = Captures()
    assert captures.begin_round("gpu")
    begun_s = clock.now
    for graph in range(20):
        captures.begin(graph)
        captures.end(graph)
    assert clock.now - begun_s == pytest.approx(training_state._PATIENCE_S, rel=0.1)
