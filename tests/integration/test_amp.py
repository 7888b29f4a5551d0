"""Loss scalers of every kind: what they say of themselves is what is shown, and nothing of theirs is changed."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.amp import GradScaler, autocast_mode, grad_scaler
from torch.optim import optimizer as torch_optimizer

import torchobs
from tests.training import Recording, StepFlag, has, loss_of, mlp, recording
from torchobs import catalog
from torchobs.flight.format.step_record import RecordKind
from torchobs.flight.reader import reader
from torchobs.probes.precision.amp import LossScales, Overflows

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


STREAK = ("torchobs.amp.skip_streak",)
SKIPPED = ("torchobs.amp.steps_skipped",)


def overflow(model: torch.nn.Module) -> None:
    """Make a gradient infinite."""
    next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, *, overflows: bool = False) -> None:
    """One step, without the update."""
    optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()  # type: ignore[no-untyped-call]
    if overflows:
        overflow(model)
    scaler.step(optimizer)


def scale_of(values: Mapping[tuple[str, ...], Any], index: int = 0) -> tuple[float, float]:
    """What is shown of a scaler."""
    return values["torchobs.amp.scale", str(index)], values["torchobs.amp.growth_tracker", str(index)]


def truth(scaler: GradScaler) -> tuple[float, float]:
    """What it says."""
    return scaler.get_scale(), float(scaler._get_growth_tracker())


@pytest.mark.parametrize("fused", [False, True])
def test_scale_tracker_streak_and_skips_are_the_scaler_s_own(run: Recording, fused: bool) -> None:  # noqa: FBT001
    """After every step: through growth, overflows in a row and a recovery."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    overflows = [False, False, False, False, True, True, False, True, False]
    streak = skipped = 0
    for overflows_now in overflows:
        step(model, optimizer, scaler, overflows=overflows_now)
        scaler.update()
        values = run.look()
        streak, skipped = (streak + 1 if overflows_now else 0), skipped + overflows_now
        assert scale_of(values) == truth(scaler)
        assert (values[STREAK], values["torchobs.amp.overflows", "0"]) == (streak, skipped)
    assert truth(scaler)[0] == 256.0
    assert [has(record, StepFlag.SKIPPED) for record in run.steps()] == overflows
    assert run.look()[SKIPPED] == 3


def test_float16_autocast_overflows_are_seen(run: Recording) -> None:
    """A real overflow of float16, at a scale that is too large: skipped until the scale has come down."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = GradScaler("cpu", init_scale=2.0**20)
    for _ in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(model) * 64
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    values = run.look()
    halvings = values[SKIPPED]
    assert 2 <= halvings < 12
    assert values["torchobs.amp.scale", "0"] == 2.0 ** (20 - halvings) == scaler.get_scale()
    assert values["torchobs.amp.autocast", "cpu", "float16"] == 1.0
    assert run.frames("torchobs.amp.scale_collapsed") == []


def test_each_optimizer_of_one_scaler_is_told_apart(run: Recording) -> None:
    """The one whose gradients overflow is skipped, the other one is not; the scale is of both."""
    one, two = mlp(0), mlp(1)
    first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.AdamW(two.parameters(), lr=0.1, fused=True)
    scaler = GradScaler("cpu")
    for index in range(6):
        step(one, first, scaler)
        step(two, second, scaler, overflows=index >= 2)
        scaler.update()
    values = run.look()
    assert (values["torchobs.amp.overflows", "0"], values["torchobs.amp.overflows", "1"]) == (0, 4)
    assert (values[STREAK], values[SKIPPED]) == (4, 4)
    assert [has(record, StepFlag.SKIPPED) for record in run.steps()] == [False, False, True, True, True, True]


def test_two_scalers_have_their_own_scales(run: Recording) -> None:
    """A GAN may have one for each of its optimizers."""
    scalers = [GradScaler("cpu", init_scale=scale) for scale in (64.0, 512.0)]
    models = [mlp(0), mlp(1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for index in range(4):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            step(model, optimizer, scaler, overflows=scaler is scalers[1] and index == 3)
            scaler.update()
    values = run.look()
    assert [scale_of(values, index) for index in (0, 1)] == [(64.0, 4.0), (256.0, 0.0)] == [truth(one) for one in scalers]


def test_scalers_are_capped_and_a_new_one_takes_a_dead_one_s_place(run: Recording) -> None:
    """A scaler per fold of a cross-validation is one series, and many at once are four."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for scale in range(10, 16):
        scaler = GradScaler("cpu", init_scale=float(scale))
        step(model, optimizer, scaler)
        scaler.update()
        assert run.look()["torchobs.amp.scale", "0"] == scale
        del scaler
        gc.collect()
    many = [GradScaler("cpu", init_scale=float(scale)) for scale in range(1, 7)]
    for scaler in many:
        step(model, optimizer, scaler)
        scaler.update()
    shown = {name[1]: value for name, value in run.look().items() if name[0] == "torchobs.amp.scale"}
    assert shown == {"0": 1.0, "1": 2.0, "2": 3.0, "3": 4.0}
    assert tuple(shown) == catalog.SCALER.values


