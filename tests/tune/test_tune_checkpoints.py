"""Checkpoints of `tune.pipeline`: how they are written, and which are refused without a change."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.tune.models import blocks
from tests.tune.pipelines import PAIR, loss_fn, weights
from torchobs import tune
from torchobs.tune import checkpoint_file


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    """Promise: a checkpoint is whole or not there, and no half of one is left beside it."""
    path = tmp_path / "run.pt"
    checkpoint_file.save({"step": 1}, path)
    with pytest.raises((TypeError, AttributeError)):
        checkpoint_file.save({"step": 2, "bad": (i for i in range(3))}, path)
    assert checkpoint_file.load(path, torch.device("cpu")) == {"step": 1}
    assert os.listdir(tmp_path) == ["run.pt"]  # noqa: PTH208  # hidden ones, too


def test_files_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    """Promise: other files, halves, other optimizers and parts are told before anything is loaded; places before training."""
    path = tmp_path / "run.pt"
    run = tune.pipeline(blocks(), amp=False)
    run.fit([PAIR], 1, loss_fn, checkpoint=path)
    others = {"junk": b"junk", "half": path.read_bytes()[:2000], "empty": b""}
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is no checkpoint, or damaged"):
            run.resume(tmp_path / name)
    torch.save(blocks().state_dict(), tmp_path / "weights")
    with pytest.raises(ValueError, match="load_state_dict"):
        run.resume(tmp_path / "weights")
    before = weights(fresh := blocks(depth=3))
    with pytest.raises(ValueError, match="another optimizer than SGD"):
        tune.pipeline(fresh, optimizer="sgd").resume(path)
    assert all(map(torch.equal, before, weights(fresh)))
    lacking = torch.load(path, weights_only=True)
    torch.save({name: lacking[name] for name in lacking if name != "loss_sum"}, tmp_path / "lacking")
    with pytest.raises(ValueError, match="it lacks loss_sum"):
        run.resume(tmp_path / "lacking")
    torch.save({**lacking, "counts": [1, 2]}, tmp_path / "listed")
    with pytest.raises(ValueError, match="it lacks counts"):
        run.resume(tmp_path / "listed")
    with pytest.raises(FileNotFoundError, match="no folder"):
        run.fit([PAIR], 2, loss_fn, checkpoint=tmp_path / "nowhere" / "run.pt")
    with pytest.raises(IsADirectoryError):
        run.fit([PAIR], 2, loss_fn, checkpoint=tmp_path)
    assert run.epoch == 1


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    """Promise: whoever catches the error and begins anew does so with the model's own weights."""
    path = tmp_path / "run.pt"
    tune.pipeline(blocks(), amp=False).fit([PAIR], 1, loss_fn, checkpoint=path)
    longer = nn.Sequential(*blocks(), nn.Linear(16, 16))
    with pytest.raises(ValueError, match="of a model with another number of parameters"):
        tune.pipeline(longer, amp=False).resume(path)
    model = nn.Sequential(*list(blocks().children())[:-1], nn.Linear(16, 5))
    run, before = tune.pipeline(model, amp=False), weights(model)
    with pytest.raises(RuntimeError, match="size mismatch"):
        run.resume(path)
    assert all(map(torch.equal, before, weights(model)))
    assert (run.step, run.optimizer.state) == (0, {})
