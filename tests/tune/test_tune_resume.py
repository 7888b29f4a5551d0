"""torchobs.tune.pipeline: after a resume the run that was not interrupted, to the last bit."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, RandomSampler

from tests.tune.models import blocks
from tests.tune.pipelines import StoppedError, loss_fn, weights
from torchobs import tune


class _Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Draws from torch's and Python's generators at each fetch, as data augmentation does."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((16,), index / 22) + 0.1 * torch.randn(16) + random.random()
        return x, x[:4] * 2


def _shuffled(seed: int, generator: str, workers: int) -> DataLoader[Any]:
    """Return a loader that shuffles by the global generator, its own or its sampler's."""
    own = torch.Generator().manual_seed(seed)
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    if generator == "sampler":
        return DataLoader(_Augmented(), sampler=RandomSampler(range(22), generator=own), **options)
    return DataLoader(_Augmented(), shuffle=True, generator=own if generator == "loader" else None, **options)


@pytest.mark.parametrize(
    ("generator", "workers", "scheduler"),
    [
        ("global", 0, "cosine"),
        ("loader", 0, "cosine"),
        ("sampler", 0, "plateau"),
        ("global", 2, "plateau"),
        ("loader", 2, "cosine"),
    ],
)
@pytest.mark.parametrize("stop_at", [2, 6, 7])
def test_resumed_is_the_run_that_was_not_interrupted(
    tmp_path: Path, stop_at: int, generator: str, workers: int, scheduler: str
) -> None:
    """Promise: to the bit on a CPU, with shuffling, dropout, augmentation and an average, within an epoch or not."""
    path = tmp_path / "run.pt"

    def made(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        random.seed(seed)
        loader = _shuffled(seed, generator, workers)
        model = blocks()
        torch.manual_seed(seed)
        options: dict[str, Any] = {"accumulate": 2, "ema_decay": 0.9, "warmup_steps": 2, "amp": torch.bfloat16}
        run = tune.pipeline(model, lr=1e-2, scheduler=scheduler, **options)
        if scheduler == "plateau":
            run.scheduler = ReduceLROnPlateau(run.optimizer, patience=0, threshold=0.9)  # which lowers the rate in epoch 2
        return run, loader

    run, loader = made(1)
    losses = run.fit(loader, 3, loss_fn)

    calls = 0

    def stopping(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 2 * stop_at:
            raise StoppedError
        return loss_fn(output, target)

    first, loader_of_first = made(1)
    with pytest.raises(StoppedError):
        first.fit(loader_of_first, 3, stopping, checkpoint=path, every=1)
    second, loader_of_second = made(99)
    second.resume(path)
    assert second.step == stop_at
    torch.rand(1)  # what is drawn before it goes on makes no difference
    rest = second.fit(loader_of_second, 3, loss_fn)
    assert rest == losses[-len(rest) :]
    assert all(map(torch.equal, weights(run.model), weights(second.model)))
    assert all(map(torch.equal, weights(run.ema), weights(second.ema)))
    assert not torch.equal(weights(run.ema)[0], weights(run.model)[0])
    assert run.scheduler.state_dict() == second.scheduler.state_dict()
    rates = [run.optimizer.param_groups[0]["lr"] for run in (run, second)]
    assert rates == ([0.0, 0.0] if scheduler == "cosine" else pytest.approx([1e-4, 1e-4]))


def test_a_flipped_bit_is_no_other_state(tmp_path: Path) -> None:
    """Promise: wherever a bit of a checkpoint is flipped, it is an error and nothing is loaded, or it is the state as saved."""
    path, damaged = tmp_path / "run.pt", tmp_path / "damaged.pt"
    torch.manual_seed(0)
    saved = tune.pipeline(blocks(), optimizer="sgd", total_steps=4, amp=False)
    saved.train_step((torch.ones(4, 16), torch.ones(4, 4)), loss_fn)
    saved.save(path)
    content, model = path.read_bytes(), blocks(depth=3)
    run, chance = tune.pipeline(model, optimizer="sgd", total_steps=4, amp=False), random.Random(0)
    before, errors = weights(model), 0
    with zipfile.ZipFile(path) as archive:  # one in each record, beside those anywhere
        starts = [entry.header_offset + 128 for entry in archive.infolist()]
    for position in [*starts, *(chance.randrange(len(content)) for _ in range(100))]:
        flipped = bytearray(content)
        flipped[position] ^= 1 << chance.randrange(8)
        damaged.write_bytes(flipped)
        try:
            run.resume(damaged)
        except ValueError:
            errors += 1
            assert all(map(torch.equal, before, weights(model)))
        else:
            assert all(map(torch.equal, weights(saved.model), weights(model)))
            assert run.step == 1
            for weight, value in zip(model.parameters(), before, strict=True):
                weight.data.copy_(value)
    assert errors > 60


def test_checksums_are_written_where_they_are_switched_off(tmp_path: Path) -> None:
    """Promise: a checkpoint can be told from a damaged one, and what the process has set for its own files stays."""
    run = tune.pipeline(blocks(), amp=False)
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        run.save(tmp_path / "run.pt")
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    run.resume(tmp_path / "run.pt")
