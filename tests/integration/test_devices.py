"""Phases, losses and norms of a device that is late: on a fake one with events, and on fakes of its tensors."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from tests.slow_device import Passed, SlowDevice
from tests.training import Recording, StepFlag, batch, has, loss_of, mlp, recording
from torchobs import catalog
from torchobs.flight.step_record import RecordKind
from torchobs.probes import amp, clipping, steps
from torchobs.probes.amp import AmpProbe, LossScaling
from torchobs.probes.device_times import LONGEST_S, DeviceTimeProbe, Mark, phase_times
from torchobs.probes.gradients import GradientProbe
from torchobs.probes.loss import LossProbe
from torchobs.probes.timeline import BACKWARD, BACKWARD_BEGINS, DATA, FORWARD, OPTIMIZER, OTHER
from torchobs.runtime.profiler import Profiles
from torchobs.tensors.device_reads import DeviceValues

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


DEVICE = torch.device("cuda:0")


class Timed:
    """A probe with a fake device, on which time passes as the test says; its clock stands still, too."""

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

    def step(self, times: int = 1) -> None:
        """On the device: data 1 ms, forward 2, backward 4, clipping 8, optimizer 16."""
        for _ in range(times):
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
        values = self.run.values()
        names = {key[1]: value for key, value in values.items() if key[0] == catalog.STEP_DEVICE_TIME.name}
        return {phase: value * 1e3 for phase, value in names.items()}


@pytest.fixture
def timed(flight_dir: Path) -> Iterator[Timed]:
    """See the class."""
    for run in recording(flight_dir, disable_probes="device_time"):
        timing = Timed(run)
        sampler = run.session._sampler
        assert sampler is not None
        sampler.stop()
        timing.step(12)  # until what looks at the first backward passes has gone
        yield timing
        timing.probe.remove()


EXPECTED = {"data": 1.0, "forward": 2.0, "backward": 4.0, "optimizer": 16.0, "other": 8.0, "between": 0.0}


def test_one_step_is_timed_and_nothing_stays_behind(timed: Timed) -> None:
    """From the end of the step before to its own; a second later the next one, with the same events."""
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    before = [len(hook) for hook in hooks]
    original = torch.autograd.backward
    assert timed.values() == {}
    timed.step(4)
    assert timed.values() == {}  # asks for what was recorded to be taken
    timed.step()
    assert timed.values() == EXPECTED
    events = timed.device.events
    assert events == 7  # end, fetch, batch, backward, its end, optimizer, end
    assert torch.autograd.backward is original
    assert [len(hook) for hook in hooks] == before
    for _ in range(5):
        timed.step()
        timed.probe.sample()
    assert timed.device.events == events
    timed.now += 1.0
    timed.probe.sample()
    timed.step(3)
    assert len(timed.probe._marks) == events
    assert timed.device.events == events


def test_a_device_that_is_behind_is_asked_again_and_not_for_ever(timed: Timed) -> None:
    """Never waited for; what does not come is dropped, and the next step is timed."""
    timed.probe.sample()
    timed.step(3)
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
    timed.step(3)
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
    timed.step(2)
    timed.probe.sample()
    timed.step()
    assert timed.values() == {}
    timed.now += 1.0
    timed.probe.sample()
    timed.step(3)
    timed.probe.sample()
    timed.step()
    assert timed.values() == EXPECTED


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


TENSORS = 3


class Late:
    """A recording with a slow device and the probes that read devices; the test asks them, not the sampler."""

    def __init__(self, run: Recording) -> None:
        context, sampler = run.session.context, run.session._sampler
        assert context is not None
        assert sampler is not None
        sampler.stop()
        self.run, self.device, scaling = run, SlowDevice(), LossScaling()
        self.context = context = dataclasses.replace(context, device=DeviceValues(self.device, every_s=0.0))
        self.gradients, self.loss, self.amp = GradientProbe(scaling), LossProbe(), AmpProbe(scaling)
        self.probes = (self.gradients, self.loss, self.amp)
        for probe in self.probes:
            probe.install(context)

    def look(self) -> None:
        """What the sampler would do."""
        self.context.device.poll()
        for probe in self.probes:
            probe.sample()

    def backward(self, *, has_loss: bool = True) -> None:
        """What is seen of a backward pass."""
        self.context.recorder.mark(BACKWARD_BEGINS, time.monotonic_ns())
        if has_loss:
            self.loss._take_later(torch.empty((), device="cuda"), within=False)

    def late(self, flag: int) -> list[Any]:
        """The late records with this flag."""
        self.context.recorder.flush()
        self.look()
        return [record for record in self.run.records() if record.kind == RecordKind.LATE and has(record, flag)]

    def norms(self) -> list[tuple[int, float]]:
        """The norms that have arrived, by step."""
        return [(record.step, record.grad_norm) for record in self.late(StepFlag.GRAD_NORM)]


@pytest.fixture
def late(flight_dir: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """See the class; the level may be the fixture's parameter. Its tensors are fakes, beside which nothing is recorded else."""
    for hooks in (amp, clipping, steps):
        monkeypatch.setattr(hooks, "graph_being_made", lambda: lambda: False)
    level = getattr(request, "param", "basic")
    for run in recording(flight_dir, disable_probes="gradients,loss,amp", level=level):
        recorded = Late(run)
        yield recorded
        for probe in recorded.probes:
            probe.remove()


