"""The guard beside a training: what it says outside, recovery around a step, and batches that are made again."""

from __future__ import annotations

import argparse
import copy
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests import distributed_rank, fork_server
from torchobs import catalog, guard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.training import Recording


def test_every_finding_is_an_event_and_a_metric_with_its_severity(run: Recording, tmp_path: Path) -> None:
    """Promise: what was refused can be seen outside: tensors, outputs, files, models, inference and resources."""
    with pytest.raises(guard.ContractError):
        guard.Contract("b 2", max=1.0).check(torch.tensor([[nan, 2.0]]), "batch")
    with pytest.raises(guard.NonFiniteOutputError):
        guard.sanitize_outputs(torch.tensor([nan]))
    guard.sanitize_outputs(torch.tensor([nan, 1.0]), "nan_to_num")
    path = tmp_path / "whole.pt"
    torch.save(argparse.Namespace(), path)
    with pytest.raises(guard.UnsafeFileError):
        guard.load(path)
    with pytest.raises(guard.WrongFileError):
        guard.verify(path, sha256="0" * 64)
    guard.check_model({"w": torch.full((2,), nan)})
    guard.check_outputs(torch.zeros(4, 2), classes=1)
    guard.safe_inference(lambda x: x, torch.tensor([nan]))
    guard.resources(cpu=None, memory=0, disk=None, gpu_memory=None).check()
    guard.record(KeyError("label"), "info", "data")
    guard.record(torch.OutOfMemoryError())
    for wrong, error in (((KeyError(), "bad"), ValueError), ((KeyError(), "info", "x"), ValueError), (("late",), TypeError)):
        with pytest.raises(error, match=r"use one of|error is an exception"):
            guard.record(*wrong)
    run.whole_round()
    events = [event for event in vars(catalog).values() if isinstance(event, catalog.Event) and ".guard." in event.name]
    frames = [(event.name, frame["attrs"]) for event in events for frame in run.frames(event.name)]
    assert {(name.removeprefix("torchobs.guard."), about["category"], about["severity"]) for name, about in frames} == {
        ("violation", "contract", "error"), ("outputs", "numerics", "error"), ("outputs", "numerics", "warning"),
        ("file", "file", "error"), ("model", "numerics", "warning"), ("resource", "resources", "warning"),
        ("recovery", "numerics", "error"), ("recovery", "data", "info"), ("recovery", "memory", "warning"),
    }  # fmt: skip
    assert [about["tensor"] for name, about in frames if name == "torchobs.guard.violation"] == ["batch"]
    values = run.values()
    assert {key for key, value in values.items() if key[0].startswith("torchobs.guard.") and value == 1} >= {
        ("torchobs.guard.violations", "contract", "error", "finite"), ("torchobs.guard.violations", "contract", "error", "max"),
        ("torchobs.guard.sanitized", "numerics", "nan_to_num", "warning"), ("torchobs.guard.findings", "load", "file", "error"),
        ("torchobs.guard.findings", "verify", "file", "error"),
        ("torchobs.guard.findings", "check_model", "numerics", "warning"),
        ("torchobs.guard.exceeded", "resources", "memory", "warning"),
        ("torchobs.guard.recoveries", "return", "numerics", "error"), ("torchobs.guard.recoveries", "record", "data", "info"),
    }  # fmt: skip
    assert values["torchobs.guard.sanitized", "numerics", "refuse", "error"] >= 1


Batch = dict[str, torch.Tensor]


def model() -> torch.nn.Module:
    """A small network."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def with_buffers() -> torch.nn.Module:
    """The same with batch norm: buffers that a skipped step must not leave changed."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1))


