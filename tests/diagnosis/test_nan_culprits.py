"""The culprit is the first, where a later step, clipping or the way in which code is written could hide it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.diagnosis.observing import Look, Observed, observe
from torchobs import catalog

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
    told = origin(run(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), Batches().loss))
    assert (told["origin"], told["step"]) == ("input", AT)


@pytest.mark.parametrize("sick", ["weight", "operator"])
def test_a_generator_is_blamed_for_what_its_critic_sees_first(sick: str) -> None:
    """Promise: its output goes, detached, into the loss that is seen first; its own graph follows in the same step."""
    maker, critic = nn.Linear(4, 4), nn.Linear(4, 1)

    def train(look: Look) -> None:
        players = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (critic, maker)]
        for number in range(1, AT + 3):
            if number == AT and sick == "weight":
                maker.weight.data[1, 1] = float("nan")
            z = torch.randn(8, 4)
            for player in players:
                made = maker(z)
                made = torch.acos(made * 0 + 2) if number == AT and sick == "operator" else made
                player.zero_grad()
                torch.autograd.backward(critic(made.detach() if player is players[0] else made).mean())
                player.step()
            look.stepped()

    told = origin(observe(train))
    if sick == "weight":
        assert (told["origin"], told["step"], told["module"]) == ("parameter", AT, "Linear")
    else:
        assert (told["origin"], told["step"], told["operator"]) == ("operator", AT, "acos")


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
                made = models[index](torch.randn(8, 4)).square().mean()
                if number == AT and index == sick:
                    made = made + torch.sqrt(0.0 * made) if gradient else made * float("inf")
                torch.autograd.backward(made)
                player.step()
            look.stepped()

    assert origin(observe(train, grad_interval=1))["step"] == AT


def test_a_constant_of_the_code_is_no_input() -> None:
    """``loss * float("inf")`` is the operator's fault."""

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        logits = model(torch.randn(8, 4))
        return torch.as_tensor((logits * (float("inf") if number == AT else 1.0)).square().mean())

    told = origin(run(nn.Linear(4, 4), loss))
    assert (told["origin"], told["operator"], told["step"]) == ("operator", "mul", AT)
    assert "constant" in told["note"]


@pytest.mark.parametrize(
    ("operator", "join"),
    [
        ("sub", lambda made, given: made - given),
        ("sub", lambda made, given: given - made),
        ("add", lambda made, given: made + given),
        ("cat", lambda made, given: torch.cat([made, given], 1)),
        ("where", lambda made, given: torch.where(given > 0, made, given)),
    ],
)
def test_an_operand_that_nobody_keeps_is_the_input(operator: str, join: Callable[..., torch.Tensor]) -> None:
    """Sums and choices keep no operand, and make nothing of finite ones: a squared difference has what came with the target."""

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        given = torch.randn(8, 4)
        if number == AT:
            given[3, 1] = float("nan")
        difference = join(model(torch.randn(8, 4)), given)
        return torch.as_tensor(difference.square().mean())

    told = origin(run(nn.Linear(4, 4), loss))
    assert (told["origin"], told["operator"], told["sample"], told["step"]) == ("input", operator, 3, AT)


def test_a_sum_that_overflows_is_the_operators() -> None:
    """Its operands were finite."""

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        much = torch.full((8, 4), 3e38 if number == AT else 0.0)
        return torch.as_tensor((model(torch.randn(8, 4)) * 0.0 + much.requires_grad_() + much.detach()).square().mean())

    told = origin(run(nn.Linear(4, 4), loss))
    assert (told["origin"], told["operator"], told["step"]) == ("operator", "add", AT)


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
    exec(compile(_TRAINER, "/opt/site-packages/trainer.py", "exec"), trainer)  # as from an installed library
    model = nn.Linear(4, 4)

    def train(look: Look) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, AT + 3):
            factor = float("inf") if number == AT else 1.0
            trainer["fit"](partial(_scaled, model, factor), 1)
            optimizer.step()
            optimizer.zero_grad()
            look.stepped()

    told = origin(observe(train))
    assert (told["operator"], told["step"]) == ("mul", AT)
    assert "trainer.py" not in str(told), told


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

    told = origin(run(model, loss, clips=True, grad_interval=1))
    assert (told["origin"], told["operator"], told["step"]) == ("backward", "sqrt", AT)


class Mean(nn.Module):
    """Divides by a count, on a line of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.count = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of four."""
        h = self.lin(x)
        return torch.as_tensor(torch.zeros_like(h).index_add(0, torch.arange(len(h)), h) / self.count)


class Norm(nn.Module):
    """All on one line."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of four."""
        return torch.as_tensor((h := self.lin(functional.relu(x))) / (h.detach().abs().amax() + 1.0))


