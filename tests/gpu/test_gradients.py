"""Norms on a CUDA device: as the reference says, never waited for, and no part of anybody's graph."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests import support
from tests.gpu import no_waiting
from tests.training import Recording, StepFlag, has, recording
from torchobs.flight.step_record import RecordKind

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=support.NEEDS_CUDA)


def model_of(dtype: torch.dtype) -> Any:
    """A small model on the device."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).to("cuda", dtype)


def backward(model: Any, batch: torch.Tensor) -> None:
    """Gradients."""
    model(batch).square().mean().backward()


def reference(model: Any) -> torch.Tensor:
    """The float64 norm, left on the device."""
    squares = [p.grad.double().pow(2).sum() for p in model.parameters()]
    return torch.stack(squares).sum().sqrt()


class Still(torch.optim.Optimizer):
    """One that changes nothing, whatever its gradients are."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it has no closure
        assert closure is None


def delivered(run: Recording) -> dict[int, float]:
    """Norms by step, once the device has done everything and the sampler has looked."""
    torch.cuda.synchronize()
    assert run.session.context is not None
    run.session.context.recorder.flush()
    support.wait_until(
        lambda: [record for record in run.records() if record.kind == RecordKind.LATE and has(record, StepFlag.GRAD_NORM)]
    )
    sampler = run.session._sampler
    assert sampler is not None
    sampler.stop()
    sampler.round(last=True)
    return {record.step: record.grad_norm for record in run.records() if has(record, StepFlag.GRAD_NORM)}


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-4), (torch.float64, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)], ids=str
)
@pytest.mark.parametrize("clipped", [False, True])
def test_norms_equal_the_reference_without_waiting(run: Recording, dtype: torch.dtype, within: float, *, clipped: bool) -> None:
    """Step by step, measured or taken from clipping; a synchronisation anywhere in the step would raise."""
    model = model_of(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True)
    batches = [torch.randn(16, 64, device="cuda", dtype=dtype) for _ in range(6)]
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        with no_waiting():
            backward(model, batch)
            norms.append(reference(model))
            if clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    expected = dict(enumerate((norm.item() for norm in norms), 1))
    assert delivered(run) == pytest.approx(expected, rel=within)
    assert run.values()["torchobs.grad.clipped_steps",] == (sum(norm > 1e-3 for norm in expected.values()) if clipped else 0)


def test_layers_and_faults_arrive(run: Recording) -> None:
    """By layer, and which of them are not finite; elements are counted from the second time on."""
    model = model_of(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = torch.randn(16, 64, device="cuda")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for spoiled in (False, True, True, True):
        optimizer.zero_grad()
        backward(model, batch)
        if spoiled:
            model[2].bias.grad[:3] = float("nan")
        optimizer.step()
        model.load_state_dict(weights)
        torch.cuda.synchronize()
        time.sleep(0.3)  # three rounds of the sampler
    delivered(run)
    values = run.values()
    assert values["torchobs.grad.layer.norm", "0"] > 0
    assert values["torchobs.grad.nonfinite_steps",] == 3
    assert values["torchobs.grad.nonfinite_elements",] >= 3


@pytest.mark.parametrize("size", [1e20, 1e-25])
def test_what_float32_cannot_square_is_finite_and_not_zero(run: Recording, size: float) -> None:
    """The squares are summed in float64."""
    parameter = nn.Parameter(torch.zeros(10, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for _ in range(2):
        parameter.grad = torch.full_like(parameter, size)
        optimizer.step()
    assert delivered(run) == pytest.approx(dict.fromkeys((1, 2), size * math.sqrt(10)), rel=1e-6)


def test_a_capture_while_values_are_under_way_is_not_harmed(run: Recording) -> None:
    """Norms and losses that the sampler waits for while another part of the program is captured, in the default mode.

    In that mode an event that is queried by any thread invalidates the capture; the sampler looks ten times a second.
    """
    model = model_of(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch, static = torch.randn(16, 64, device="cuda"), torch.ones(8, device="cuda")
    doubled = torch.empty_like(static)
    for _ in range(3):
        for _ in range(20):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mul(static, 2, out=doubled)
            time.sleep(0.35)  # three rounds of the sampler
            doubled += 1
        graph.replay()
    torch.cuda.synchronize()
    assert doubled.tolist() == [3.0] * 8
    assert set(delivered(run)) == set(range(1, 61))
    assert run.errors() == []


def test_two_streams_deliver_each_its_own(run: Recording) -> None:
    """Steps in turn on a stream that is busy and on the default one: values come in order, and are right."""
    model = model_of(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch, norms = torch.randn(16, 64, device="cuda"), list[torch.Tensor]()
    streams: list[Any] = [torch.cuda.default_stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for number in range(6):
        stream, other = streams[number % 2], streams[1 - number % 2]
        stream.wait_stream(other)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            backward(model, batch * (number + 1))
            norms.append(reference(model))
            optimizer.step()
    torch.cuda.synchronize()
    expected = dict(enumerate((norm.item() for norm in norms), 1))
    assert delivered(run) == pytest.approx(expected, rel=1e-6)
    assert run.errors() == []


def test_nothing_waits_for_the_device_in_a_whole_run(flight_dir: Path) -> None:
    """From ``init()`` to ``shutdown()``, the sampler's slow looks included: clipping, accumulation, a fused optimizer."""
    model, batch = model_of(torch.float32), torch.randn(16, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    torch.cuda.synchronize()
    with no_waiting():
        for run in recording(flight_dir, level="advanced"):
            begun = time.monotonic()
            while time.monotonic() - begun < 2.5:
                optimizer.zero_grad()
                backward(model, batch)
                backward(model, batch)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                time.sleep(0.01)
            assert run.errors() == []


def test_a_large_gradient_is_not_copied(run: Recording) -> None:
    """The allocator's peak over a measured step of 100 million bfloat16 elements grows by a megabyte at most."""
    parameter = nn.Parameter(torch.zeros(100_000_000, device="cuda", dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer = torch.optim.SGD([parameter], lr=0.0, foreach=False)
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for hook in list(_global_optimizer_pre_hooks.values()):
        hook(optimizer, (optimizer,), {})
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1_000_000
    optimizer.step()
    assert run.errors() == []


def test_elements_that_are_not_finite_are_counted_without_a_copy(run: Recording) -> None:
    """Of 100 million bfloat16 elements: the peak grows by what eight million comparisons take, in each of the steps."""
    parameter = nn.Parameter(torch.zeros(100_000_000, device="cuda", dtype=torch.bfloat16))
    optimizer = Still([parameter])
    parameter.grad = torch.full_like(parameter, 0.5)
    parameter.grad[:5] = float("nan")
    parameter.grad[-2:] = float("-inf")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        with no_waiting():
            optimizer.step()
        torch.cuda.synchronize()
        time.sleep(0.3)  # three rounds of the sampler
    assert torch.cuda.max_memory_allocated() - before < 20_000_000
    delivered(run)
    assert run.values()["torchobs.grad.nonfinite_elements",] >= 7


def test_gradients_of_all_kinds_at_once(run: Recording) -> None:
    """Sparse, complex, float8, transposed, scattered ones in one optimizer; a norm for each, and none is waited for."""
    torch.manual_seed(0)
    gradients = [torch.randn(30, 40, device="cuda", dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex64)]
    gradients += [torch.randn(40, 30, device="cuda").t(), torch.randn(30, 80, device="cuda")[:, ::2]]
    gradients += [torch.randn(30, 40, device="cuda").to(torch.float8_e5m2)]
    indices = torch.tensor([[0, 3, 5]], device="cuda")
    sparse = torch.sparse_coo_tensor(indices, torch.randn(3, 8, device="cuda"), (10, 8)).coalesce()
    wide = [x.abs().double() if x.is_complex() else x.to(torch.float64) for x in [*gradients, sparse.values()]]
    expected = math.sqrt(sum(float(gradient.pow(2).sum()) for gradient in wide))
    parameters = [nn.Parameter(torch.zeros_like(gradient), requires_grad=gradient.dtype.itemsize > 1) for gradient in gradients]
    parameters.append(nn.Parameter(torch.zeros(10, 8, device="cuda")))
    for parameter, gradient in zip(parameters, [*gradients, sparse], strict=True):
        parameter.grad = gradient
    optimizer = Still(parameters)
    with no_waiting():
        for _ in range(2):
            optimizer.step()
    assert delivered(run) == pytest.approx(dict.fromkeys((1, 2), expected), rel=1e-6)


def test_the_default_device_is_no_matter(flight_dir: Path) -> None:
    """``set_default_device("cuda")``: memory that is pinned is the CPU's all the same."""
    with torch.device("cuda"):
        for run in recording(flight_dir, level="advanced"):
            model = model_of(torch.float32)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            for _ in range(3):
                optimizer.zero_grad()
                backward(model, torch.randn(16, 64))
                optimizer.step()
            assert set(delivered(run)) == {1, 2, 3}
