"""The user's tensors, models and losses, read without harm: batches, samples, living objects, models beside a training."""

from __future__ import annotations

import gc
import sys
from collections import UserDict
from dataclasses import dataclass
from functools import partial
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody does
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from torchobs import debug, tune
from torchobs.probes.leak import count_objects
from torchobs.tensors.batches import batch_sizes
from torchobs.tensors.losses import check_trained, compute_loss
from torchobs.tensors.references import living, types_of_objects
from torchobs.tensors.running import evaluating, training

if TYPE_CHECKING:
    from collections.abc import Callable


IDS = torch.zeros(4, 16, dtype=torch.int64)
MASK = torch.ones(4, 16, dtype=torch.int64)
IMAGES, LABELS = torch.zeros(8, 3, 5, 5), torch.zeros(8, dtype=torch.int64)


@dataclass
class Sentences:
    """A batch of a class of its own."""

    tokens: torch.Tensor
    length: int


BATCHES: dict[str, tuple[object, int, int]] = {
    "tensor": (torch.zeros(8, 3), 8, 0),
    "scalar": (torch.zeros(()), 0, 0),
    "image and label": ([IMAGES, LABELS], 8, 0),
    "nested collation": (default_collate([((torch.zeros(3), torch.zeros(2)), 1), ((torch.zeros(3), torch.zeros(2)), 0)]), 2, 0),
    "dictionary": ({"image": IMAGES, "label": LABELS, "path": ["a"] * 8, "epoch": 3}, 8, 0),
    "text model": ({"input_ids": IDS, "attention_mask": MASK, "labels": IDS}, 4, 64),
    "encoding": (UserDict(input_ids=IDS, attention_mask=MASK), 4, 64),
    "encoder and decoder": ({"input_ids": IDS, "decoder_input_ids": torch.zeros(4, 9, dtype=torch.int64)}, 4, 64),
    "text and image": ({"pixel_values": torch.zeros(4, 3, 5, 5), "input_ids": IDS.int()}, 4, 64),
    "multiple choice": ({"input_ids": torch.zeros(2, 4, 8, dtype=torch.int64), "labels": torch.zeros(2)}, 2, 64),
    "dataclass": (Sentences(IDS, 16), 4, 64),
    "inputs and targets": ([IDS, IDS], 4, 64),
    "ids and a class": ([IDS, torch.zeros(4, dtype=torch.int64)], 4, 64),
    "image and several labels": ([IMAGES, torch.zeros(8, 20, dtype=torch.int64)], 8, 0),
    "categories and numbers": ([torch.zeros(8, 26, dtype=torch.int64), torch.zeros(8, 13), torch.zeros(8)], 8, 0),
    "labels of several classes by name": ({"x": torch.zeros(8), "label": torch.zeros(8, 20, dtype=torch.int64)}, 8, 0),
    "source and target of two lengths": ([IDS, torch.zeros(4, 9, dtype=torch.int64)], 4, 0),
    "bytes": (torch.zeros(4, 16, dtype=torch.uint8), 4, 0),
    "a causal mask beside it": ([torch.zeros(8, 5), torch.zeros(8, 5), torch.zeros(5, 5)], 8, 0),
    "detection, targets as dictionaries": (
        (tuple(torch.zeros(3, 9, 9) for _ in range(5)), tuple({"boxes": torch.zeros(n, 4)} for n in range(5))), 5, 0,
    ),
    "list of samples": ([(torch.zeros(3, 9, 9), 1)] * 6, 6, 0),
    "list of dictionaries": ([{"image": torch.zeros(3, 9, n), "label": torch.tensor(1)} for n in range(6)], 6, 0),
    "packed": (pack_sequence([torch.zeros(5, 2), torch.zeros(3, 2)]), 2, 0),
    "ragged": (torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=torch.jagged), 2, 0),
    "numbers": (list(range(1_000_000)), 0, 0),
    "text": ("abc", 0, 0),
    "too deep": ([[[[[torch.zeros(8)]]]]], 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_sizes_are_those_of_the_batch(name: str) -> None:
    """Samples: the dimension that the tensors share, or the number of those that were not stacked; tokens: only of ids."""
    batch, samples, tokens = BATCHES[name]
    assert batch_sizes(batch) == (tokens, samples)


def test_quantiles_of_values_that_go_by_column() -> None:
    """Promise: those of all elements, where every second column is a hundred times larger, or a channel is zero."""
    torch.manual_seed(0)
    weight, image = torch.randn(1024, 512), torch.rand(512, 512, 4)
    weight[:, 1::2] *= 100
    image[..., 0] = 0.0
    for x in (weight, image):
        quantiles = debug.inspect_tensor(x).quantiles
        assert quantiles is not None
        for share in (0.05, 0.5, 0.95):
            below = float((x <= quantiles[str(share)]).double().mean())
            assert below == pytest.approx(max(share, 0.25 if x is image else 0), abs=0.005)


class Layer(torch.nn.Linear):
    """A class of the user's."""


def test_objects_of_a_class_and_of_those_that_inherit_from_it_are_found() -> None:
    """Each once, and no longer than it lives."""
    layer, model = Layer(2, 2), torch.nn.Sequential(Layer(2, 2))
    layers = living(Layer)
    assert sum(module is layer for module in layers) == 1
    assert sum(module is model[0] for module in layers) == 1
    assert not any(module is model for module in layers)
    del layer, layers
    assert len(living(Layer)) == 1
    assert not any(kind is None for kind in types_of_objects())


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda: living(torch.nn.Module), id="modules"),
        pytest.param(count_objects, id="objects that grow"),
        pytest.param(lambda: debug.memory("here"), id="memory at a point"),
    ],
)
def test_a_look_at_all_objects_breaks_nothing_that_other_threads_are_building(look: Callable[[], Any]) -> None:
    """``tuple(...)`` raises ``SystemError`` in CPython where anything else refers to the tuple: the training would fail."""
    unfinished = ([torch.zeros(1) for _ in range(40)],)  # references to them are objects that let a collection begin
    switches, before = list[bool](), (sys.gettrace(), gc.get_threshold())
    referrers = sys.getrefcount(unfinished)

    def switch(frame: FrameType, *_: object) -> Callable[..., Any]:
        """Where Python code runs, another thread may: in the look itself, and in finalizers and callbacks of a collection."""
        frame.f_trace_opcodes = True
        switches.append(sys.getrefcount(unfinished) > referrers)
        return switch

    def called(*_: object) -> None:
        """As code of Python's does that a collection runs."""

    look()  # its imports would collect garbage at each twentieth object
    gc.callbacks.append(called)
    gc.set_threshold(20)  # so that one begins in each look, if it may
    sys.settrace(switch)
    try:
        look()
    finally:
        sys.settrace(before[0])
        gc.callbacks.remove(called)
        gc.set_threshold(*before[1])
    assert switches
    assert not any(switches)


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
    with debug.validation(model) as validation:
        validation.add(2, loss=model(torch.ones(2, 4)).sum())


