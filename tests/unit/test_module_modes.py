"""Functions that evaluate a model beside its training leave each module in the mode, and the state, that it was in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from torchobs import debug, tune
from torchobs.tensors.running import evaluating, training

if TYPE_CHECKING:
    from collections.abc import Callable


class _Merging(nn.Linear):
    """Adds a trained part to its weight for evaluation, and takes it out for training, as a LoRA layer does."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.weight.requires_grad = False
        self.part, self.merged = nn.Parameter(torch.ones(size, size)), False

    def train(self, on: bool = True) -> _Merging:  # noqa: FBT001, FBT002  # torch calls it by position
        super().train(on)
        if on == self.merged:
            self.weight.data += self.part.detach() * (-1 if on else 1)
            self.merged = not on
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight if self.merged else self.weight + self.part, self.bias)


class _FrozenStatistics(nn.Sequential):
    """Keeps its normalisation in evaluation mode in training, and its dropout on in evaluation."""

    def train(self, mode: bool = True) -> _FrozenStatistics:  # noqa: FBT001, FBT002
        super().train(mode)
        self[0].eval()
        self[1].train()
        return self


def _model() -> nn.Sequential:
    frozen, cold = _Merging(4).eval(), nn.Sequential(nn.Dropout(), nn.Linear(4, 4))
    cold[0].eval()
    return nn.Sequential(_Merging(4), frozen, _FrozenStatistics(nn.BatchNorm1d(4), nn.Dropout()).train(), cold)


def _validate(model: nn.Module) -> None:
    with debug.validation(model) as found:
        found.add(2, loss=model(torch.ones(2, 4)).sum())


RUNS: dict[str, Callable[[nn.Module], object]] = {
    "validation": _validate,
    "inference": lambda model: debug.inference(model, torch.ones(2, 4)),
    "measure": lambda model: tune.optimize(model, mode="none", example=torch.ones(2, 4)).measure(),
}


@pytest.mark.parametrize("name", RUNS)
def test_modes_and_what_modules_keep_in_train_are_as_before(name: str) -> None:
    """Promise: a `train()` of a module's own is called there and back; a child whose mode is not its parent's keeps it."""
    model = _model()
    merging = [module for module in model.modules() if isinstance(module, _Merging)]
    before = [module.training for module in model.modules()]
    inside = list[list[bool]]()
    model.register_forward_hook(lambda *_: inside.append([module.merged for module in merging]))
    RUNS[name](model)
    assert inside
    assert all(all(merged) for merged in inside)
    assert [module.training for module in model.modules()] == before
    assert [module.merged for module in merging] == [False, True]
    model(torch.ones(2, 4)).sum().backward()
    assert merging[0].part.grad is not None


def test_inside_it_is_what_eval_makes_of_it() -> None:
    """Also where a module's own `train` chooses its children's modes, and after an exception."""
    model, other = _model(), _model().eval()
    before = [module.training for module in model.modules()]
    with evaluating(model):
        assert [module.training for module in model.modules()] == [module.training for module in other.modules()]
        assert [module.training for module in model[2].children()] == [False, True]
    with pytest.raises(ZeroDivisionError), evaluating(model):
        1 / 0  # noqa: B018
    assert [module.training for module in model.modules()] == before


def test_training_mode_for_a_while_leaves_no_layer_unmerged() -> None:
    """The other way: of a model that is evaluated, and whose layers are merged."""
    model = _model().eval()
    merging = [module for module in model.modules() if isinstance(module, _Merging)]
    before = [module.training for module in model.modules()]
    weights = [module.weight.clone() for module in merging]
    with training(model):
        assert [module.training for module in model.modules()] == [module.training for module in _model().train().modules()]
        assert not any(module.merged for module in merging)
    assert [module.training for module in model.modules()] == before
    assert all(module.merged for module in merging)
    assert all(torch.equal(module.weight, weight) for module, weight in zip(merging, weights, strict=True))


def test_a_graph_that_has_no_modes_is_run_as_it_is() -> None:
    """Promise: one of `torch.export`, whose `train()` raises, can be validated and run."""
    x = torch.ones(2, 4)
    graph = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval(), (x,)).module()
    with debug.validation(graph) as found:
        found.add(2, loss=graph(x).sum())
    assert found.error is None
    assert torch.equal(debug.inference(graph, x).output, graph(x))
