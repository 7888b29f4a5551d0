"""Tasks for the next backward: in the training thread, once, and never within the capture of a CUDA graph."""

# mypy: disable-error-code="no-untyped-call"
# Tensor.backward has no annotations

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchobs.probes.core.training_state import TrainingState
from torchobs.taps.taps import SafePoint

if TYPE_CHECKING:
    import pytest


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


def test_a_watch_of_backward_passes_in_front_of_it_does_not_keep_tasks_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is put back there when another tool has removed it."""
    training, done = TrainingState(), list[str]()
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # back to what it is now, afterwards
    SafePoint(training).arm(lambda: done.append("asked"))
    armed = torch.autograd.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        training.backwards = 1
        armed(*args, **kwargs)
        training.backwards = 0

    monkeypatch.setattr(torch.autograd, "backward", watched)
    backward()
    assert done == ["asked"]


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
