"""What is evaluation, what is data, and what a user says: none of it is taken for a step or for training."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchobs
from tests import support
from tests.training import Recording, loss_of, mlp


def nap(seconds: float) -> float:
    """Sleep, and return how long it was."""
    begun = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begun


@pytest.mark.parametrize("how", ["eval and no_grad", "no_grad", "only another loader"])
def test_evaluation_between_steps_is_neither_a_step_nor_a_slow_step(run: Recording, how: str) -> None:
    """An evaluation of 0.2 s between steps of some ms: it is counted as evaluation, and no step got slower."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(40, 8), torch.randn(40, 1))
    training, validation = DataLoader(data, batch_size=8), DataLoader(data, batch_size=8)
    napped_s, ending = list[float](), list[float]()

    def evaluate() -> None:
        if how == "only another loader":
            for inputs, _ in validation:
                napped_s.append(nap(0.04))
                model(inputs)
            return
        if how == "eval and no_grad":
            model.eval()
        with torch.no_grad():
            for inputs, _ in validation:
                napped_s.append(nap(0.04))
                model(inputs)
        if how == "eval and no_grad":
            model.train()

    for epoch in range(3):
        for inputs, targets in training:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            ending.append(time.perf_counter())
            optimizer.step()
        if epoch < 2:
            evaluate()
    took_s, steps = time.perf_counter() - ending[4], run.steps()
    assert len(steps) == 15
    evaluation_s = sum(record.phase_s[5] for record in steps)
    assert sum(napped_s) * (1 - 1e-6) <= evaluation_s <= took_s - sum(record.duration_s for record in steps[5:])


def test_evaluation_without_a_loader(run: Recording) -> None:
    """NanoGPT's way: batches by a function, estimate_loss() between eval() and train()."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ending, napped_s = list[float](), 0.0
    for index in range(6):
        if index == 3:
            model.eval()
            with torch.no_grad():
                napped_s = nap(0.15)
                loss_of(model)
            model.train()
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        ending.append(time.perf_counter())
        optimizer.step()
    took_s, steps = time.perf_counter() - ending[2], run.steps()
    assert napped_s * (1 - 1e-6) <= steps[3].phase_s[5] <= took_s - sum(record.duration_s for record in steps[3:])


def test_a_teacher_in_eval_mode_is_no_evaluation(run: Recording) -> None:
    """``teacher.eval()`` before every forward, never train() again: the time stays the step's."""
    model, teacher = mlp(0), mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for index in range(4):
        teacher.eval()
        time.sleep(0.02)
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert sum(record.phase_s[5] for record in run.steps()) == 0.0


def test_batches_prefetched_for_an_accumulation_are_data(run: Recording) -> None:
    """Hugging Face's Trainer fetches all batches of an accumulation before the first forward; that is no evaluation."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = iter(DataLoader(TensorDataset(torch.randn(96, 8), torch.randn(96, 1)), batch_size=8))
    for _ in range(3):
        batches = [next(loader) for _ in range(4)]
        for inputs, targets in batches:
            torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    steps = run.steps()
    assert len(steps) == 3
    assert sum(record.phase_s[5] for record in steps) == 0.0
    assert all(record.phase_s[0] > 0 for record in steps)


def test_a_phase_named_by_the_user_wins(run: Recording) -> None:
    """``with torchobs.phase("data")`` around a plain iterator is data; what follows is forward."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for index in range(3):
        with torchobs.phase("data"):
            time.sleep(0.03)
        optimizer.zero_grad()
        time.sleep(0.02)
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torchobs.phase("checkpoint"):
            time.sleep(0.05)
    steps = run.steps()
    assert all(record.phase_s[0] >= 0.03 * (1 - 1e-6) for record in steps)
    assert all(record.phase_s[1] > 0.02 for record in steps)
    assert steps[1].phase_s[6] >= 0.05 * (1 - 1e-6)
    assert [record.duration_s for record in steps] == pytest.approx([sum(record.phase_s[:5]) for record in steps])


@pytest.mark.parametrize("how", ["eval and a loader", "eval", "no_grad"])
def test_an_evaluation_is_what_the_rank_is_said_to_do(run: Recording, how: str) -> None:
    """While it lasts: the exporter is patient in it, however long that is. Training says what it is at, again, after it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    validation = DataLoader(TensorDataset(torch.randn(8, 8), torch.randn(8, 1)), batch_size=8)
    seen = []
    for index in range(2):
        optimizer.zero_grad()
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.train(how == "no_grad")
    with torch.no_grad():
        for inputs, _ in validation if how != "eval" else [(torch.ones(1, 8), None)]:
            model(inputs)
            seen.append(support.wait_until(lambda: run.view().live.phase == "evaluation"))
    model.train()
    optimizer.zero_grad()
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    support.wait_until(lambda: run.view().live.phase == "other")
    assert seen == [True]
