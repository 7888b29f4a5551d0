"""Mixed precision: skipped steps, the loss scale and its mistakes; the type that autocast uses, and compiled regions."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.training import Recording, StepFlag, has, loss_of, mlp, recording
from torchobs import catalog
from torchobs.catalog.findings import finding
from torchobs.probes import amp

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


STREAK = ("torchobs.amp.skip_streak",)
SKIPPED = ("torchobs.amp.steps_skipped",)


def sgd() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, *, overflows: bool = False) -> None:
    """One step, without the update."""
    optimizer.zero_grad()
    scaler.scale(loss_of(model)).backward()  # type: ignore[no-untyped-call]
    if overflows:
        next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
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


def test_each_optimizer_of_one_scaler_is_told_apart(run: Recording) -> None:
    """The one with the overflow is skipped, the other one is not; they share the scale."""
    model, other = mlp(0), mlp(1)
    first, second = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(other.parameters(), lr=0.1, fused=True)
    scaler = GradScaler("cpu")
    for index in range(6):
        step(model, first, scaler)
        step(other, second, scaler, overflows=index >= 2)
        scaler.update()
    values = run.look()
    assert (values["torchobs.amp.overflows", "0"], values["torchobs.amp.overflows", "1"]) == (0, 4)
    assert (values[STREAK], values[SKIPPED]) == (4, 4)
    assert [has(record, StepFlag.SKIPPED) for record in run.steps()] == [False, False, True, True, True, True]


def test_a_collapsed_scale_is_told_once(run: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """A run that skips every step dies quietly: the scale falls below 1, and that is an event and one line."""
    model, optimizer = sgd()
    scaler = GradScaler("cpu", init_scale=4.0)
    with caplog.at_level(logging.WARNING, "torchobs"):
        for _ in range(6):
            step(model, optimizer, scaler, overflows=True)
            scaler.update()
            run.look()
    assert run.values()[STREAK] == 6
    assert run.attributes("torchobs.amp.scale_collapsed") == [{"scaler": "0", "scale": 0.5}]
    assert [line.getMessage() for line in caplog.records if "loss scale" in line.getMessage()] == [
        "torchobs: The loss scale has fallen to 0.5: it is lowered, and the step skipped, whenever gradients are not finite."
    ]
    scaler.update(new_scale=256.0)
    run.look()
    scaler.update(new_scale=0.25)
    run.look()
    assert len(run.frames("torchobs.amp.scale_collapsed")) == 2


@pytest.mark.usefixtures("group")
def test_a_sharded_scaler_on_one_process(flight_dir: Path) -> None:
    """FSDP's scaler overrides ``scale``, ``unscale_`` and ``update``, and adds found_inf up over the ranks."""
    before = dict(vars(ShardedGradScaler))
    for run in recording(flight_dir):
        assert vars(ShardedGradScaler)["update"] is not before["update"]
        model, optimizer = sgd()
        scaler = ShardedGradScaler("cpu", init_scale=128.0, growth_interval=2)
        losses = []
        for index in range(5):
            losses.append(loss_of(model).item())
            step(model, optimizer, scaler, overflows=index == 3)
            scaler.update()
            assert scale_of(run.look()) == truth(scaler)
        assert [has(record, StepFlag.SKIPPED) for record in run.steps()] == [False, False, False, True, False]
        assert [record.loss for record in run.steps()] == losses
    assert dict(vars(ShardedGradScaler)) == before


@pytest.mark.parametrize("order", ["before", "before, fused", "explicit", "right"])
def test_clipping_before_the_unscaling_is_told(run: Recording, order: str, caplog: pytest.LogCaptureFixture) -> None:
    """A classic mistake: the limit is that of gradients 1,024 times as large. The norm that is shown has no scale in it."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), fused="fused" in order)
    scaler = GradScaler("cpu", init_scale=1024.0)
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
    events = run.attributes(catalog.EVENT_AMP_CLIPPED_SCALED.name)
    assert events == ([] if order == "right" else [{"limit": 0.5, "scale": 1024.0}])
    assert [line for line in caplog.messages if "before scaler.unscale_" in line] == [] or order != "right"


@pytest.mark.parametrize(
    ("dtype", "scaled", "evaluates", "warnings"),
    [(torch.float16, False, False, 1), (torch.bfloat16, False, False, 0), (torch.float16, True, False, 0),
     (torch.float16, False, True, 0)],
    ids=["float16", "bfloat16", "with a scaler that is gone by then", "an evaluation"],
)  # fmt: skip
def test_float16_training_without_a_scaler_is_told_once(
    run: Recording, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, warnings: int, *, scaled: bool, evaluates: bool
) -> None:
    """Its small gradients become zero, which no metric would show. Nobody is warned where there is nothing to scale."""

    def main() -> None:
        model, optimizer = sgd()
        scaler = GradScaler("cpu", init_scale=4.0, enabled=scaled)
        for _ in range(amp.UNSCALED_STEPS + 1):
            optimizer.zero_grad()
            with torch.set_grad_enabled(not evaluates), torch.autocast("cpu", dtype=dtype):
                loss = loss_of(model)
            scaler.scale(loss_of(model) if evaluates else loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()

    main()
    gc.collect()
    with caplog.at_level(logging.WARNING, "torchobs"):
        values = [run.look() for _ in range(3)][-1]
    used = {name[1:] for name, value in values.items() if name[0] == "torchobs.amp.autocast" and value == 1.0}
    assert used == {("cpu", str(dtype).removeprefix("torch."))}
    assert scaled or not [name for name in values if name[0] == "torchobs.amp.scale"]
    assert len(run.frames("torchobs.amp.unscaled")) == warnings
    text = f"torchobs: {finding('amp_unscaled').short}"
    assert [line for line in caplog.messages if "float16" in line] == [text] * warnings
