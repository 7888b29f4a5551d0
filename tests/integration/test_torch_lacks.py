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
from tests import flights
from tests.training import Recording, batch, mlp
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
        Recording(session).whole_round()  # the sampler has seen it; the round under way may have looked before
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
    monkeypatch.delattr(owner, attribute)
    before = surface()
    with torchobs.init(flight_dir=flight_dir, grad_interval=1) as session:
        model = train(session, scheduled=scheduled)
    assert surface() == before
    assert all(map(torch.equal, model.parameters(), expected))
    off, reasons, steps = found(flight_dir)
    assert (off, set(reasons)) == (LACKING[name], LACKING[name])
    assert set(reasons.values()) <= {"AttributeError", "ImportError"}
    assert steps == (0 if "step" in off else 3)


def surface() -> dict[str, Any]:
    """What the probes replace in torch."""
    owners = (
        torch, torch.autograd, torch.autocast, torch.amp.GradScaler, torch.nn.Module, torch.nn.utils.clip_grad, DataLoader,
        DistributedDataParallel, torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ExponentialLR,
        torch.utils.data.dataloader._SingleProcessDataLoaderIter.__base__, torch.optim.Optimizer,
    )  # fmt: skip
    names = ("step", "__iter__", "__next__", "__init__", "__enter__", "train", "backward", "save", "load", "scale", "update")
    replaced: dict[str, Any] = {f"{owner}.{name}": vars(owner).get(name) for owner in owners for name in names}
    optimizer = sys.modules["torch.optim.optimizer"]
    return replaced | {
        name: dict(hooks)
        for name, hooks in vars(optimizer).items()
        if name.endswith("_hooks") and isinstance(hooks, dict)  # and not a module, as Dynamo imports them into what it compiles
    }
