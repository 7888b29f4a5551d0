"""Another version of torch, which lacks what a probe relies on: that probe is off with a reason, and training is not affected.

A probe that comes to use another private name of torch adds it here; a test sees to that.
"""

from __future__ import annotations

import ast
import io
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import torchobs
from tests import flights
from tests.training import Recording, batch, mlp
from torchobs.flight import reader

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

LATER = frozenset({"_recompile_re"})
"""Used at the very end only, to undo what ``trace_rules.add`` did"""

CUDA = frozenset(
    {
        *("_cuda_attach_out_of_memory_observer", "_cuda_isHistoryEnabled", "_lazy_call", "_queued_calls"),
        "_cuda_hasPrimaryContext",
    }
)
"""On a CPU there is nothing to ask them for"""

FOR_A_PROFILE = frozenset({"_profiler_enabled", "_is_profiler_enabled"})
"""Asked for when somebody wants a profile, which is refused without them"""

NEEDED_BY_TORCH = frozenset(
    {
        *("_enabled", "_scale", "_growth_tracker"),  # GradScaler
        *("_index_sampler", "_next_data", "_workers", "_num_workers", "_data_queue", "_task_info", "_rcvd_idx"),  # a loader
        "_shutdown",  # the same
        *("_local_tensor", "_values", "_indices", "_fsdp_flattened"),  # a DTensor, a sparse tensor, a flat parameter of FSDP
        *("_active_ddp_module", "_version"),  # on DDP while it runs, of every tensor
        *("_buffers", "_parameters"),  # of every module
        "_execution_engine",  # of every backward
        "_metadata",  # of a module's state
        *("_schema", "_base", "_sequence_nr"),  # of every operator, view and node of a graph
        "_autograd",  # which says whether a profiler runs
        *("_world", "_in_order", "_get_root_mesh", "_compiled_call_impl", "_forward_cls", "_input_metadata", "_get_fsdp_state"),
        *("_unsharded_param", "_hf_hook"),  # asked for by getattr with a default, or hasattr
        *("_opt_called", "_schedulers", "_fsdp_param_groups", "_popen"),  # schedulers, fully_shard, a process
        *("_global_forward_pre_hooks", "_get_tracing_state"),  # of every call of a module
    }
)
"""Set on its own objects by the torch that uses them: a hook that misses one is a hook that raises (tests/faults)"""


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


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", LACKING)
def test_a_probe_whose_torch_is_another_is_off_with_a_reason(
    name: str, flight_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are the same, the other probes are at work, and torch is left as it was."""
    for module in ("torch._dynamo", "torch.distributed.fsdp"):
        import_module(module)
    scheduled = LACKING[name] != {"schedulers"}  # what torch's own schedulers cannot do without either
    expected = train(scheduled=scheduled)
    path, _, attribute = name.rpartition(".")
    within, _, last = path.rpartition(".")
    owner: Any = sys.modules.get(path) or getattr(import_module(within), last)
    monkeypatch.delattr(owner, attribute)
    before = surface()
    with torchobs.init(flight_dir=flight_dir, grad_interval=1) as session:
        model = train(session, scheduled=scheduled)
    assert surface() == before
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
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


def is_name(node: ast.expr, *names: str) -> bool:
    """Return True if an expression is one of these names."""
    return isinstance(node, ast.Name) and node.id in names


def private_names() -> set[str]:
    """Those that the probes use of objects that are not theirs; their own are those that a class of the file sets."""
    names: set[object] = set()
    package = Path(torchobs.__file__).parent
    rooms = [path for room in ("probes", "taps", "tensors") for path in (package / room).rglob("*.py")]
    for path in (*rooms, package / "runtime" / "profiler.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        own = {node.attr for node in attributes if isinstance(node.ctx, ast.Store) and is_name(node.value, "self")}
        names |= {node.attr for node in attributes if node.attr not in own and not is_name(node.value, "self", "sys")}
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr"}:
                names |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return {name for name in names if isinstance(name, str) and name[:1] == "_" != name[1:2]}


def test_no_private_name_of_torch_is_forgotten() -> None:
    """Whatever the probes use is taken away above, or stands here with the reason why it cannot be."""
    taken = {part for name in LACKING for part in name.split(".") if part.startswith("_")}
    not_torch = {"_C", "_DummyThread", "_fields", "_make", "_replace"}
    assert private_names() - not_torch <= taken | LATER | CUDA | FOR_A_PROFILE | NEEDED_BY_TORCH
    assert private_names() >= LATER | CUDA | FOR_A_PROFILE | NEEDED_BY_TORCH
