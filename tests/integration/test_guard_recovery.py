"""Recovery around a training step: what is done about each kind of error, and that a training that needs none is the same."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.guard_trainings import Batch, Trained, batches, model, same, weights, with_buffers
from torchobs import guard

if TYPE_CHECKING:
    from tests.training import Recording


def test_a_healthy_training_is_the_same_to_the_bit() -> None:
    """Promise: where nothing happens, the weights are those of a hand-written loop."""
    plain, guarded = with_buffers(), Trained(with_buffers())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    for batch in batches(30):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(plain(batch["x"]), batch["y"]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert guarded.step(batch).stepped
    assert same(weights(plain), weights(guarded.network))
    assert not guarded.recovery.counts


def test_a_bad_batch_is_skipped_and_kept() -> None:
    """Promise: weights, buffers and the optimizer's state are as if the batch had not been; it is kept to look at."""
    trained, spared = Trained(with_buffers()), Trained(with_buffers())
    for index, batch in enumerate(batches(20)):
        if index == 7:
            bad = {**batch, "x": batch["x"].clone()}
            bad["x"][3, 2] = nan
            outcome = trained.step(bad)
            assert (outcome.stepped, outcome.action) == (False, "skip")
            assert outcome.reason == "the loss is nan"
        assert trained.step(batch).stepped
        assert spared.step(batch).stepped
    assert same(weights(trained.network), weights(spared.network))
    (kept,) = trained.recovery.evidence
    assert (kept.step, bool(torch.isnan(kept.batch["x"][3, 2]))) == (8, True)


def test_a_gradient_that_is_not_finite_is_skipped_too() -> None:
    """Promise: a loss may be finite where its gradient is not: a root at 0."""
    trained = Trained(model())
    before = weights(trained.network)
    zeros = {"x": torch.zeros(4, 8), "y": torch.zeros(4, 1)}
    outcome = trained.recovery.step(zeros, lambda batch: (trained.network(batch["x"]) * 0).abs().sqrt().mean())
    assert (outcome.action, outcome.reason) == ("skip", "a gradient is not finite")
    assert same(before, weights(trained.network))


def test_a_budget_ends_in_the_original_error() -> None:
    """Promise: what goes on for ever is an error in the end."""
    trained = Trained(model(), nonfinite=2)
    bad = {"x": torch.full((4, 8), nan), "y": torch.zeros(4, 1)}
    assert [trained.step(bad).action for _ in range(2)] == ["skip", "skip"]
    with pytest.raises(guard.NonFiniteLossError, match="the loss is nan"):
        trained.step(bad)


