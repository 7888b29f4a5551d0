"""What becomes of the gradients besides their total: layers and their names, clipping, non-finite elements, zeros, updates."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import torchobs
from tests.training import Recording, StepFlag, has, loss_of, mlp, norm_of, recording
from torchobs import catalog
from torchobs.flight.control import LEVELS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def shown(run: Recording) -> dict[tuple[str, ...], Any]:
    """All values, once the sampler has looked as it does at the end: in its place, for it is one thread."""
    run.records()
    sampler = run.session._sampler
    assert sampler is not None
    sampler.stop()
    sampler._thread.join()
    for probe, observe in run.session._slow:
        if probe == "gradients":
            observe()
    assert run.session.writer is not None
    run.session.writer.publish()
    return run.values()


def layers(run: Recording, metric: catalog.Metric = catalog.GRAD_LAYER_NORM) -> dict[str, float]:
    """A metric's values by layer."""
    return {key[1]: value for key, value in shown(run).items() if key[0] == metric.name}


def backward(model: Any, seed: int = 0) -> None:
    """Gradients, by whatever wraps backward at the time."""
    loss_of(model, seed).backward()  # type: ignore[no-untyped-call]


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int = 0, spoil: Callable[[], object] | None = None) -> None:
    """One step of training; ``spoil`` is called when the gradients are there."""
    optimizer.zero_grad()
    backward(model, seed)
    weights = {name: value.clone() for name, value in model.state_dict().items()} if spoil is not None else {}
    if spoil is not None:
        spoil()
    optimizer.step()
    if weights:
        model.load_state_dict(weights)  # even a learning rate of 0 times NaN is NaN


def test_what_is_beyond_the_cap_is_other_and_counted(flight_dir: Path) -> None:
    """Ten thousand layers are sixteen series and one; nothing is silent, and the squares still add up."""
    for run in recording(flight_dir, layers=16):
        model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(2, 4)).square().mean().backward()
        norm = norm_of(model)
        optimizer.step()
        values = shown(run)
        found = layers(run)
        assert len(found) == 17
        assert values["torchobs.grad.layers_folded",] == 24
        assert sum(value**2 for value in found.values()) == pytest.approx(norm**2, rel=1e-4)


@pytest.mark.parametrize("how", ["modules", "param_names", "watch", "wrapped"])
def test_names_are_found(run: Recording, how: str) -> None:
    """By the optimizer's own names, by watch(), or by looking for the modules; wrappers leave no trace in them."""
    model: Any = nn.Sequential()
    model.add_module("first", nn.Linear(8, 4))
    model.add_module("second", nn.Linear(4, 1))
    trained: nn.Module = model
    if how == "watch":
        torchobs.watch(model)
    if how == "wrapped":
        trained = torch.compile(nn.DataParallel(model), backend="eager")  # type: ignore[assignment]
    named = [(f"module.{name}", p) for name, p in model.named_parameters()] if how == "param_names" else model.parameters()
    optimizer = torch.optim.SGD(named, lr=0.1)
    step(trained, optimizer)
    assert layers(run).keys() == {"first", "second"}


def test_tied_frozen_late_and_nameless_parameters(run: Recording) -> None:
    """Tied ones are one, frozen ones none, late ones are found, and what no module holds is called by its place."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    model[1].weight = model[0].weight
    model[2].requires_grad_(requires_grad=False)
    bare = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([*model[:3].parameters(), bare], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8) * bare).sum().backward()
        optimizer.step()
    assert layers(run).keys() == {"0", "1", "group0.5"}
    optimizer.add_param_group({"params": list(model[3].parameters())})
    optimizer.zero_grad()
    model(torch.randn(4, 8) * bare).sum().backward()
    optimizer.step()
    assert layers(run).keys() == {"0", "1", "3", "group0.5"}


def test_two_models_with_the_same_paths_are_told_apart(run: Recording) -> None:
    """A GAN's generator and discriminator both have a layer 0."""
    one, two = mlp(0), mlp(1)
    first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
    for _ in range(3):
        step(one, first)
        step(two, second)
    found = layers(run)
    assert len(found) == 4
    assert sum(value**2 for value in found.values()) == pytest.approx(run.steps()[-1].grad_norm ** 2, rel=1e-4)


