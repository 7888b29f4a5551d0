"""A NaN that a loss makes of finite values is explained: by what was averaged over nothing, or by a row that was all masked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.diagnosis.observing import Look, observe
from tests.diagnosis_files import fact, facts, steps, told
from torchobs import catalog
from torchobs.probes.nonfinite.backward import likely_node
from torchobs.probes.nonfinite.graph import operator_of, read_graph
from torchobs.probes.nonfinite.origin import GraphTracer, NonfiniteOrigin, user_frames

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

IGNORED = "all 4 targets of the batch (tags) are ignored (ignore_index=-100), and the mean over none is NaN"
SELECTION = "it is over nothing, since the selection (index) before it left no element, and the mean over none is NaN"
EMPTY = "it is over nothing, since the batch is empty, and the mean over none is NaN"
INFINITY = float("inf")


def origin_of(loss: torch.Tensor) -> NonfiniteOrigin:
    """What is said of a loss that is not finite, by the caller's variables."""
    assert not loss.isfinite()
    found = GraphTracer([loss], user_frames(sys._getframe(1)), 1).forward()
    assert found is not None
    return found


def entropy(**settings: Any) -> Loss:
    """A cross entropy of all targets."""
    return lambda scores, tags, _: functional.cross_entropy(scores, tags, **settings)


@pytest.mark.parametrize(
    ("loss", "operator", "why"),
    [
        (entropy(), "nll_loss", IGNORED),
        (entropy(label_smoothing=0.1), "nll_loss", IGNORED),
        (lambda y, t, _: functional.nll_loss(y.log_softmax(1), t) / 2, "nll_loss", IGNORED),
        (lambda y, t, _: functional.cross_entropy(y.view(1, 4, 7).transpose(1, 2), t.view(1, 4)), "nll_loss2d", IGNORED),
        (lambda y, t, _: functional.cross_entropy(y, t * 0, ignore_index=0), "nll_loss", "are ignored (ignore_index=0)"),
        (
            lambda y, t, _: functional.cross_entropy(y, t * 0, weight=torch.tensor([0.0, 1, 1, 1, 1, 1, 1])),
            "nll_loss",
            "the class weights of all 4 targets of the batch are 0, and 0 / 0 is NaN",
        ),
        (lambda y, t, _: functional.cross_entropy(y[:0], t[:0]), "nll_loss", "the selection (slice) before it"),
        (lambda y, t, m: functional.cross_entropy(y[m], t[m]), "nll_loss", SELECTION),
        (lambda y, _, m: y[m].mean(), "mean", SELECTION),
        (lambda y, _, m: y[m].mean(0).sum(), "mean", SELECTION),
        (lambda y, t, m: functional.cross_entropy(y, t * 0, reduction="none")[m].mean(), "mean", SELECTION),
        (lambda y, _, m: y.masked_select(m[:, None]).mean(), "mean", "the selection (masked_select) before it"),
        (lambda y, _, m: functional.mse_loss(y[m], torch.zeros(0, 7)), "mse_loss", SELECTION),
        (lambda y, _, m: functional.l1_loss(y[m], torch.zeros(0, 7)), "mean", SELECTION),
        (lambda y, _, m: functional.huber_loss(y[m], torch.zeros(0, 7)), "huber_loss", SELECTION),
        (
            lambda y, _, m: functional.binary_cross_entropy_with_logits(y[m], torch.zeros(0, 7)),
            "binary_cross_entropy_with_logits",
            SELECTION,
        ),
    ],
)
def test_a_mean_over_nothing_is_named_as_that(loss: Loss, operator: str, why: str) -> None:
    """With what left nothing to average: ignored targets, weights of zero, an empty selection or batch, a mask."""
    tags, nobody = torch.full((4,), -100), torch.zeros(4, dtype=torch.bool)
    origin = origin_of(loss(nn.Linear(5, 7)(torch.randn(4, 5)), tags, nobody))
    assert (origin.kind, origin.operator) == ("operator", operator)
    assert why in origin.note
    assert why in origin.sentence()
    assert origin.parameter == ("tags" if "(tags)" in why else "")


def test_a_batch_without_a_sample_is_named_as_that() -> None:
    """The model has had it, and made an empty output of it."""
    scores = nn.Linear(5, 7)(torch.randn(0, 5))
    assert origin_of(functional.cross_entropy(scores, torch.zeros(0, dtype=torch.long))).note == EMPTY
    assert origin_of(functional.mse_loss(scores, torch.zeros(0, 7))).note == EMPTY


