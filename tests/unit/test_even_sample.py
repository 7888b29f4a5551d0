"""Elements that are taken as a sample of a tensor come from all of its columns."""

import pytest
import torch

from torchobs import debug


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
