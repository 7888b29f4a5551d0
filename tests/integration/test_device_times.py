"""The phases of a step on a device, which a fake one's events tell: real trainings, real loaders and optimizers on the CPU."""

# mypy: disable-error-code="no-untyped-call"
# Tensor.backward has no annotations

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset

from tests.slow_device import Passed, SlowDevice
from tests.training import Recording, batch, mlp, recording
from torchobs import catalog
from torchobs.probes.device_times import LONGEST_S, DeviceTimeProbe, Mark, phase_times
from torchobs.probes.timeline import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER
from torchobs.tensors.device_reads import DeviceValues

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEVICE = torch.device("cuda:0")


class Timed:
    """A probe whose device is a fake one, on which time passes as the test says; its clock stands still, too."""

    def __init__(self, run: Recording) -> None:
        assert run.session.context is not None
        self.run, self.device, self.now = run, SlowDevice(), 100.0
        self.context = dataclasses.replace(run.session.context, device=DeviceValues(self.device))
        self.probe = DeviceTimeProbe(lambda: True, lambda: self.now)
        vars(self.probe)["_find_device"] = lambda: DEVICE
        self.probe.install(self.context)
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.optimizer.register_step_post_hook(lambda *_: self.spend(16))
        loader = DataLoader(TensorDataset(*batch(size=400)), batch_size=4, collate_fn=self.collated)
        self.batches = iter(loader)

    def step(self, *, passes: int = 1) -> None:
        """On the device: data 1 ms, forward 2, backward 4, clipping 8, optimizer 16."""
        for _ in range(passes):
            inputs, _targets = next(self.batches)
            self.device.now_ms += 2
            loss = self.model(inputs).square().mean()
            loss.register_hook(lambda _: self.spend(4))
            loss.backward()
        self.device.now_ms += 8
        self.optimizer.step()
        self.optimizer.zero_grad()

    def collated(self, samples: list[Any]) -> Any:
        self.spend(1)
        return torch.utils.data.default_collate(samples)

    def spend(self, milliseconds: float) -> None:
        self.device.now_ms += milliseconds

    def values(self) -> dict[str, float]:
        """What was published, by phase in ms."""
        self.probe.sample()
        assert self.run.session.writer is not None
        self.run.session.writer.publish()
        found = self.run.values()
        names = {key[1]: value for key, value in found.items() if key[0] == catalog.STEP_DEVICE_TIME.name}
        return {phase: value * 1e3 for phase, value in names.items()}


@pytest.fixture
def timed(flight_dir: Path) -> Iterator[Timed]:
    """See the class."""
    for run in recording(flight_dir, disable_probes="device_time"):
        found = Timed(run)
        sampler = run.session._sampler
        assert sampler is not None
        sampler.stop()
        for _ in range(12):  # until what looks at the first backward passes has gone
            found.step()
        yield found
        found.probe.remove()


EXPECTED = {"data": 1.0, "forward": 2.0, "backward": 4.0, "optimizer": 16.0, "other": 8.0, "between": 0.0}


def test_one_step_is_timed_and_nothing_stays_behind(timed: Timed) -> None:
    """From the end of the step before to its own; a second later the next one, with the same events."""
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    before = [len(hook) for hook in hooks]
    original = torch.autograd.backward
    assert timed.values() == {}
    for _ in range(4):
        timed.step()
    assert timed.values() == {}  # asks for what was recorded to be taken
    timed.step()
    assert timed.values() == EXPECTED
    made = timed.device.events
    assert made == 7  # end, fetch, batch, backward, its end, optimizer, end
    assert torch.autograd.backward is original
    assert [len(hook) for hook in hooks] == before
    for _ in range(5):
        timed.step()
        timed.probe.sample()
    assert timed.device.events == made
    timed.now += 1.0
    timed.probe.sample()
    for _ in range(3):
        timed.step()
    assert len(timed.probe._marks) == made
    assert timed.device.events == made


