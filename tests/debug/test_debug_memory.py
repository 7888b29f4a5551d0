"""``debug.memory_by_module``, ``memory_growth`` and ``memory`` measure what they say."""

# mypy: disable-error-code="comparison-overlap, index, no-untyped-call, operator, union-attr"
# ruff: noqa: NPY002  # the global generator, which augmentations draw from

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils.checkpoint import checkpoint

from tests.debug.models import Slope, hooks
from torchobs import debug, guard, tune
from torchobs.probes.leak import MOST_TENSORS, Tracing


def wide() -> torch.nn.Sequential:
    """A model with activations larger than its inputs."""
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))


def test_components_are_counted_to_the_byte() -> None:
    """Parameters, gradients, optimizer state, buffers, inputs, and what each module keeps for the backward pass."""
    model = torch.nn.Sequential(*wide(), torch.nn.BatchNorm1d(8))
    count = sum(x.numel() for x in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    usage = debug.memory_by_module(model, torch.randn(16, 64), optimizer=optimizer)
    assert (usage.parameters_bytes, usage.gradients_bytes, usage.buffers_bytes) == (4 * count, 4 * count, 72)
    assert usage.inputs_bytes == 16 * 64 * 4
    assert usage.optimizer_state_bytes == 8 * count + 4 * len(list(model.parameters()))  # two moments, and each one's step
    assert {(row.name, row.activations_bytes) for row in usage.modules} >= {
        ("1", 16 * 256 * 4),
        ("3", 16 * 8 * 4 + 2 * 8 * 4),
    }  # the input, and mean and deviation
    assert usage.activations_bytes == sum(row.activations_bytes or 0 for row in usage.modules)
    assert str(usage.batch_size) in str(usage)


def test_without_a_batch_there_are_the_weights_alone() -> None:
    """By module, tied ones once; nothing is run."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    usage = debug.memory_by_module(model)
    assert (usage.parameters_bytes, usage.buffers_bytes, usage.total_bytes) == (96, 40, 136)
    assert (usage.batch_size, usage.activations_bytes, usage.peak_bytes, usage.gradients_bytes) == (None,) * 4
    assert [(row.name, row.parameters_bytes, row.buffers_bytes) for row in usage.modules] == [("1", 32, 40), ("0", 64, 0)]
    assert usage["0"].activations_bytes is None


def test_the_state_of_an_optimizer_that_has_not_stepped() -> None:
    """Is what it is after its first step."""
    optim = torch.optim
    kinds: list[Callable[..., Any]] = [optim.SGD, optim.Adagrad, optim.RMSprop, optim.Adafactor, optim.AdamW]
    for kind in kinds:
        model = wide()
        optimizer = kind(model.parameters())
        foretold = debug.memory_by_module(model, torch.randn(4, 64), optimizer=optimizer).optimizer_state_bytes
        for x in model.parameters():
            x.grad = torch.ones_like(x)
        optimizer.step()
        assert debug.memory_by_module(model, torch.randn(4, 64), optimizer=optimizer).optimizer_state_bytes == foretold


def test_lines_and_objects_that_grew_are_named() -> None:
    """Tensors by the line that made them, without those that are gone; Python's memory by ``tracemalloc``."""
    kept: list[Any] = []
    with debug.memory_growth("leak") as growth:
        assert (growth.host, growth.tensor_lines) == (None, ())
        for _ in range(5):
            kept.append(torch.ones(1000, 100))  # the tensors' line
            torch.ones(10_000, 10).add_(1)
        kept.append([str(number) * 100 for number in range(1000)])  # the texts' line
    lines = Path(__file__).read_text().splitlines()
    (row,) = growth.tensor_lines
    assert (row.size_bytes, row.count, growth.tensor_bytes) == (5 * 400_000, 5, 5 * 400_000)
    assert growth.tensor_peak_bytes == 6 * 400_000
    assert "the tensors' line" in lines[int(row.name.rpartition(":")[2]) - 1]
    assert "the texts' line" in lines[int(growth.python_lines[0].name.rpartition(":")[2]) - 1]
    assert growth.python_lines[0].size_bytes > 200_000
    assert {kind.name: kind.count for kind in growth.objects}["torch.Tensor"] == 5
    assert not tracemalloc.is_tracing()
    assert "leak" in str(growth)


def test_tracing_of_others_is_left_to_them() -> None:
    """Promise: the user's own goes on, and may end within a block; that of the leak probe, which was there first, as well."""
    tracemalloc.start()
    with pytest.raises(ValueError, match="on"), debug.memory_growth() as interrupted:
        raise ValueError("on")
    assert tracemalloc.is_tracing()
    assert interrupted.host is not None
    assert _python_dispatch._get_current_dispatch_mode() is None
    with debug.memory_growth() as growth:
        tracemalloc.stop()
    assert (growth.python_lines, growth.host is not None) == ((), True)
    probe = Tracing()
    probe.start()
    with debug.memory_growth() as growth:
        probe.stop()
        kept = [bytearray(100_000)]
    assert growth.python_lines[0].size_bytes >= len(kept[0])
    assert not tracemalloc.is_tracing()


def test_a_point_has_the_tensors_by_shape() -> None:
    """Views of one memory count once."""
    kept = torch.ones(123, 1000)
    views = [kept[:], kept[:]]
    point = debug.memory("here")
    (row,) = (row for row in point.largest if row.shape == (123, 1000))
    assert (row.count, row.size_bytes, row.dtype, row.device) == (3, 492_000, "float32", "cpu")
    assert point.host_bytes > 10 << 20
    assert (point.label, point.devices, len(views)) == ("here", (), 2)
    assert point.tensor_bytes >= 492_000


def test_all_tensors_are_counted_also_those_of_other_classes() -> None:
    """However many there are; quantised weights and adapters are of classes that inherit from a parameter."""

    class Weight(nn.Parameter):
        pass

    many, weight = [torch.empty(1, 9) for _ in range(MOST_TENSORS + 10)], Weight(torch.ones(124, 1000))
    point = debug.memory()
    assert point.tensors > len(many)
    assert {row.shape for row in point.largest} >= {(1, 9), tuple(weight.shape)}


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what torch says of sparse, quantised and nested tensors

WHOLE = torch.arange(12.0).reshape(3, 4)
KINDS: list[Callable[[], torch.Tensor]] = [
    WHOLE.to_sparse,
    lambda: WHOLE.to_sparse_bsc((1, 2)),
    lambda: torch.arange(3.0)[:, None].expand(3, 5),
    lambda: torch.quantize_per_tensor(WHOLE, 0.1, 0, torch.qint8),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
]


def _dies(_: torch.Tensor) -> torch.Tensor:
    return torch.full((), float("nan"), requires_grad=True)


def _skip(model: nn.Module, x: torch.Tensor) -> None:
    recovery = guard.Recovery(model, torch.optim.SGD(model.parameters(), 0.1))
    assert recovery.step(x, _dies).action == "skip"


def _benchmark(model: nn.Module, x: torch.Tensor) -> None:
    tune.benchmark(model, (x, x), nn.functional.mse_loss, modes=("none",), rounds=6)


def _budget(model: nn.Module, x: torch.Tensor) -> None:
    tune.optimize(model, mode="memory_efficient", checkpointing=nn.Linear, activation_budget=1, example=x)


RUNS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "memory_usage": debug.memory_by_module,
    "count_flops": debug.count_flops,
    "devices": debug.check_devices,
    "trace_nan": debug.trace_nan,
    "ddp": lambda model, _: debug.compare_ranks(model),
    "Recovery": _skip,
    "benchmark": _benchmark,
    "activation_budget": _budget,
}