def test_the_module_whose_line_is_apart_is_named() -> None:
    """Both divide between the same two layers, the second on the very line on which it calls its own."""
    model = nn.Sequential(Mean(), Norm())

    def loss(_: nn.Module, number: int) -> torch.Tensor:
        mean = model[0]
        assert isinstance(mean, Mean)
        mean.count = torch.zeros(1) if number == AT else torch.ones(1)
        return torch.as_tensor(model(torch.randn(8, 4)).square().mean())

    told = origin(run(model, loss))
    assert (told["operator"], told["module"], told["step"]) == ("div", "0", AT)


_SCRIPT = """
import torch

class Helper:
    def ratio(self, a, b):
        return a / b

def unrelated(a, b):
    return [c / b for c in a]

for number in range(1, 8):
    x = torch.randn(8, 4)
    y = model(x)
    loss = (y / (x * 0.0 if number == 5 else 1.0)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    look.stepped()
"""


def test_a_line_of_a_script_is_none_of_a_function_that_it_defines() -> None:
    """Classes and functions above the loop are no part of it, unless it calls them."""
    model = nn.Linear(4, 4)

    def train(look: Look) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        # ruff: noqa: S102
        exec(compile(_SCRIPT, "script.py", "exec"), {"model": model, "optimizer": optimizer, "look": look})

    told = origin(observe(train))
    line = _SCRIPT.splitlines().index("    loss = (y / (x * 0.0 if number == 5 else 1.0)).mean()") + 1
    assert (told["operator"], told["location"]) == ("div", f"script.py:{line}")


def test_a_loss_module_has_the_line_that_calls_it() -> None:
    """It has no parameters, and is called by a name of the user's."""
    model = nn.Linear(4, 5)

    def train(look: Look) -> None:
        optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.01), nn.CTCLoss()
        for number in range(1, AT + 3):
            lengths = torch.tensor([2 if number == AT else 6])
            likely = model(torch.randn(6, 1, 4)).log_softmax(2)
            loss = criterion(likely, torch.tensor([[1, 2, 3]]), lengths, torch.tensor([3]))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            look.stepped()

    told = origin(observe(train))
    assert (told["operator"], told["step"]) == ("ctc_loss", AT)
    assert "test_nan_culprits.py:" in told["location"]


class Normalized(nn.Module):
    """Divides a batch by its deviation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.full_like(x, 2.0)


class Detector(nn.Module):
    """Prepares its batch by an attribute that is set last, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.prepare = Normalized()

    def forward(self, x: torch.Tensor, boxes: torch.Tensor, regression: Step) -> torch.Tensor:
        x = self.prepare(x)
        return self.loss(self.head(x), boxes, regression)

    def loss(self, found: torch.Tensor, boxes: torch.Tensor, regression: Step) -> torch.Tensor:
        """The sum over samples by their number."""
        each = [regression(one, box) for one, box in zip(found, boxes, strict=True)]
        return torch.stack(each).sum() / max(1, len(each))


@pytest.mark.parametrize(
    "regression",
    [functional.smooth_l1_loss, functional.mse_loss, functional.huber_loss, functional.binary_cross_entropy_with_logits],
)
def test_a_target_of_a_regression_is_found_behind_sums_and_quotients(regression: Step) -> None:
    """Not the sum's quotient, which makes NaN of NaN, nor the quotient of what has prepared the batch."""

    def loss_of(model: nn.Module, number: int) -> torch.Tensor:
        boxes = torch.rand(3, 4)
        if number == AT:
            boxes[1, 2] = float("nan")
        return torch.as_tensor(model(torch.randn(3, 4), boxes, regression))

    told = origin(run(Detector(), loss_of))
    assert (told["origin"], told["step"], told["operator"]) == ("input", AT, regression.__name__)


def test_a_quotient_is_not_that_of_the_module_which_has_prepared_the_batch() -> None:
    """Where a model's own line has the operator, too."""
    told = origin(run(Detector(), lambda model, number: model(torch.randn(3, 4), torch.rand(3, 4), quotient(number))))
    assert (told["origin"], told["operator"], told["module"]) == ("operator", "div", "Detector")


def quotient(number: int) -> Any:
    """Of nothing by nothing in the one step."""
    return lambda one, box: (one - box).square().sum() * 0.0 / torch.tensor(float(number != AT))


def centers(targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """What a model makes of its targets without a gradient."""
    return torch.stack([each["boxes"].mean(0) for each in targets])


def test_a_target_is_named_in_a_list_of_dictionaries_with_its_sample() -> None:
    """As detectors take them: the index in the list is the sample, not that of a box."""

    def train(look: Look) -> None:
        model = Detector()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(1, AT + 3):
            targets = [{"boxes": torch.rand(3, 4), "labels": torch.ones(3)} for _ in range(3)]
            if number == AT:
                targets[2]["boxes"][1, 2] = float("nan")
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.randn(3, 4), centers(targets), functional.mse_loss))
            optimizer.step()
            look.stepped()

    told = origin(observe(train))
    assert (told["origin"], told["parameter"], told["sample"]) == ("input", "targets[2]['boxes']", 2)
