"""Fixtures of tests that compile a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch._dynamo

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing of another test's is compiled, or counted."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