def test_a_buffer_may_be_of_any_kind() -> None:
    """Promise: none of them raises or ends the process, and the buffer is the same tensor afterwards."""
    for make in KINDS:
        model, buffer = nn.Sequential(nn.Linear(4, 4)), make()
        model.register_buffer("odd", buffer)
        for run in RUNS.values():
            run(model, torch.randn(8, 4))
            assert model.odd is buffer


class _Checkpointed(nn.Module):
    """Recomputes a recurrent layer and a part that has the weights of the first layer."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.cell, self.tied = nn.Linear(6, 6), nn.GRU(6, 6), nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(y: torch.Tensor) -> torch.Tensor:
            return self.tied(self.cell(y)[0]).tanh()  # type: ignore[no-any-return]

        return checkpoint(part, self.first(x), use_reentrant=self.reentrant).square()  # type: ignore[no-any-return]


class _Counting(nn.Module):
    """Keeps a count and a mean as buffers, and draws from all generators."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1  # another tensor each time, as in `self.queue = torch.cat(...)`
        self.mean = x.detach().mean()
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        return self.norm(self.layer(x + noise))  # type: ignore[no-any-return]


def random_states() -> list[Any]:
    """The next number of each generator, which stays where it is."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return drawn


@pytest.mark.parametrize("name", sorted(RUNS.keys() - {"ddp", "benchmark"}))
def test_a_model_that_is_run_beside_its_training_is_as_before(name: str) -> None:
    """Promise: buffers, also those that a forward pass replaces, and the states of Python's, NumPy's and torch's generators."""
    model, x = _Counting(), torch.randn(6, 4)
    model(x)
    buffers = dict(model.named_buffers())
    values, drawn = {key: buffer.clone() for key, buffer in buffers.items()}, random_states()
    RUNS[name](model, x)
    after = dict(model.named_buffers())
    assert all(after[key] is buffer and torch.equal(buffer, values[key]) for key, buffer in buffers.items())
    assert after.keys() == buffers.keys()
    assert name == "Recovery" or random_states() == drawn  # a step of training draws


