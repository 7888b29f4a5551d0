"""The phase that a rank was in when an exception ended it: the time before was spent there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torchobs.flight.format.step_record import LIVE_PHASES
from torchobs.runtime.stall_watch import live_phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.training import Recording


class Lines(Dataset[torch.Tensor]):
    """A few samples, after which one cannot be read."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            raise self.error
        return torch.ones(2)


class Refused(torch.autograd.Function):
    """A function without a backward pass."""

    @staticmethod
    def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: torch.Tensor) -> torch.Tensor:
        raise LookupError


MODEL = torch.nn.Linear(2, 1)


def step(optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """One step of training."""
    optimizer.zero_grad()
    MODEL(batch).sum().backward()
    optimizer.step()


def fetching(error: BaseException) -> Callable[[torch.optim.Optimizer], None]:
    """Return a training in which a fetch raises."""

    def train(optimizer: torch.optim.Optimizer) -> None:
        for batch in DataLoader(Lines(error)):
            step(optimizer, batch)

    return train


def in_backward(optimizer: torch.optim.Optimizer) -> None:
    """A training in which a backward pass raises."""
    step(optimizer, torch.ones(1, 2))
    Refused.apply(MODEL(torch.ones(1, 2)).sum()).backward()  # type: ignore[no-untyped-call]


def elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """A training that raises between two steps."""
    step(optimizer, torch.ones(1, 2))
    raise LookupError


def raised(train: Callable[[torch.optim.Optimizer], None], kind: type[BaseException]) -> None:
    """Let it end as an uncaught exception ends a program."""
    with pytest.raises(kind) as caught:
        train(torch.optim.SGD(MODEL.parameters(), lr=0.1))
    sys.excepthook(kind, caught.value, caught.value.__traceback__)


def phase(run: Recording) -> str:
    """What the sampler writes down as the phase."""
    context = run.session.context
    assert context is not None
    return LIVE_PHASES[live_phase(context)[0]]


@pytest.mark.parametrize(
    ("train", "kind", "name"),
    [
        (fetching(LookupError()), LookupError, "data"),
        (fetching(KeyboardInterrupt()), KeyboardInterrupt, "data"),
        (in_backward, LookupError, "backward"),
        (elsewhere, LookupError, "other"),
    ],
)
def test_a_rank_ends_in_the_phase_that_raised(
    run: Recording, train: Callable[[torch.optim.Optimizer], None], kind: type[BaseException], name: str
) -> None:
    """Promise: a wait for a batch that ends by an exception or Ctrl-C was in `data`, not outside of all phases."""
    raised(train, kind)
    assert phase(run) == name


def test_who_goes_on_is_in_a_phase_of_its_own(run: Recording) -> None:
    """Promise: an exception that somebody has caught is past with the next batch."""
    raised(fetching(LookupError()), LookupError)
    next(iter(DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 2)))))
    assert phase(run) == "forward"
