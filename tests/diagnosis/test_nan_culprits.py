"""The culprit of a NaN is the first, however code is written; what a loss or a function made of finite values is explained."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.diagnosis.observing import Look, Observed, observe
from tests.diagnosis_files import fact, origin_told
from torchobs import catalog
from torchobs.probes.nonfinite import forward
from torchobs.probes.nonfinite import origin as words
from torchobs.probes.nonfinite.backward import likely_node
from torchobs.probes.nonfinite.origin import GraphTracer, NonfiniteOrigin, user_frames
from torchobs.tensors.graph import read_graph

AT = 5
Step = Callable[[nn.Module, int], torch.Tensor]


def run(model: nn.Module, loss_of: Step, *, clips: bool = False, **settings: Any) -> Observed:
    """Train; ``loss_of``: of a step."""

    def train(look: Look) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, AT + 3):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            torch.autograd.backward(loss)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            look.stepped()

    torch.manual_seed(0)
    return observe(train, **settings)


def origin(observed: Observed) -> dict[str, Any]:
    """What is told first, with its step."""
    fact = observed.events(catalog.EVENT_NONFINITE_ORIGIN)[0]
    return {"step": fact.step, **fact.attributes}


class Batches:
    """Hands out batches that no variable of a running function holds when the backward pass begins."""

    def loss(self, model: nn.Module, number: int) -> torch.Tensor:
        """Of a batch, the sixth with a NaN in one sample."""
        x = torch.randn(8, 4)
        if number == AT:
            x[3, 1] = float("nan")
        return torch.as_tensor(model(x).square().mean())


def test_a_batch_that_nobody_holds_is_not_blamed_on_the_weights_it_spoiled() -> None:
    """Frameworks call the backward pass where the batch is out of sight: what the step made of the weights comes later."""
    culprit = origin(run(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), Batches().loss))
    assert (culprit["origin"], culprit["step"]) == ("input", AT)


@pytest.mark.parametrize("sick", ["weight", "operator"])
def test_a_generator_is_blamed_for_what_its_critic_sees_first(sick: str) -> None:
    """Promise: its output goes, detached, into the loss that is seen first; its own graph follows in the same step."""

    def train(look: Look) -> None:
        critic, maker = nn.Linear(4, 1), nn.Linear(4, 4)
        players = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (critic, maker)]
        for number in range(1, AT + 3):
            if number == AT and sick == "weight":
                maker.weight.data[1, 1] = float("nan")
            z = torch.randn(8, 4)
            for player in players:
                samples = maker(z)
                samples = torch.acos(samples * 0 + 2) if number == AT and sick == "operator" else samples
                player.zero_grad()
                torch.autograd.backward(critic(samples.detach() if player is players[0] else samples).mean())
                player.step()
            look.stepped()

    culprit = origin(observe(train))
    if sick == "weight":
        assert (culprit["origin"], culprit["step"], culprit["parameter"]) == ("parameter", AT, "Linear2.weight")
    else:
        assert (culprit["origin"], culprit["step"], culprit["operator"]) == ("operator", AT, "acos")


@pytest.mark.parametrize("sick", [0, 1])
@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
def test_each_player_of_an_iteration_has_its_step(sick: int, gradient: bool) -> None:  # noqa: FBT001  # a parameter of the test
    """Both players' optimizers make one step: a NaN of the second is not dated to the next."""
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]

    def train(look: Look) -> None:
        players = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        for number in range(1, AT + 3):
            for index, player in enumerate(players):
                player.zero_grad()
                loss = models[index](torch.randn(8, 4)).square().mean()
                if number == AT and index == sick:
                    loss = loss + torch.sqrt(0.0 * loss) if gradient else loss * float("inf")
                torch.autograd.backward(loss)
                player.step()
            look.stepped()

    assert origin(observe(train, grad_interval=1))["step"] == AT