@pytest.fixture
def parameters() -> Iterator[list[torch.nn.Parameter]]:
    """Three that a device has, with gradients. Backward passes over fakes need a CUDA build, and are not done here."""
    with FakeTensorMode(), torch.no_grad():
        tensors = [torch.nn.Parameter(torch.empty(10, 20 + index, device="cuda")) for index in range(TENSORS)]
        for tensor in tensors:
            tensor.grad = torch.empty_like(tensor)
        yield tensors


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "loop": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=False),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_norms_of_steps_land_in_any_order_and_are_written_in_theirs(
    late: Late, parameters: list[torch.nn.Parameter], kind: str
) -> None:
    """Nothing is written of a step before all its numbers are there, nor of one after it; then all of it, exactly."""
    optimizer = OPTIMIZERS[kind](parameters)
    for _ in range(3):
        optimizer.step()
    assert late.norms() == []
    assert len(late.device.sent) == 3
    late.device.land_as([3.0, 4.0, 0.0], copy=1)
    assert late.norms() == []
    late.device.land_as([6.0, 8.0, 0.0])
    assert late.norms() == [(1, 10.0), (2, 5.0)]
    late.device.land_as([math.nan, 1.0, 1.0])
    assert late.norms() == [(1, 10.0), (2, 5.0), (3, pytest.approx(math.nan, nan_ok=True))]


def test_clipping_on_a_device_gives_the_norm_and_says_whether_it_clipped(
    late: Late, parameters: list[torch.nn.Parameter]
) -> None:
    """By its own total, which is a tensor that nobody has looked at."""
    optimizer = OPTIMIZERS["foreach"](parameters)
    for _ in range(2):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    late.look()
    assert late.norms() == []
    for copy in list(late.device.sent):
        late.device.land_as([0.5] * len(copy[0]))
    assert [step for step, _ in late.norms()] == [1, 2]
    assert late.run.errors() == []


def test_the_loss_scale_of_a_fused_optimizer_is_divided_by_on_the_host(
    late: Late, parameters: list[torch.nn.Parameter]
) -> None:
    """It is one more number of the same copy; what it found to be infinite marks the step when it lands."""
    optimizer: Any = OPTIMIZERS["fused"](parameters)
    optimizer.grad_scale, optimizer.found_inf = (torch.empty((), device="cuda") for _ in range(2))
    optimizer.step()
    (copy,) = late.device.sent
    assert len(copy[0]) == TENSORS + 1
    late.device.land_as([0.0, 6.0, 8.0, 2.0])
    assert late.norms() == [(1, 5.0)]


