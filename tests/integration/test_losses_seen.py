"""The loss of each step, whatever class of tensor it is, and by whatever door the backward is entered."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.autograd import grad as imported_grad

from tests.training import Recording, StepFlag, batch, has, loss_of, mlp, norm_of, recording
from torchobs.flight.layout import PHASE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

BACKWARD = PHASE_NAMES.index("backward")


class Annotated(torch.Tensor):
    """As MONAI's MetaTensor and fastai's TensorBase: every function of torch's returns one, and passes through Python."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Empty(torch.Tensor):
    """A wrapper that has a shape, and no number in it: looking at one is the end of the training."""

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        msg = "nobody may look"
        raise RuntimeError(msg)


def engine(tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """As Megatron-LM calls it (``megatron/core/pipeline_parallel/schedules.py``, ``custom_backward``)."""
    torch.autograd.Variable._execution_engine.run_backward(
        tensors=tuple(tensors), grad_tensors=tuple(gradients), keep_graph=False, create_graph=False, inputs=(),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def by_grad(loss: torch.Tensor, model: torch.nn.Module, grad: Callable[..., Any]) -> None:
    """Gradients that are asked for, and given to the optimizer by hand."""
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, grad(loss, parameters), strict=True):
        parameter.grad = gradient


DOORS: dict[str, Callable[[torch.Tensor, torch.nn.Module], object]] = {
    "autograd.backward": lambda loss, _: torch.autograd.backward(loss),
    "a tuple of one": lambda loss, _: torch.autograd.backward((loss,)),
    "by name, with no gradient": lambda loss, _: torch.autograd.backward(tensors=[loss], grad_tensors=[None]),
    "a tuple of two": lambda loss, _: torch.autograd.backward((loss / 4, loss * 0.75)),
    "the engine": lambda loss, _: engine([loss], [torch.ones_like(loss)]),
    "autograd.grad": lambda loss, model: by_grad(loss, model, torch.autograd.grad),
    "grad, imported before": lambda loss, model: by_grad(loss, model, imported_grad),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_backward_by_any_door_is_one(run: Recording, name: str) -> None:
    """Its loss is the step's, but of ``torch.autograd.grad``; its time is backward's, and its gradient's norm is measured."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for index in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, index)
        losses.append(loss.item())
        DOORS[name](loss, model)
        norms.append(norm_of(model))
        optimizer.step()
    steps = run.steps()
    if name in {"autograd.grad", "grad, imported before"}:  # what it begins from may be no loss
        assert not any(has(record, StepFlag.LOSS) for record in steps)
    else:
        assert [record.loss for record in steps] == pytest.approx(losses, rel=1e-6)
        assert {record.losses for record in steps} == {1}
    assert [record.grad_norm for record in steps] == pytest.approx(norms, rel=1e-4)
    assert all(record.phase_s[BACKWARD] > 0.0 for record in steps)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_loss_of_a_tensor_subclass_is_read_without_its_code(run: Recording, *, scaled: bool) -> None:
    """MONAI's and fastai's losses have the class of their inputs; nothing of theirs is called for our look at them."""
    model, (inputs, targets) = mlp(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    expected, calls = [], []
    listeners = run.context.hooks.takes_loss.listeners
    take = list(listeners)
    for watched in (True, True, False, True):
        listeners[:] = take if watched else []
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs.as_subclass(Annotated)), targets)
        assert type(loss) is Annotated
        expected.append(float(loss.detach().as_subclass(torch.Tensor)))
        scaled_loss = scaler.scale(loss) if scaled else loss
        before = Annotated.calls
        torch.autograd.backward(scaled_loss)
        calls.append(Annotated.calls - before)
        scaler.step(optimizer)
        scaler.update()
    steps = run.steps()
    assert [record.loss for record in steps if has(record, StepFlag.LOSS)] == expected[:2] + expected[3:]
    assert len(set(calls[1:])) == 1, "as often as without the probe"


def test_a_tensor_without_numbers_is_not_looked_at(run: Recording) -> None:
    """A wrapper with a dispatch of its own: a DTensor's value would need a collective, a fake tensor has none."""
    take, *_ = run.context.hooks.takes_loss.listeners  # the loss probe's; another one looks at the first losses
    wrapper = torch.Tensor._make_wrapper_subclass(Empty, (), requires_grad=True)
    take(wrapper, None, True)  # noqa: FBT003  # as the hook calls it
    take((wrapper, torch.ones(())), None, True)  # noqa: FBT003
    assert run.context.recorder.values.losses == 0


def test_a_pipeline_stage_has_no_loss(run: Recording) -> None:
    """Its backward begins with the gradient that the next stage has sent, of an output or of what stands for it."""
    model, (inputs, _) = mlp(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        output = model(inputs)
        gradient = torch.randn_like(output)
        engine([output], [gradient])
        optimizer.step()
        total = model(inputs).sum()
        torch.autograd.backward([total], [torch.tensor(0.25)])
        optimizer.step()
    assert not any(has(record, StepFlag.LOSS) for record in run.steps())
    assert all(record.phase_s[BACKWARD] > 0.0 for record in run.steps())


def test_the_engine_is_put_back(flight_dir: Path) -> None:
    """And while ours is there, whoever asks it for something else, or within a backward, has torch's own.

    An error in it is the user's, and the next backward is seen again.
    """
    before, within = torch.autograd.Variable._execution_engine, list[Any]()
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda _: within.append(torch.autograd.Variable._execution_engine.run_backward))  # type: ignore[no-untyped-call]
    for run in recording(flight_dir):
        now = torch.autograd.Variable._execution_engine
        assert isinstance(now, type(before))
        assert now is not before
        leaf.sum().backward()  # type: ignore[no-untyped-call]
        assert within == [before.run_backward]
        model = mlp()
        spent = loss_of(model)
        spent.backward()  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="second time"):
            engine([spent], [torch.ones_like(spent)])
        engine([loss_of(model, 3)], [torch.ones(())])
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert len(run.steps()) == 1
    assert torch.autograd.Variable._execution_engine is before


def test_the_log_names_the_first_step_of_each_kind(run: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """A loss that jumps and turns NaN soon after, within one round of the sampler's: one line each, with its own step."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    sampler = run.session._sampler
    assert sampler is not None
    sampler.stop()
    sampler._thread.join()
    for loss in [*(2.0 + 0.1 * (step % 3) for step in range(40)), 1e9, math.nan, math.nan]:
        optimizer.zero_grad()
        (parameter.sum() * 0 + loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with caplog.at_level(logging.WARNING, "torchobs"):
        run.look()
    jump, nan = (line for line in caplog.messages if "loss" in line)
    assert jump.startswith("torchobs: The loss has jumped to 1e9 in step 41, usual is 2.")
    assert nan == "torchobs: The loss is not finite in step 42."
