"""Fixtures of tests that compile a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from tests.training import Recording, recording

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing of another test's is compiled, or counted."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """A recording."""
    yield from recording(flight_dir, log_level="ERROR")


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs forget it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