@pytest.mark.parametrize("function", [debug.memory_by_module, debug.count_flops])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_nothing_of_it_is_changed(function: Callable[..., Any], mode: Callable[[], Any]) -> None:
    """Promise: parameters are the same objects, ``.grad`` keeps what is in it, and no hook of a parameter is called."""
    model, x, called = _Checkpointed(reentrant=True), torch.randn(8, 6), list[object]()
    before = [(name, parameter, parameter.clone()) for name, parameter in model.named_parameters(remove_duplicate=False)]
    for parameter in model.parameters():
        parameter.register_hook(called.append)
        parameter.register_post_accumulate_grad_hook(called.append)
    model.first.weight.grad = torch.ones(6, 6)
    with mode():
        function(model, x)
    after = list(model.named_parameters(remove_duplicate=False))
    assert all(parameter is y and torch.equal(y, z) for (_, parameter), (_, y, z) in zip(after, before, strict=True))
    assert [name for name, _ in after] == [name for name, *_ in before]
    assert all(parameter is other for parameter, other in zip(model.cell._flat_weights, model.cell.parameters(), strict=True))
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == ["first.weight"]
    assert torch.equal(model.first.weight.grad, torch.ones(6, 6))
    assert called == []


def test_gradients_are_on_where_they_are_measured() -> None:
    """Promise: called where gradients are off, as in an evaluation, the answers are the same, and they are off afterwards."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(6, 4)
    expected = debug.memory_by_module(model, x).activations_bytes, debug.count_flops(model, x).flops
    with torch.no_grad():
        assert (debug.memory_by_module(model, x).activations_bytes, debug.count_flops(model, x).flops) == expected
        assert debug.trace_nan(model, x) is None
        assert not torch.is_grad_enabled()


def test_a_backward_pass_that_waits_is_still_possible() -> None:
    """Promise: what is put back counts as no change of what a graph has kept."""
    model, x = _Counting().eval(), torch.randn(6, 4)
    loss = (model(x) * model.norm.running_var).sum()
    debug.count_flops(model, x)
    loss.backward()
    assert model.layer.weight.grad is not None


def test_a_model_that_differentiates_in_its_forward_pass() -> None:
    """Promise: its operations are counted, its devices judged, and what it cannot do without gradients is no mistake of it."""
    model, x = Slope(), torch.randn(4, 2)
    counted = debug.count_flops(model, x)
    # twice 2 x 8 and 8 x 1, and the gradient of each of both by its input
    assert counted.forward == 2 * 4 * 2 * (2 * 8 + 8)
    assert counted.backward > 0
    assert debug.check_devices(model, x).error is None
    assert hooks(model) == 0
