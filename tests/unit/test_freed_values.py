"""Tensors without memory, as FSDP leaves the weights that it has gathered, are unknown; nothing is raised."""

from __future__ import annotations

import torch

from torchobs.probes.nonfinite.values import Condition, bad_elements, condition, statistics


def test_a_tensor_whose_memory_was_freed_is_unknown() -> None:
    """Its shape is there, its values are not."""
    freed = torch.ones(4, 4)
    freed.untyped_storage().resize_(0)
    assert condition(freed) is Condition.UNKNOWN
    assert statistics("freed", freed) is None
    assert bad_elements(freed) == ()
    assert condition(torch.ones(0)) is Condition.FINITE
