"""Checkpoints of `tune.pipeline`: how they are written, and which are refused without a change."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import io
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tune.models import PAIR, blocks, loss_fn, weights
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
    """Promise: other files, halves, other optimizers and parts are errors before anything is loaded; places before training."""
    path = tmp_path / "run.pt"
    run = tune.pipeline(blocks(), loss_fn, amp="off")
    run.fit([PAIR], 1, checkpoint=path)
    for name, content in {"junk": b"junk", "half": path.read_bytes()[:2000], "empty": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is no checkpoint, or damaged$"):
            run.resume(tmp_path / name)
    assert tune.pipeline(blocks(), loss_fn, amp="fp16").resume(path).epoch == 1, "the scaler begins anew"
    torch.save(blocks().state_dict(), tmp_path / "weights")
    with pytest.raises(ValueError, match="load_state_dict"):
        run.resume(tmp_path / "weights")
    before = weights(fresh := blocks(depth=3))
    for optimizer in ("sgd", torch.optim.AdamW(list(fresh.parameters())[:1])):
        with pytest.raises(ValueError, match=r"another optimizer than (SGD|AdamW)"):
            tune.pipeline(fresh, loss_fn, optimizer=optimizer).resume(path)
    assert all(map(torch.equal, before, weights(fresh)))
    lacking = torch.load(path, weights_only=True)
    torch.save({name: lacking[name] for name in lacking if name != "scaler"}, tmp_path / "lacking")
    with pytest.raises(ValueError, match="it lacks scaler"):
        run.resume(tmp_path / "lacking")
    with pytest.raises(FileNotFoundError, match="no folder"):
        run.fit([PAIR], 2, checkpoint=tmp_path / "nowhere" / "run.pt")
    with pytest.raises(IsADirectoryError):
        run.fit([PAIR], 2, checkpoint=tmp_path)
    assert run.epoch == 1


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    """Promise: whoever catches the error and begins anew does so with the model's own weights."""
    path = tmp_path / "run.pt"
    tune.pipeline(blocks(), loss_fn, amp="off").fit([PAIR], 1, checkpoint=path)
    model = nn.Sequential(*list(blocks().children())[:-1], nn.Linear(16, 5))
    run, before = tune.pipeline(model, loss_fn, amp="off"), weights(model)
    with pytest.raises(ValueError, match="of another model: its parameters have other names or shapes"):
        run.resume(path)
    assert all(map(torch.equal, before, weights(model)))
    assert (run.step, run.optimizer.state) == (0, {})


def test_a_checkpoint_is_as_readable_as_any_file(tmp_path: Path) -> None:
    """Promise: others may read it as they may what torch.save writes; of a link, what it leads to is replaced."""
    plain, path, link = tmp_path / "plain.pt", tmp_path / "run.pt", tmp_path / "last.pt"
    torch.save({}, plain)
    link.symlink_to("run.pt")
    for step in (1, 2):
        (tmp_path / ".run.pt.tmp").write_bytes(b"half of it, of a process that was killed")
        checkpoint_file.save({"step": step}, link)
        assert not (tmp_path / ".run.pt.tmp").exists()
        assert link.is_symlink()
        assert path.stat().st_mode == plain.stat().st_mode
        assert checkpoint_file.load(path, torch.device("cpu")) == {"step": step}


class Failing(io.BytesIO):
    """A file that fails in its second write."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def write(self, data: Any) -> int:
        if self.tell():
            raise self.error
        return super().write(data)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_a_save_is_raised(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a full disk is the system's error, Ctrl-C is Ctrl-C; torch complains of its archive in their place."""
    monkeypatch.setattr(Path, "open", lambda *_: Failing(error))
    with pytest.raises(type(error)):
        checkpoint_file.save({"weights": torch.zeros(8)}, tmp_path / "run.pt")


def test_a_flipped_bit_is_no_other_state(tmp_path: Path) -> None:
    """Promise: wherever a bit of a checkpoint is flipped, it is an error and nothing is loaded, or it is the state as saved."""
    path, damaged = tmp_path / "run.pt", tmp_path / "damaged.pt"
    torch.manual_seed(0)
    saved = tune.pipeline(blocks(), loss_fn, optimizer="sgd", total_steps=4, amp="off")
    saved.train_step((torch.ones(4, 16), torch.ones(4, 4)))
    saved.save(path)
    content, model = path.read_bytes(), blocks(depth=3)
    run, chance = tune.pipeline(model, loss_fn, optimizer="sgd", total_steps=4, amp="off"), random.Random(0)
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
