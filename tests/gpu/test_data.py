"""Pinned memory, which only a CUDA build knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests import support
from tests.gpu import no_waiting
from tests.training import Recording
from torchobs.probes.data.batch_watch import BatchWatch
from torchobs.probes.data.pinned_memory_hint import PinningHint, pageable_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=support.NEEDS_CUDA)


def test_pinned_memory_and_the_device_s_own_are_not_pageable() -> None:
    """Only what a copy would have to stage counts."""
    assert pageable_bytes(torch.zeros(10)) == 40
    assert pageable_bytes(torch.zeros(10).pin_memory()) == 0
    assert pageable_bytes(torch.zeros(10, device="cuda")) == 0


@pytest.mark.parametrize("pinned", [False, True])
def test_a_loader_that_does_not_pin_is_hinted_at(run: Recording, *, pinned: bool) -> None:
    """Once a CUDA device is in use, a batch is looked at, without a synchronisation of the device."""
    context = run.session.context
    assert context is not None
    hint = PinningHint(context)
    watch = BatchWatch(context.breaker("loaders"), lambda _, batch: hint.look(batch))
    torch.zeros(1, device="cuda")
    loader: Any = DataLoader(torch.zeros(6, 40_000), batch_size=2, pin_memory=pinned)  # type: ignore[arg-type]
    iterator = iter(loader)
    watch.begun(iterator, now=False)
    watch.arm_latest()
    assert "_next_data" in vars(iterator)
    with no_waiting():
        next(iterator)
    assert "_next_data" not in vars(iterator)
    assert len(run.frames("torchobs.data.unpinned")) == (not pinned)
