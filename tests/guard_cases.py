"""Small real models for the guard's functions: a batch, a contract, inputs that are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from tests.debug.models import MODELS
from torchobs import guard

if TYPE_CHECKING:
    from collections.abc import Callable

Batch = dict[str, torch.Tensor]


class Case(NamedTuple):
    """A model and what it takes. The batch has its arguments by name, and a ``target``."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    contract: guard.Contract
    """of the first argument"""
    wrong: tuple[torch.Tensor, ...]
    """first arguments that it cannot take"""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss."""
        target, inputs = batch["target"], {name: value for name, value in batch.items() if name != "target"}
        output = model(**inputs)
        if isinstance(output, torch.Tensor):
            return nn.functional.cross_entropy(output, target)
        return nn.functional.mse_loss(output.sample, target)


def _of(name: str, argument: str, contract: guard.Contract, *wrong: torch.Tensor) -> Case:
    make, batch = MODELS[name]
    return Case(make, lambda: dict(zip((argument, "target"), batch(), strict=True)), contract, wrong)


def _unet() -> nn.Module:
    import diffusers

    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    model: nn.Module = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4, **blocks
    )
    return model


def _noise() -> Batch:
    return {"sample": torch.randn(4, 1, 8, 8), "timestep": torch.randint(100, (4,)), "target": torch.randn(4, 1, 8, 8)}


CASES = {
    "MLP": _of("MLP", "input", guard.Contract("batch 8", dtype="floating"), torch.randn(5, 7), torch.ones(5, 8).long()),
    "CNN": _of("CNN", "input", guard.Contract("batch 3 height width", dtype="floating"), torch.randn(5, 4, 8, 8)),
    "GPT": _of("GPT", "tokens", guard.Contract("batch length", dtype="integer", min=0, max=10), torch.randn(5, 6)),
    "UNet": Case(_unet, _noise, guard.Contract("batch 1 8 8", dtype="floating"), (torch.randn(4, 3, 8, 8),)),
}
"""The MLP and the CNN are ``Sequential``, whose argument is called ``input``"""
