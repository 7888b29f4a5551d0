"""Forward stamps: they divide the time before a backward pass, and neither training nor torch's tracers see them."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules import module
from torch.utils.data import DataLoader, Dataset

from tests.training import Recording, mlp
from torchobs.flight.forward import LEAST_STAMPS
from torchobs.flight.layout import PHASE_NAMES
from torchobs.probes import forward_stamps
from torchobs.probes.forward_stamps import ForwardStamps
from torchobs.runtime.stack_samples import StackSamples

INPUTS = torch.ones(2, 8)


class Training:
    """A training that can be asked for a stamp in every step."""

    def __init__(self, run: Recording) -> None:
        assert run.session.context is not None
        self.context = run.session.context
        self.stamps = ForwardStamps(self.context)
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def step(self, inputs: torch.Tensor = INPUTS, before_s: float = 0.0, within_s: float = 0.0) -> None:
        time.sleep(before_s)
        loss = self.model(inputs).square().mean()
        time.sleep(within_s)
        loss.backward()
        self.optimizer.step()

    def ask(self) -> None:
        """Have the next optimizer step set the hook, and make that step."""
        self.stamps._sampled_step, self.stamps._due_ns = self.context.recorder.step, 0
        self.stamps.sample()
        self.step()
        assert self.is_set()

    def is_set(self) -> bool:
        """Return whether the next call of a module is looked at."""
        return self.stamps._key in module._global_forward_pre_hooks


@pytest.fixture
def training(run: Recording, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """Other tests of this process compile."""
    monkeypatch.setattr(forward_stamps, "has_compiled", lambda: False)
    stamped = Training(run)
    for _ in range(3):
        stamped.step()
    yield stamped
    stamped.stamps.remove()


def phase_times(run: Recording) -> dict[str, float]:
    """Seconds in each phase, so far."""
    return {key[1]: value for key, value in run.look().items() if key[0] == "torchobs.step.phase.time"}


def test_stamps_divide_what_no_fetch_does(run: Recording, training: Training) -> None:
    """Making a batch takes 10 ms, the forward pass 1 ms: once there are enough stamps; a single step stays between."""
    for _ in range(LEAST_STAMPS + 30):
        training.ask()
        training.step(before_s=0.01, within_s=0.001)
    before = phase_times(run)
    assert before["between"] > 0.0
    for _ in range(40):
        training.step(before_s=0.01, within_s=0.001)
    after = phase_times(run)
    assert after["between"] == before["between"]
    assert 40 * 0.001 < after["forward"] - before["forward"] < 0.5 * (after["other"] - before["other"])
    last = dict(zip(PHASE_NAMES, run.steps()[-1].phase_s, strict=True))
    assert (last["forward"], last["between"] > 0.01) == (0.0, True)


def test_a_line_between_a_fetch_and_the_forward_pass_is_sampled(training: Training) -> None:
    """For as long as it was to the forward pass in the last stamped step: what comes then is that, and the loss."""
    samples, fetched = StackSamples(training.context), iter(DataLoader([INPUTS] * 2, batch_size=None))  # type: ignore[arg-type]
    training.ask()
    next(fetched)
    samples.sample()
    training.step(before_s=0.2)
    next(fetched)
    samples.sample()
    time.sleep(0.3)
    samples.sample()
    assert [place.function for place in samples._counts] == ["test_a_line_between_a_fetch_and_the_forward_pass_is_sampled"]
    assert samples._total == 1.0


def test_calls_that_are_no_forward_pass_of_training_are_passed_over(training: Training) -> None:
    """Without gradients, or in a fetch."""
    training.ask()
    with torch.no_grad():
        training.model(INPUTS)
    assert training.is_set()
    training.model(INPUTS)
    assert not training.is_set()
    training.ask()

    class Transforming(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, _: int) -> Any:
            return training.model(INPUTS)

    next(iter(DataLoader(Transforming(), batch_size=None)))
    assert training.is_set()
    training.step()
    assert not training.is_set()


def scripted(model: torch.nn.Module) -> str:
    """The graph of a trace of torch.jit."""
    return re.sub(r"___torch_mangle_\d+\.", "", str(torch.jit.trace(model, (INPUTS,)).graph))  # type: ignore[no-untyped-call]


USES: dict[str, Callable[[torch.nn.Module], Any]] = {
    "functional_call": lambda model: torch.func.functional_call(model, dict(model.named_parameters()), (INPUTS,)).tolist(),
    "vmap": lambda model: torch.func.vmap(model)(INPUTS).tolist(),
    "fx": lambda model: torch.fx.symbolic_trace(model).code,
    "jit": scripted,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("use", USES)
def test_what_traces_or_transforms_a_model_sees_nothing(training: Training, use: str) -> None:
    """The same result while the hook is set as without it."""
    expected = USES[use](training.model)
    training.ask()
    assert USES[use](training.model) == expected


@pytest.mark.parametrize(
    "use",
    [
        lambda model: torch.compile(model, backend="eager")(INPUTS),
        lambda model: torch.export.export(model, (INPUTS,), strict=True),
    ],
    ids=["compile", "export"],
)
def test_dynamo_finds_no_hook(training: Training, use: Callable[[torch.nn.Module], object]) -> None:
    """Compiling a module beside a global hook warns, and exporting one fails; there are no stamps from then on."""
    training.ask()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert use(training.model) is not None
    assert not training.is_set()
