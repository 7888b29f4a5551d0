"""``debug.count_flops`` counts what is multiplied, whichever operator does it, and names those that it does not know."""

# mypy: disable-error-code="no-untyped-call"

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchobs import debug
from torchobs.debug.flop_formulas import formulas

BATCH, LENGTH, WIDTH = 3, 10, 16


class _Of(nn.Module):
    """A function of a linear layer's output."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(width, width, bias=False), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x))


class _First(nn.Sequential):
    """The output of a recurrent layer without its state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent_layers_count_their_matrices(
    kind: Callable[..., nn.Module], gates: int, layers: int, directions: int
) -> None:
    """Promise: input and state are multiplied by their weights at each step, in each direction and layer."""
    cell = kind(WIDTH, 8, num_layers=layers, bidirectional=directions == 2)
    own = sum(directions * gates * 8 * ((WIDTH if layer == 0 else 8 * directions) + 8) for layer in range(layers))
    found = debug.count_flops(_First(cell), torch.randn(LENGTH, BATCH, WIDTH))
    assert found.forward == 2 * LENGTH * BATCH * own
    assert found.forward < found.backward <= 2 * found.forward  # of the first input and state no gradient is needed
    assert found.unknown == ()


def test_a_fused_recurrent_layer_of_a_gpu_counts_the_same() -> None:
    """Promise: by its list of weights, with biases and a projection among them."""
    cell = nn.LSTM(WIDTH, 8, num_layers=2, proj_size=4)
    formula = formulas()[torch.ops.aten._cudnn_rnn]
    own = 4 * 8 * (WIDTH + 4) + 4 * 8 + 4 * 8 * (4 + 4) + 4 * 8
    assert formula(torch.randn(LENGTH, BATCH, WIDTH), list(cell.parameters()), 5, out_val=None) == 2 * LENGTH * BATCH * own


@pytest.mark.parametrize("dropout", [0.0, 0.5])  # torch chooses another implementation on the CPU
def test_attention_counts_scores_and_values(dropout: float) -> None:
    """Promise: two products of queries, keys and values in each head, whether torch fuses them or not."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        return functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout)

    found = debug.count_flops(_Of(attend), torch.randn(BATCH, LENGTH, WIDTH))
    attention = 2 * 2 * BATCH * LENGTH * LENGTH * WIDTH
    assert found.forward == 2 * BATCH * LENGTH * WIDTH * WIDTH + attention
    # four products for the gradients; what is fused computes the scores again
    assert found.backward == 2 * BATCH * LENGTH * WIDTH * WIDTH + (2 * attention if dropout else 5 * attention // 2)


@pytest.mark.parametrize("trained", [True, False])
def test_an_encoder_layer_counts_the_same_in_both_modes(*, trained: bool) -> None:
    """Promise: in evaluation, fused into one operator where nothing is trained, as in training."""
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    expected = debug.count_flops(layer, x).forward
    assert expected == 2 * BATCH * LENGTH * (4 * WIDTH * WIDTH + 2 * WIDTH * 32) + 4 * BATCH * LENGTH * LENGTH * WIDTH
    assert debug.count_flops(layer.eval().requires_grad_(requires_grad=trained), x).forward == expected
    attention = layer.self_attn

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attention(x, x, x)[0]  # type: ignore[no-any-return]

    assert debug.count_flops(Attention(), x).forward == expected - 2 * BATCH * LENGTH * 2 * WIDTH * 32


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d])
def test_each_gradient_of_a_convolution_counts_as_the_convolution(kind: type[nn.Conv2d], groups: int) -> None:
    """Promise: in any number of groups; the first layer's input needs no gradient."""
    first, second = (kind(8, 8, 3, groups=groups, padding=1) for _ in range(2))
    dimensions = first.weight.dim() - 2
    found = debug.count_flops(nn.Sequential(first, second), torch.randn(BATCH, 8, *[6] * dimensions))
    assert found.forward == 2 * 2 * BATCH * 6**dimensions * first.weight.numel()
    assert found.backward == 3 * found.forward // 2


def test_a_complex_product_is_four_real_ones() -> None:
    """Promise: four products and sums, in each of the passes."""
    x = torch.randn(BATCH, WIDTH)
    found = debug.count_flops(nn.Linear(WIDTH, WIDTH, dtype=torch.complex64), x.to(torch.complex64))
    expected = debug.count_flops(nn.Linear(WIDTH, WIDTH), x)
    assert (found.forward, found.backward) == (4 * expected.forward, 4 * expected.backward)


@pytest.mark.filterwarnings("ignore::UserWarning")  # what torch says of sparse tensors
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_of_a_sparse_matrix_what_is_stored_is_multiplied(layout: torch.layout) -> None:
    """Promise: forward and backward, by the stored elements."""
    graph = torch.eye(BATCH).to_sparse(layout=layout)
    found = debug.count_flops(_Of(lambda x: torch.sparse.mm(graph, x)), torch.randn(BATCH, WIDTH))
    dense = 2 * BATCH * WIDTH * WIDTH
    assert (found.forward, found.backward) == (dense + 2 * BATCH * WIDTH, dense + 2 * BATCH * WIDTH)


@torch.library.custom_op("torchobs_tests::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: torch.fft.rfft(x.detach()).abs(), ("aten._fft_r2c",)),
        (lambda x: functional.bilinear(x.detach(), x.detach(), torch.ones(2, WIDTH, WIDTH)), ("aten._trilinear",)),
        (lambda x: torch.linalg.qr(x.detach()).Q, ("aten.linalg_qr",)),
        (lambda x: _twice(x.detach()), ("torchobs_tests.twice",)),
        (lambda x: torch.linalg.vector_norm(torch.lgamma(x)).reshape(1), ()),
        (lambda x: x.new_zeros(BATCH, BATCH).addmm_(x.detach(), x.detach().t()), ()),
        (lambda x: x.detach() @ torch.ones(WIDTH), ()),
    ],
)
def test_what_multiplies_without_a_formula_is_named(
    function: Callable[[torch.Tensor], torch.Tensor], names: tuple[str, ...]
) -> None:
    """Promise: Fourier transforms, decompositions, and another library's operators; nothing that is counted."""
    assert debug.count_flops(_Of(function), torch.randn(BATCH, WIDTH)).unknown == names


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped products")
def test_the_products_of_experts_are_those_of_their_rows() -> None:
    """Promise: each row is multiplied by its own expert's matrix alone; forward, and twice backward."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8, 16, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ends = torch.tensor([8, 16, 24], dtype=torch.int32)
            return torch._grouped_mm(x, self.weight, offs=ends)

    x = torch.randn(24, 8, dtype=torch.bfloat16, requires_grad=True)
    counted = debug.count_flops(Experts(), x, loss_fn=lambda y: y.square().sum())
    assert (counted.forward, counted.unknown) == (2 * 24 * 8 * 16, ())
    assert counted.backward % counted.forward == 0 < counted.backward