def test_a_loss_that_never_lands_holds_nobody_up(late: Late, parameters: list[torch.nn.Parameter]) -> None:
    """Losses are written in the order of their steps; the norms of the same steps do not wait for them."""
    optimizer = OPTIMIZERS["foreach"](parameters)
    for _ in range(2):
        late.loss._take_later(torch.empty((), device="cuda", dtype=torch.bfloat16), within=False)
        optimizer.step()
    sizes = [len(values) for values, _ in late.device.sent]
    assert sizes == [1, TENSORS, 1, TENSORS]
    late.device.land_as([1.0] * TENSORS, copy=3)
    late.device.land_as([9.0], copy=2)
    late.device.land_as([1.0] * TENSORS, copy=1)
    assert len(late.norms()) == 2
    assert late.late(StepFlag.LOSS) == []
    late.device.land_as([8.0])
    assert [(record.step, record.loss) for record in late.late(StepFlag.LOSS)] == [(1, 8.0), (2, 9.0)]


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """What is asked of torch's kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view:  # the others ask a fake where it is
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("late", ["advanced"], indirect=True)
def test_nothing_of_ours_gets_into_a_captured_graph(late: Late, parameters: list[torch.nn.Parameter]) -> None:
    """A capture begins between two steps, with the weights' copy of level advanced held from the first.

    Launched while the step is captured, the comparison would be a part of the graph, and each replay write to memory that was
    ours for a step.
    """
    optimizer = OPTIMIZERS["foreach"](parameters)
    late.context.hooks.before_step.notify(optimizer, False)  # noqa: FBT003  # a listener
    late.context.recorder.optimizer_ends(optimizer, 1)
    late.context.recorder.flush()
    late.device.land_as([1.0] * TENSORS)
    late.gradients.observe()
    late.context.hooks.before_step.notify(optimizer, False)  # noqa: FBT003  # as above
    assert late.gradients._updates._copied is not None
    loss, found_inf = torch.empty((), device="cuda"), torch.empty((), device="cuda")
    late.device.is_capturing = True
    with Calls() as calls:
        late.loss._take_later(loss, within=False)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        its_own = len(calls.names)
        late.context.hooks.before_step.notify(optimizer, False)  # noqa: FBT003  # as above
        late.amp._overflows.fused(optimizer, found_inf)
        assert len(calls.names) == its_own
    late.device.is_capturing = False
    assert vars(late.gradients._updates)["_copied"] is None  # replays have changed the weights since
    assert late.run.errors() == []


def test_a_profile_begins_and_ends_outside_of_captures(late: Late) -> None:
    """Both wait for the device, which would end a capture; it is begun at the next backward pass that is not captured."""
    profiles = Profiles(late.context)
    profiles.request(1, 1)
    model = mlp()
    for capturing in (True, False):
        late.device.is_capturing = capturing
        assert profiles._running is None
        loss_of(model).backward()  # type: ignore[no-untyped-call]
    assert profiles._running is not None
    profiles.close()
    assert late.run.frames(catalog.EVENT_PROFILE_FAILED.name) == []


def test_a_training_on_fakes_is_not_recorded_and_breaks_nothing(flight_dir: Path) -> None:
    """People run one to learn what memory it will need; norms and losses of the real one that follows are there."""
    for run in recording(flight_dir, level="advanced"):
        for where in ("cpu", "cuda"):
            with FakeTensorMode(), torch.no_grad():
                tensors = [torch.nn.Parameter(torch.empty(10, 20, device=where)) for _ in range(TENSORS)]
                for tensor in tensors:
                    tensor.grad = torch.empty_like(tensor)
                optimizer = torch.optim.AdamW(tensors, lr=0.1, foreach=True)
                for _ in range(3):
                    torch.nn.utils.clip_grad_norm_(tensors, 1.0)
                    torch.nn.utils.clip_grad_value_(tensors, 1.0)
                    optimizer.step()
        assert run.errors() == []
        model = mlp()
        following = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(3):
            loss_of(model, index).backward()  # type: ignore[no-untyped-call]
            following.step()
        real = run.steps()[-3:]
        assert all(has(step, StepFlag.GRAD_NORM) and has(step, StepFlag.LOSS) for step in real)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_losses_and_norms_of_other_devices_are_recorded(late: Late, kind: str) -> None:
    """By the same door, without events, and without float64, which not all have."""
    with FakeTensorMode(), torch.no_grad():
        parameters = [torch.nn.Parameter(torch.empty(10, 20, device=kind)) for _ in range(TENSORS)]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = OPTIMIZERS["loop"](parameters)
        late.loss._take_later(torch.empty((), device=kind, dtype=torch.bfloat16), within=False)
        optimizer.step()
    sizes = [len(values) for values, _ in late.device.sent]
    assert sizes == [1, TENSORS]
    late.device.land_as([8.0])
    late.device.land_as([2.0, 3.0, 6.0])
    assert late.norms() == [(1, 7.0)]
    assert [record.loss for record in late.late(StepFlag.LOSS)] == [8.0]
    assert late.device.events == 0


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_a_device_that_cannot_copy_is_said_to_be_one(late: Late, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no loss, and that is an event, once, with the reason; nothing waits for it."""

    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(late.device, "numbers", refuse)
    with FakeTensorMode():
        loss = torch.empty((), device=kind)
    for _ in range(3):
        late.loss._take_later(loss, within=False)
        late.look()
    assert late.device.sent == []
    (event,) = late.run.frames(catalog.EVENT_DEVICE_UNREAD.name)
    assert event["attrs"] == {"device_type": kind}
