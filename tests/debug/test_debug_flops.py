"""``debug.count_flops`` counts what torch's counter knows, and names the products that it does not know."""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchobs import debug

BATCH, LENGTH, WIDTH = 3, 10, 16


class _Of(nn.Module):
    """A function of a linear layer's output."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH, bias=False), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


def test_each_gradient_of_a_convolution_counts_as_the_convolution() -> None:
    """Promise: forward once, backward for input and weight; the first layer's input needs no gradient."""
    first, second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
    counted = debug.count_flops(nn.Sequential(first, second), torch.randn(BATCH, 8, 6, 6))
    assert counted.forward == 2 * 2 * BATCH * 6**2 * first.weight.numel()
    assert (counted.backward, counted.unknown) == (3 * counted.forward // 2, ())


def test_products_of_matrices_count_forward_and_for_each_gradient() -> None:
    """Promise: of a perceptron of two layers, with the operators that did it; and that is what ``flops`` adds up."""
    counted = debug.count_flops(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(BATCH, 8))
    forward = 2 * BATCH * (8 * 16 + 16 * 4)
    assert (counted.forward, counted.backward) == (forward, forward + 2 * BATCH * 16 * 4)
    assert counted.flops == sum(number for _, number in counted.operators)
    assert counted.unknown == ()


def _attend(x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: torch.fft.rfft(x.detach()).abs(), {"aten._fft_r2c"}),
        (lambda x: torch.linalg.qr(x.detach().flatten(0, 1)).Q, {"aten.linalg_qr"}),
        (_attend, {f"aten._scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")}),
        (lambda x: torch.linalg.vector_norm(torch.lgamma(x)).reshape(1), set()),
    ],
)
def test_what_multiplies_without_a_formula_is_named(function: Callable[[torch.Tensor], torch.Tensor], names: set[str]) -> None:
    """Promise: Fourier transforms, decompositions, fused attention on the CPU; no operation that is no product."""
    counted = debug.count_flops(_Of(function), torch.randn(BATCH, LENGTH, WIDTH))
    assert set(counted.unknown) == names
    assert counted.forward == 2 * BATCH * LENGTH * WIDTH * WIDTH


def test_a_recurrent_layer_is_named_rather_than_left_out_silently() -> None:
    """Promise: torch's counter has no formula of an LSTM; the result says so."""
    counted = debug.count_flops(nn.LSTM(WIDTH, 8), torch.randn(LENGTH, BATCH, WIDTH), loss_fn=lambda output: output[0].sum())
    assert counted.unknown != ()