@pytest.mark.parametrize(
    ("origin_", "operator", "join"),
    [
        ("operator", "mul", lambda output, _, ill: output * (float("inf") if ill else 1.0)),
        ("input", "sub", lambda output, target, _: output - target),
        ("input", "sub", lambda output, target, _: target - output),
        ("input", "add", lambda output, target, _: output + target),
        ("input", "cat", lambda output, target, _: torch.cat([output, target], 1)),
        ("input", "where", lambda output, target, _: torch.where(target > 0, output, target)),
    ],
)
def test_an_operand_that_nobody_keeps_is_the_input(origin_: str, operator: str, join: Callable[..., torch.Tensor]) -> None:
    """Sums and choices keep no operand, and make nothing of finite ones: a squared difference has what came with the target.

    Not so a constant of the code, which is the operator's.
    """

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        target = torch.randn(8, 4)
        if number == AT:
            target[3, 1] = float("nan")
        return torch.as_tensor(join(model(torch.randn(8, 4)), target, number == AT).square().mean())

    culprit = origin(run(nn.Linear(4, 4), loss))
    assert (culprit["origin"], culprit["operator"], culprit["step"]) == (origin_, operator, AT)
    assert culprit.get("sample") == (3 if origin_ == "input" else None)
    assert ("constant" in culprit.get("note", "")) == (operator == "mul")


_TRAINER = """
def fit(step, epochs):
    for _ in range(epochs * 1):
        one(step)

def one(step):
    step().backward()
"""


def _scaled(model: nn.Module, factor: float) -> torch.Tensor:
    return torch.as_tensor((model(torch.randn(8, 4)) * factor).square().mean())


def test_the_arithmetic_of_an_installed_trainer_is_no_line_of_the_loss() -> None:
    """The loop of a trainer multiplies, too; the function that made the loss has returned."""
    trainer = dict[str, Any]()
    exec(compile(_TRAINER, "/opt/site-packages/trainer.py", "exec"), trainer)  # noqa: S102  # as from an installed library
    model = nn.Linear(4, 4)

    def train(look: Look) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, AT + 3):
            factor = float("inf") if number == AT else 1.0
            trainer["fit"](partial(_scaled, model, factor), 1)
            optimizer.step()
            optimizer.zero_grad()
            look.stepped()

    culprit = origin(observe(train))
    assert (culprit["operator"], culprit["step"]) == ("mul", AT)
    assert "trainer.py" not in str(culprit), culprit


class Root(nn.Module):
    """The root of zero has no derivative; the whole is a ratio, whose derivative is dubious, too, and is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.first, self.second = nn.Parameter(torch.ones(1)), nn.Linear(4, 4), nn.Linear(4, 1)
        self.alike = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of four."""
        inner = self.first(x)
        root = torch.sqrt((inner - inner.detach()).square().sum(1) + (0.0 if self.alike else 1.0))
        return torch.as_tensor((self.second(x).squeeze(1) + root) / self.scale)


def test_clipping_makes_all_gradients_nan_and_does_not_hide_the_first() -> None:
    """The total norm is NaN, and every gradient is divided by it: which were bad before is known from their norms."""
    model = Root()

    def loss(_: nn.Module, number: int) -> torch.Tensor:
        model.alike = number == AT
        return torch.as_tensor(model(torch.randn(8, 4)).mean())

    culprit = origin(run(model, loss, clips=True, grad_interval=1))
    assert (culprit["origin"], culprit["operator"], culprit["step"]) == ("backward", "sqrt", AT)


def test_a_loss_module_has_the_line_that_calls_it() -> None:
    """It has no parameters, and is called by a name of the user's."""
    criterion = nn.CTCLoss()

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        lengths = torch.tensor([2 if number == AT else 6])
        return torch.as_tensor(
            criterion(model(torch.randn(6, 1, 4)).log_softmax(2), torch.tensor([[1, 2, 3]]), lengths, torch.tensor([3]))
        )

    culprit = origin(run(nn.Linear(4, 5), loss))
    assert (culprit["operator"], culprit["step"]) == ("ctc_loss", AT)
    assert "test_nan_culprits.py:" in culprit["location"]


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

IGNORED = "all 4 targets of the batch (tags) are ignored (ignore_index=-100), and the mean over none is NaN"
INFINITY = float("inf")


def origin_of(loss: torch.Tensor) -> NonfiniteOrigin:
    """What is said of a loss that is not finite, by the caller's variables."""
    assert not loss.isfinite()
    culprit = GraphTracer([loss], user_frames(sys._getframe(1)), 1).forward()
    assert culprit is not None
    return culprit


def entropy(**settings: Any) -> Loss:
    """A cross entropy of all targets."""
    return lambda scores, tags, _: functional.cross_entropy(scores, tags, **settings)


