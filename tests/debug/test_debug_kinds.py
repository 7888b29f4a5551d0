"""Models and batches of other kinds: packed sequences, scripted modules, complex numbers, dataclasses, the device meta."""

# mypy: disable-error-code="no-untyped-call"

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from torchobs import debug


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, packed: PackedSequence) -> torch.Tensor:
        out, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        return self.head(out.sum(1))  # type: ignore[no-any-return]


def test_a_packed_sequence_is_one_argument() -> None:
    """Promise: it is given as it is, though torch has made it a tuple."""
    model, batch = _Packed(), pack_padded_sequence(torch.randn(4, 6, 5), torch.tensor([6, 5, 3, 2]), batch_first=True)
    assert torch.equal(debug.forward_pass(model, batch).output, model(batch))
    step = debug.training_step(model, torch.optim.SGD(model.parameters(), 0.1), lambda out: out.square().mean(), batch)
    assert step.anomalies == ()
    assert debug.trace_nan(model, batch) is None
    usage = debug.memory_usage(model, batch)
    assert usage.batch_size == 4
    with torch.no_grad():
        batch.data[3, 2] = float("nan")
    origin = debug.trace_nan(model, (batch, torch.zeros(4, 3)), nn.functional.mse_loss)
    assert origin is not None
    assert origin.kind == "input"


def test_scripted_modules_take_no_hooks_and_are_looked_at_from_outside() -> None:
    """Promise: no function raises because of them, twice in a row, and the optimizer steps."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    model, x = nn.Sequential(scripted, nn.Linear(8, 2)), torch.randn(5, 4)
    for _ in range(2):
        for one in (model, scripted):
            assert debug.memory_usage(one, x).activations > 0
            assert debug.inference(one, x).anomalies == ()
            optimizer = torch.optim.SGD(one.parameters(), 0.1)
            step = debug.training_step(one, optimizer, lambda out: out.square().mean(), x, activations=True)
            assert step.optimization.update_norm > 0
        assert [row.name for row in debug.forward_pass(model, x, activations=True).activations] == ["1"]
        assert debug.trace_nan(model, x) is None


@dataclass
class _Output:
    logits: torch.Tensor
    hidden: Any = None


def test_what_is_in_a_dataclass_is_looked_at() -> None:
    """Promise: a NaN in an output that is a dataclass is told."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> _Output:
            return _Output(x, [x.log()])

    found = debug.forward_pass(Model(), torch.tensor([-1.0, 1.0]))
    assert found.anomalies == ("output.hidden[0]: 1 NaN of 2 elements",)


wrong: Any = debug
"""To be called as nobody who checks types would"""


def _model() -> nn.Module:
    return nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: wrong.trace_nan("model", torch.zeros(1)), r"trace_nan\(\) takes a torch.nn.Module, not str"),
        (
            lambda: wrong.training_step(_model(), nn.functional.mse_loss, None, None),
            "takes a torch.optim.Optimizer, not function",
        ),
        (lambda: wrong.training_step(_model(), torch.optim.SGD([torch.zeros(1)]), 3, None), "takes a loss function after"),
        (lambda: wrong.memory_usage(_model(), torch.zeros(1, 2), optimizer=3), "takes a torch.optim.Optimizer, not int"),
        (lambda: wrong.devices(_model(), optimizer=3), r"devices\(\) takes a torch.optim.Optimizer, not int"),
        (lambda: wrong.check_gradients(_model(), scaler=3), "takes a torch.amp.GradScaler as scaler, not int"),
        (lambda: wrong.optimization_step(torch.optim.SGD([torch.zeros(1)]), scaler=3), "GradScaler as scaler, not int"),
        (lambda: wrong.backward_pass(torch.zeros(1, requires_grad=True).sum(), scaler=3), "GradScaler as scaler, not int"),
        (lambda: wrong.check_gradients(_model()).exploding("3"), "a threshold of a norm is above 0, not '3'"),
        (lambda: wrong.check_gradients(_model()).vanishing(None), "a threshold of a norm is above 0, not None"),
        (lambda: wrong.enable("basic", memory_every="3"), "whole numbers, 1 or more, not 100, '3', 10, 1000"),
        (lambda: wrong.operation(3), "takes a name, or stands alone above a function, not int"),
        (lambda: wrong.dataloader([1], batches="3"), "takes at least one batch, not '3'"),
        (lambda: wrong.profile(lambda: None, active="3"), "active and top >= 1, whole numbers, not 1, 1, '3', 15"),
        (lambda: wrong.performance("x", slow_s="3").__enter__(), "slow_s > 0 and samples >= 1, not 'x', '3', None"),
        (
            lambda: wrong.early_stopping("loss", patience="3", mode="min"),
            r"patience >= 1, min_delta >= 0, not \('loss', '3', 0.0\)",
        ),
        (lambda: wrong.early_stopping(3, mode="min"), r"needs a name, patience >= 1, min_delta >= 0, not \(3, 10, 0.0\)"),
    ],
)
def test_wrong_arguments_are_refused_with_a_word(call: Any, words: str) -> None:
    """Promise: a wrong argument is an error that says what to do, before anything is done."""
    with pytest.raises((TypeError, ValueError), match=words):
        call()