class Halving(GradScaler):
    """Overrides everything, as one's own scaler may, and calls its parent."""

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        assert self._scale is not None
        self._scale.mul_(0.5)


def test_a_subclass_that_overrides_everything_counts_once(run: Recording) -> None:
    """Its method and its parent's are one call."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = Halving("cpu", init_scale=64.0)
    losses = []
    for index in range(4):
        step(model, optimizer, scaler, overflows=index == 1)
        losses.append(loss_of(model))
        scaler.update()
        assert scale_of(run.look()) == truth(scaler)
    assert run.look()[SKIPPED] == 1
    assert [has(record, StepFlag.SKIPPED) for record in run.steps()] == [False, True, False, False]


def test_a_subclass_defined_later_is_found(run: Recording) -> None:
    """One that calls no parent is seen from the next look on, ten seconds later at most."""

    class Own(GradScaler):
        def update(self, new_scale: Any = None) -> None:
            del new_scale
            self._scale.fill_(8.0)  # type: ignore[union-attr]
            self._per_optimizer_states.clear()

    run.look()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = Own("cpu")
    step(model, optimizer, scaler)
    scaler.update()
    assert scale_of(run.look()) == (8.0, 0.0)


def test_a_disabled_scaler_shows_nothing(run: Recording) -> None:
    """It has no scale; whether it is there makes no difference."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", enabled=False)
    for _ in range(3):
        step(model, optimizer, scaler)
        scaler.update()
    values = run.look()
    assert [name for name in values if name[0].startswith("torchobs.amp.")] == [SKIPPED]
    assert (values[SKIPPED], len(run.steps())) == (0, 3)


