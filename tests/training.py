"""What tests of the probes share: a session, its records, what it touches in the process, and statistics computed by hand."""

from __future__ import annotations

import copy
import math
import sys
import threading
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader

import torchobs
from tests import flights
from tests.support import wait_until
from torchobs import catalog
from torchobs.flight import reader
from torchobs.flight.step_record import RecordKind, StepFlag, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torchobs.flight.writer import FlightWriter
    from torchobs.probes.context import ProbeContext


@dataclass
class Recording:
    """A session, and what its flight file says so far."""

    session: torchobs.Session

    @property
    def context(self) -> ProbeContext:
        """What the session's probes share."""
        context = self.session.context
        assert context is not None
        return context

    @property
    def writer(self) -> FlightWriter:
        """The writer of its file."""
        writer = self.session.writer
        assert writer is not None
        return writer

    def file(self) -> closing[reader.FlightFile]:
        return closing(reader.open_path(self.writer.path))

    def view(self) -> reader.View:
        with self.file() as file:
            return file.read()

    def records(self) -> list[StepRecord]:
        """All records, the pending end of the first cycle included (as shutdown would write it)."""
        self.context.recorder.flush()
        with self.file() as file:
            return file.steps()

    def steps(self) -> list[StepRecord]:
        return [record for record in self.records() if record.kind == RecordKind.STEP]

    def values(self) -> dict[tuple[str, ...], Any]:
        return {
            (point.series.name, *(str(value) for _, value in point.series.attributes)): point.value
            for point in self.view().points
        }

    def whole_round(self) -> None:
        """Wait until the sampler has done a whole round, begun after this was called: each begins with a heartbeat."""
        for _ in range(2):
            self._beat_after(self.view().live.heartbeat_ns)

    def _beat_after(self, beat_ns: int | None) -> None:
        wait_until(lambda: self.view().live.heartbeat_ns != beat_ns)

    def look(self) -> dict[tuple[str, ...], Any]:
        """Do one whole round of the sampler's in this thread, whose own is stopped; return the values."""
        sampler = self.session._sampler
        assert sampler is not None
        sampler.stop()
        sampler._thread.join()  # which an end does not wait for longer than a second
        sampler.round(last=True)
        return self.values()

    def frames(self, name: str) -> list[dict[str, Any]]:
        """The events and spans of that name, as they stand in the file."""
        with self.file() as file:
            return [frame for frame in flights.frames(file) if frame.get("name") == name]

    def attributes(self, name: str) -> list[dict[str, Any]]:
        return [frame["attrs"] for frame in self.frames(name)]

    def errors(self) -> list[str]:
        breakers = self.context.breakers.values()
        return [f"{breaker.probe}: {breaker.failures} {breaker.errors}" for breaker in breakers if breaker.errors]


def recording(flight_dir: Path, **overrides: object) -> Iterator[Recording]:
    """Yield a recording that measures the norm in every step; check that no probe failed."""
    session = torchobs.init(flight_dir=flight_dir, **{"grad_interval": 1, **overrides})
    assert session.active
    run = Recording(session)
    try:
        yield run
        assert run.errors() == []
    finally:
        torchobs.shutdown()


def mlp(seed: int = 0, width: int = 16) -> torch.nn.Sequential:
    """A small model, the same for the same seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))


def batch(seed: int = 0, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=generator), torch.randn(size, 1, generator=generator)


def loss_of(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    """Mean squared error on one batch."""
    inputs, targets = batch(seed)
    return torch.nn.functional.mse_loss(model(inputs), targets)


def train(steps: int) -> None:
    """Some steps of a model and an optimizer of their own."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(steps):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def norm_of(model: torch.nn.Module) -> float:
    """The float64 reference of the gradients' total norm."""
    squares = [float(p.grad.double().pow(2).sum()) for p in model.parameters() if p.grad is not None]
    return math.sqrt(sum(squares))


def has(record: StepRecord, flag: int) -> bool:
    """Whether a record has the flag."""
    return bool(record.flags & flag)


__all__ = ["Recording", "StepFlag", "batch", "has", "loss_of", "mlp", "norm_of", "recording"]

METRICS = {
    "mean_abs": catalog.ACTIVATION_LAYER_MEAN_ABS,
    "std": catalog.ACTIVATION_LAYER_STD,
    "max_abs": catalog.ACTIVATION_LAYER_MAX,
    "zero": catalog.ACTIVATION_LAYER_ZERO,
    "nonfinite": catalog.ACTIVATION_LAYER_NONFINITE,
}


