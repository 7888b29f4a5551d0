"""Inference that returns what became of it."""

from __future__ import annotations

from math import nan

import pytest
import torch

from torchobs import guard


class Flaky:
    """A model that fails some times."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.errors:
            raise self.errors.pop(0)
        return x * 2


def test_safe_inference_returns_what_became_of_it() -> None:
    """Promise: success with data, or an error with its kind; what may pass is tried again, what may not is not."""
    x = torch.ones(2)
    result = guard.safe_inference(Flaky(torch.OutOfMemoryError(), ConnectionError()), x, backoff_s=0.0)
    assert (result.success, result.attempts, result.severity, result.error) == (True, 3, guard.Severity.WARNING, None)
    assert result.data.tolist() == [2.0, 2.0]
    assert not result.data.requires_grad
    lasting = guard.safe_inference(Flaky(TypeError("wrong")), x, backoff_s=0.0)
    assert (lasting.success, lasting.attempts, lasting.category) == (False, 1, guard.Category.DATA)
    assert "TypeError: wrong" in str(lasting)
    spent = guard.safe_inference(Flaky(*[torch.OutOfMemoryError() for _ in range(9)]), x, max_retries=2, backoff_s=0.0)
    assert (spent.success, spent.attempts, spent.category) == (False, 3, guard.Category.MEMORY)
    not_finite = guard.safe_inference(Flaky(), torch.tensor([nan]))
    assert (not_finite.success, not_finite.attempts, not_finite.category) == (False, 1, guard.Category.NUMERICS)
    assert guard.safe_inference(lambda a, b: a + b, {"a": x, "b": x}).data.tolist() == [2.0, 2.0]
    for wrong in ({"max_retries": -1}, {"max_retries": 2.5}, {"backoff_s": nan}, {"backoff_s": "1"}):
        with pytest.raises(ValueError, match="0 or more"):
            guard.safe_inference(Flaky(), x, **wrong)
    with pytest.raises(TypeError, match="cannot be called"):
        guard.safe_inference("model", x)  # type: ignore[arg-type]