def test_a_scaler_made_before_init_is_seen(flight_dir: Path) -> None:
    """The patches sit on the class."""
    model, scaler = mlp(), GradScaler("cpu", init_scale=32.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for run in recording(flight_dir):
        step(model, optimizer, scaler)
        scaler.update()
        assert scale_of(run.look()) == (32.0, 1.0)


class SlowDevice:
    """Delivers values when it is told to, as a device does."""

    def __init__(self) -> None:
        self.unread: dict[str, str] = {}
        self.under_way: list[Any] = []

    def take(self, value: torch.Tensor, deliver: Any) -> bool:
        assert value.device.type == "meta"
        self.under_way.append(deliver)
        return True

    def poll(self) -> None:
        """Deliver nothing by itself."""


def test_what_fused_optimizers_found_on_a_device_marks_its_step_once(run: Recording) -> None:
    """Two find an overflow in one step, another's was known at once: each step is marked by one record, each find counted."""
    context = run.session.context
    assert context is not None
    device: Any = SlowDevice()
    context = dataclasses.replace(context, device=device)
    found_inf = torch.zeros((), device="meta")
    models = [mlp(seed) for seed in range(3)]
    plain, *fused = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    overflows = Overflows(context)
    for index in range(3):
        for optimizer in (plain, *fused):
            context.recorder.optimizer_begins(optimizer)
            if optimizer is not plain:
                overflows.fused(optimizer, found_inf)
            elif index == 1:
                overflows.skipped(optimizer)
            else:
                overflows.stepped(optimizer)
            context.recorder.optimizer_ends(optimizer, time.monotonic_ns())
    overflows.sample()
    assert [has(record, StepFlag.SKIPPED) for record in run.steps()] == [False, True, False]
    for deliver, value in zip(device.under_way, (1.0, 1.0, 0.0, 1.0, 0.0, 0.0), strict=True):
        deliver(value)
    overflows.sample()
    late = [record.step for record in run.records() if record.kind == RecordKind.LATE]
    assert late == [1]
    context.writer.fold()
    values = run.look()
    assert [values["torchobs.amp.overflows", str(index)] for index in range(3)] == [1, 1, 2]
    assert (values[SKIPPED], values[STREAK]) == (2, 0)


def test_a_scale_on_a_device_is_copied_once_a_look(run: Recording) -> None:
    """After an update, and not again before the last was shown."""
    context = run.session.context
    assert context is not None
    device: Any = SlowDevice()
    context = dataclasses.replace(context, device=device)
    scaler = GradScaler("cpu")
    scaler._scale, scaler._growth_tracker = torch.ones((), device="meta"), torch.zeros((), device="meta")
    scales = LossScales(context)
    for looks in range(1, 4):
        for _ in range(5):
            scales.updated(scaler)
        assert len(device.under_way) == 2 * looks
        device.under_way[-2](4.0 * looks)
        device.under_way[-1](float(looks))
        scales.sample()
        assert scale_of(run.look()) == (4.0 * looks, float(looks))


def test_the_last_moment_is_in_the_file(flight_dir: Path) -> None:
    """A run that ends before the sampler has ever looked leaves its scale, its overflows and its streak all the same."""
    session = torchobs.init(flight_dir=flight_dir)
    assert session.writer is not None
    path = session.writer.path
    try:
        found = Recording(session)
        assert session._sampler is not None
        session._sampler.stop()
        model, scaler = mlp(), GradScaler("cpu", init_scale=32.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for index in range(3):
            step(model, optimizer, scaler, overflows=index == 2)
            scaler.update()
        assert found.errors() == []
    finally:
        torchobs.shutdown()
    with contextlib.closing(reader.open_path(path)) as file:
        values = {point.series.name: point.value for point in file.read().points}
    shown = [values[name] for name in ("torchobs.amp.scale", "torchobs.amp.overflows", "torchobs.amp.skip_streak")]
    assert shown == [16.0, 1, 1.0]


def test_an_optimizer_that_is_none_of_torch_s_is_not_called_skipped(run: Recording) -> None:
    """It fires no hooks, so that nobody knows whether it stepped."""

    class Plain:
        def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
            self.param_groups = [{"params": parameters}]

        def step(self) -> None:
            """Do nothing."""

    model, scaler = mlp(), GradScaler("cpu")
    optimizer: Any = Plain(list(model.parameters()))
    for _ in range(3):
        scaler.scale(loss_of(model)).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    assert run.look()[SKIPPED] == 0


def test_an_error_of_the_scaler_s_reaches_the_user_and_changes_nothing(run: Recording) -> None:
    """Stepping twice without an update raises as it always did; the next step counts."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu")
    step(model, optimizer, scaler)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    scaler.update()
    step(model, optimizer, scaler, overflows=True)
    scaler.update()
    assert [has(record, StepFlag.SKIPPED) for record in run.steps()] == [False, True]


def test_a_collapsed_scale_is_told_once(run: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """A run whose every step is skipped dies quietly: the scale falls below 1, and that is an event and one line."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=4.0)
    with caplog.at_level(logging.WARNING, "torchobs"):
        for _ in range(6):
            step(model, optimizer, scaler, overflows=True)
            scaler.update()
            run.look()
    assert run.values()[STREAK] == 6
    assert run.attributes("torchobs.amp.scale_collapsed") == [{"scaler": "0", "scale": 0.5}]
    assert [line.getMessage() for line in caplog.records if "loss scale" in line.getMessage()] == [
        "torchobs: the loss scale has fallen to 0.5 by step 3: the gradients are not finite at any scale, and steps are skipped"
    ]
    scaler.update(new_scale=256.0)
    run.look()
    scaler.update(new_scale=0.25)
    run.look()
    assert len(run.frames("torchobs.amp.scale_collapsed")) == 2


def test_a_sharded_scaler_on_one_process(flight_dir: Path, tmp_path: Path) -> None:
    """FSDP's scaler overrides ``scale``, ``unscale_`` and ``update``, and adds found_inf up over the ranks."""
    from torch import distributed
    from torch.distributed.fsdp import sharded_grad_scaler

    before = dict(vars(sharded_grad_scaler.ShardedGradScaler))
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        for run in recording(flight_dir):
            assert vars(sharded_grad_scaler.ShardedGradScaler)["update"] is not before["update"]
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = sharded_grad_scaler.ShardedGradScaler("cpu", init_scale=128.0, growth_interval=2)
            losses = []
            for index in range(5):
                losses.append(loss_of(model).item())
                step(model, optimizer, scaler, overflows=index == 3)
                scaler.update()
                assert scale_of(run.look()) == truth(scaler)
            assert [has(record, StepFlag.SKIPPED) for record in run.steps()] == [False, False, False, True, False]
            assert [record.loss for record in run.steps()] == losses
    finally:
        distributed.destroy_process_group()
    assert dict(vars(sharded_grad_scaler.ShardedGradScaler)) == before


def test_removal_is_exact(flight_dir: Path) -> None:
    """Class attributes and hooks are what they were, a subclass's included, however often autocast was looked at."""
    owners = (grad_scaler.GradScaler, Halving, autocast_mode.autocast)
    before = [dict(vars(owner)) for owner in owners]
    hooks = dict(torch_optimizer._global_optimizer_pre_hooks)
    for run in recording(flight_dir):
        assert [dict(vars(owner)) != was for owner, was in zip(owners, before, strict=True)] == [True] * 3
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler("cpu")
        with torch.autocast("cpu"):
            step(model, optimizer, scaler)
        scaler.update()
        run.look()
    assert [dict(vars(owner)) for owner in owners] == before
    assert dict(torch_optimizer._global_optimizer_pre_hooks) == hooks


def test_without_a_scaler_nobody_pays(run: Recording) -> None:
    """The hook on optimizers comes with the first scaler's first step."""
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks
    scaler = GradScaler("cpu")
    for _ in range(2):
        step(model, optimizer, scaler)
        scaler.update()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks + 1
    assert len(run.steps()) == 3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ["before", "explicit", "right"])
def test_clipping_before_the_unscaling_is_told(
    run: Recording, order: str, caplog: pytest.LogCaptureFixture, *, fused: bool
) -> None:
    """A classic mistake: the limit is that of gradients 1,024 times as large. The norm that is shown has no scale in it."""
    model = mlp()
    optimizer, scaler = torch.optim.Adam(model.parameters(), fused=fused), GradScaler("cpu", init_scale=1024.0)
    norms = []
    for index in range(70):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, index)).backward()  # type: ignore[no-untyped-call]
        if order == "right":
            scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        norms.append(norm if order == "right" else norm / 1024.0)
        if order == "explicit":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    run.look()
    assert [record.grad_norm for record in run.steps()] == pytest.approx(norms, rel=1e-5)
    told = run.attributes(catalog.EVENT_AMP_CLIPPED_SCALED.name)
    assert told == ([] if order == "right" else [{"limit": 0.5, "scale": 1024.0}])
    assert [line for line in caplog.messages if "before scaler.unscale_" in line] == [] or order != "right"


