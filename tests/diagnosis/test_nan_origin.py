"""NaN and infinity are traced to where they were born, in real trainings, each with a sickness at a random step and place."""

from __future__ import annotations

import random
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import nn

import torchobs
from tests import flights, support
from tests.diagnosis.random_trainings import TRAININGS, Setup, Sickly
from tests.diagnosis.sick_models import build, kinds, plant
from tests.diagnosis.sicknesses import not_finite
from tests.training import Recording, recording
from torchobs import catalog, debug
from torchobs.flight import reader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACCURACY = 0.95


@pytest.mark.long
def test_the_culprit_is_named_at_the_first_occurrence(pytestconfig: pytest.Config) -> None:
    """Kind, operator, module, parameter, sample and step all have to be right in 95 of 100 cases; every second by default.

    Every training with every sickness that it can have; optimizer and precision by turns.
    """
    cases = [(training, kind) for training in TRAININGS for kind in kinds(training)]
    chosen = list(enumerate(cases))[:: 1 if pytestconfig.getoption("share") >= 1 else 2]
    wrong = list[str]()
    for place, (training, kind) in chosen:
        precision = "bfloat16" if place % 3 == 0 else "float32"
        setup = Setup(training, ("sgd", "adamw")[place // 2 % 2], precision, compiled=False, seed=place)
        verdict = not_finite(setup, random.Random(place), kind, last_start=8, grad_interval=1)
        if not verdict.culprit or verdict.steps:
            wrong.append(f"{setup}: {verdict}")
    assert len(wrong) <= (1 - ACCURACY) * len(chosen), "\n".join(wrong)


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """A recording."""
    torch.manual_seed(0)
    yield from recording(flight_dir, log_level="ERROR")


@pytest.mark.parametrize("odd", ["masked", "infinite_target", "unused_nan", "where", "norm_at_zero", "root_of_small"])
def test_infinities_that_do_no_harm_are_no_birth(run: Recording, odd: str) -> None:
    """Values that are not finite are ordinary as long as the loss and the gradients are."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(6):
        x = torch.randn(5, 4)
        h = model(x)
        if odd == "masked":
            h = h.masked_fill(torch.eye(5, 4).bool(), float("-inf")).softmax(-1)
        if odd == "infinite_target":
            h = torch.minimum(h, torch.full_like(h, float("inf")))
        if odd == "unused_nan":
            torch.log(h - h - 1)
        if odd == "norm_at_zero":
            h = h + torch.linalg.vector_norm(h - h.detach(), dim=-1, keepdim=True)  # whose derivative torch takes to be 0
        if odd == "root_of_small":
            h = h + torch.sqrt((h - h.detach()).square() + 1e-12)
        if odd == "where":
            h = torch.where(h.isfinite(), h, torch.full_like(h, float("nan")))
        optimizer.zero_grad()
        torch.autograd.backward(h.square().mean())
        optimizer.step()
    run.look()
    assert run.frames(catalog.EVENT_NONFINITE_ORIGIN.name) == []


class Looked(nn.Module):
    """Mentions ``*`` behind its last module, and ``/`` where nobody who reads its code finds it."""

    divide: ClassVar[dict[str, Any]] = {"sick": lambda h: h / (h - h.detach()), "": lambda h: h}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.sickness = nn.Linear(4, 4), nn.Linear(4, 3), ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.last(self.divide[self.sickness](self.first(x))) * 2.0
        return logits


@pytest.mark.parametrize(("sickness", "scale", "module"), [("sick", 1.0, "Looked"), ("", 1e38, "")])
def test_a_line_that_only_has_the_same_operator_is_not_named(run: Recording, sickness: str, scale: float, module: str) -> None:
    """Of the script, if the model calls what comes before and after; of the model, if the loss comes before."""
    model, rate = Looked(), scale / 2
    for number in range(4):
        model.sickness = sickness if number == 3 else ""
        loss = nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.arange(5) % 3)
        torch.autograd.backward(loss * scale * scale if number == 3 else loss * rate)
    run.look()
    (origin,) = run.attributes(catalog.EVENT_NONFINITE_ORIGIN.name)
    assert origin.get("module", "") == module
    assert bool(module) != (int(origin.get("location", ":0").rpartition(":")[2]) > Looked.forward.__code__.co_firstlineno + 3)


def bits(tensor: torch.Tensor) -> list[int]:
    """All bits of a tensor: NaN is not equal to itself."""
    return tensor.reshape(-1).view(torch.uint8).tolist()


def guarded(seed: int, *, guard: bool) -> list[torch.Tensor]:
    """Train through a sickness that passes, held back by a guard or by hand; return weights, statistics, randomness."""
    training = build("cnn", "adamw", seed)
    chance, model, optimizer = random.Random(seed), training.models["model"], training.optimizers["model"]
    guarding = debug.nan_guard(optimizer) if guard else None
    for number in range(8):
        x = training.make_batch()
        planted = plant(training, "sqrt" if number == 3 else "log", chance, x) if number in {3, 5} else None
        optimizer.zero_grad()
        loss = training.losses["model"](x)
        torch.autograd.backward(loss)
        if guard or planted is None:
            optimizer.step()
        for _, module in training.modules(Sickly):
            module.sickness = ""
    if guarding is not None:
        guarding.remove()
        assert guarding.held == 2
    return [*(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def test_training_is_bit_identical_with_tracing_armed_and_after_it(flight_dir: Path) -> None:
    """Two faults are traced, the backward passes in between are watched: nothing of the training differs, no hook stays."""
    plain = guarded(1, guard=False)
    recorder = recording(flight_dir, log_level="ERROR")
    run = next(recorder)
    traced = guarded(1, guard=True)
    run.look()
    culprits = run.attributes(catalog.EVENT_NONFINITE_ORIGIN.name)
    assert [(culprit["origin"], culprit["operator"]) for culprit in culprits] == [("backward", "sqrt"), ("operator", "log")]
    assert len(run.frames(catalog.EVENT_STEP_HELD.name)) == 2
    assert [bits(tensor) for tensor in plain] == [bits(tensor) for tensor in traced]
    assert run.session.context is not None
    assert not any(probe == "nonfinite" for probe, _ in run.session.context.hooks.takes_loss._by_probe)
    next(recorder, None)


def test_a_traced_step_leaves_no_memory_behind(run: Recording) -> None:
    """Neither the graph nor the batch of the faulty step is kept, by us or by the frames that were looked at."""
    model = nn.Linear(4, 4)
    gone = []

    def fit() -> None:
        for number in range(4):
            x = torch.randn(5, 4)
            x[0, 0] = float("nan")
            loss = model(x).mean()
            loss.backward()
            if number == 0:
                gone.extend([weakref.ref(x), weakref.ref(loss)])
        assert [reference() for reference in gone] == [None, None]

    fit()
    run.look()
    (frame,) = run.frames(catalog.EVENT_NONFINITE_ORIGIN.name)
    assert (frame["attrs"]["parameter"], frame["attrs"]["sample"]) == ("x", 0)


def test_a_guarded_fault_is_seen_in_the_next_backward_with_its_values(run: Recording) -> None:
    """First inferred from the graph; the weights stay finite, and so the same node is then seen at work, and told once."""
    training = build("mlp", "adamw", 0)
    _, module = training.modules(Sickly)[1]
    module.sickness = "half_power"
    with debug.nan_guard(training.optimizers["model"]) as guard:
        for _ in range(4):
            training.step()
    assert guard.held == 4
    assert all(parameter.isfinite().all() for parameter in training.models["model"].parameters())
    run.look()
    (frame,) = run.frames(catalog.EVENT_NONFINITE_ORIGIN.name)
    assert (frame["attrs"]["operator"], frame["attrs"]["module"]) == ("pow", "blocks.1")
    assert run.session.context is not None
    assert any(origin.inputs for origin in run.session.context.origins.values())


def test_the_anomaly_and_the_callback_name_the_culprit(run: Recording) -> None:
    """``torchobs.anomaly`` has module and operator; ``on_anomaly`` gets the whole origin; one that raises is called once."""
    reports: list[torchobs.AnomalyReport] = []
    end = torchobs.on_anomaly(reports.append)
    broken = torchobs.on_anomaly(lambda _: 1 / 0)
    training, step = build("mlp", "sgd", 3), 5
    for _ in range(1, step):
        training.step()
    planted, x = plant(training, "log", random.Random(3), training.make_batch())
    for _ in range(3):
        training.step(x)
    run.look()
    end()
    broken()
    frame = next(event for event in run.frames(catalog.EVENT_ANOMALY.name) if event["attrs"]["kind"] == "nonfinite_loss")
    assert (frame["step"], frame["attrs"]["module"], frame["attrs"]["operator"]) == (step, planted.module, "log")
    first = next(report for report in reports if report.kind == "nonfinite_loss")
    assert (first.step, first.origin.module, first.origin.kind) == (step, planted.module, "operator")
    with pytest.raises(TypeError, match="takes a function"):
        torchobs.on_anomaly(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("sickness", ["log", "sqrt"])
def test_raise_on_ends_the_training_before_the_optimizer_steps(flight_dir: Path, sickness: str) -> None:
    """``NonFiniteError`` has the origin, the weights are finite, and afterwards nothing raises."""
    session = recording(flight_dir, raise_on={"nonfinite"}, log_level="ERROR")
    next(session)
    training = build("mlp", "sgd", 0)
    training.step()
    planted, x = plant(training, sickness, random.Random(0), training.make_batch())
    with pytest.raises(torchobs.NonFiniteError) as raised:
        training.step(x)
    origin = raised.value.origin
    assert origin is not None
    assert (origin.kind, origin.operator, origin.module) == (planted.kind, planted.operator, planted.module)
    assert all(parameter.isfinite().all() for parameter in training.models["model"].parameters())
    next(session, None)
    training.step(x)


@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_two_ranks_name_the_culprit_each_for_itself(start: Any, flight_dir: Path, way: str) -> None:
    """No rank waits for another: one with a bad batch names its sample, the other blames nothing of its own.

    FSDP frees the weights after the forward pass, so that nothing can be computed again, and has functions of its own in it.
    """
    port, ranks = support.free_port(), []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**support.clean_environment(), **place, "TORCHOBS_DIR": str(flight_dir), "OMP_NUM_THREADS": "1"}
        command = (sys.executable, "-m", "tests.scripts.nan_rank", way)
        ranks.append(start(*command, torch=True, env=environment, cwd=support.ROOT, stderr=subprocess.PIPE))
    outputs = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    culprits: dict[int, list[dict[str, Any]]] = {}
    for path in flight_dir.glob("*.flight"):
        file = reader.open_path(str(path))
        frames = [frame for frame in flights.frames(file) if frame.get("name") == catalog.EVENT_NONFINITE_ORIGIN.name]
        rank = int(file.read(final=True).header.resource["rank"])
        culprits[rank] = [{"step": frame["step"], **frame["attrs"]} for frame in frames]
        file.close()
    assert (culprits[1][0]["step"], culprits[1][0]["origin"], culprits[1][0]["sample"]) == (5, "input", 2)
    assert culprits[1][0]["module"] == "first"
    assert {culprit["origin"] for culprit in culprits[0]} <= {"unknown"}


def test_a_script_s_own_locals_stay_as_they_are(run: Recording) -> None:
    """A script that keeps ``locals()``, for its hyperparameters, finds in it what it has put there."""
    source = "def train(lr, wd, loss):\n    kept = locals()\n    (loss * float('nan')).backward()\n    return dict(kept)\n"
    names: dict[str, Any] = {}
    exec(source, names)  # noqa: S102  # pytest rewrites functions of this file, which then name `locals` themselves
    loss = nn.Linear(2, 1)(torch.ones(1, 2)).mean()
    assert names["train"](0.1, 0.2, loss).keys() == {"lr", "wd", "loss"}
    run.look()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_what_a_hook_cannot_look_at_does_not_reach_the_user(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of an unusual kind turns the probe off, if anything, and never the backward pass of the training."""
    recorder: Any = recording(flight_dir)
    next(recorder)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(4):
        optimizer.zero_grad()
        ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
        parts = [part.sum() for part in model(ragged).unbind()]
        loss = torch.stack(parts).mean()
        monkeypatch.setattr(Faulty, "ill", number == 0)
        torch.autograd.backward(Faulty.apply(loss))  # type: ignore[no-untyped-call]
        optimizer.step()
    torchobs.shutdown()
    recorder.close()  # what the hook raised keeps this frame, and with it the recorder, which else ends a later session


class Faulty(torch.autograd.Function):
    """A function of the user's, with a derivative that is wrong from some step on."""

    ill = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """A copy."""
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """NaN."""
        del ctx
        return gradients[0] * float("nan") if Faulty.ill else gradients[0]


def test_a_derivative_that_the_user_has_written_is_named(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its class and line, in a step that was not measured, of a finite loss: the next one's graph and the weights tell."""
    torch.manual_seed(0)
    recorder = recording(flight_dir, log_level="ERROR", grad_interval=100)
    run = next(recorder)
    body, head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
    for number in range(8):
        monkeypatch.setattr(Faulty, "ill", number == 5)
        optimizer.zero_grad()
        torch.autograd.backward(head(Faulty.apply(body(torch.randn(5, 4)))).square().mean())  # type: ignore[no-untyped-call]
        optimizer.step()
    run.look()
    ((step, culprit),) = [(frame["step"], frame["attrs"]) for frame in run.frames(catalog.EVENT_NONFINITE_ORIGIN.name)]
    assert (culprit["origin"], culprit["operator"], step, __file__ in culprit["location"]) == ("backward", "Faulty", 6, True)
    next(recorder, None)


def test_a_derivative_has_its_step_though_the_graph_is_gone_before_the_optimizer_steps(run: Recording) -> None:
    """A helper that returns a detached loss frees the graph: what the weights have become tells of the step before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def descend(factor: float) -> torch.Tensor:
        loss = torch.sqrt(model(torch.randn(5, 4)).square() * factor + 1.0 * (factor > 0)).mean()
        torch.autograd.backward(loss)
        return loss.detach()

    for number in range(8):
        optimizer.zero_grad()
        descend(0.0 if number == 5 else 1.0)
        optimizer.step()
    run.look()
    (frame,) = run.frames(catalog.EVENT_NONFINITE_ORIGIN.name)
    assert (frame["attrs"]["origin"], frame["attrs"]["operator"], frame["step"]) == ("backward", "sqrt", 6)
