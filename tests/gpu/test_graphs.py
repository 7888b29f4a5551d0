"""CUDA graphs: what is captured holds nothing of ours, so that replays compute what they would without us."""

# mypy: disable-error-code="no-untyped-call"
# streams, events and Tensor.backward have no annotations

from __future__ import annotations

import functools
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests import support
from tests.training import Recording, recording
from torchobs.flight.step_record import StepFlag

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=support.NEEDS_CUDA)


def model_of() -> nn.Sequential:
    """The same model every time, on the device."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).cuda()


def batches(count: int) -> list[torch.Tensor]:
    """The same batches every time."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    return [torch.randn(16, 64, device="cuda", generator=generator) for _ in range(count)]


def captured_whole(pause_s: float) -> list[torch.Tensor]:
    """Forward, backward, clipping and step in one graph, as torch's notes on CUDA graphs have it; return the weights."""
    model, static = model_of(), torch.zeros(16, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(static).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    side: Any = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for batch in batches(12):
            static.copy_(batch)
            step()
            time.sleep(pause_s)  # rounds of the sampler, which choose layers and copy their weights
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()
    blocks = [torch.full((1 << 16,), 7.0, device="cuda") for _ in range(64)]  # takes the place of what was freed
    for batch in batches(10):
        static.copy_(batch)
        graph.replay()
    torch.cuda.synchronize()
    assert all(bool((block == 7.0).all()) for block in blocks)
    return [parameter.detach().clone() for parameter in model.parameters()]


def graphed_callables(_: float) -> list[torch.Tensor]:
    """A model with graphs for its forward and backward pass; the optimizer's step is none."""
    model = model_of()
    graphed: Any = torch.cuda.make_graphed_callables(model, (torch.randn(16, 64, device="cuda"),))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for batch in batches(10):
        optimizer.zero_grad(set_to_none=True)
        graphed(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    torch.cuda.synchronize()
    return [parameter.detach().clone() for parameter in model.parameters()]


def reduced_overhead(_: float) -> list[torch.Tensor]:
    """``mode="reduce-overhead"``: torch makes and manages the graphs, and overwrites their outputs at each call."""
    torch.compiler.reset()
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    loss_of = torch.compile(lambda batch: model(batch).square().mean(), mode="reduce-overhead")
    for batch in batches(12):
        optimizer.zero_grad(set_to_none=True)
        loss_of(batch).backward()
        optimizer.step()
    torch.cuda.synchronize()
    return [parameter.detach().clone() for parameter in model.parameters()]


def observed(flight_dir: Path, train: Callable[[float], list[torch.Tensor]]) -> list[torch.Tensor]:
    """The weights after a training at level advanced, everything measured as often as can be."""
    weights: list[torch.Tensor] = []
    for run in recording(flight_dir, level="advanced", overhead_budget=0.2):
        weights = train(0.3)
        run.look()
        assert [record.step for record in run.records() if record.flags & StepFlag.GRAD_NORM]
    return weights


@pytest.mark.parametrize("train", [captured_whole, graphed_callables])
def test_replays_compute_what_they_would_without_us(flight_dir: Path, train: Callable[[float], list[torch.Tensor]]) -> None:
    """To the bit, and no memory but their own is written to."""
    plain = train(0.0)
    weights = observed(flight_dir, train)
    assert all(torch.equal(weight, other) for weight, other in zip(plain, weights, strict=True))


def noted(rounds: list[str], name: str, **_: bool) -> None:
    """In place of a round: note that there was one."""
    rounds.append(name)


def test_threads_of_ours_rest_while_a_graph_is_captured(run: Recording) -> None:
    """They might collect a graph, and its end would end the capture; what waits for a backward waits on."""
    context, sampler, manager = run.session.context, run.session._sampler, run.session._probe_manager
    assert context is not None
    assert sampler is not None
    assert manager is not None
    rounds, asked, gpu = list[str](), list[bool](), manager._probes["gpu"]
    for name, owner in (("sampler", sampler), ("gpu", gpu._monitor)):  # type: ignore[attr-defined]  # the GPU probe's
        vars(owner)["round"] = functools.partial(noted, rounds, name)
    model, static = model_of(), torch.ones(16, 64, device="cuda")
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for _ in range(3):
            model(static).square().mean().backward()
    main.wait_stream(side)
    model.zero_grad(set_to_none=True)
    event, graph = torch.cuda.Event(), torch.cuda.CUDAGraph()
    event.record()
    context.at_backward(lambda: asked.append(event.query()))
    with torch.cuda.graph(graph):
        assert context.training.captures.in_progress()
        begun = len(rounds)
        gpu.observe()  # type: ignore[attr-defined]  # as above
        time.sleep(0.5)
        model(static).square().mean().backward()
        assert len(rounds) == begun
        assert asked == []
    assert not context.training.captures.in_progress()
    graph.replay()
    torch.cuda.synchronize()
    model(static).square().mean().backward()
    assert asked == [True]
    gpu.observe()  # type: ignore[attr-defined]  # as above
    expected = {"sampler"} if gpu._monitor.absent else {"sampler", "gpu"}  # type: ignore[attr-defined]  # as above
    support.wait_until(lambda: expected <= set(rounds[begun:]))


@pytest.mark.skipif(shutil.which("c++") is None, reason=support.NEEDS_COMPILER)
def test_graphs_of_the_compiler_s_own(flight_dir: Path) -> None:
    """As above; whatever is kept of a loss does not keep the compiler from using its memory again."""
    pytest.importorskip("triton", reason=support.NEEDS_COMPILER)
    plain = reduced_overhead(0.0)
    weights = observed(flight_dir, reduced_overhead)
    assert all(torch.allclose(weight, other, rtol=1e-5) for weight, other in zip(plain, weights, strict=True))
