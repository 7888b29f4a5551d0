"""Distributed training, in real process groups of two ranks: what is recognised, what DDP says, and whether ranks agree."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import closing
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests import flights, support
from tests.diagnosis.observing import read
from tests.training import Recording, loss_of, mlp
from torchobs import catalog
from torchobs.cli.top import Watch, screen
from torchobs.detect.disagreement import LOOKED_BATCHES, drifted, same_batches, same_losses
from torchobs.diagnosis.health import health
from torchobs.document.text import TerminalStyle
from torchobs.exporter.config import ExporterConfig
from torchobs.flight import reader
from torchobs.probes.distributed import AXES, Parallelism, Place, by_axis, of_frameworks, recognise, root_dimensions
from torchobs.probes.replicas import number_of, sums_of
from torchobs.ranks.live import DetailsReader, RunsReader
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from pathlib import Path


class Ended(NamedTuple):
    """What a rank printed, and what its flight file holds in the end."""

    said: dict[str, Any]
    values: dict[tuple[str, ...], Any]
    events: list[dict[str, Any]]


def train(start: Any, flight_dir: Path, *program: str) -> list[Ended]:
    """Two ranks of a program, to their end; `distributed_rank`'s arguments, or `-c` and a script."""
    command = (sys.executable, *(() if program[0] == "-c" else ("-m", "tests.distributed_rank")), *program)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(support.free_port()), "OMP_NUM_THREADS": "1"}
    environment = {**support.clean_environment(), **world, "TORCHOBS_DIR": str(flight_dir)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": support.ROOT}
    ranks = [start(*command, torch=True, env={**environment, "RANK": rank, "LOCAL_RANK": rank}, **streams) for rank in "01"]
    outputs = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    said = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    return [Ended(answer, *_recorded(flight_dir, rank)) for rank, answer in enumerate(said)]


def _recorded(flight_dir: Path, rank: int) -> tuple[dict[tuple[str, ...], Any], list[dict[str, Any]]]:
    for path in flight_dir.glob("*.flight"):
        with closing(reader.open_path(os.fspath(path))) as file:
            view = file.read(final=True)
            if view.header.resource["rank"] == rank:
                points = [((point.series.name, *(f"{name}={value}" for name, value in point.series.attributes)), point.value)
                          for point in view.points]  # fmt: skip
                return dict(points), flights.frames(file)
    raise AssertionError(f"no flight file of rank {rank}")


def errors(ended: Ended) -> list[tuple[str, ...]]:
    """Probes that failed."""
    return [key for key, value in ended.values.items() if key[0] == "torchobs.probe.errors" and value]


def test_ddp_is_found_and_tells_its_timings(start: Any, flight_dir: Path) -> None:
    """A model made long before init() is found in one of its forwards. Not one collective is ours."""
    for ended in train(start, flight_dir, "ddp"):
        values = ended.values
        assert errors(ended) == []
        assert values[("torchobs.distributed.world_size",)] == 2
        assert values[("torchobs.distributed.info", "backend=gloo", "mesh=", "parallelism=ddp")] == 1
        parts = ("forward", "backward", "communication", "overlap")
        times = {part: values[("torchobs.ddp.time", f"part={part}")] for part in parts}
        assert all(0 < time < 5 for time in times.values())
        assert times["overlap"] <= times["communication"]
        assert values[("torchobs.ddp.buckets",)] >= 2
        assert 0 < values[("torchobs.ddp.bucket.size",)] <= 16_000
        assert values[("torchobs.ddp.unused.size",)] == (3 * 3 + 3) * 4
        labels = ("comm_hook=", "find_unused_parameters=true", "gradient_as_bucket_view=false", "static_graph=false")
        setup = ("torchobs.ddp.info", *labels)
        assert values[setup] == 1
        events = [fields["attrs"] for fields in ended.events if fields["name"] == "torchobs.distributed"]
        assert events[-1] == {"backend": "gloo", "world_size": 2, "parallelism": "ddp", "mesh": ""}
        assert len([key for key in values if key[0].startswith(("torchobs.distributed", "torchobs.ddp"))]) <= 12
        assert ended.said["watched"] == ended.said["plain"] > 0


@pytest.mark.usefixtures("run", "group")  # in this order
def test_a_short_run_tells_ddp_s_choices(run: Recording) -> None:
    """A hook that compresses gradients changes what is communicated. Six steps, and a process group made after init()."""
    model = DistributedDataParallel(mlp(), static_graph=True, gradient_as_bucket_view=True)
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    values: dict[tuple[str, ...], Any] = {}
    for index in range(6):
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        values = run.look()
    assert values["torchobs.ddp.info", "fp16_compress_hook", "false", "true", "true"] == 1
    assert ("torchobs.ddp.unused.size",) not in values
    with Join([model]):
        loss_of(model).backward()  # type: ignore[no-untyped-call]
    assert any("ddp+join" in key for _ in range(2) for key in run.look()), "ranks of uneven inputs have other steps"


def test_sharded_models_are_recognised(start: Any, flight_dir: Path) -> None:
    """``fully_shard`` by its device mesh, without DDP's series or a collective."""
    for rank, ended in enumerate(train(start, flight_dir, "fsdp2")):
        assert ended.values[("torchobs.distributed.info", "backend=gloo", "mesh=dp=2", "parallelism=fsdp2")] == 1
        place = ("torchobs.distributed.coordinates", *(f"{axis}={rank if axis == 'dp' else ''}" for axis in sorted(AXES)))
        assert ended.values[place] == 1
        assert ended.values[("torchobs.distributed.copies",)] == 1, "tokens are divided by it"
        assert [key for key in ended.values if key[0].startswith("torchobs.ddp")] == []
        assert ended.said["watched"] == ended.said["plain"] > 0
        assert errors(ended) == []


def test_axes_without_parameters_are_known_by_their_process_groups() -> None:
    """A pipeline stage's parameters are plain tensors. Rank 5 of eight, which is in a group of no mesh, too.

    Tensor parallelism is known by its mesh.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        distributed.new_group([4, 5], group_desc="cp")
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        assert recognise([], ddp=True) == Parallelism(("ddp",), (), 4, (("dp", 0), ("tp", 1), ("pp", 1)))
        assert root_dimensions(mesh["tp"]) == {"pp": (1, 2), "dp": (0, 2), "tp": (1, 2)}
        model = parallelize_module(mlp(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        assert recognise([Optimizer(*model.parameters())], ddp=False).kinds == ("tensor",)
    finally:
        distributed.destroy_process_group()


class Optimizer:
    def __init__(self, *parameters: object) -> None:
        self.param_groups = [{"params": list(parameters)}]


AXES_OF: tuple[tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]], ...] = (
    ({"dp": (1, 2), "tp": (3, 4), "world": (7, 8)}, {"dp": (1, 2), "tp": (3, 4)}),
    ({"dp_replicate": (1, 2), "dp_shard": (2, 4), "cp": (0, 2)}, {"dp": (6, 8), "cp": (0, 2)}),
    ({"dp_shard": (2, 4), "fsdp": (5, 8), "cp": (1, 2)}, {"dp": (2, 4), "cp": (1, 2)}),  # fsdp: dp_shard and cp in one
    ({"replicate": (1, 2), "shard": (0, 2)}, {"dp": (2, 4)}),
    ({"dp": (1, 2), "dp_shard": (0, 2), "pipeline": (1, 2), "ep": (2, 4)}, {"dp": (1, 2), "pp": (1, 2), "ep": (2, 4)}),
    ({"dim0": (1, 2)}, {}),
)


def test_axes_by_the_names_of_dimensions() -> None:
    """As torchtitan, Lightning, Accelerate and PyTorch's documentation name them."""
    for named, axes in AXES_OF:
        assert by_axis({name: Place(*place) for name, place in named.items()}) == axes


class Grid:
    """The getters of DeepSpeed's pipeline grid: its "model" is tensor and pipeline parallelism in one."""

    def __getattr__(self, name: str) -> Any:
        values = {"data_parallel": (1, 2), "slice_parallel": (1, 2), "model_parallel": (5, 6), "pipe_parallel": (2, 3)}
        for axis, (rank, size) in values.items():
            if name in {f"get_{axis}_rank", f"get_{axis}_world_size"}:
                return lambda: rank if name.endswith("_rank") else size
        raise AttributeError(name)


def test_a_framework_that_is_loaded_says_where_a_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By attribute: Megatron's module before its groups exist, and after; DeepSpeed's with and without a grid."""
    assert of_frameworks() == {}
    deepspeed = ModuleType("deepspeed.utils.groups")
    deepspeed.mpu = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, deepspeed.__name__, deepspeed)
    assert of_frameworks() == {}
    deepspeed.mpu = Grid()  # type: ignore[attr-defined]
    assert of_frameworks() == {"dp": (1, 2), "tp": (1, 2), "pp": (2, 3)}
    spread = recognise([Optimizer(torch.nn.Parameter(torch.ones(1)))], ddp=False)
    assert (spread.copies, spread.coordinates) == (6, (("dp", 1), ("tp", 1), ("pp", 2)))

    megatron = ModuleType("megatron.core.parallel_state")
    ready = False
    values = {"tensor_model": (1, 4), "pipeline_model": (0, 1), "data": (3, 8), "context": (1, 2), "expert_model": (0, 1)}
    vars(megatron)["model_parallel_is_initialized"] = lambda: ready
    for axis, (rank, size) in values.items():
        vars(megatron)[f"get_{axis}_parallel_rank"] = lambda rank=rank: rank
        vars(megatron)[f"get_{axis}_parallel_world_size"] = lambda size=size: size
    monkeypatch.setitem(sys.modules, megatron.__name__, megatron)
    assert of_frameworks()["pp"] == (2, 3), "DeepSpeed's, until Megatron has made its groups"
    ready = True
    assert of_frameworks() == {"dp": (3, 8), "tp": (1, 4), "cp": (1, 2)}


_PLAIN = """
import torch, torch.distributed as dist, torchobs
from torch.utils.data import DataLoader, TensorDataset

torchobs.init()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rank = dist.get_rank()

def step(x, y):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
{loop}
dist.destroy_process_group()
torchobs.shutdown()
print("{{}}")
"""
_LOADED = """
data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
torch.manual_seed(0)
loader = DataLoader(data, batch_size=8, {loader})
for epoch in range(2):
    for x, y in loader:
        {step}
"""
_OF_PARTS = """\
step(x[rank::2], y[rank::2])
        for u, v in DataLoader(data, batch_size=8):
            model.module(u)
"""


def script(*, loader: str = "shuffle=True", step: str = "step(x, y)") -> str:
    """A training with a data loader."""
    return _PLAIN.format(loop=_LOADED.format(loader=loader, step=step))


def said_live(flight_dir: Path) -> tuple[str, str]:
    """What the live page and `torchobs top` say of the run."""
    with closing(Scanner(ExporterConfig(flight_dir=str(flight_dir)))) as scanner:
        snapshot = scanner.scan()
        (shown,) = RunsReader().runs(snapshot, DetailsReader().gather(scanner, snapshot, ()))
        runs, _ = Watch(scanner).look()
    return health(shown).text, "\n".join(screen(runs, TerminalStyle(1000), 100).lines)


def test_a_sampler_that_is_missing(start: Any, flight_dir: Path) -> None:
    """All ranks read all data, in one order; the remedy is named."""
    train(start, flight_dir, "-c", script(loader="shuffle=True, num_workers=1"))
    observed = read(flight_dir)
    assert "same_batches" in observed.kinds()
    assert "DistributedSampler" in observed.text("same_batches")
    assert all("DistributedSampler" in text for text in said_live(flight_dir))


def test_ranks_with_data_of_their_own(start: Any, flight_dir: Path) -> None:
    """Nothing is said of parts of a batch, nor of an evaluation on all data.

    What is compared is written down for each of the first iterations, on every rank.
    """
    train(start, flight_dir, "-c", script(step=_OF_PARTS))
    observed = read(flight_dir)
    assert observed.said() == []
    assert [fact.step for fact in observed.events(catalog.EVENT_REPLICA_BATCHES)][:1] == [1]
    assert not any("same data" in text for text in said_live(flight_dir))


def test_batches_are_told_apart() -> None:
    """By values and by their order; nested, of any type."""
    x = torch.arange(12.0).view(3, 4)
    batches: list[Any] = [x, x.flip(0), [x, x], {"ids": x.long(), "mask": x > 2}]
    assert len({number_of(batch) for batch in batches}) == len(batches)
    assert number_of((x, [x.half()])) == number_of([x, x])
    assert number_of({"text": "a", "n": 3}) is None
    assert number_of([x, torch.full((2,), torch.nan)]) is None


def test_the_verdict_needs_batches_and_losses() -> None:
    """Eight batches that differ from each other, and losses equal to the bit."""
    batches = [float(number) for number in range(LOOKED_BATCHES)]
    losses = {step: 1.0 / (1 + step) for step in range(1, 20)}
    other = losses | {19: losses[19] * (1 + 2**-50)}
    assert same_losses([losses, losses])
    assert not same_losses([losses, other])
    assert same_batches({"0": {1: batches}, "1": {1: batches}}) == 1
    assert same_batches({"0": {1: batches}, "1": {1: batches[::-1]}}) is None
    assert same_batches({"0": {1: [1.0] * 8}, "1": {1: [1.0] * 8}}) is None


_WEIGHTS = """
torch.manual_seed(rank)
for number in range(1, 34):
    if rank == 1 and number == 20:
        torch.nn.init.normal_(model.module[0].weight)
    step(torch.randn(4, 8), torch.zeros(4, 1))
"""


def test_weights_changed_on_one_rank(start: Any, flight_dir: Path) -> None:
    """As by a checkpoint that is loaded on one rank alone, after the model was wrapped."""
    train(start, flight_dir, "-c", _PLAIN.format(loop=_WEIGHTS))
    observed = read(flight_dir)
    assert "weights_differ" in observed.kinds()
    assert "in step 32 the weights of ranks 0 and 1 are not the same (in step 16 they were)" in observed.text("weights_differ")


def weights(ranks: int, odd: dict[str, float]) -> dict[str, dict[int, list[float]]]:
    """What ranks write down in three steps; those that are odd have noise of that part of the weights' size in the last two."""
    chance = random.Random(0)
    sums: dict[str, dict[int, list[float]]] = {}
    for step in (16, 32, 64):
        same = [chance.gauss(0, 1) for _ in range(128)]
        for rank in map(str, range(ranks)):
            noise = odd.get(rank, 0.0) if step > 16 else 0.0
            sums.setdefault(rank, {})[step] = sums_of([value + noise * chance.gauss(0, 1) for value in same])
    return sums


def test_the_odd_rank_is_named() -> None:
    """Since when, when they last were alike, and who; of two ranks, and of two halves, nobody is the odd one."""
    assert drifted(weights(4, {"2": 0.1})) == (32, 16, ("2",))
    assert drifted(weights(2, {"1": 0.1})) == (32, 16, ("0", "1"))
    assert drifted(weights(4, {"1": 0.1, "3": 0.5})) == (32, 16, ("0", "1", "2", "3"))
    assert drifted(weights(8, dict.fromkeys("0123", 1e-4))) is None, "rounding"
    assert drifted({"0": {16: [1.0, 2.0]}, "1": {32: [5.0, 6.0]}}) is None, "no common step"
    assert drifted({"0": {16: [1.0, float("nan")]}, "1": {16: [1.0, 3.0]}}) is None
