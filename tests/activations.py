"""What tests of level extreme share: a recording that looks at every step, and the statistics computed by hand."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.training import Recording

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
        """The probe."""
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
        """The series by layer."""
        found: dict[str, dict[str, float]] = {}
        for (name, *attributes), value in self.run.look().items():
            for field, metric in METRICS.items():
                if name == metric.name:
                    found.setdefault(attributes[0], {})[field] = value
        return found


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
    path = next(name for name, each in model.named_modules() if each is module)
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