def batches(number: int) -> list[Batch]:
    """Batches of eight samples, of a problem that can be learned."""
    source = torch.Generator().manual_seed(0)
    inputs = [torch.randn(8, 8, generator=source) for _ in range(number)]
    return [{"x": x, "y": x.sum(1, keepdim=True)} for x in inputs]


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The mean loss."""
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


class Trained:
    """A network, its optimizer and a recovery around its steps."""

    def __init__(self, network: torch.nn.Module, **policy: Any) -> None:
        self.network = network
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        self.recovery = guard.Recovery(network, self.optimizer, guard.RecoveryPolicy(**policy))
        self.largest = 10**9
        """samples that fit"""

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """The mean loss; raises what a device without enough memory raises."""
        if len(batch["x"]) > self.largest:
            raise torch.OutOfMemoryError("too many samples")
        return loss_of(model, batch)

    def step(self, batch: Batch) -> guard.StepOutcome:
        """One step."""
        return self.recovery.step(batch, self.loss)


def weights(network: torch.nn.Module) -> list[torch.Tensor]:
    """All parameters and buffers, copied."""
    return [value.detach().clone() for value in network.state_dict().values()]


def same(left: torch.nn.Module, right: torch.nn.Module | list[torch.Tensor]) -> bool:
    """True if all are equal to the bit."""
    others = weights(right) if isinstance(right, torch.nn.Module) else right
    return all(map(torch.equal, weights(left), others))


def assert_close(left: torch.nn.Module, right: torch.nn.Module) -> None:
    """Weights that are the same but for rounding."""
    torch.testing.assert_close(weights(left), weights(right))


def test_a_healthy_training_is_the_same_to_the_bit() -> None:
    """Promise: where nothing happens, the weights are those of a hand-written loop."""
    plain, guarded = with_buffers(), Trained(with_buffers())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    for batch in batches(30):
        optimizer.zero_grad()
        loss_of(plain, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert guarded.step(batch).stepped
    assert same(plain, guarded.network)
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
            assert [str(problem) for problem in outcome.problems] == ["step 8: the loss is nan"]
        assert trained.step(batch).stepped
        assert spared.step(batch).stepped
    assert same(trained.network, spared.network)
    (kept,) = trained.recovery.evidence
    assert (kept.step, bool(torch.isnan(kept.batch["x"][3, 2]))) == (8, True)


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)])
def test_a_gradient_that_is_not_finite_is_skipped_too(scaler: Any) -> None:
    """Promise: a loss may be finite where its gradient is not: a root at 0; with a scaler that is off, as for bfloat16, too."""
    trained = Trained(model())
    trained.recovery.scaler = scaler
    before = weights(trained.network)
    zeros = {"x": torch.zeros(4, 8), "y": torch.zeros(4, 1)}
    outcome = trained.recovery.step(zeros, lambda model, batch: (model(batch["x"]) * 0).abs().sqrt().mean())
    assert (outcome.action, outcome.problems[0].text) == ("skip", "a gradient is not finite")
    assert same(trained.network, before)


def test_a_budget_ends_in_the_original_error() -> None:
    """Promise: what goes on for ever is an error in the end."""
    trained = Trained(model(), nonfinite=2)
    bad = {"x": torch.full((4, 8), nan), "y": torch.zeros(4, 1)}
    assert [trained.step(bad).action for _ in range(2)] == ["skip", "skip"]
    with pytest.raises(guard.NonFiniteLossError, match="the loss is nan"):
        trained.step(bad)
    none = Trained(model(), oom=0)
    none.largest = 4
    with pytest.raises(torch.OutOfMemoryError):
        none.step(sized(8))
    none.largest = 8
    assert none.step(sized(8)).parts == 1


@pytest.mark.parametrize("largest", [1, 3])
def test_a_batch_that_does_not_fit_is_split(largest: int) -> None:
    """Promise: the gradients are those of the whole batch, whatever part of it fits; the next batch is split at once."""
    trained, whole = Trained(model()), Trained(model())
    trained.largest = largest
    calls: list[int] = []

    def compute(model: torch.nn.Module, part: Batch) -> torch.Tensor:
        calls.append(len(part["x"]))
        return trained.loss(model, part)

    for batch in batches(5):
        outcome = trained.recovery.step(batch, compute)
        assert (outcome.stepped, outcome.action) == (True, "split")
        assert outcome.loss == pytest.approx(whole.step(batch).loss, rel=1e-5)
    assert_close(trained.network, whole.network)
    assert sum(size > largest for size in calls) == trained.recovery.counts["memory.split"] <= 3


def sized(number: int) -> Batch:
    """A batch of so many samples."""
    return {"x": torch.randn(number, 8), "y": torch.randn(number, 1)}


def _without_memory(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    raise RuntimeError("CUDA out of memory, it says", model, batch)


def test_other_errors_are_the_user_s() -> None:
    """Promise: an error that is none of these is raised at once, a RuntimeError with fitting words too."""
    trained = Trained(model())
    with pytest.raises(RuntimeError, match="out of memory"):
        trained.recovery.step(batches(1)[0], _without_memory)


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
    assert "back to step 41" in outcome.problems[0].text
    assert at_snapshot is not None
    assert same(trained.network, at_snapshot[0])
    assert str(trained.optimizer.state_dict()) == str(at_snapshot[1])
    assert all(trained.step(batch).stepped for batch in good[45:])


class Readable(Dataset[int]):
    """Samples; some cannot be read."""

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


def micro_batches(batch: Batch, *lengths: int) -> list[Batch]:
    """A batch in parts of these lengths."""
    parts = {name: torch.split(value, list(lengths)) for name, value in batch.items()}
    return [{name: parts[name][index] for name in parts} for index in range(len(lengths))]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("lengths", [(4, 4), (5, 2, 1)])
def test_micro_batches_make_the_step_of_the_whole_batch(lengths: tuple[int, ...], scaled: bool) -> None:  # noqa: FBT001
    """Promise: gradients, clipping and loss are those of one large batch, scaled or not, for unequal parts too."""
    ours, theirs = model(), model()
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.5) for network in (ours, theirs)]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    recovery = guard.Recovery(ours, optimizers[0], scaler=scaler, max_grad_norm=0.1)
    for batch in batches(3):
        outcome = recovery.step(micro_batches(batch, *lengths), loss_of, accumulate=True)
        assert (outcome.action, outcome.parts, outcome.stepped) == ("none", len(lengths), True)
        optimizers[1].zero_grad()
        loss = loss_of(theirs, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        assert float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)) > 0.1
        optimizers[1].step()
        assert outcome.loss == pytest.approx(loss.item(), rel=1e-5)
    assert_close(ours, theirs)


def test_a_step_of_micro_batches_is_skipped_as_a_whole() -> None:
    """Promise: one NaN costs one step and one use of the budget; the micro-batch that had it is kept, and no other."""
    trained = Trained(with_buffers(), nonfinite=1)
    before = weights(trained.network)
    parts = micro_batches(batches(1)[0], 4, 4)
    parts[0]["x"][1, 1] = nan
    outcome = trained.recovery.step(parts, trained.loss, accumulate=True)
    assert (outcome.action, trained.recovery.counts) == ("skip", {"numerics.skip": 1})
    assert same(trained.network, before)
    (kept,) = trained.recovery.evidence
    assert (len(kept.batch["x"]), bool(torch.isnan(kept.batch["x"][1, 1]))) == (4, True)


def test_micro_batches_that_do_not_fit_are_split() -> None:
    """Promise: the whole step is done again in smaller parts, with the same gradients."""
    trained, whole, (batch,) = Trained(model()), Trained(model()), batches(1)
    trained.largest = 2
    outcome = trained.recovery.step(micro_batches(batch, 5, 3), trained.loss, accumulate=True)
    assert (outcome.action, outcome.parts) == ("split", 5)
    whole.step(batch)
    assert_close(trained.network, whole.network)


def test_with_a_scaler_gradients_are_the_scaler_s_affair() -> None:
    """Promise: an overflow of scaled gradients is skipped by the scaler, which lowers its scale, not by us."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    recovery = guard.Recovery(network, optimizer, scaler=scaler)
    batch = batches(1)[0]
    before = weights(network)
    outcome = recovery.step(batch, lambda model, part: (model(part["x"]) * 1e3).square().mean())
    assert (outcome.action, outcome.stepped) == ("none", False)
    assert isfinite(outcome.loss)
    assert same(network, before)
    assert scaler.get_scale() == 2.0**119


