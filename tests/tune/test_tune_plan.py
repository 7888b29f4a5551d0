"""torchobs.tune.optimize: what a plan does, undoes, refuses, and says about what it does not do."""

# mypy: disable-error-code="no-untyped-call, operator, union-attr, unreachable"

from __future__ import annotations

import copy
import functools
import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.debug.models import Slope
from tests.training import Recording
from tests.tune.models import Block, blocks, convolutions
from torchobs import tune
from torchobs.tune.difference import compare

MODES = ("none", "amp", "compile", "memory_efficient", "full", "inference")


def fingerprint(model: nn.Module) -> list[Any]:
    """Everything about a model and torch that a plan could change: classes, attributes, hooks, bits, strides, flags."""
    modules = [(name, type(module), sorted(vars(module)), module.training) for name, module in model.named_modules()]
    hooks = [len(vars(module)[name]) for module in model.modules() for name in sorted(vars(module)) if name.endswith("_hooks")]
    tensors = [
        (name, tensor.stride(), tensor.dtype, tensor.detach().contiguous().view(torch.uint8).tolist())
        for name, tensor in model.state_dict().items()
        if tensor.dim()
    ]
    backends = torch.backends
    flags: list[Any] = [backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32, backends.cudnn.benchmark]
    flags += [backends.cudnn.deterministic, torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")]
    flags += [torch.get_default_dtype(), backends.mkldnn.enabled, torch.is_grad_enabled()]
    return [modules, hooks, tensors, flags, torch.get_rng_state().tolist()]


@pytest.mark.parametrize("level", ["basic", "extreme"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [blocks, convolutions])
def test_undo_leaves_nothing_behind(make: Any, mode: str, level: str) -> None:
    """Promise: applied and undone, twice, model and torch are bit for bit what they were."""
    model = make()
    before = fingerprint(model)
    plan = tune.optimize(model, mode=mode, level=level, amp=torch.bfloat16)
    for _ in range(2):
        assert plan.apply().apply().applied
        assert not plan.undo().undo().applied
        assert fingerprint(model) == before
    with plan:
        changes = set(plan.used) & {"autocast", "checkpointing", "channels_last", "compile"}
        assert (fingerprint(model) != before) == bool(changes)
    assert fingerprint(model) == before


def test_each_technique_is_used_or_skipped_with_its_reason() -> None:
    """Promise: printing a plan says of each technique what it does or why not."""
    plan = tune.optimize(convolutions(), mode="full", level="extreme", amp=torch.bfloat16)
    assert plan.used == ("autocast", "channels_last", "fused_optimizer", "loader", "compile")
    text = str(plan)
    assert "- tf32            only NVIDIA GPUs have TF32" in text
    assert "+ autocast        bfloat16: asked for" in text
    assert all(decision.reason for decision in plan.decisions)
    nothing = tune.optimize(blocks(), mode="full", level="off")
    assert nothing.used == ()
    assert {decision.reason for decision in nothing.decisions} == {"not part of level 'off'", "not part of mode 'full'"}
    assert nothing.to_dict()["decisions"][1] == {"technique": "autocast", "used": False, "reason": "not part of level 'off'"}


def test_autocast_computes_in_its_type_and_keeps_weights_in_float32() -> None:
    """Promise: under mode amp the forward pass is autocast's own, the weights stay float32, and so do their gradients."""
    model, x = blocks().eval(), torch.randn(8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
    with tune.optimize(model, mode="amp", amp=torch.bfloat16) as plan:
        got = model(x)
        got.float().sum().backward()
        assert plan.dtype == "bfloat16"
        assert not plan.grad_scaler().is_enabled()
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, expected)
    assert {weight.grad.dtype for weight in model.parameters() if weight.grad is not None} == {torch.float32}
    assert model(x).dtype is torch.float32
    assert tune.optimize(model, mode="amp", amp=torch.float16).grad_scaler().is_enabled()


def test_checkpointing_keeps_less_and_changes_no_gradient() -> None:
    """Promise: the same gradients to the bit, dropout included, from fewer bytes kept for the backward pass."""

    def gradients(model: nn.Module) -> tuple[list[Tensor], int]:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        torch.manual_seed(1)
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.ones(64, 16)).square().sum()
        loss.backward()
        return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None], sum(kept.values())

    model = blocks()
    plain, kept = gradients(model)
    with tune.optimize(model, mode="memory_efficient", amp="off", checkpointing=Block) as plan:
        assert plan.used == ("checkpointing",)
        saved, kept_less = gradients(model)
    assert all(map(torch.equal, plain, saved))
    assert kept_less < kept / 2