RUNS: dict[str, Callable[[nn.Module], object]] = {
    "validation": _validate,
    "inference": lambda model: debug.inference(model, torch.ones(2, 4)),
    "measure": lambda model: tune.optimize(model, mode="none", example=torch.ones(2, 4)).inspect(),
}


@pytest.mark.parametrize("name", RUNS)
def test_modes_and_what_modules_keep_in_train_are_as_before(name: str) -> None:
    """Promise: a `train()` of a module's own is called there and back; a child with a mode other than its parent's keeps it."""
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
    """Promise: one of `torch.export`, with a `train()` that raises, can be validated and run."""
    x = torch.ones(2, 4)
    graph = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval(), (x,)).module()
    with debug.validation(graph) as validation:
        validation.add(2, loss=graph(x).sum())
    assert validation.error is None
    assert torch.equal(debug.inference(graph, x).output, graph(x))


X, Y = torch.ones(3, 2), torch.zeros(3, 1)


def row_sums(inputs: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Sums of the rows: 2 each."""
    return scale * inputs.sum(1, keepdim=True)


def whole(model: Any, batch: Any) -> torch.Tensor:
    """The first form."""
    loss: torch.Tensor = (model(batch[0]) - batch[1]).square().mean()
    return loss


@pytest.mark.parametrize(
    ("batch", "loss_fn", "target", "expected"),
    [
        ((X, Y), whole, None, 4.0),
        ((X, Y), nn.MSELoss(), None, 4.0),
        ((X, Y), torch.dist, None, 12.0**0.5),
        ((X, Y), partial(F.mse_loss, reduction="sum"), None, 12.0),
        ((X, 2.0, Y), nn.MSELoss(), None, 16.0),
        (X, nn.MSELoss(), Y, 4.0),
        ({"inputs": X, "scale": 2.0}, lambda output: output.mean(), None, 4.0),
        ({"inputs": X}, lambda output, batch: (output - batch["inputs"].sum(1, keepdim=True)).sum(), None, 0.0),
        (X, lambda *arguments: arguments[0].mean() + arguments[1].mean(), None, 3.0),
        (X, None, None, 6.0),
    ],
)
def test_a_loss_function_of_each_form_is_called_as_it_asks(batch: Any, loss_fn: Any, target: Any, expected: float) -> None:
    """A model's name first asks for model and batch; everything else gets the output, and a target if it takes one."""
    assert compute_loss(row_sums, batch, loss_fn, target=target).item() == pytest.approx(expected)


def test_without_a_function_the_output_has_the_loss_or_nothing_has() -> None:
    """As models of Transformers return it."""
    loss = torch.tensor(3.0)
    assert compute_loss(lambda _: SimpleNamespace(loss=loss), X) is loss
    assert compute_loss(lambda _: "no tensor", X) is None


def test_a_function_that_takes_the_model_takes_no_target() -> None:
    """It would get the output in the model's place."""
    with pytest.raises(TypeError, match="takes no target"):
        compute_loss(row_sums, (X, Y), whole, target=Y)


def test_what_is_no_loss_function_is_refused_with_both_forms() -> None:
    """Before the model runs."""
    cases: list[Any] = ["mse", 3, lambda: 0, lambda _first, _second, _third: 0]
    for loss_fn in cases:
        with pytest.raises(TypeError, match=r"loss_fn\(model, batch\), or loss_fn\(output, target\)"):
            compute_loss(lambda _: pytest.fail("the model has run"), X, loss_fn)


def test_a_model_that_is_offloaded_computes() -> None:
    """Promise: a model on the device meta is refused, but not one whose weights accelerate brings when they are needed."""
    offloaded: Any = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match="on the device meta, where nothing is computed"):
        check_trained(offloaded)
    offloaded._hf_hook = object()
    check_trained(offloaded)
    check_trained(nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2)))
