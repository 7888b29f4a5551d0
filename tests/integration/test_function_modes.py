"""Modes of the user's own see no tensor operation of ours, and the default device, which is such a mode, is none of ours."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode

import torchobs
from tests.training import Recording, batch, has, mlp
from torchobs.debug.memory import resized
from torchobs.flight.step_record import StepFlag
from torchobs.guard import Contract, check_outputs
from torchobs.probes.replica_batches import number_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEPS, BAD = 40, 30
CPU = torch.device("cpu")


class Calls(TorchFunctionMode):
    """Counts what is called."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count it."""
        del types
        self.names[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


def train() -> list[torch.Tensor]:
    """Some steps, of which one has a NaN; return the parameters."""
    with CPU:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for number in range(STEPS):
            inputs, targets = batch(number)
            if number == BAD:
                inputs = inputs / 0.0 * 0.0
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            if number % 2:
                clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("level", ["basic", "extreme"])
def test_a_mode_sees_what_the_training_calls_alone(flight_dir: Path, level: str) -> None:
    """At most the value of each clipping's norm is read in its sight, where that is the compiled part's."""
    with Calls() as plain:
        train()
    with torchobs.init(flight_dir=flight_dir, level=level, grad_interval=2) as session, Calls() as seen:
        train()
        assert Recording(session).errors() == []
    more = seen.names - plain.names
    assert not plain.names - seen.names
    assert more.keys() <= {"item", "__get__"}
    assert more.total() <= 2 * (STEPS // 2)


@pytest.fixture
def default_device() -> Iterator[None]:
    """Another than the CPU, which any machine has: what is made on it has no values."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
def test_a_training_on_another_default_device_is_recorded(flight_dir: Path) -> None:
    """With norms, and what is done about a NaN."""
    with torchobs.init(flight_dir=flight_dir, level="extreme", grad_interval=2) as session:
        train()
        recording = Recording(session)
        recording.look()
        assert recording.errors() == []
        steps = recording.steps()
    assert len(steps) == STEPS
    assert sum(has(step, StepFlag.GRAD_NORM) for step in steps) >= STEPS // 2


@pytest.mark.usefixtures("default_device")
def test_tools_compute_where_the_values_are() -> None:
    """On another device they would compute nothing, and on a GPU they would fail or wait for it."""
    with CPU:
        inputs, _ = batch(size=64)
    assert number_of((inputs,)) == number_of((inputs.clone(),))
    packed = pack_padded_sequence(inputs.reshape(4, 16, 8), torch.tensor([16, 8, 4, 2], device="cpu"), batch_first=True)
    assert resized(packed, 4, 8).data.device == CPU
    Contract(max=0.1).check(torch.full((4,), 0.1, device=CPU))
    assert check_outputs(inputs).ok
