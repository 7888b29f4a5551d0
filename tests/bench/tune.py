"""What each mode of torchobs.tune gains on this machine, as docs/tune.md has it: ``python -m tests.bench.tune [MODEL …]``.

Prints a Markdown table for each model, made by ``tune.benchmark``, and draws it where ``--plots DIR`` says.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchobs import tune

TRAINING = ("none", "amp", "compile", "memory_efficient", "full")
INFERENCE = ("none", "compile", "inference")
ROUNDS = 15


def mlp() -> tuple[nn.Module, Any]:
    """Three layers of 512, batches of 64."""
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, (torch.randn(64, 512), torch.randint(0, 10, (64,)))


def cnn() -> tuple[nn.Module, Any]:
    """Three convolutions of 32 channels, batches of 16 images of 32 × 32."""
    layers = [part for _ in range(3) for part in (nn.LazyConv2d(32, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    x = torch.randn(16, 3, 32, 32)
    model(x)
    return model, (x, torch.randint(0, 10, (16,)))


def transformer() -> tuple[nn.Module, Any]:
    """Four encoder layers of width 128, batches of 8 sequences of 64."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Flatten(), nn.Linear(64 * 128, 10))
    return model, (torch.randn(8, 64, 128), torch.randint(0, 10, (8,)))


def unet() -> tuple[nn.Module, Any]:
    """A UNet of diffusers with two levels of 32 and 64 channels, random weights; batches of 8 images of 16 × 16."""
    from diffusers import UNet2DModel

    class Denoiser(nn.Module):
        """Takes and returns tensors, as a loss function does."""

        def __init__(self) -> None:
            super().__init__()
            self.unet = UNet2DModel(
                sample_size=16,
                layers_per_block=1,
                block_out_channels=(32, 64),
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            )

        def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
            noise: torch.Tensor = self.unet(x, steps).sample
            return noise

    x = torch.randn(8, 3, 16, 16)
    return Denoiser(), ((x, torch.randint(1000, (8,))), torch.randn_like(x))


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "unet": unet}


def table(name: str, result: Any) -> str:
    """Return a benchmark as rows of Markdown."""
    rows = []
    for each in result.modes:
        memory = "–" if each.memory_savings is None else f"{100 * each.memory_savings:.0f} %"
        verdict = "" if each is result.modes[0] else ", noise" if each.is_noise else ""
        speed = f"{each.speedup_factor.median:.2f} [{each.speedup_factor.low:.2f}, {each.speedup_factor.high:.2f}]{verdict}"
        step, first = f"{1e3 * each.step_s.median:.2f} ms", f"{each.first_step_s:.2g} s"
        rows.append(f"| {name} | {each.mode} | {step} | {speed} | {memory} | {first} | {each.difference:.1e} |")
    return "\n".join(rows)


def main() -> None:
    """Benchmark the models that are asked for, by default all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--plots", type=Path, help="directory of the pictures")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(MODELS)}")
    print("| model | mode | step | times as fast | memory saved | first step | difference |\n|---|---|---|---|---|---|---|")
    for name in options.models:
        torch.manual_seed(0)
        model, (x, target) = MODELS[name]()
        loss_fn = nn.functional.cross_entropy if target.dtype == torch.int64 else nn.functional.mse_loss
        optimizer = torch.optim.AdamW(model.parameters())
        level: Any = {"level": "advanced", "rounds": ROUNDS}
        training = tune.benchmark(model, (x, target), optimizer, loss_fn, modes=TRAINING, **level)
        inference = tune.benchmark(model, x, modes=INFERENCE, quantize="dynamic", **level)
        for kind, result in ("training", training), ("inference", inference):
            print(table(f"{name}, {kind}", result), flush=True)
            if options.plots:
                result.plot(options.plots / f"tune-{name}-{kind}.svg")


if __name__ == "__main__":
    main()