def test_check_measures_and_refuses() -> None:
    """Promise: a difference above the tolerance raises, with the numbers, and undoes the plan."""
    model, x = blocks(), torch.randn(32, 16)
    before = fingerprint(model)
    plan = tune.optimize(model, mode="amp", example=x, amp=torch.bfloat16).apply()
    difference = plan.check()
    assert 1e-6 < difference.relative < difference.tolerance == 8 * torch.finfo(torch.bfloat16).eps
    assert plan.applied
    with pytest.raises(tune.NumericalDifferenceError, match="The plan is undone") as refused:
        plan.check(x, tolerance=1e-6)
    assert refused.value.difference.relative == difference.relative
    assert not plan.applied
    assert fingerprint(model) == before
    exact = tune.optimize(model, mode="none").check(x)
    assert (exact.relative, exact.largest, exact.finite) == (0.0, 0.0, True)


class _Samples(nn.Module):
    """Draws in evaluation mode, counts its calls, masks, and returns what has no ``__dict__``."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> _Slotted:
        self.steps += 1
        y = self.layer(x) + torch.randn(4)
        return _Slotted(y.masked_fill(torch.arange(4) > 2, -torch.inf))


@dataclass(slots=True)
class _Slotted:
    logits: Tensor


def test_check_leaves_no_trace_and_compares_what_is_alike() -> None:
    """Promise: random numbers, counters and infinities of a mask are no difference, and are as before; a lost mask is one."""
    model = _Samples()
    before = fingerprint(model)
    difference = tune.optimize(model, mode="none").check(torch.ones(2, 4))
    assert (difference.relative, difference.largest, difference.finite) == (0.0, 0.0, True)
    assert tune.optimize(model, amp=torch.bfloat16).check(torch.ones(2, 4)).relative > 0
    assert fingerprint(model) == before
    masked, plain = [torch.tensor([1.0, -torch.inf]).double()], [torch.tensor([1.0, 2.0]).double()]
    assert not compare(plain, masked, 1.0).ok
    assert not compare([-masked[0]], masked, 1.0).ok
    assert not compare(masked, plain, 1.0).finite


def test_plans_are_undone_in_their_order() -> None:
    """Promise: a plan below another one on the same modules refuses to be undone, changes nothing, and can be afterwards."""
    model = blocks()
    before = fingerprint(model)
    below, above = (tune.optimize(model, mode="amp", amp=torch.bfloat16) for _ in range(2))
    below.apply()
    above.apply()
    with pytest.raises(RuntimeError, match="by another plan or by FSDP: undo that first"):
        below.undo()
    assert (below.applied, above.applied) == (True, True)
    above.undo()
    below.undo()
    assert fingerprint(model) == before


def test_compiled_model_computes_the_same_and_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the compiled function runs, survives an undo, and its outputs are within the tolerance."""
    # dynamo and autograd as ever, without a C++ compiler's minute
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    model, x = blocks(depth=1), torch.randn(8, 16)
    plan = tune.optimize(model, mode="full", checkpointing=Block, example=x, amp=torch.bfloat16)
    torch._dynamo.utils.counters.clear()
    assert plan.check().ok
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert plan.check().ok
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    assert plan.ok


class _Uncompilable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y[:1], (x,)) if torch.compiler.is_compiling() else x + 1


def test_what_cannot_be_compiled_runs_eagerly_and_says_why() -> None:
    """Promise: a compiler's failure is a reason in the plan, and the model computes."""
    model, x = _Uncompilable(), torch.randn(4, 3)
    with tune.optimize(model, mode="compile") as plan:
        assert torch.equal(model(x), x + 1)
        assert torch.equal(model(x), x + 1)
    (problem,) = plan.problems
    assert (problem.kind, problem.where) == ("failed", "compile")
    assert "compile" not in plan.used
    assert f"failed, runs eagerly: {problem.text}" in str(plan)


def test_copies_and_files_are_of_the_model_s_own_class() -> None:
    """Promise: a model with a plan applied can be copied and saved; the copy is plain and has weights of its own."""
    model = blocks()
    with tune.optimize(model, mode="memory_efficient", amp=torch.bfloat16):
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        names = list(model.state_dict())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        assert type(other) is nn.Sequential
        assert type(other[0]) is Block
        assert list(other.state_dict()) == names
        assert other[0].up.weight.data_ptr() != model[0].up.weight.data_ptr()


