"""Steps of a recovery that span micro-batches, with clipping and a loss scaler; and arguments that make no sense."""

from __future__ import annotations

from math import isfinite, nan
from typing import Any

import pytest
import torch

from tests.guard_trainings import Batch, Trained, batches, model, same, weights, with_buffers
from torchobs import guard


def micro_batches(batch: Batch, *lengths: int) -> list[Batch]:
    """A batch in parts of these lengths."""
    parts = {name: torch.split(value, list(lengths)) for name, value in batch.items()}
    return [{name: parts[name][index] for name in parts} for index in range(len(lengths))]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("lengths", [(4, 4), (5, 2, 1)])
def test_micro_batches_make_the_step_of_the_whole_batch(lengths: tuple[int, ...], scaled: bool) -> None:  # noqa: FBT001
    """Promise: gradients, clipping and loss are those of one large batch, scaled or not, for unequal parts too."""
    ours, theirs = model(), model()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (ours, theirs)]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    recovery = guard.Recovery(ours, optimizers[0], scaler=scaler, max_grad_norm=0.1)
    for batch in batches(3):
        outcome = recovery.step(
            micro_batches(batch, *lengths),
            lambda part: torch.nn.functional.mse_loss(ours(part["x"]), part["y"]),
            accumulate=True,
        )
        assert (outcome.action, outcome.parts, outcome.stepped) == ("none", len(lengths), True)
        optimizers[1].zero_grad()
        loss = torch.nn.functional.mse_loss(theirs(batch["x"]), batch["y"])
        loss.backward()  # type: ignore[no-untyped-call]
        assert float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)) > 0.1
        optimizers[1].step()
        assert outcome.loss == pytest.approx(loss.item(), rel=1e-5)
    for mine, whole in zip(weights(ours), weights(theirs), strict=True):
        torch.testing.assert_close(mine, whole)


def test_a_step_of_micro_batches_is_skipped_as_a_whole() -> None:
    """Promise: one NaN costs one step and one use of the budget; the micro-batch that had it is kept, and no other."""
    trained = Trained(with_buffers(), nonfinite=1)
    before = weights(trained.network)
    parts = micro_batches(batches(1)[0], 4, 4)
    parts[0]["x"][1, 1] = nan
    outcome = trained.recovery.step(parts, trained.loss, accumulate=True)
    assert (outcome.action, trained.recovery.counts) == ("skip", {"numerics.skip": 1})
    assert same(before, weights(trained.network))
    (kept,) = trained.recovery.evidence
    assert (len(kept.batch["x"]), bool(torch.isnan(kept.batch["x"][1, 1]))) == (4, True)


def test_micro_batches_that_do_not_fit_are_split() -> None:
    """Promise: the whole step is done again in smaller parts, with the same gradients."""
    trained, whole = Trained(model()), Trained(model())
    trained.largest = 2
    (batch,) = batches(1)
    outcome = trained.recovery.step(micro_batches(batch, 5, 3), trained.loss, accumulate=True)
    assert (outcome.action, outcome.parts) == ("split", 5)
    whole.step(batch)
    for ours, theirs in zip(weights(trained.network), weights(whole.network), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_with_a_scaler_gradients_are_the_scaler_s_affair() -> None:
    """Promise: an overflow of scaled gradients is skipped by the scaler, which lowers its scale, not by us."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    recovery = guard.Recovery(network, optimizer, scaler=scaler)
    batch = batches(1)[0]
    before = weights(network)
    outcome = recovery.step(batch, lambda part: (network(part["x"]) * 1e3).square().mean())
    assert (outcome.action, outcome.stepped) == ("none", False)
    assert isfinite(outcome.loss)
    assert same(before, weights(network))
    assert scaler.get_scale() == 2.0**119


def test_a_disabled_scaler_judges_nothing() -> None:
    """Promise: with ``enabled=False``, as scripts write it for bfloat16, gradients that are not finite are found here."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    recovery = guard.Recovery(network, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False), max_grad_norm=1.0)
    outcome = recovery.step(torch.zeros(4, 8), lambda batch: (network(batch) * 0).abs().sqrt().mean())
    assert (outcome.action, outcome.reason) == ("skip", "a gradient is not finite")
    assert recovery.step(torch.ones(4, 8), lambda batch: network(batch).square().mean()).stepped


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"io": -1}, "a budget is 0 or more"),
        ({"nonfinite": nan}, "a whole number"),
        ({"oom": "many"}, "a whole number"),
        ({"snapshot_every": 0}, "snapshot_every at least 1"),
        ({"backoff_s": nan}, "backoff_s is nan"),
        ({"least_excess": -1.0}, "a number, 0 or more"),
        ({"data_errors": ValueError}, "a tuple of exception classes"),
        ({"agree": "yes"}, "agree is 'yes': True or False"),
    ],
)
def test_a_policy_of_nonsense_is_refused(policy: dict[str, Any], message: str) -> None:
    """Promise: a budget that is none is an error where it is written."""
    with pytest.raises(ValueError, match=message):
        guard.RecoveryPolicy(**policy)