@dataclass
class Extreme:
    """A recording at level extreme that looks at every step, and does the sampler's rounds itself."""

    run: Recording

    @property
    def probe(self) -> Any:
        manager: Any = self.run.session._probe_manager
        return manager._probes["activations"]

    def start(self, step: Callable[[int], object]) -> None:
        """Do the first steps, of which none is looked at, and the round in which modules are chosen."""
        for index in range(4):
            step(index)
        self.look_at_every_step()
        step(4)  # the probe begins here

    def look_at_every_step(self) -> None:
        """Do a round of the sampler's, and have no step left out from now on."""
        self.run.look()
        self.probe._pace.fixed = self.probe._pace.interval = 1

    def stats(self) -> dict[str, dict[str, float]]:
        statistics: dict[str, dict[str, float]] = {}
        for (name, *attributes), value in self.run.look().items():
            for field, metric in METRICS.items():
                if name == metric.name:
                    statistics.setdefault(attributes[0], {})[field] = value
        return statistics


def hooks(model: nn.Module) -> int:
    """Forward hooks of all modules."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def by_hand(output: torch.Tensor) -> dict[str, float]:
    """The same statistics in float64."""
    values = output.detach().double().flatten()
    finite = values[values.isfinite()]
    return {
        "mean_abs": float(finite.abs().mean()),
        "std": float(finite.std(correction=0)),
        "max_abs": float(finite.abs().max()),
        "zero": float((values == 0).double().mean()),
        "nonfinite": 1.0 - len(finite) / len(values),
    }


def outputs_of(model: nn.Module, inputs: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """What a module put out when the model was called last with these inputs, computed apart."""
    kept: list[torch.Tensor] = []
    twin = copy.deepcopy(model)
    path = next(name for name, candidate in model.named_modules() if candidate is module)
    twin.get_submodule(path).register_forward_hook(lambda _module, _args, output: kept.append(output))
    twin(inputs)
    return kept[0]


def perceptron() -> nn.Sequential:
    """With dead units, some of them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def trainer(model: nn.Module, inputs: torch.Tensor, call: Callable[..., Any] | None = None) -> Callable[[int], None]:
    """A step whose weights stay as they are, so that the last one's outputs can be computed again."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(_index: int) -> None:
        optimizer.zero_grad()
        (call or model)(inputs).float().square().mean().backward()
        optimizer.step()

    return step


def surface() -> dict[str, Any]:
    """Everything of torch, sys and threading that a session touches."""
    from torch._dynamo import trace_rules
    from torch.amp import autocast_mode, grad_scaler
    from torch.optim import lr_scheduler

    replaced = (grad_scaler.GradScaler, autocast_mode.autocast, dataloader.DataLoader, *vars(lr_scheduler).values())
    return {
        "classes": {owner: dict(vars(owner)) for owner in replaced if isinstance(owner, type) and "torch" in owner.__module__},
        "save and load": (torch.save, torch.load, torch.serialization.save),
        "exit": sys.exit,
        "pre": dict(torch_optimizer._global_optimizer_pre_hooks),
        "post": dict(torch_optimizer._global_optimizer_post_hooks),
        "parameters built": dict(torch.nn.modules.module._global_parameter_registration_hooks),
        "modules built": dict(torch.nn.modules.module._global_module_registration_hooks),
        "backward": torch.autograd.backward,
        "next": vars(dataloader._BaseDataLoaderIter)["__next__"],
        "train": vars(torch.nn.Module)["train"],
        "clip": torch.nn.utils.clip_grad._get_total_norm,
        "skipped": list(trace_rules.SKIP_DIRS),
        "expression": trace_rules.SKIP_DIRS_RE.pattern,
        "excepthook": sys.excepthook,
        "thread excepthook": threading.excepthook,
        "meta path": list(sys.meta_path),
        "threads": {thread.name for thread in threading.enumerate() if thread.name.startswith("torchobs")},
    }


def torch_hooks() -> dict[str, Any]:
    """What of that is torch's."""
    ours_while_active = {"exit", "excepthook", "thread excepthook", "meta path", "threads", "skipped", "expression"}
    return {name: value for name, value in surface().items() if name not in ours_while_active}