def test_a_function_computes_as_planned() -> None:
    """Promise: as decorator, with arguments and without, as a call, and of a model, also where the function raises."""
    model = blocks()

    @tune.optimize(amp="bf16")
    def forward(x: Tensor, *, times: int = 1) -> Tensor:
        return model(x) * times  # type: ignore[no-any-return]

    assert forward(torch.ones(2, 16), times=2).dtype is torch.bfloat16
    assert forward.__name__ == "forward"
    assert forward.plan.used == ("autocast", "fused_optimizer", "loader")  # type: ignore[attr-defined]
    assert tune.optimize(model.forward, amp="off")(torch.ones(2, 16)).dtype is torch.float32

    @tune.optimize(model, mode="amp", amp=torch.bfloat16)
    def fail() -> None:
        assert model(torch.ones(2, 16)).dtype is torch.bfloat16
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fail()
    assert model(torch.ones(2, 16)).dtype is torch.float32


def test_options_for_optimizer_and_loader() -> None:
    """Promise: what the optimizer and the loader are to be given fits them."""
    model = blocks()
    plan = tune.optimize(model, mode="amp")
    optimizer = torch.optim.AdamW(model.parameters(), **plan.optimizer_options(torch.optim.AdamW))
    assert optimizer.defaults["fused"]
    assert plan.optimizer_options(torch.optim.LBFGS) == {}
    assert plan.loader_options(0) == {"num_workers": 0, "pin_memory": False}
    assert plan.loader_options(2)["persistent_workers"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mode": "fast"}, ValueError, "unknown mode 'fast': use one of none, amp"),
        ({"amp": torch.int8}, ValueError, "amp is 'bf16', 'fp16', 'off'"),
        ({"checkpointing": "Linear"}, TypeError, "checkpointing is a class of modules, or several of them, not 'Linear'"),
        ({"activation_budget": "1GB"}, ValueError, "a number of bytes above 0, not '1GB'"),
    ],
)
def test_wrong_arguments_say_what_to_do(options: dict[str, Any], error: type[Exception], words: str) -> None:
    """Promise: a wrong argument is an error of the call."""
    with pytest.raises(error, match=words):
        tune.optimize(nn.Linear(2, 2), **options)
    wrong: Any
    for wrong in ("model", None, nn.Linear):
        with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, or decorates a function, not"):
            tune.optimize(wrong)
    with pytest.raises(TypeError, match=r"a class is needed, such as torch\.optim\.AdamW, not str"):
        tune.optimize(nn.Linear(2, 2)).optimizer_options("adamw")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass a batch here"):
        tune.optimize(nn.Linear(2, 2)).check()


def test_plans_are_events(run: Recording) -> None:
    """Promise: that a plan was applied, undone or refused is recorded with its mode, level and techniques."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    tune.optimize(model, mode="amp", level="advanced", amp=torch.bfloat16).apply().undo()
    with pytest.raises(tune.NumericalDifferenceError):
        tune.optimize(model, mode="amp", amp=torch.bfloat16).check(x, tolerance=0.0)
    run.whole_round()
    events = run.attributes("torchobs.tune.plan")
    assert [event["action"] for event in events] == ["applied", "undone", "refused"]
    assert events[0]["mode"] == "amp"
    assert events[0]["level"] == "advanced"
    assert events[0]["techniques"] == "autocast, fused_optimizer, loader"
    assert events[2]["difference"] > 0


def test_a_model_that_needs_gradients_in_its_forward_pass_is_compared_with_them() -> None:
    """Promise: a plan is checked and timed; no parameter has a gradient of it."""
    model, x = Slope(), torch.randn(8, 2)
    difference = tune.optimize(model, mode="amp", example=x, amp=torch.bfloat16).inspect()
    assert 0 < difference.relative < difference.tolerance
    result = tune.benchmark(
        model, (x, torch.zeros(8, 2)), nn.functional.mse_loss, modes=("none", "amp"), rounds=6, warmup=0,
        amp=torch.bfloat16,
    )  # fmt: skip
    assert result["amp"].difference == difference.relative
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_meta_device_and_scripted_models_are_skipped_not_crashed() -> None:
    """Promise: what a device or a model cannot is skipped with a reason."""
    assert "not supported" in str(tune.optimize(nn.Linear(2, 2, device="meta"), mode="full", level="extreme"))
    tune.optimize(nn.Linear(2, 2, device="meta"), mode="memory_efficient").apply().undo()
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    plan = tune.optimize(traced, mode="full", amp=torch.bfloat16)
    assert not {"autocast", "compile"} & set(plan.used)
