"""A step's phases on a CUDA device, and what else is recorded there in few calls: optimizers in backward, limits."""

# mypy: disable-error-code="no-untyped-call"
# Tensor.backward has no annotations

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests import support
from tests.gpu import no_waiting
from tests.training import Recording, StepFlag, has
from torchobs import catalog

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=support.NEEDS_CUDA)

SLOW_S = 0.05


@pytest.fixture
def probe(run: Recording) -> Any:
    """The probe of a recording with a resting sampler: the test asks when it wants."""
    sampler, manager = run.session._sampler, run.session._probe_manager
    assert sampler is not None
    assert manager is not None
    sampler.stop()
    return manager._probes["device_time"]


def slowly(samples: list[Any]) -> Any:
    """A batch that takes a while."""
    time.sleep(SLOW_S)
    return torch.utils.data.default_collate(samples)


def test_the_device_waits_for_its_batch_and_the_phases_make_up_the_step(run: Recording, probe: Any) -> None:
    """Nothing is synchronised for it; what the device did in the meantime is not the host's time."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = iter(DataLoader(TensorDataset(torch.randn(64, 512)), batch_size=4, collate_fn=slowly))
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with no_waiting():
        for index in range(10):
            if index == 5:
                probe._since_s = float("-inf")
                probe.sample()
            if index == 6:
                begun.record()
            (inputs,) = next(batches)
            model(inputs.pin_memory().to("cuda", non_blocking=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if index == 6:
                done.record()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        probe.sample()
        model(torch.zeros(4, 512, device="cuda")).square().mean().backward()
    probe.sample()
    assert run.session.writer is not None
    run.session.writer.publish()
    values = {phase: run.values()[catalog.STEP_DEVICE_TIME.name, phase] for phase in catalog.PHASES}
    assert values["data"] >= 0.8 * SLOW_S
    assert values["backward"] > 0
    assert values["optimizer"] > 0
    assert sum(values.values()) == pytest.approx(begun.elapsed_time(done) / 1e3, rel=0.1)


def test_a_step_on_two_streams_is_not_timed(run: Recording, probe: Any) -> None:
    """Its forward and backward pass are on a stream of their own: the time between two streams' events says nothing."""
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for index in range(10):
        if index == 5:
            probe._since_s = float("-inf")
            probe.sample()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            model(torch.ones(4, 64, device="cuda")).square().mean().backward()
        main.wait_stream(side)
        optimizer.step()
    torch.cuda.synchronize()
    for _ in range(2):
        probe.sample()
        model(torch.zeros(4, 64, device="cuda")).square().mean().backward()
    assert run.session.writer is not None
    run.session.writer.publish()
    assert not [key for key in run.values() if key[0] == catalog.STEP_DEVICE_TIME.name]


def test_norms_of_optimizers_within_the_backward_pass(run: Recording) -> None:
    """One copy for a step has those of all of them."""
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).cuda()
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {
        parameter: torch.optim.SGD([parameter], lr=0.0) for parameter in model.parameters()
    }
    squares = list[torch.Tensor]()

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        squares.append(parameter.grad.double().square().sum())
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    batches = [torch.randn(16, 64, device="cuda") for _ in range(8)]
    with no_waiting():
        for batch in batches:
            model(batch).square().mean().backward()
    torch.cuda.synchronize()
    run.records()
    run.look()
    count = len(optimizers)
    expected = [sum(map(float, squares[at : at + count])) ** 0.5 for at in range(0, len(squares), count)]
    norms = {record.step: record.grad_norm for record in run.records() if has(record, StepFlag.GRAD_NORM)}
    assert [norms[step] for step in range(3, 9)] == pytest.approx(expected[2:], rel=1e-6)