def test_clipping_by_norm_is_counted_and_its_threshold_shown(run: Recording) -> None:
    """A step is clipped when its norm exceeded the threshold; layers are those of before."""
    model: Any = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = 0.0
    for limit in (1e-3, 1e6, 1e-3):
        optimizer.zero_grad()
        backward(model)
        before = norm_of(model[0])
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    steps = run.steps()
    assert [has(record, StepFlag.CLIPPED) for record in steps] == [True, False, True]
    values = shown(run)
    assert values["torchobs.grad.clipped_steps",] == 2
    assert values["torchobs.grad.clip.max_norm",] == 1e-3
    assert layers(run)["0"] == pytest.approx(before, rel=1e-4)


@pytest.mark.parametrize("how", ["public names", "a part", "without foreach", "imported before"])
def test_every_way_to_clip_is_seen(run: Recording, how: str) -> None:
    """The two halves by their public names, a part of the model, the slow path, a name that was imported long ago."""
    from torch.nn.utils import clip_grad_norm_

    model: Any = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        if how == "public names":
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, norm)
        elif how == "a part":
            clip_grad_norm_(model[0].parameters(), 1e-3)
        else:
            clip_grad_norm_(model.parameters(), 1e-3, foreach=None if how == "imported before" else False)
        optimizer.step()
    assert [has(record, StepFlag.CLIPPED) for record in run.steps()] == [True, True]
    assert layers(run).keys() == {"0", "2"}


def test_nonfinite_elements_are_counted_and_their_layers_named(run: Recording) -> None:
    """How many, where and of which kind; the event says it once, the counter always."""
    model: Any = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def spoil() -> None:
        model[2].weight.grad[0, :3] = float("nan")
        model[2].bias.grad[0] = float("inf")

    step(model, optimizer)
    shown(run)
    for _ in range(2):
        step(model, optimizer, spoil=spoil)
    values = shown(run)
    assert values["torchobs.grad.nonfinite_elements",] == 8
    assert values["torchobs.grad.nonfinite_steps",] == 2
    assert run.attributes("torchobs.grad.nonfinite") == [
        {"layers": ["2"], "layers_affected": 1, "elements": 4, "kinds": ["inf", "nan"]}
    ]
    assert layers(run)["2"] > 0  # the last finite one


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("size", [1e20, 1e-25])
def test_what_float32_cannot_square_is_finite_and_not_zero(run: Recording, size: float, *, clipped: bool) -> None:
    """1e20 squared overflows and 1e-25 squared is 0 in float32; the gradient is neither infinite nor zero."""
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        (parameter * size).sum().backward()  # type: ignore[no-untyped-call]
        if clipped:
            torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
    assert [record.grad_norm for record in run.steps()] == pytest.approx([size * 10**0.5] * 2, rel=1e-6)
    values = shown(run)
    assert values["torchobs.grad.nonfinite_elements",] == 0
    assert values["torchobs.grad.zero",] == 0.0


def test_dead_layers_are_shown(run: Recording) -> None:
    """A layer behind a ReLU that never fires has gradients of exactly zero: two of four tensors."""
    model: Any = mlp()
    with torch.no_grad():
        model.append(nn.ReLU()).append(nn.Linear(1, 1))
        model[2].bias.fill_(-1e6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, optimizer)
    assert shown(run)["torchobs.grad.zero",] == pytest.approx(5 / 6)


