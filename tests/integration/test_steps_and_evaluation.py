"""What is evaluation, what is data, and what a user says: none of it is taken for a step or for training."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

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
