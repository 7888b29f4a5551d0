"""Gradients: norms against a float64 reference, layers, shards, clipping, non-finite elements, zeros, updates, explosions."""

from __future__ import annotations

import gc
import json
import math
import os
from dataclasses import dataclass
from functools import partial
from math import isnan, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchobs
from tests import fork_server
from tests.training import Recording, StepFlag, has, loss_of, mlp, norm_of, recording
from torchobs import catalog
from torchobs.detect.spikes import BlownLayer
from torchobs.document.live import figures
from torchobs.probes.layers import MOST_LAYERS, SHOWN_S, GrownLayers
from torchobs.ranks.rank_view import RunView
from torchobs.ranks.runs import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def shown(run: Recording) -> dict[tuple[str, ...], Any]:
    """All values, once the sampler has looked as it does at the end."""
    run.records()
    return run.look()


def layers(run: Recording, metric: catalog.Metric = catalog.GRAD_LAYER_NORM) -> dict[str, float]:
    """A metric's values by layer."""
    return {key[1]: value for key, value in shown(run).items() if key[0] == metric.name}


def backward(model: Any, seed: int = 0) -> None:
    """Gradients, by whatever wraps backward at the time."""
    loss_of(model, seed).backward()  # type: ignore[no-untyped-call]


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    """One step of training."""
    optimizer.zero_grad()
    backward(model, seed)
    optimizer.step()


def test_what_is_beyond_the_cap_is_other_and_counted(flight_dir: Path) -> None:
    """Ten thousand layers are sixteen series and one; nothing is silent, and the squares still add up."""
    for run in recording(flight_dir, layers=16):
        model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(2, 4)).square().mean().backward()
        norm = norm_of(model)
        optimizer.step()
        values = shown(run)
        norms = layers(run)
        assert len(norms) == 17
        assert values["torchobs.grad.layers_folded",] == 24
        assert sum(value**2 for value in norms.values()) == pytest.approx(norm**2, rel=1e-4)


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
    generator, discriminator = mlp(0), mlp(1)
    first, second = torch.optim.SGD(generator.parameters(), lr=0.1), torch.optim.SGD(discriminator.parameters(), lr=0.1)
    for _ in range(3):
        step(generator, first)
        step(discriminator, second)
    norms = layers(run)
    assert norms.keys() == {f"Sequential{number}.{layer}" for number in ("", 2) for layer in (0, 2)}
    assert sum(value**2 for value in norms.values()) == pytest.approx(run.steps()[-1].grad_norm ** 2, rel=1e-4)


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


@pytest.mark.parametrize("how", ["public names", "without foreach", "imported before"])
def test_every_way_to_clip_is_seen(run: Recording, how: str) -> None:
    """The two halves by their public names, the slow path, a name that was imported long ago."""
    from torch.nn.utils import clip_grad_norm_

    model: Any = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        if how == "public names":
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, norm)
        else:
            clip_grad_norm_(model.parameters(), 1e-3, foreach=None if how == "imported before" else False)
        optimizer.step()
    assert [has(record, StepFlag.CLIPPED) for record in run.steps()] == [True, True]


def test_nonfinite_elements_are_counted_and_their_layers_named(run: Recording) -> None:
    """How many, where, and inf or NaN; the event says it once, the counter always."""
    model: Any = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step(model, optimizer)
    shown(run)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        model[2].weight.grad[0, :3] = float("nan")
        model[2].bias.grad[0] = float("inf")
        optimizer.step()
        model.load_state_dict(weights)  # even a learning rate of 0 times NaN is NaN
    values = shown(run)
    assert values["torchobs.grad.nonfinite_elements",] == 8
    assert values["torchobs.grad.nonfinite_steps",] == 2
    assert run.attributes("torchobs.grad.nonfinite") == [
        {"layers": ["2"], "layers_affected": 1, "elements": 4, "kinds": ["inf", "nan"]}
    ]
    assert layers(run)["2"] > 0  # the last finite one


def test_what_float32_cannot_square_is_finite_and_not_zero(run: Recording) -> None:
    """1e20 squared overflows and 1e-25 squared is 0 in float32; the gradient is neither infinite nor zero."""
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    sizes = [1e20, 1e20, 1e-25, 1e-25]
    for index, size in enumerate(sizes):
        optimizer.zero_grad()
        (parameter * size).sum().backward()  # type: ignore[no-untyped-call]
        if index % 2:
            torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()
        assert shown(run)["torchobs.grad.zero",] == 0.0
    assert [record.grad_norm for record in run.steps()] == pytest.approx([size * 10**0.5 for size in sizes], rel=1e-6)
    assert shown(run)["torchobs.grad.nonfinite_elements",] == 0


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
            ratios, sizes = layers(run, catalog.UPDATE_LAYER_RATIO), layers(run, catalog.PARAM_LAYER_NORM)
            assert ratios.keys() == sizes.keys() == (set() if level == "basic" else {"0", "2"})
            for name, size in sizes.items():
                elements = sum(parameter.numel() for parameter in model[int(name)].parameters())
                assert size == pytest.approx(nn.utils.get_total_norm(model[int(name)].parameters()).item(), rel=1e-2)
                assert ratios[name] == pytest.approx(1e-5 * elements**0.5 / size, rel=1e-2)


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


