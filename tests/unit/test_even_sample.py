"""Elements that are taken as a sample of a tensor come from all of its columns."""

from collections import Counter

import pytest
import torch

from torchobs import debug
from torchobs.tensors.values import evenly_sampled


@pytest.mark.parametrize(
    ("shape", "most"), [((512, 1024), 1 << 12), ((30, 7, 22), 96), ((4, 8), 8), ((15, 4), 32), ((5, 3), 15), ((2, 3), 9)]
)
def test_every_column_and_every_part_comes_as_often(shape: tuple[int, ...], most: int) -> None:
    """Promise: at most as many as wanted and not much less, none twice; of the places in each dimension about as many each."""
    count = torch.Size(shape).numel()
    taken = evenly_sampled(torch.arange(count), most).tolist()
    assert min(count, most) / 2 < len(taken) <= most
    assert len(set(taken)) == len(taken)
    for axis in range(1, len(shape)):
        period = torch.Size(shape[axis:]).numel()
        often = Counter(index % period for index in taken)
        assert max(often.values()) <= len(taken) / period + count // len(taken) + 1
        assert len(often) >= min(period, len(taken)) / 2
    halves = Counter(index * 2 // count for index in taken)
    assert abs(halves[0] - halves[1]) <= count // len(taken) + 1


def test_quantiles_of_values_that_go_by_column() -> None:
    """Promise: those of all elements, where every second column is a hundred times larger, or a channel is zero."""
    torch.manual_seed(0)
    weight, image = torch.randn(1024, 512), torch.rand(512, 512, 4)
    weight[:, 1::2] *= 100
    image[..., 0] = 0.0
    for x in (weight, image):
        found = debug.analyze_tensor(x).quantiles
        assert found is not None
        for share in (0.05, 0.5, 0.95):
            below = float((x <= found[str(share)]).double().mean())
            assert below == pytest.approx(max(share, 0.25 if x is image else 0), abs=0.005)
