"""Tasks for the next backward: in the training thread, once, and never within the capture of a CUDA graph."""

# mypy: disable-error-code="no-untyped-call"
# Tensor.backward has no annotations

from __future__ import annotations

import torch

from torchobs.probes.core.safe_point import SafePoint
from torchobs.probes.core.training_state import TrainingState


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