STEPS = 4
LARGE = 40_000_000


def reference(parameters: Any) -> float:
    """The float64 norm, a chunk at a time."""
    total = 0.0
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        total += sum(float(part.double().pow(2).sum()) for part in grad.detach().reshape(-1).split(4_000_000))
    return math.sqrt(total)


def gpt() -> nn.Module:
    """Two blocks, with the embedding tied to the head. Attention without a mask: only its gradients matter here."""
    embedding, head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    head.weight = embedding.weight
    blocks = [nn.TransformerEncoderLayer(32, 2, 128, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(2)]
    return nn.Sequential(embedding, *blocks, head)


def large_mlp() -> nn.Module:
    """Large enough for a weight to take the path of large tensors."""
    return nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 1))


def cnn() -> nn.Module:
    """With batch normalisation, in channels_last."""
    layers = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    )
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]  # it has no such overload


def rows() -> torch.Tensor:
    """A batch for the MLP."""
    return torch.randn(4, 8)


def tokens() -> torch.Tensor:
    """One for the GPT."""
    return torch.randint(0, 64, (4, 12))


@dataclass(frozen=True)
class Case:
    """One training. ``cast``: autocast's type; ``dtype``: the weights'; ``scaled``: with a loss scaler."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    within: float = 1e-4
    dtype: torch.dtype = torch.float32
    cast: torch.dtype | None = None
    scaled: bool = False


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Changes p.grad in its step."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True, foreach=True)


def muon(parameters: Any) -> torch.optim.Optimizer:
    """Takes matrices only."""
    return torch.optim.Muon([parameter for parameter in parameters if parameter.dim() == 2], lr=1e-3)


fused = partial(torch.optim.AdamW, lr=1e-3, fused=True)
"""Unscales in its step"""
CASES = {
    "mlp, sgd nesterov foreach": Case(large_mlp, rows, sgd),
    "mlp, adamw fused, fp16 with scaler": Case(large_mlp, rows, fused, 1e-2, cast=torch.float16, scaled=True),
    "mlp, sgd, fp16 with scaler": Case(large_mlp, rows, sgd, 1e-2, cast=torch.float16, scaled=True),
    "cnn, sgd, bf16 autocast": Case(
        cnn, lambda: torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last), sgd, 1e-2, cast=torch.bfloat16
    ),
    "gpt, adamw fused": Case(gpt, tokens, fused),
    "gpt, adafactor, bf16": Case(gpt, tokens, lambda p: torch.optim.Adafactor(p, lr=1e-3), 1e-2, dtype=torch.bfloat16),
    "gpt, muon for its matrices": Case(gpt, tokens, muon),
}


@pytest.mark.parametrize("name", CASES)
def test_norms_equal_the_reference_step_by_step(run: Recording, name: str) -> None:
    """Whatever trains, and however, loss and norm are those of the step, without the loss scale: as backward left them."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model().to(case.dtype)
    optimizer = case.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=case.scaled)
    norms, losses = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = case.inputs()
        with torch.autocast("cpu", case.cast or torch.bfloat16, enabled=case.cast is not None):
            loss = model(inputs).abs().float().square().mean()
        losses.append(loss.item())
        scaler.scale(loss).backward()
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norms.append(reference(stepped) / scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    assert [record.loss for record in run.steps()] == losses
    assert [record.grad_norm for record in run.steps()] == pytest.approx(norms, rel=case.within)
    assert min(norms) > 0


def test_an_embedding_of_forty_million_elements(run: Recording) -> None:
    """Where torch's own foreach norm is 2.4e-3 off."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(LARGE // 1000, 1000))
    weight.grad = torch.randn(LARGE // 1000, 1000)
    optimizer = torch.optim.SGD([weight], lr=0.0, foreach=True)
    optimizer.step()
    assert [record.grad_norm for record in run.steps()] == pytest.approx([reference([weight])], rel=1e-4)


RANKS = 2
CLIPPED_TO = 1e-3
LAYOUTS = ("fsdp", "hsdp", "tensor parallel", "fsdp1", "fsdp1 original")


def train_sharded(rank: int, directory: str) -> None:
    """A rank: train with each layout, and write what is recorded of it."""
    world = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ.update(world)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    recorded = {how: train_one(how, f"{directory}/{how}/{rank}") for how in LAYOUTS}
    Path(directory, f"{rank}.json").write_text(json.dumps(recorded))
    dist.barrier()
    dist.destroy_process_group()


def sharded(how: str) -> nn.Module:
    """A model with that layout."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.LayerNorm(4))
    if how.startswith("fsdp1"):
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=how.endswith("original"))
    if how == "hsdp":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ranks",))
    if how == "tensor parallel":
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh)
    return model  # type: ignore[no-any-return]


