"""Mistakes of a loop are reported: no ``zero_grad``, ``train()`` or ``step()``, kept losses; what looks alike is not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch
from torch import nn

import torchobs
from tests.diagnosis.observing import Look, observe
from tests.training import Recording
from torchobs import catalog
from torchobs.detect.learning import LASTING_STEPS
from torchobs.probes.never_stepped import NeverStepped
from torchobs.probes.phases import OpenTime

pytestmark = pytest.mark.usefixtures("seeded")


def mistakes(run: Recording) -> list[tuple[str, int | None]]:
    """The mistakes and the steps that they are dated to."""
    run.look()
    return [(frame["attrs"]["kind"], frame.get("step")) for frame in run.frames(catalog.EVENT_LOOP_MISTAKE.name)]


def net() -> nn.Sequential:
    """A network with a mode."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))


def backward(model: nn.Module) -> None:
    """One pass over a batch."""
    torch.autograd.backward(model(torch.randn(8, 8)).square().mean())


def steps(run: Recording, model: nn.Module, optimizer: torch.optim.Optimizer, count: int, clear: Callable[[], object]) -> None:
    """Train; ``clear``: what comes before each backward pass."""
    for _ in range(count):
        clear()
        backward(model)
        optimizer.step()
    run.look()


def test_gradients_that_are_set_to_zero(run: Recording) -> None:
    """To zero or to none, with clipping, and with several passes a step."""
    for to_none in (True, False):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(12):
            for _ in range(3):
                backward(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        assert mistakes(run) == []


def test_gradients_that_are_copied_in_are_not_accumulated(run: Recording) -> None:
    """Master weights: nothing sets their gradients to zero, and nothing need."""
    model = nn.Linear(8, 1)
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    copies = [torch.zeros_like(master) for master in masters]
    for master, gradient in zip(masters, copies, strict=True):
        master.grad = gradient
    for _ in range(12):
        model.zero_grad()
        backward(model)
        with torch.no_grad():
            torch._foreach_copy_(copies, [parameter.grad for parameter in model.parameters() if parameter.grad is not None])
            optimizer.step()
            torch._foreach_copy_(list(model.parameters()), [*masters])
    assert mistakes(run) == []


def test_train_that_was_forgotten_after_an_evaluation(run: Recording) -> None:
    """Dated to the first step in evaluation mode, and reported once."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps(run, model, optimizer, 10, optimizer.zero_grad)
    model.eval()
    steps(run, model, optimizer, 2 * LASTING_STEPS + 10, optimizer.zero_grad)
    assert mistakes(run) == [("evaluation_mode", 11)]


def _partly(model: nn.Sequential) -> None:
    model.eval()
    model[4].train()


def _always(model: nn.Sequential) -> None:
    """A checkpoint that is loaded in evaluation mode may be meant to be trained so."""
    model.eval()


def _frozen(model: nn.Sequential) -> None:
    model.eval()
    model[0].requires_grad_(requires_grad=False)


@pytest.mark.parametrize("change", [_partly, _frozen, _always])
def test_a_mode_that_is_meant_so(run: Recording, change: Callable[[nn.Sequential], None]) -> None:
    """A backbone in evaluation mode, a second phase with a part frozen, and one mode from the start."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if change is not _always:
        steps(run, model, optimizer, 10, optimizer.zero_grad)
    change(model)
    steps(run, model, optimizer, LASTING_STEPS + 20, optimizer.zero_grad)
    assert mistakes(run) == []


# --- an optimizer that never steps --------------------------------------------------------------------------------------------


def passes(model: nn.Module, count: int, before: Callable[[], object] = lambda: None) -> None:
    """Backward passes, each after a call of ``before``."""
    for _ in range(count):
        before()
        model(torch.randn(8, 8)).square().mean().backward()


def test_an_optimizer_that_never_steps_is_told(run: Recording) -> None:
    """The line that was forgotten, or that an ``if`` never comes to."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for count in (60, 100):
        passes(model, count, optimizer.zero_grad)
        run.look()
    (mistake,) = run.attributes(catalog.EVENT_LOOP_MISTAKE.name)
    assert (mistake["kind"], mistake["optimizer"]) == ("never_stepped", "AdamW")
    assert mistake["backward_passes"] in range(100, 161)


def saliency() -> None:
    """Gradients of a model that is not trained here."""
    model = nn.Linear(8, 1)
    passes(model, 150, model.zero_grad)


def attack() -> None:
    """Gradients of the input; the model has an optimizer."""
    model, example = nn.Linear(8, 1), torch.randn(8, 8, requires_grad=True)
    optimizer = torch.optim.Adam(model.parameters())
    model.requires_grad_(requires_grad=False)
    for _ in range(150):
        example.grad = None
        model(example).square().mean().backward()
    del optimizer


def trains() -> None:
    """A search for something before the training, then the training."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters())
    passes(model, 50, optimizer.zero_grad)
    passes(model, 150, lambda: (optimizer.step(), optimizer.zero_grad()))


def trains_by_hand() -> None:
    """An optimizer that is made and not used, since the script updates the parameters itself."""
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters())

    def update() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
                    parameter.grad = None

    passes(model, 150, update)
    del optimizer