@pytest.mark.parametrize(
    ("loss", "operator", "why"),
    [
        (entropy(), "nll_loss", IGNORED),
        (entropy(label_smoothing=0.1), "nll_loss", IGNORED),
        (lambda y, t, _: functional.cross_entropy(y.view(1, 4, 7).transpose(1, 2), t.view(1, 4)), "nll_loss2d", IGNORED),
        (lambda y, t, _: functional.cross_entropy(y, t * 0, ignore_index=0), "nll_loss", "are ignored (ignore_index=0)"),
        (lambda y, t, m: functional.cross_entropy(y[m], t[m]), "nll_loss", words.OVER_NOTHING),
        (lambda y, _, m: y[m].mean(), "mean", words.OVER_NOTHING),
        (lambda y, _, m: functional.mse_loss(y[m], torch.zeros(0, 7)), "mse_loss", words.OVER_NOTHING),
    ],
)
def test_a_mean_over_nothing_is_named_as_that(loss: Loss, operator: str, why: str) -> None:
    """With what left nothing to average: ignored targets, an empty selection or batch."""
    tags, nobody = torch.full((4,), -100), torch.zeros(4, dtype=torch.bool)
    origin = origin_of(loss(nn.Linear(5, 7)(torch.randn(4, 5)), tags, nobody))
    assert (origin.kind, origin.operator) == ("operator", operator)
    assert why in origin.note
    assert why in origin.sentence()
    assert origin.parameter == ("tags" if "(tags)" in why else "")


TAGS = torch.arange(4)
FLOAT16: dict[str, tuple[Callable[[nn.Linear, torch.Tensor], torch.Tensor], tuple[str, str, str]]] = {
    "product": (lambda head, x: entropy()(head(x * 3e3), TAGS, x), ("operator", "addmm", words.BEYOND_FLOAT16)),
    "unread": (lambda head, x: entropy()(head(x * 3e3), TAGS, x), ("unknown", "log_softmax", words.UNREAD)),
    "cast": (lambda head, x: head(head.weight[:4] * x * 1e6).sum(), ("operator", "to_copy", words.BEYOND_FLOAT16)),
    "input": (lambda head, x: (x := x * 1e5, head(x).float().sum())[1], ("input", "addmm", words.CAST)),
    "divisor": (lambda head, x: head(x)[:0].sum() / torch.zeros(()), ("operator", "div", words.BY_ZERO)),
}


@pytest.mark.parametrize("case", FLOAT16)
def test_what_overflows_is_named_and_not_the_loss_that_shows_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: what a loss has not kept is computed again, casts included; if it is too large, nothing is called its birth."""
    loss, named = FLOAT16[case]
    monkeypatch.setattr(forward, "_MOST_ELEMENTS", 0 if case == "unread" else 1 << 26)
    head = nn.Linear(8, 8)
    head.weight.data.fill_(1.0)
    with torch.autocast("cpu", dtype=torch.float16):
        origin = origin_of(loss(head, torch.full((4, 8), 2.0) * TAGS[:, None]))
    assert (origin.kind, origin.operator, origin.note) == named


class Attention(nn.Module):
    """Self-attention that puts its mask on in one of several ways; sample 2 is padding alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.inner = way, nn.MultiheadAttention(8, 2, batch_first=True)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> Any:
        """Of shape (batch, time, 8)."""
        if self.way.startswith("multihead"):
            padding = torch.zeros(pad.shape).masked_fill(pad, -INFINITY) if "float" in self.way else pad
            return self.out(self.inner(x, x, x, key_padding_mask=padding)[0])
        query, key, value = self.qkv(x).chunk(3, -1)
        scores, mask = query @ key.transpose(-1, -2), pad[:, None]
        if self.way == "masked_fill":
            scores = (scores / 2.0).masked_fill(mask, -INFINITY)
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
    """However the mask was put on."""
    model = Attention(way)
    origin = origin_of(model(torch.randn(4, 6, 8), padded()).square().mean())
    assert (origin.kind, origin.operator) == ("operator", "softmax")
    assert "every value of the row was masked (negative infinity" in origin.note
    assert origin.module in {"inner", "Attention"}


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
    assert "That derivative is" not in origin_told(event)