@pytest.mark.parametrize("largest", [1, 3, 4, 7])
def test_a_batch_that_does_not_fit_is_split(largest: int) -> None:
    """Promise: the gradients are those of the whole batch, whatever part of it fits; the next batch is split at once."""
    trained, whole = Trained(model()), Trained(model())
    trained.largest = largest
    calls: list[int] = []

    def compute(part: Batch) -> torch.Tensor:
        calls.append(len(part["x"]))
        return trained.loss(part)

    for batch in batches(5):
        outcome = trained.recovery.step(batch, compute)
        assert (outcome.stepped, outcome.action) == (True, "split")
        assert outcome.loss == pytest.approx(whole.step(batch).loss, rel=1e-5)
    for ours, theirs in zip(weights(trained.network), weights(whole.network), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert sum(size > largest for size in calls) == trained.recovery.counts["memory.split"] <= 3


def sized(number: int) -> Batch:
    """A batch of so many samples."""
    return {"x": torch.randn(number, 8), "y": torch.randn(number, 1)}


def test_larger_parts_are_tried_again() -> None:
    """Promise: where the memory was short for a moment, batches are whole again after some hundred steps."""
    trained = Trained(model())
    batch = sized(8)
    trained.largest = 2
    trained.step(batch)
    trained.largest = 8
    assert [trained.step(batch).parts for _ in range(210)] == [4] * 99 + [2] * 101 + [1] * 10


def test_a_failed_attempt_leaves_no_statistics() -> None:
    """Promise: batch norm has seen the parts of the batch that were trained, and not the attempt that did not fit."""
    trained = Trained(with_buffers())
    attempts = iter([True, False, False])

    def compute(part: Batch) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(trained.network(part["x"]), part["y"])
        if next(attempts):
            raise torch.OutOfMemoryError("in the backward, say")
        return loss

    assert trained.recovery.step(batches(1)[0], compute).parts == 2
    assert int(trained.network[1].num_batches_tracked) == 2  # type: ignore[index]


class Cached(torch.nn.Module):
    """A module whose buffers are replaced, as caches and some running statistics are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        self.seen: torch.Tensor
        self.last: Any
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen, self.last = self.seen + len(x), x.detach()
        y: torch.Tensor = self.linear(x)
        return y


def test_buffers_that_are_replaced_are_put_back() -> None:
    """Promise: of a skipped step nothing is left, whether a forward pass changed a buffer in place or made another one."""
    trained = Trained(Cached())
    assert trained.step({"x": torch.full((4, 8), nan), "y": torch.zeros(4, 1)}).action == "skip"
    assert float(trained.network.seen) == 0.0  # type: ignore[arg-type]
    assert "last" not in trained.network.state_dict()  # a buffer that is None is in none
    trained.step(batches(1)[0])
    assert float(trained.network.seen) == 8.0  # type: ignore[arg-type]


@dataclass
class _Batch:
    x: torch.Tensor
    y: list[torch.Tensor]


class _OfTokenizer(UserDict[str, Any]):
    """A mapping that is no dictionary, as tokenizers and their collators return."""


@pytest.mark.parametrize("made", [_Batch, lambda x, y: _OfTokenizer(x=x, y=y)])
def test_batches_of_any_structure_are_split(made: Any) -> None:
    """Promise: what does not fit is halved within its class, and a bad one is kept apart from the tensors of the loader."""
    trained, whole = Trained(model()), Trained(model())
    trained.largest = 4

    def compute(part: Any) -> torch.Tensor:
        assert type(part) is type(made(None, None))
        x, y = (part.x, part.y) if isinstance(part, _Batch) else (part["x"], part["y"])
        return trained.loss({"x": x, "y": y[0]})

    for batch in batches(3):
        outcome = trained.recovery.step(made(batch["x"], [batch["y"]]), compute)
        assert (outcome.action, outcome.parts) == ("split", 2)
        assert outcome.loss == pytest.approx(whole.step(batch).loss, rel=1e-5)
    bad = torch.full((4, 8), nan)
    trained.recovery.step(made(bad, [torch.zeros(4, 1)]), compute)
    kept = trained.recovery.evidence[0].batch
    bad.zero_()
    assert (kept.x if isinstance(kept, _Batch) else kept["x"]).isnan().all()


def test_other_errors_are_the_user_s() -> None:
    """Promise: an error that is none of these is raised at once, a RuntimeError with fitting words too."""
    trained = Trained(model())
    with pytest.raises(RuntimeError, match="out of memory"):
        trained.recovery.step(batches(1)[0], lambda _: (_ for _ in ()).throw(RuntimeError("CUDA out of memory, it says")))


def test_a_loss_that_jumps_goes_back_to_the_snapshot() -> None:
    """Promise: weights and momentum are those of the last snapshot; training then goes on and learns."""
    trained = Trained(model(), snapshot_every=10)
    good = batches(60)
    for batch in good[:40]:
        trained.step(batch)
    at_snapshot = None
    for batch in good[40:45]:
        if trained.recovery.steps == 40:
            at_snapshot = weights(trained.network), copy.deepcopy(trained.optimizer.state_dict())
        trained.step(batch)
    outcome = trained.step({"x": good[0]["x"], "y": good[0]["y"] + 1e4})
    assert outcome.action == "restore"
    assert "back to step 41" in outcome.reason
    assert at_snapshot is not None
    assert same(at_snapshot[0], weights(trained.network))
    assert str(trained.optimizer.state_dict()) == str(at_snapshot[1])
    assert all(trained.step(batch).stepped for batch in good[45:])


def test_jumps_that_a_training_always_makes_undo_nothing_more() -> None:
    """Promise: where the loss is high once in thirty steps, as when an episode ends, two are undone and the run goes on."""
    trained, extra = Trained(model(), snapshot_every=10), 0.0

    def loss(part: Batch) -> torch.Tensor:
        return trained.loss(part) + extra

    done = []
    for index, batch in enumerate(batches(600)):
        extra = 300.0 if index >= 50 and index % 30 == 0 else 0.0
        done.append(trained.recovery.step(batch, loss).action)
    assert done.count("restore") == 2


class Readable(Dataset[int]):
    """Samples, of which some cannot be read."""

    def __init__(self, size: int, bad: dict[int, Exception]) -> None:
        self._size, self._bad = size, bad

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        if index in self._bad:
            raise self._bad[index]
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_cannot_be_read_is_skipped(workers: int) -> None:
    """Promise: the other batches come, with workers and without; the last one may be a bad one."""
    recovery = Trained(model()).recovery
    data = Readable(6, {1: ValueError("truncated"), 3: ConnectionError("reset"), 5: KeyError("label")})
    assert [int(batch) for batch in recovery.batches(DataLoader(data, batch_size=1, num_workers=workers))] == [0, 2, 4]
    assert recovery.counts == {"data.skip": 3}


def test_transient_errors_are_repeated() -> None:
    """Promise: what fails for a moment works in the end; what lasts is raised."""
    recovery = Trained(model(), backoff_s=0.0, io=3).recovery
    failures = [OSError(5, "I/O error"), TimeoutError()]

    def save() -> str:
        if failures:
            raise failures.pop()
        return "saved"

    assert recovery.retry(save) == "saved"
    assert recovery.counts == {"io.retry": 2}
    with pytest.raises(PermissionError):
        recovery.retry(lambda: (_ for _ in ()).throw(PermissionError(13, "denied")))


def test_what_was_done_is_recorded(run: Recording) -> None:
    """Promise: counts by category and action, and events with a severity."""
    trained = Trained(model(), nonfinite=1)
    bad = {"x": torch.full((4, 8), nan), "y": torch.zeros(4, 1)}
    trained.step(bad)
    with pytest.raises(guard.NonFiniteLossError):
        trained.step(bad)
    run.whole_round()
    values = run.values()
    assert values["torchobs.guard.recoveries", "skip", "numerics", "warning"] == 1
    assert values["torchobs.guard.recoveries", "raise", "numerics", "error"] == 1
    assert [frame["attrs"]["severity"] for frame in run.frames("torchobs.guard.recovery")] == ["warning", "error"]
