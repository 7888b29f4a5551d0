"""Another version of torch, which lacks what a probe relies on: that probe is off with a reason, and training goes on."""

from __future__ import annotations

import functools
import io
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchobs
from tests import flights, support
from tests.training import Recording, batch, mlp, surface
from torchobs.flight import reader

if TYPE_CHECKING:
    from pathlib import Path

LACKING: dict[str, set[str]] = {
    "torch._C._ImperativeEngine": set(),
    "torch._C._distributed_c10d._dump_fr_trace": set(),
    "torch._C._distributed_c10d.ProcessGroup._get_sequence_number_for_group": set(),
    "torch._dynamo.callback.callback_handler": {"compile"},
    "torch._C._current_graph_task_id": set(),
    "torch._dynamo.trace_rules.add": {"dynamo"},
    "torch._dynamo.utils.CompilationMetrics": {"compile"},
    "torch._dynamo.utils.counters": {"compile"},
    "torch._dynamo.utils.get_compilation_metrics": {"compile"},
    "torch._dynamo.utils.graph_break_reasons": {"compile"},
    "torch._foreach_norm": {"gradients"},
    "torch.distributed._composable_state._module_state_mapping": {"distributed"},
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": {"distributed"},
    "torch.nn.utils.clip_grad._get_total_norm": set(),
    "torch.optim.lr_scheduler._enable_get_lr_call": {"schedulers"},
    "torch.optim.optimizer.register_optimizer_step_post_hook": {"step"},
    "torch.optim.optimizer.register_optimizer_step_pre_hook": {"step", "amp"},
    "torch.utils.data.dataloader._BaseDataLoaderIter": {"data"},
    "torch.utils.weakref": set(),
}
"""What to take away, and which probes are off then: none, where there is another way."""


def train(session: torchobs.Session | None = None, *, scheduled: bool) -> torch.nn.Module:
    """What a script does that knows nothing of torchobs; the model that it has trained."""
    model = DistributedDataParallel(mlp())
    if session is not None:
        Recording(session).look()  # in which DDP is found
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduled else None
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for inputs, targets in DataLoader(TensorDataset(*batch(size=12)), batch_size=4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        if schedule is not None:
            schedule.step()
        model.eval()
        torch.save(model.state_dict(), io.BytesIO())
        model.train()  # type: ignore[no-untyped-call]
    return model


def found(flight_dir: Path) -> tuple[set[str], dict[str, str], object]:
    """The probes that are shown as off, what the events say of them, and the steps."""
    (path,) = flight_dir.glob("*.flight")
    file = reader.open_path(str(path))
    points = file.read(final=True).points
    events = [fields["attrs"] for fields in flights.frames(file) if fields["name"] == "torchobs.probe.disabled"]
    file.close()
    off = {
        str(dict(point.series.attributes)["probe"])
        for point in points
        if point.series.name == "torchobs.probe.disabled" and point.value
    }
    steps = next(point.value for point in points if point.series.name == "torchobs.steps")
    return off, {event["probe"]: event["exception.type"] for event in events}, steps


@functools.cache
def trained_plainly(*, scheduled: bool) -> list[torch.Tensor]:
    """The weights without torchobs."""
    return list(train(scheduled=scheduled).parameters())


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", LACKING)
def test_a_probe_whose_torch_is_another_is_off_with_a_reason(
    name: str, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are the same, the other probes are at work, and torch is left as it was."""
    for module in ("torch._dynamo", "torch.distributed.fsdp"):
        import_module(module)
    scheduled = LACKING[name] != {"schedulers"}  # what torch's own schedulers cannot do without either
    expected = trained_plainly(scheduled=scheduled)
    path, _, attribute = name.rpartition(".")
    within, _, last = path.rpartition(".")
    owner: Any = sys.modules.get(path) or getattr(import_module(within), last)
    before = surface()
    with monkeypatch.context() as patch:
        patch.delattr(owner, attribute)
        with torchobs.init(flight_dir=flight_dir, grad_interval=1) as session:
            model = train(session, scheduled=scheduled)
    support.wait_until(lambda: surface() == before)  # its thread is waited for, but not for ever
    assert all(map(torch.equal, model.parameters(), expected))
    off, reasons, steps = found(flight_dir)
    assert (off, set(reasons)) == (LACKING[name], LACKING[name])
    assert set(reasons.values()) <= {"AttributeError", "ImportError"}
    assert steps == (0 if "step" in off else 3)