def test_a_failed_attempt_leaves_no_statistics() -> None:
    """Promise: batch norm has seen the parts of the batch that were trained, and not the attempt that did not fit."""
    trained = Trained(with_buffers())
    attempts = iter([True, False, False])

    def compute(model: torch.nn.Module, part: Batch) -> torch.Tensor:
        loss = loss_of(model, part)
        if next(attempts):
            raise torch.OutOfMemoryError("in the backward, say")
        return loss

    assert trained.recovery.step(batches(1)[0], compute).parts == 2
    assert int(trained.network[1].num_batches_tracked) == 2  # type: ignore[index]


class Changing:
    """State that is no tensor: lists and dictionaries that go on changing."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"history": [], "best": {"loss": 9.0}}

    def state_dict(self) -> dict[str, Any]:
        """The state itself, as careless code returns it."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state itself."""
        self.state = state


def test_a_snapshot_shares_nothing_with_what_it_was_taken_of() -> None:
    """Promise: lists and dictionaries of the extra objects are those of the snapshot's time, at every restoration."""
    changing, trained = Changing(), Trained(model(), snapshot_every=1000)
    recovery = guard.Recovery(trained.network, trained.optimizer, trained.recovery.policy, extra=[changing])

    def compute(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        changing.state["history"].append(1)
        changing.state["best"]["loss"] -= 1.0
        return loss_of(model, batch)

    for batch in batches(30):
        recovery.step(batch, compute)
    for _ in range(2):
        assert recovery.step({"x": batches(1)[0]["x"], "y": torch.full((8, 1), 1e4)}, compute).action == "restore"
        assert changing.state == {"history": [], "best": {"loss": 9.0}}


def test_a_batch_that_cannot_be_split_is_the_original_error() -> None:
    """Promise: tensors of different lengths are no reason for another error; and what fits is not split for it."""
    trained = Trained(model())
    trained.largest = 4
    odd = {"x": torch.randn(8, 8), "y": torch.randn(8, 1), "mask": torch.ones(3)}
    with pytest.raises(torch.OutOfMemoryError):
        trained.step(odd)
    trained.step(batches(1)[0])
    assert trained.step({"x": torch.randn(2, 8), "y": torch.randn(2, 1), "mask": torch.ones(3)}).stepped


def test_a_lasting_error_of_data_is_raised() -> None:
    """Promise: a missing disk is no bad sample, and a generator that ended early is no end of the data."""
    recovery = Trained(model()).recovery
    with pytest.raises(FileNotFoundError):
        list(recovery.batches(DataLoader(Readable(3, {1: FileNotFoundError(2, "gone")}), batch_size=None)))

    def ends_early() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(recovery.batches(ends_early()))
    with pytest.raises(ValueError, match="all bad"):
        list(Trained(model(), data=2).recovery.batches(DataLoader(Readable(9, dict.fromkeys(range(9), ValueError("all bad"))))))


POLICIES: list[tuple[dict[str, Any], str]] = [
    ({"io": -1}, "a budget is 0 or more"),
    ({"backoff_s": nan}, "backoff_s is nan"),
    ({"data_errors": ValueError}, "a tuple of exception classes"),
    ({"agree": "yes"}, "agree is 'yes': True or False"),
]
NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"model": "resnet"}, "model is a torch.nn.Module, not str"),
    ({"extra": ["ema"]}, "extra is a list of objects that have"),
    ({"max_grad_norm": nan}, "max_grad_norm is nan; it is a number above 0"),
    ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "none of the model's parameters"),
    ({"optimizer": torch.optim.LBFGS([torch.zeros(1)])}, "LBFGS calls a closure"),
]