def test_updates_are_measured_from_level_advanced_on(flight_dir: Path) -> None:
    """Gradients of ones and SGD: a step moves each of n weights by the learning rate. At level basic there is none of it."""
    for level in ("basic", "advanced"):
        for run in recording(flight_dir, level=level, overhead_budget=0.2):
            model: Any = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
            for index in range(60):
                backward(model)
                for parameter in model.parameters():
                    parameter.grad.fill_(1.0)
                optimizer.step()
                if not index:
                    shown(run)
            found, sizes = layers(run, catalog.UPDATE_LAYER_RATIO), layers(run, catalog.PARAM_LAYER_NORM)
            assert found.keys() == sizes.keys() == (set() if level == "basic" else {"0", "2"})
            for name, size in sizes.items():
                elements = sum(parameter.numel() for parameter in model[int(name)].parameters())
                assert size == pytest.approx(norm_of_weights(model[int(name)]), rel=1e-2)
                assert found[name] == pytest.approx(1e-5 * elements**0.5 / size, rel=1e-2)


def norm_of_weights(layer: nn.Module) -> float:
    """The reference."""
    return float(sum(p.detach().double().pow(2).sum() for p in layer.parameters()) ** 0.5)


def test_the_level_decides_while_training_runs(run: Recording) -> None:
    """Four times as many layers at advanced, and back."""
    assert run.session.context is not None
    (changed,) = run.session.context.hooks.level.listeners
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for level, series in (("basic", 17), ("advanced", 22)):
        changed(LEVELS.index(level))
        step(model, optimizer)
        assert len(layers(run)) == series


def test_odd_gradients_are_measured(run: Recording) -> None:
    """Empty, sparse, complex, half, double, conjugated and not contiguous ones, all in one optimizer."""
    torch.manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(0, 3)),
        nn.Parameter(torch.randn(5, dtype=torch.float64)),
        nn.Parameter(torch.randn(5, dtype=torch.complex64)),
        nn.Parameter(torch.randn(300, 700).half()),
        nn.Parameter(torch.randn(300, 700).bfloat16().t()),
        nn.Parameter(torch.randn(4, 3)),
    ]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    for parameter in parameters[:5]:
        parameter.grad = torch.randn_like(parameter)
    parameters[2].grad = torch.randn(5, dtype=torch.complex64).conj()
    indices = torch.tensor([[0, 0, 2]])
    parameters[5].grad = torch.sparse_coo_tensor(indices, torch.ones(3, 3), (4, 3), check_invariants=False)
    expected = [p.grad.to_dense().resolve_conj() for p in parameters if p.grad is not None]
    squares = [float(grad.abs().double().pow(2).sum()) for grad in expected]
    optimizer.step()
    assert run.steps()[0].grad_norm == pytest.approx(sum(squares) ** 0.5, rel=1e-3)


def test_no_gradient_outlives_its_step(run: Recording) -> None:
    """We hold names and numbers, never tensors: memory is freed when the user frees it."""
    model: Any = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.zero_grad()
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # and no step follows, as when a loss scaler skips it
    import weakref

    alive = [weakref.ref(p.grad) for p in model.parameters()]
    optimizer.zero_grad()
    gc.collect()
    assert [reference for reference in alive if reference() is not None] == []
    assert run.errors() == []


def test_a_large_gradient_is_not_copied(flight_dir: Path) -> None:
    """A bfloat16 gradient of 25 million elements (50 MB): measuring it adds nothing to the peak of the memory."""
    program = f"""
import torch, torchobs
from torch.optim import optimizer as hooks
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
torchobs.init(flight_dir={str(flight_dir)!r}, grad_interval=1)
small = torch.nn.Parameter(torch.zeros(200_000, dtype=torch.bfloat16))
large = torch.nn.Parameter(torch.zeros(25_000_000, dtype=torch.bfloat16))
for parameter in (small, large):
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer = torch.optim.SGD([parameter], lr=0.0, foreach=False)
    before = peak()
    for handler in hooks._global_optimizer_pre_hooks.values():
        handler(optimizer, (optimizer,), {{}})
    print(peak() - before)
    optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 20_000  # KiB