def train_one(how: str, flight_dir: str) -> dict[str, Any]:
    """Train three steps; the last is clipped."""
    session = torchobs.init(flight_dir=flight_dir, grad_interval=1)
    model: Any = sharded(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    whole = []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        full = [getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for p in model.parameters()]
        squares = torch.tensor(sum(float(gradient.double().pow(2).sum()) for gradient in full if gradient is not None))
        if how.startswith("fsdp1"):
            dist.all_reduce(squares)
        whole.append(float(squares) ** 0.5)
        if step == 2 and how.startswith("fsdp1"):
            model.clip_grad_norm_(CLIPPED_TO)
        elif step == 2 and how != "tensor parallel":  # torch itself cannot clip DTensors and tensors together
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPED_TO)
        optimizer.step()
    run = Recording(session)
    values = shown(run)  # written down before the steps are read: the directory need not be on tmpfs
    steps = run.steps()
    recorded = {
        "norms": [record.grad_norm for record in steps], "whole": whole,
        "clipped": [has(record, StepFlag.CLIPPED) for record in steps],
        "ranks": values["torchobs.grad.norm_ranks",], "layers": layers(run), "errors": run.errors(),
    }  # fmt: skip
    torchobs.shutdown()
    return recorded


@pytest.fixture(scope="module")
def said_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank said, by layout: one pair of processes for all, since most of a process is torch's import."""
    answers = fork_server.said_by_ranks(train_sharded, tmp_path_factory.mktemp("ranks"))
    return {how: [rank[how] for rank in answers] for how in LAYOUTS}


@pytest.mark.parametrize("how", LAYOUTS)
def test_squares_over_the_ranks_add_up_to_the_whole(how: str, said_of: dict[str, list[dict[str, Any]]]) -> None:
    """Σ norm² × norm_ranks / ranks is the whole's: of tensors sharded, replicated, or plain beside DTensors.

    Promise: where torch.nn.utils clips gradients, each rank has the whole's norm, and nobody has computed or exchanged it for
    us. FSDP1 clips by a method of its own: there it is that of this rank's shard, after clipping.
    """
    answers, whole_is_known = said_of[how], how in {"fsdp", "hsdp"}
    for step in range(3):
        ranks = 1 if step == 2 and whole_is_known else RANKS
        squares = sum(rank["norms"][step] ** 2 * ranks / RANKS for rank in answers)
        whole = CLIPPED_TO if step == 2 and how.startswith("fsdp1") else answers[0]["whole"][step]
        assert sqrt(squares) == pytest.approx(whole, rel=1e-3)
    norms = [rank["norms"][2] for rank in answers]
    assert (norms[0] == pytest.approx(norms[1], rel=1e-6)) == whole_is_known
    if how != "fsdp1":  # which has one flat parameter
        assert {name for rank in answers for name in rank["layers"]} == {"0", "2", "3"}
    assert [rank["clipped"] for rank in answers] == [[False, False, whole_is_known]] * RANKS
    assert [rank["ranks"] for rank in answers] == [1 if whole_is_known else RANKS] * RANKS
    assert [rank["errors"] for rank in answers] == [[], []]


@pytest.fixture(params=[0.005, 0.2], ids=["seldom", "often"])
def paced(flight_dir: Path, request: pytest.FixtureRequest) -> Iterator[Recording]:
    """A recording with the interval that a user gets: by the default budget seldom, by a generous one in every step."""
    yield from recording(flight_dir, grad_interval=None, overhead_budget=request.param)