def test_arguments_of_nonsense_are_refused() -> None:
    """Promise: a wrong argument, or a budget that is none, is an error where it is written, which says what is needed."""
    for policy, message in POLICIES:
        with pytest.raises(ValueError, match=message):
            guard.RecoveryPolicy(**policy)
    for wrong, message in NONSENSE:
        network = model()
        arguments = {"model": network, "optimizer": torch.optim.SGD(network.parameters(), lr=0.1), **wrong}
        with pytest.raises((TypeError, ValueError), match=message):
            guard.Recovery(**arguments)


def test_ranks_recover_together(tmp_path: Path) -> None:
    """Promises: of two ranks, which are one job for all scenarios.

    Both skip the step in which one has a bad batch, and their weights stay the same; without ``agree`` it is an error on both,
    for the gradients of the bad batch have reached the other, too. A loss that jumps on one puts both back to their snapshots,
    of the same step. Micro-batches of all ranks make the step of all samples, with one exchange of gradients. A rank without
    memory has the original error, and the other one an error and no endless wait. Where each rank has gradients of its own,
    ``agree`` holds a step back on both; without it one goes on alone.
    """
    ranks = fork_server.said_by_ranks(distributed_rank.recover, tmp_path)
    said = {scenario: [rank[scenario] for rank in ranks] for scenario in ranks[0]}
    for scenario in ("agree", "micro_batches"):
        first, second = said[scenario]
        assert first["actions"] == second["actions"] == ["none", "none", "none", "skip", "none", "none"]
        assert all(isfinite(weight) for weight in first["weights"])
    assert [answer["actions"] for answer in said["alone"]] == [["none", "none", "none", "raise"]] * 2
    first, second = said["spike"]
    assert first["actions"] == second["actions"]
    assert (first["actions"].count("restore"), first["actions"][30]) == (1, "restore")
    for scenario in ("agree", "micro_batches", "spike", "held"):
        assert said[scenario][0]["weights"] == said[scenario][1]["weights"], scenario
    for answer in said["averaged_once"]:
        assert answer["collectives"] == 1
        assert answer["weights"] == pytest.approx(answer["expected"], rel=1e-5)
    assert [answer["error"] for answer in said["out_of_memory"]] == ["RuntimeError", "OutOfMemoryError"]
    assert [[answer["held"] for answer in said[scenario]] for scenario in ("held", "held_alone")] == [[1, 1], [0, 1]]
    assert said["held_alone"][0]["weights"] != said["held_alone"][1]["weights"]
