"""Model FLOPs of a training, their share of a device's peak, and the exact count."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchobs
from tests.training import Recording, StepFlag, has, mlp
from torchobs import debug
from torchobs.probes.flops import FlopsProbe

if TYPE_CHECKING:
    from torchobs.probes.context import ProbeContext

VOCABULARY, WIDTH, LENGTH, BATCH = 13, 8, 6, 2
OWN = VOCABULARY * WIDTH + VOCABULARY
"""Parameters of the output layer: the embedding is only looked up"""
FLOPS, MFU = ("torchobs.model.flops",), ("torchobs.mfu",)


def train(steps: int, dtype: torch.dtype | None = None) -> None:
    """A language model, perhaps under autocast."""
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters())
    for (ids,) in DataLoader(TensorDataset(torch.zeros(steps * BATCH, LENGTH, dtype=torch.int64)), batch_size=BATCH):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(ids).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    MODELS[:] = [model, optimizer]


MODELS: list[Any] = []
"""Keeps what was trained last: a run's estimate is about models that are there"""


def test_a_language_model_s_operations_are_estimated(run: Recording) -> None:
    """Six for each token and parameter that multiplies; on a CPU there is no peak to compare them with."""
    train(5)
    values = run.look()
    assert values[FLOPS] == 6 * OWN * BATCH * LENGTH
    assert MFU not in values


def test_without_tokens_there_is_no_estimate(run: Recording) -> None:
    """A model of other inputs has operations only where the script gives them, and what it gives counts before any estimate."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (inputs,) in DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=4):
        model(inputs).sum().backward()
        optimizer.step()
    assert FLOPS not in run.values()
    context = given(run)
    probe = FlopsProbe()
    probe.install(context)
    run.look()
    probe.observe()
    assert FLOPS not in run.values()
    torchobs.log(flops=1e9)
    again = FlopsProbe()
    again.install(context)
    again.observe()
    context.writer.publish()
    assert run.values()[FLOPS] == 1e9


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA A100-SXM4-80GB", None, 19.5e12),
        ("Tesla T4", torch.bfloat16, None),
        ("NVIDIA A999", None, None),
    ],
)
def test_the_utilization_is_the_share_of_the_device_s_peak(
    run: Recording, name: str, dtype: torch.dtype | None, peak: float | None
) -> None:
    """By the steps' durations alone, and the type of autocast or of the parameters; absent where that has no peak."""
    train(6, dtype)
    run.look()
    context = given(run)
    probe = FlopsProbe(lambda _: name)  # as if the CPU were one
    probe.install(context)
    probe.observe()
    context.writer.publish()
    values = run.values()
    assert (MFU in values) == (peak is not None)
    if peak is not None:
        mean_s = fmean(step.duration_s for step in run.steps() if not has(step, StepFlag.UNTIMED))
        assert values[MFU] == pytest.approx(6 * OWN * BATCH * LENGTH / mean_s / peak, rel=1e-6)


def test_what_cannot_be_is_not_shown(run: Recording) -> None:
    """More than the peak: the share ends, as it does when training has ended."""
    train(6)
    run.look()
    context = given(run)
    probe = FlopsProbe(lambda _: "NVIDIA H200")
    probe.install(context)
    probe.observe()
    context.writer.publish()
    assert run.values()[MFU] > 0
    torchobs.log(flops=1e30)
    train(3)
    context.recorder.flush()
    context.writer.fold()
    probe.observe()
    context.writer.publish()
    assert MFU not in run.values()


def test_the_type_of_autocast_is_known(run: Recording) -> None:
    """By the type of device, once it was entered in training."""
    train(2, torch.bfloat16)
    assert given(run).training.autocast == {"cpu": "bfloat16"}


def given(run: Recording) -> ProbeContext:
    """The session's context."""
    assert run.session.context is not None
    return run.session.context


def test_the_estimate_and_the_count_agree() -> None:
    """On a model of layers alone, but for the gradient of its input, which nobody needs."""
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=False) for _ in range(10)])
    found = debug.count_flops(model, torch.ones(7, 32))
    assert found.flops == 6 * 7 * 10 * 32 * 32 - 2 * 7 * 32 * 32