def test_an_empty_mean_is_no_mean_over_nothing() -> None:
    """Promise: over the columns of no rows it has no element, thus no NaN, and the logarithm of 0 beside it is named."""
    errors, logits = nn.Linear(5, 7)(torch.ones(0, 5)), nn.Linear(3, 3)(torch.ones(2, 3))
    origin = origin_of(torch.cat([(errors**2).mean(-1), (logits @ torch.zeros(3, 1)).log().mean(-1)]).mean())
    assert (origin.kind, origin.operator) == ("operator", "log")
    assert "nothing" not in origin.note


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: (y * 0).sum().log(),
        lambda y: (y * 0 - 1).sum().sqrt(),
        lambda y: (y * 1e30).exp().mean() * 0,
        lambda y: (y * 1e38 * 1e38).softmax(-1).mean(),
    ],
)
def test_what_has_another_cause_has_no_such_explanation(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Values outside of a function's domain, or too large."""
    note = origin_of(loss(nn.Linear(5, 7)(torch.ones(4, 5)).abs() + 1)).note
    assert "nothing" not in note
    assert "masked" not in note
    assert "divisor" not in note


class Attention(nn.Module):
    """Self-attention that puts its mask on in one of several ways; sample 2 is padding alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner, self.qkv, self.out = (
            way,
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 24),
            nn.Linear(8, 5),
        )

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> Any:
        """Of shape (batch, time, 8)."""
        if self.way.startswith("multihead"):
            given = torch.zeros(pad.shape).masked_fill(pad, -INFINITY) if "float" in self.way else pad
            return self.out(self.inner(x, x, x, key_padding_mask=given)[0])
        query, key, value = self.qkv(x).chunk(3, -1)
        scores, mask = query @ key.transpose(-1, -2), pad[:, None]
        if self.way == "masked_fill":
            scores = scores.masked_fill(mask, -INFINITY)
        elif self.way == "add":
            scores = scores + torch.zeros(mask.shape).masked_fill(mask, -INFINITY)
        elif self.way == "where":
            scores = torch.where(mask, torch.tensor(-INFINITY), scores)
        return self.out(scores.softmax(-1) @ value)


def padded() -> torch.Tensor:
    """A mask of four sequences."""
    pad = torch.zeros(4, 6, dtype=torch.bool)
    pad[:, 5] = pad[2] = True
    return pad


@pytest.mark.parametrize("way", ["masked_fill", "add", "where", "multihead", "multihead float"])
def test_a_softmax_of_a_row_that_is_all_masked_is_named_as_that(way: str) -> None:
    """However the mask was put on; the elements are those of the row."""
    model = Attention(way)
    origin = origin_of(model(torch.randn(4, 6, 8), padded()).square().mean())
    assert (origin.kind, origin.operator) == ("operator", "softmax")
    assert "every value of a row that it was given was masked (negative infinity)" in origin.note
    assert origin.module in {"inner", "Attention"}
    assert origin.elements[0][0] == (4 if "multihead" in way else 2)  # of batch times heads there


@pytest.mark.parametrize(
    ("operator", "hint"),
    [
        ("sqrt", " That derivative is infinite at 0."),
        ("div", " That derivative is infinite where its divisor is 0."),
        ("mul", ""),
    ],
)
def test_where_a_derivative_is_infinite_is_said_of_the_operator_that_is_meant(operator: str, hint: str) -> None:
    """Of others it says nothing; and one that nobody saw at work is the likely one."""
    for note, born in (("", "born"), ("from the graph's structure", "most likely born")):
        event = fact(catalog.EVENT_NONFINITE_ORIGIN, 1.0, origin="backward", operator=operator, module="head", note=note)
        text = told(facts(steps(3), events=[event]))["nonfinite_origin"]
        assert text == f"The NaN or infinity was {born} in the derivative of {operator} in head.{hint}"


BOUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x * 0),
    "norm": lambda x: functional.pairwise_distance(x, x, eps=0).sum(),
    "std": lambda x: (x * 0).std(),
    "std_mean": lambda x: torch.std_mean(x * 0)[0],
    "cdist": lambda x: torch.cdist(x, x, 1.0).sum(),
    "euclidean_dist": lambda x: torch.cdist(x, x, 2.0, "use_mm_for_euclid_dist").sum(),
    "atan2": lambda x: torch.atan2(x * 0, x * 0).sum(),
    "binary_cross_entropy": lambda x: functional.binary_cross_entropy(x * 0, torch.ones(3, 3)),
}


@pytest.mark.parametrize("operator", BOUNDED)
def test_a_derivative_that_torch_bounds_is_not_called_infinite(operator: str) -> None:
    """Promise: where mathematics has none, torch's derivative is finite; such an operator is neither blamed nor explained."""
    weight = nn.Parameter(torch.ones(3, 3))
    nodes = read_graph([BOUNDED[operator](weight).grad_fn])
    assert operator in {node.operator for node in nodes}
    assert torch.autograd.grad(BOUNDED[operator](weight), weight)[0].isfinite().all()
    assert likely_node(nodes, {id(weight)}) is None
    event = fact(catalog.EVENT_NONFINITE_ORIGIN, 1.0, origin="backward", operator=operator)
    assert "That derivative is" not in told(facts(steps(3), events=[event]))["nonfinite_origin"]


def test_all_targets_that_are_ignored_are_told_in_a_training() -> None:
    """With the variable's name, and as past after fifty steps: the gradients of ignored targets are zero."""

    def train(look: Look) -> None:
        model = nn.Linear(5, 7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, 80):
            tags = torch.full((4,), -100) if number == 15 else torch.randint(0, 7, (4,))
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(torch.randn(4, 5)), tags))
            optimizer.step()
            look.stepped()

    observed = observe(train, grad_interval=1)
    text = observed.text("nonfinite_origin")
    assert "of step 15 was born in nll_loss" in text
    assert IGNORED in text
    assert observed.diagnosis.verdict.text.startswith("All well.")


def test_operators_have_the_names_that_torch_gives_them() -> None:
    """Digits and what follows them are one word."""
    names = {
        "NllLoss2DBackward0": "nll_loss2d",
        "MaxPool2DWithIndicesBackward0": "max_pool2d_with_indices",
        "Log1PBackward0": "log1p",
        "SmoothL1LossBackward0": "smooth_l1_loss",
        "LogSoftmaxBackward0": "log_softmax",
    }
    assert {name: operator_of(name) for name in names} == names