@pytest.mark.parametrize("script", [saliency, attack, trains, trains_by_hand], ids=lambda function: function.__name__)
def test_other_backward_passes_are_left_in_peace(run: Recording, script: Callable[[], None]) -> None:
    """Not everything with a gradient is a training without a step."""
    for _ in range(2):
        script()
        assert mistakes(run) == []


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that name what a loop without an optimizer of torch's calls."""
    return [record.message for record in caplog.records if "call torchobs.step() after each" in record.message]


@pytest.mark.parametrize(("count", "later_s"), [(49, 0.0), (150, 0.0), (2, 121.0)])
def test_a_run_without_an_optimizer_hears_of_torchobs_step_once(
    run: Recording, caplog: pytest.LogCaptureFixture, count: int, later_s: float
) -> None:
    """After 50 backward passes, or two minutes; later where other optimizers are left: theirs are watched first."""
    now_s = [1.0]
    run.look()
    caplog.clear()
    looks = NeverStepped(run.context, run.context.breaker("step"), clock=lambda: now_s[0])
    model = nn.Linear(8, 1)
    for _ in range(count):
        passes(model, 1)
        looks.sample()
        now_s[0] += later_s
    for _ in range(4 if later_s else 0):  # another test's optimizers may be alive, and are watched first, in a backward pass
        passes(model, 1)
        looks.sample()
        now_s[0] += later_s
    looks.sample()
    assert len(said(caplog)) == (count > 49 or later_s > 0)


def test_a_run_that_calls_torchobs_step_hears_nothing(run: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """It has done what would be said."""
    passes(nn.Linear(8, 1), 150, torchobs.step)
    run.look()
    assert said(caplog) == []
    assert len(run.steps()) == 150


def test_backward_passes_that_lead_to_no_step_are_not_idle(run: Recording) -> None:
    """Of updates by hand all time is before the first step."""
    passes(nn.Linear(8, 1), 20)
    run.look()
    OpenTime(run.context).sample(last=True)
    assert not run.values().get((catalog.GOODPUT_TIME.name, "idle"))


# --- losses that are kept with their graphs -----------------------------------------------------------------------------------

STEPS = 150


def test_what_does_not_grow_is_left_alone() -> None:
    """Tensors without a graph, and a window of the last losses."""
    detached, window = list[torch.Tensor](), deque[torch.Tensor](maxlen=20)

    def train(look: Look) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            optimizer.zero_grad()
            outputs = model(torch.randn(4, 8))
            window.append(outputs.square().mean())
            torch.autograd.backward(window[-1] * 1024)
            optimizer.step()
            detached.extend([window[-1].detach(), outputs.detach()])
            look.stepped()

    assert observe(train).said() == []


def test_a_graph_that_is_meant_to_stay() -> None:
    """Weights derived once; each backward pass retains their graph."""

    def train(look: Look) -> None:
        weight = nn.Parameter(torch.randn(8, 8))
        optimizer = torch.optim.SGD([weight], lr=1e-2)
        derived = (weight.detach().clone().requires_grad_() * 2.0).tanh()
        for _ in range(STEPS):
            optimizer.zero_grad()
            torch.autograd.backward((derived @ weight).square().mean(), retain_graph=True)
            optimizer.step()
            look.stepped()

    assert observe(train).said() == []
