"""``debug.profile``, slow operations and ``count_flops``: tables, traces, blocks, products."""
# mypy: disable-error-code="no-untyped-call, attr-defined, operator"

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.debug.models import texts
from torchobs import debug
from torchobs.debug.profiles import device_and_host_time


def test_steps_of_a_function(tmp_path: Path) -> None:
    """Called as often as asked; torch's table with the input shapes, FLOPs; both trace files."""
    layer, batch, calls = nn.Linear(16, 32), torch.randn(8, 16), 0

    def step() -> None:
        nonlocal calls
        calls += 1
        layer(batch).sum().item()

    trace = tmp_path / "trace.json.gz"
    profile = debug.profile(step, wait=1, warmup=1, active=4, batch_size=8, trace=trace, tensorboard=tmp_path / "logs")
    assert (calls, profile.steps) == (6, 4)
    assert profile.flops == 4 * 2 * 8 * 16 * 32
    assert profile.sample_time_s == pytest.approx(profile.time_s / 4 / 8)
    assert all(name in profile.table for name in ("aten::addmm", "aten::_local_scalar_dense", "[8, 16]"))
    assert profile.top_operator in profile.table
    assert "aten::addmm" in gzip.decompress(trace.read_bytes()).decode()
    (board,) = (tmp_path / "logs").glob("*.pt.trace.json")
    assert json.loads(board.read_text())["traceEvents"]
    assert "aten::addmm" in str(profile)


def test_blocks_of_the_user_s_count_as_no_operators() -> None:
    """``record_function`` spans its kernels on the device, and Python code on the host; launches are the operators'."""
    rows = [
        row("aten::mm", "CPU", host=10, device=100), row("MmBackward0", "CPU", host=5), row("cudaLaunchKernel", "CPU", host=3),
        row("void at::native::kernel<float>", "CUDA", device=100), row("Memcpy HtoD", "CUDA", device=20),
        row("my::block", "CPU", host=5000, annotates=True), row("my::block", "CUDA", device=150, annotates=True),
        row("ProfilerStep*", "CPU", host=7000, annotates=True), row("[memory]", "CPU", host=1),
    ]  # fmt: skip
    device_s, host_s = device_and_host_time(rows)
    assert device_s == pytest.approx(120e-6)
    assert host_s == pytest.approx(18e-6)


def row(key: str, kind: str, *, host: int = 0, device: int = 0, annotates: bool = False) -> SimpleNamespace:
    """A row of ``key_averages()``; times in microseconds."""
    return SimpleNamespace(
        key=key, device_type=SimpleNamespace(name=kind), is_user_annotation=annotates, self_cpu_time_total=host,
        self_device_time_total=device,
    )  # fmt: skip


def test_a_loop_of_ones_own() -> None:
    """All batches pass; the profile is there once its steps are, and the profiler is gone then."""
    layer, profiled = nn.Linear(4, 4), []
    loop = debug.profile([torch.randn(3, 4) for _ in range(8)], wait=2, warmup=1, active=2)
    for batch in loop:
        profiled.append(torch.autograd._profiler_enabled())
        layer(batch)
    assert profiled == [False, False, False, True, True, False, False, False]
    assert loop.result.steps == 2
    assert "aten::addmm" in loop.result.table


def test_a_loop_that_ends_early() -> None:
    """By its end or by a break: the result has what was recorded, and the profiler is gone."""
    layer = nn.Linear(4, 4)
    loop = debug.profile([torch.randn(3, 4)] * 4, wait=1, warmup=1, active=10)
    for batch in loop:
        layer(batch)
    assert loop.result.steps == 2
    loop = debug.profile([torch.randn(3, 4)] * 4, wait=0, warmup=2, active=10)
    for batch in loop:
        layer(batch)
        break
    assert loop.result.steps is None
    assert texts(loop.result) == (
        "profile: no step was recorded: the loop ended within wait=0 and warmup=2 steps, or in the next",
    )
    assert not torch.autograd._profiler_enabled()


def test_a_block_with_stacks() -> None:
    """Rows by stack; an exception goes on and the profile is filled all the same; only one profiler at a time."""
    with debug.profile("matmul", stacks=True) as profile:
        torch.randn(64, 64) @ torch.randn(64, 64)
    assert (profile.name, profile.steps) == ("matmul", 1)
    assert "aten::mm" in profile.table
    assert "Source Location" in profile.table
    with pytest.raises(KeyError), debug.profile("broken") as profile:  # noqa: PT012  # it is entered, then raises
        torch.ones(3).sum()
        raise KeyError
    assert "aten::sum" in profile.table
    with debug.profile("outer"), pytest.raises(RuntimeError, match="another profiler"):
        debug.profile(lambda: None)
    assert not torch.autograd._profiler_enabled()


def test_slow_operations() -> None:
    """They are problems, counted, with the time by sample; also as a decorator."""
    with debug.context("sleep", slow_s=0.01, samples=10) as slow:
        time.sleep(0.02)
    assert not slow.ok
    assert slow.sample_time_s == pytest.approx(slow.time_s / 10)
    nothing = debug.operation("nothing", slow_s=10.0)(lambda: 3)
    assert nothing() == nothing() == 3
    with pytest.raises(KeyError), debug.context("broken") as broken:  # it is entered, then raises
        raise KeyError
    assert broken.error == "KeyError"
    try:
        slow.to_dict()["absent"]
    except KeyError:  # a block in a handler has not failed for that
        with debug.context("retry") as again, debug.context("inner") as info, debug.validation() as validated:
            validated.add(1)
        assert (again.error, info.error, validated.error) == (None, None, None)
    summary = debug.summary()
    assert {row.operation: (row.count, row.with_problems) for row in summary.operations} == {
        "sleep": (1, 1), "nothing": (2, 0), "broken": (1, 0), "retry": (1, 0), "inner": (1, 0),
    }  # fmt: skip
    assert str(summary.problems[0]).startswith("sleep: it took")


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
    """Promise: Fourier transforms, decompositions, fused attention on the CPU, an LSTM; no operation that is no product."""
    x = torch.randn(BATCH, LENGTH, WIDTH)
    counted = debug.count_flops(_Of(function), x)
    assert set(counted.unknown) == names
    assert counted.forward == 2 * BATCH * LENGTH * WIDTH * WIDTH
    assert debug.count_flops(nn.LSTM(WIDTH, 8), x, loss_fn=lambda output: output[0].sum()).unknown != ()