def test_backward_passes_of_a_step_are_added_up(timed: Timed) -> None:
    """Accumulation."""
    timed.probe.sample()
    for _ in range(3):
        timed.step(passes=3)
    timed.probe.sample()
    timed.step()
    assert timed.values() == {**EXPECTED, "data": 3.0, "forward": 6.0, "backward": 12.0}


def test_a_device_that_is_behind_is_asked_again_and_not_for_ever(timed: Timed) -> None:
    """Never waited for; what does not come is dropped, and the next step is timed."""
    timed.probe.sample()
    for _ in range(3):
        timed.step()
    timed.device.has_reached = False
    for _ in range(3):
        timed.probe.sample()
        timed.step()
    assert timed.values() == {}
    assert timed.probe._marks
    timed.now += LONGEST_S + 1
    timed.probe.sample()
    timed.step()
    assert not timed.probe._marks
    timed.device.has_reached = True
    timed.probe.sample()
    for _ in range(3):
        timed.step()
        timed.probe.sample()
    timed.step()
    assert timed.values() == EXPECTED


def test_nothing_is_recorded_while_a_graph_is_captured(timed: Timed) -> None:
    """Whenever the capture begins: the step is dropped."""
    timed.device.is_capturing = True
    timed.probe.sample()
    for _ in range(3):
        timed.step()
    timed.device.is_capturing = False
    timed.now += 1.0
    timed.probe.sample()
    timed.step()
    timed.device.is_capturing = True
    timed.step()
    timed.device.is_capturing = False
    timed.probe.sample()
    timed.step()
    assert timed.values() == {}


def test_a_step_on_two_streams_is_not_timed(timed: Timed) -> None:
    """An event of the first may be reached after the last one of the second; a step on another stream alone is."""
    timed.probe.sample()
    timed.step()
    timed.device.current = 1
    for _ in range(2):
        timed.step()
    timed.probe.sample()
    timed.step()
    assert timed.values() == {}
    timed.now += 1.0
    timed.probe.sample()
    for _ in range(3):
        timed.step()
    timed.probe.sample()
    timed.step()
    assert timed.values() == EXPECTED


def test_a_step_with_something_else_in_it_is_not_timed(timed: Timed) -> None:
    """An evaluation, or a phase of the script's own: the host's phases leave them out."""
    timed.probe.sample()
    timed.step()
    timed.model.eval()
    timed.model.train()
    timed.step()
    timed.probe.sample()
    timed.step()
    assert timed.values() == {}
    assert not timed.probe._marks


def test_nothing_is_put_in_place_without_cuda(flight_dir: Path) -> None:
    """On a CPU it is asked whether there is CUDA now, and that is all."""
    for run in recording(flight_dir):
        manager: Any = run.session._probe_manager
        probe = manager._probes[DeviceTimeProbe.name]
        for _ in range(3):
            probe.sample()
        assert not probe._subscriptions
        assert probe._state == ""


def test_what_leads_to_a_backward_pass_is_between_and_idle_time_is_the_phase_s() -> None:
    """Without a loader that is seen, all before the backward pass; after it, until the next optimizer, other."""
    device = SlowDevice()

    def at(phase: int, now_ms: float) -> Mark:
        device.now_ms = now_ms
        return Mark(phase, Passed(device))

    plain = [at(OTHER, 0), at(BACKWARD, 10), at(OTHER, 30), at(OPTIMIZER, 31), at(OTHER, 36)]
    expected = {"data": 0.0, "forward": 0.0, "backward": 0.020, "optimizer": 0.005, "other": 0.001, "between": 0.010}
    assert phase_times(plain) == pytest.approx(expected)
    fetched = [at(OTHER, 0), at(DATA, 2), at(FORWARD, 5), at(BACKWARD, 6), at(OTHER, 7)]
    assert phase_times(fetched) == pytest.approx(
        {"data": 0.003, "forward": 0.001, "backward": 0.001, "optimizer": 0.0, "other": 0.002, "between": 0.0}
    )
