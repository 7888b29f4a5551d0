"""Several threads that train in one process: the count of the one that is recorded is exact, and the others are told of."""

# mypy: disable-error-code="no-untyped-call"
# Tensor.backward has no annotations

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.training import Recording, StepFlag, loss_of, mlp
from torchobs import catalog


def train(seed: int, steps: int) -> list[float]:
    """A training of its own; return the losses."""
    model, losses = mlp(seed), list[float]()
    optimizer = torch.optim.Adam(model.parameters())
    for index in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, index)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def test_of_two_threads_that_train_at_once_one_is_recorded(run: Recording, caplog: pytest.LogCaptureFixture) -> None:
    """All of its steps and none of the other's, which is said once."""
    losses, beside, model = list[float](), threading.Event(), mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def other() -> None:
        for seed in range(3):
            train(seed, 40)
        beside.set()

    thread = threading.Thread(target=other, name="second")
    index = 0
    while not beside.is_set() or index < 50:
        optimizer.zero_grad()
        loss = loss_of(model, index)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        index += 1
        if index == 3:
            thread.start()
    thread.join()
    assert [record.loss for record in run.steps()] == losses
    run.look()
    assert run.attributes(catalog.EVENT_OTHER_THREAD.name) == [{"thread": "second"}]
    assert "second" in caplog.text


def test_threads_that_train_one_after_the_other_are_all_recorded(run: Recording) -> None:
    """Each has ended when the next one begins."""
    expected = list[float]()
    for seed in range(3):
        thread = threading.Thread(target=lambda seed=seed: expected.extend(train(seed, 20)))
        thread.start()
        thread.join()
    steps = run.steps()
    assert len(steps) == 60
    seen = [(record.loss, loss) for record, loss in zip(steps, expected, strict=True) if record.flags & StepFlag.LOSS]
    assert len(seen) >= 57  # a thread's first backward comes before it is known as the one that trains
    assert all(found == loss for found, loss in seen)
    assert run.frames(catalog.EVENT_OTHER_THREAD.name) == []


@pytest.mark.parametrize("stepping", ["backward", "step"])
def test_a_backward_pass_in_another_thread_than_the_step_is_the_steps(run: Recording, stepping: str) -> None:
    """Promise: each is a step, whichever of the two a pool's thread does."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ThreadPoolExecutor(1) as pool:
        for index in range(40):
            optimizer.zero_grad()
            loss = loss_of(model, index)
            if stepping == "backward":
                pool.submit(loss.backward).result()
                optimizer.step()
            else:
                loss.backward()
                pool.submit(optimizer.step).result()
    assert len(run.steps()) >= 39, "the first may have been in a thread that had not trained yet"
