"""Parameters: their names, those that no optimizer has or that DDP finds unused, and those that are swapped."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchobs
from tests.training import Recording, batch, mlp, recording
from torchobs import catalog
from torchobs.detect.learning import LASTING_STEPS

pytestmark = pytest.mark.usefixtures("seeded")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class SpareHead(torch.nn.Module):
    """Two heads, the second outside of the loss; their weights may be one tensor, and the body frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.spare = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.main(self.body(x))
        return out


def raised(run: Recording, model: torch.nn.Module) -> dict[str, Any]:
    """What is recorded of the error of a model's second forward pass, when it ends the program."""
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="did not receive grad") as caught:
        model(torch.ones(1, 3))
    sys.excepthook(RuntimeError, caught.value, caught.value.__traceback__)
    (attributes,) = run.attributes(catalog.EVENT_EXCEPTION.name)
    return attributes


@pytest.mark.usefixtures("group")
def test_parameters_without_a_gradient_are_named(flight_dir: Path) -> None:
    """By the names in the model that DDP wraps, and that raised.

    Another DDP model, frozen parameters before and tied ones shift the indices; what is frozen later does not.
    """
    for run in recording(flight_dir):
        other = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 1)))
        inner = SpareHead()
        inner.body.weight.requires_grad_(False)  # noqa: FBT003  # its one argument
        inner.main.weight = inner.spare.weight
        model = DistributedDataParallel(inner)
        inner.body.weight.requires_grad_(True)  # noqa: FBT003  # its one argument
        other(torch.ones(1, 3)).sum().backward()
        attributes = raised(run, model)
        assert (attributes["unused"], attributes["unused_count"], attributes["unused_of"]) == (["spare.bias"], 1, "SpareHead")


STEPS = 12


@pytest.fixture
def swapping() -> Iterator[None]:
    """As torch will do by default in some later version."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A step."""
    inputs, targets = batch()
    dtype = next(model.parameters()).dtype
    nn.functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def convert_and_load(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters after a conversion there and back, and loading them."""
    model.double()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    model.float()
    return list(model.parameters())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("level", ["basic", "extreme"])
def test_a_model_under_watch_is_converted_and_loaded(flight_dir: Path, level: str) -> None:
    """During training, and after the end of the recording: the same parameters, trained on; compiled, too."""
    model = mlp()
    with torchobs.init(flight_dir=flight_dir, level=level, grad_interval=1) as session:
        torchobs.watch(model)
        recording, optimizer = Recording(session), sgd(model)
        before = list(model.parameters())
        for _ in range(STEPS):
            step(model, optimizer)
        recording.whole_round()
        after = convert_and_load(model)
        assert all(parameter is other for parameter, other in zip(before, after, strict=True))
        for _ in range(STEPS):
            step(model, optimizer)
        layers = {layer[0] for name, *layer in recording.look() if name == "torchobs.grad.layer.norm"}
        if level == "basic":  # the inputs of its calls are noted, which are its parameters and the batch
            compiled = torch.compile(model, backend="aot_eager")
            for _ in range(STEPS):
                step(compiled, optimizer)
            convert_and_load(model)
        reference: Any = weakref.ref(before[0])  # a reference of others is refused as ever
        with pytest.raises(RuntimeError, match="swap Linear"):
            model.double()
        assert reference() is not None
        del reference
    assert len(convert_and_load(model)) == len(before)
    assert layers == {"0", "2"}


def backward(model: nn.Module) -> None:
    """One pass over a batch."""
    torch.autograd.backward(model(torch.randn(8, 8)).square().mean())


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.first(self.body(x)) + self.second(self.body(x))
        return total


def left_out(
    run: Recording, model: nn.Module, optimizer: torch.optim.Optimizer, after_step: Callable[[], object] = lambda: None,
    count: int = 5 * LASTING_STEPS,
) -> list[Any]:  # fmt: skip
    """Train with looks; return the parameters that are reported."""
    for number in range(count):
        model.zero_grad()
        backward(model)
        optimizer.step()
        after_step()
        if number % (LASTING_STEPS // 2) == 1:
            run.look()
    return [frame["attrs"]["parameters"] for frame in run.frames(catalog.EVENT_LEFT_OUT_PARAMETERS.name)]


def test_what_is_trained_by_other_means_or_later(run: Recording) -> None:
    """By hand, or in an optimizer that has not stepped yet; and a teacher in evaluation mode, without ``no_grad``."""
    model, teacher = Heads(), nn.Linear(8, 1).eval()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=1e-3)
    later = torch.optim.SGD(model.first.parameters(), lr=1e-3)

    def step() -> None:
        for parameter in model.second.parameters():
            assert parameter.grad is not None
            parameter.data -= 1e-3 * parameter.grad
        inputs = torch.randn(8, 8)
        torch.autograd.backward((teacher(inputs) - model(inputs)).square().mean())

    assert left_out(run, model, optimizer, step) == []
    assert later.param_groups


def test_an_optimizer_that_begins_to_step_late(run: Recording) -> None:
    """Told when hundreds of steps have gone by, not as soon; then taken back, one part after another."""
    model = Heads()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=1e-3)
    late = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (model.first, model.second)]
    assert left_out(run, model, optimizer) == []
    left_out(run, model, optimizer, count=8 * LASTING_STEPS)
    left_out(run, model, optimizer, late[0].step, LASTING_STEPS)
    events = left_out(run, model, optimizer, lambda: [part.step() for part in late], LASTING_STEPS)
    assert events == [["first.weight", "first.bias", "second.weight", "second.bias"], ["second.weight", "second.bias"], []]
    assert run.frames(catalog.EVENT_LEFT_OUT_PARAMETERS.name)[0]["attrs"]["optimizer"] == "AdamW"


_GRADIENT: Any = torch.Tensor.grad


class Watched(nn.Parameter):
    """Notes the threads that ask for its gradient."""

    readers: set[int] = set()  # noqa: RUF012  # of all of them

    @property
    def grad(self) -> Any:
        self.readers.add(threading.get_ident())
        return _GRADIENT.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRADIENT.__set__(self, value)


def test_no_other_thread_reads_a_gradient(run: Recording) -> None:
    """A backward pass replaces gradients without holding the GIL: whoever reads one meanwhile may crash the process."""
    Watched.readers.clear()
    model = Heads()
    for module in (model.body, model.first, model.second):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, Watched(parameter.detach()))
    optimizer = torch.optim.SGD([*model.body.parameters(), *model.first.parameters()], lr=1e-3)
    for number in range(5 * LASTING_STEPS):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        if number % (LASTING_STEPS // 4) == 1:
            other = threading.Thread(target=run.look)
            other.start()
            other.join()
    assert run.frames(catalog.EVENT_LEFT_OUT_PARAMETERS.name), "it was looked at"
    assert Watched.readers == {threading.get_ident()}
