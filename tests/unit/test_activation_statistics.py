"""Statistics of outputs: of any type and size, with values that are not finite, and of several calls together."""

from __future__ import annotations

from math import isnan

import pytest
import torch

from tests.activations import by_hand
from torchobs.probes.activations.statistics import MOST_ELEMENTS, NUMBERS, ActivationStats, combine, first_tensor, numbers


def stats(*outputs: torch.Tensor) -> ActivationStats:
    """The statistics of some calls."""
    rows = [numbers(torch, output, 0) for output in outputs]
    return combine([(row.double().tolist(), count) for row, count in rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_several_calls_are_as_one(dtype: torch.dtype, offset: float) -> None:
    """Of different sizes, with zeros and values that are not finite in some; nothing cancels where the mean is large."""
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(size, generator=generator) + offset for size in (10, 1000, 7)]
    parts[1][::3] = 0.0
    parts[2][0], parts[0][3] = float("nan"), float("-inf")
    parts = [part.to(dtype) for part in parts]
    found = stats(*parts)
    assert found._asdict() == pytest.approx({**by_hand(torch.cat(parts)), "elements": 1017}, rel=1e-4)


def test_an_output_without_any_finite_value_is_that_and_no_more() -> None:
    """There is nothing to be averaged."""
    found = stats(torch.full((5,), float("inf")))
    assert found == ActivationStats(0.0, 0.0, 0.0, 0.0, 1.0, 5)


def test_the_greatest_numbers_raise_nothing() -> None:
    """A square that overflows is infinite, or unknown."""
    found = stats(torch.tensor([1e300, -1e300], dtype=torch.float64), torch.tensor([1e300], dtype=torch.float64))
    assert found.max_abs == 1e300
    assert found.std == float("inf") or isnan(found.std)


@pytest.mark.parametrize("shape", [(), (3,), (0x9000, 64), (1, 1 << 20), (2, 3, 1 << 18), (1 << 19, 1)])
def test_no_more_is_looked_at_than_the_limit(shape: tuple[int, ...]) -> None:
    """Whatever the shape, and with elements from all of what is looked at."""
    output = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    row, count = numbers(torch, output, 32)
    assert count == output.numel() or MOST_ELEMENTS // 2 < count <= MOST_ELEMENTS
    assert len(row) - NUMBERS <= 32
    assert len(row) - NUMBERS >= min(count, 17)


def test_the_first_tensor_is_found_in_bounds() -> None:
    """No output is searched for longer than a moment."""
    kind, wanted = torch.Tensor, torch.ones(1)
    assert first_tensor({"a": [1, (wanted,)]}, kind) is wanted
    assert first_tensor([[[[[wanted]]]]], kind) is None
    assert first_tensor([0] * 100 + [wanted], kind) is None
    assert first_tensor(torch.nn.Parameter(wanted), kind) is None