def test_every_clipped_step_has_its_norm_before_clipping(paced: Recording) -> None:
    """Whatever changes on the way: a layer is frozen and thawed, a step clips twice, one not at all, a gradient overflows."""
    model = mlp(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    norms, clipped = dict[int, float](), list[bool]()
    for step in range(1, 301):
        frozen = 100 <= step < 130
        for parameter in parameters[:2]:
            parameter.requires_grad_(not frozen)
        optimizer.zero_grad()
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        if step == 200:
            assert parameters[2].grad is not None
            parameters[2].grad[0, 0] = torch.inf
        limit = 1e-6 if step % 3 else 1e6
        norms[step] = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
        if step % 50 == 7:
            torch.nn.utils.clip_grad_norm_(parameters, 1e6)
        if step % 40 != 11:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        clipped.append(step % 40 != 11 and limit < norms[step] < torch.inf)
        optimizer.step()
        if step == 200:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.nan_to_num_(0.1)
    records = paced.steps()
    assert len(records) == 300
    for record in records:
        if record.step % 40 != 11:
            assert has(record, StepFlag.GRAD_NORM), record.step
            assert record.grad_norm == pytest.approx(norms[record.step], rel=1e-5)
    assert [has(record, StepFlag.CLIPPED) for record in records] == clipped


def test_clipping_a_part_does_not_pass_for_the_whole(run: Recording) -> None:
    """Only the first layer is clipped: the norm is that of all gradients, as the optimizer finds them."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    norms = []
    for index in range(3):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model[0].parameters(), 0.01)
        norms.append(norm_of(model))
        optimizer.step()
    assert [record.grad_norm for record in run.steps()] == pytest.approx(norms, rel=1e-4)


LATE_STEPS = 12


def mistakes(run: Recording) -> list[dict[str, Any]]:
    """The attributes of the mistakes that were reported."""
    return [frame["attrs"] for frame in run.frames(catalog.EVENT_LOOP_MISTAKE.name)]


def train_clipping(run: Recording, before: Callable[[nn.Module], object], after: Callable[[nn.Module], object]) -> None:
    """A loop of three micro-batches with something between backward and step, something after the step, and a look."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(LATE_STEPS):
        optimizer.zero_grad()
        for _ in range(3):
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            before(model)
        optimizer.step()
        after(model)
        run.look()


def clip(limit: float) -> Callable[[nn.Module], object]:
    """Clip by norm."""
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), limit)


def nothing(_: nn.Module) -> None:
    """Do nothing."""


def test_a_clipping_after_the_step_is_told(run: Recording) -> None:
    """Once, whether it clips or not."""
    train_clipping(run, nothing, clip(0.5))
    assert mistakes(run) == [{"kind": "clipped_late"}]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (clip(0.5), nothing),
        (clip(0.5), lambda model: nn.utils.get_total_norm([p.grad for p in model.parameters()])),
        (nothing, lambda model: nn.utils.clip_grad_norm_(model.parameters(), float("inf"))),
    ],
    ids=["each micro-batch", "a norm for the log", "a norm by an infinite limit"],
)
def test_others_are_left_alone(
    run: Recording, before: Callable[[nn.Module], object], after: Callable[[nn.Module], object]
) -> None:
    """What clips in time, in each micro-batch, or asks for a norm alone."""
    train_clipping(run, before, after)
    assert mistakes(run) == []


def test_a_scaler_that_skips_steps_makes_no_clipping_late(run: Recording) -> None:
    """A step that is skipped ends nothing of what clipping has changed."""
    model, scaler = mlp(), GradScaler("cpu", init_scale=2.0**60, growth_interval=1000, backoff_factor=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(LATE_STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * 1e30).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        run.look()
    assert mistakes(run) == []


def growth(run: Recording) -> dict[str, Any]:
    """How much the gradients of layers grew."""
    return {key[1]: value for key, value in run.values().items() if key[0] == catalog.GRAD_LAYER_GROWTH.name}


def test_layers_that_grew_are_shown_for_ten_minutes(run: Recording) -> None:
    """At most eight names in a whole run; a layer with a usual gradient of zero has a number, too."""
    context = run.session.context
    assert context is not None
    grown = GrownLayers(context)
    for index in range(12):
        grown.publish(BlownLayer(f"layer{index}", 5.0, float(index > 0)), 0.0)
    context.writer.publish()
    named = growth(run)
    assert len(named) == MOST_LAYERS
    assert (named["layer0"], named["layer1"]) == (1e9, 5.0)
    grown.publish(BlownLayer("layer1", 9.0, 1.0), SHOWN_S - 1.0)
    grown.forget(SHOWN_S)
    context.writer.publish()
    assert {name for name, value in growth(run).items() if value is not None and not isnan(value)} == {"layer1"}


def test_how_many_parameters_the_model_has(run: Recording, flight_dir: Path) -> None:
    """Each once, tied ones too; frozen ones apart, with the name of a frozen layer between trained ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    tied = nn.ModuleDict({"body": model, "again": model[3]})
    for layer in (model[0], model[2]):
        layer.requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([parameter for parameter in tied.parameters() if parameter.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    values = shown(run)
    name = catalog.MODEL_PARAMETERS.name
    assert (values[name, "trainable"], values[name, "frozen"]) == (25, 40)
    (event,) = run.attributes(catalog.EVENT_FROZEN_BETWEEN.name)
    assert (event["layers"], event["layers_affected"]) == (["body.2"], 1)
    (view,), _ = load(list(flight_dir.glob("*.flight")))
    (card,) = [figure for figure in figures(view, RunView((view,), 1, 1)).figures if figure.name == "Parameters"]
    assert (card.value, card.more) == ("65", "25 trained, 40 frozen; frozen between trained ones: layer body.2")