def test_what_a_skipped_step_clipped_is_no_mistake_of_the_next(run: Recording) -> None:
    """It was clipped after the unscaling, and no optimizer came to take it; nor is one optimizer's another's."""
    models = mlp(), mlp(1)
    optimizers, scaler = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models], GradScaler("cpu", init_scale=64.0)
    for index in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, index)).backward()  # type: ignore[no-untyped-call]
            if index % 2:
                overflow(model)
        for model, optimizer in zip(models, optimizers, strict=True):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    run.look()
    assert run.frames(catalog.EVENT_AMP_CLIPPED_SCALED.name) == []


class Generous(GradScaler):
    """Its methods take more than their parents' do."""

    def scale(self, outputs: Any, weight: float = 1.0) -> Any:
        return super().scale(weight * outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer, again: bool = False) -> None:  # noqa: FBT001, FBT002
        assert again
        super().unscale_(optimizer)

    def get_scale(self, default: float = 1.0) -> float:
        return super().get_scale() or default


def test_a_scaler_s_methods_take_what_they_take_without(run: Recording) -> None:
    """By place and by name."""
    model, scaler = mlp(), Generous("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(loss_of(model), 2.0).backward()
    scaler.scale(loss_of(model), weight=2.0).backward()
    scaler.unscale_(optimizer, again=True)
    assert scaler.get_scale(2.0) == scaler.get_scale(default=2.0) == 8.0
    scaler.step(optimizer)
    scaler.update()
    assert run.errors() == []
