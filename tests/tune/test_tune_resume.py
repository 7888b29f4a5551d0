"""torchobs.tune.pipeline: a run goes on from its checkpoint, and a damaged one is refused."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.tune.models import blocks
from tests.tune.pipelines import Listed, StoppedError, loss_fn, weights
from torchobs import tune


@pytest.mark.parametrize("scheduler", ["cosine", "plateau"])
@pytest.mark.parametrize("stop_at", [2, 5, 6, 7])
def test_resumed_is_the_run_that_was_not_interrupted(tmp_path: Path, stop_at: int, scheduler: str) -> None:
    """Promise: to the bit, within an epoch or not, where neither loader nor model draws a random number."""
    path, batches = tmp_path / "run.pt", [(torch.randn(4, 16), torch.randn(4, 4)) for _ in range(5)]
    first_weights = blocks(dropout=0.0).state_dict()

    def made() -> tune.Pipeline:
        model = blocks(dropout=0.0)
        model.load_state_dict(first_weights)
        run = tune.pipeline(model, lr=1e-2, scheduler=scheduler, accumulate=2, warmup_steps=2, amp=torch.bfloat16)
        if scheduler == "plateau":
            run.scheduler = ReduceLROnPlateau(run.optimizer, patience=0, threshold=0.9)  # lowers the rate in epoch 2
        return run

    run = made()
    losses = run.fit(Listed(batches), 3, loss_fn)
    calls = 0

    def stopping(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 5 * (stop_at // 3) + 2 * (stop_at % 3):  # an epoch has three steps, of 2, 2 and 1 batches
            raise StoppedError
        return loss_fn(output, target)

    with pytest.raises(StoppedError):
        made().fit(Listed(batches), 3, stopping, checkpoint=path, every=1)
    second = made().resume(path)
    assert second.step == stop_at
    rest = second.fit(Listed(batches), 3, loss_fn)
    assert rest == losses[-len(rest) :]
    assert all(map(torch.equal, weights(run.model), weights(second.model)))
    assert run.scheduler.state_dict() == second.scheduler.state_dict()
    assert run.optimizer.param_groups[0]["lr"] == second.optimizer.param_groups[0]["lr"]


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
