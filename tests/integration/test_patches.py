"""Other tools replace and restore what we have replaced, or watch every call: nothing is lost, and none of ours is seen."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pack_padded_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

import torchobs
from tests.training import Recording, StepFlag, batch, has, loss_of, mlp, recording
from torchobs import catalog
from torchobs.debug.memory_use import resized
from torchobs.guard import Contract, check_outputs
from torchobs.probes.replicas import number_of
from torchobs.taps import patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """Nothing that a test has replaced stays."""
    places: tuple[tuple[Any, str], ...] = (
        (torch.autograd, "backward"), (torch.nn.Module, "train"), (DataLoader, "__iter__"), (sys, "excepthook"),
        (torch, "save"),
    )  # fmt: skip
    before = [(owner, name, vars(owner)[name]) for owner, name in places]
    yield
    for owner, name, value in before:
        setattr(owner, name, value)
    patch._dormant.clear()


def trainer() -> Callable[[int], None]:
    """Trains one model for some steps, and on when it is called again."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return train


def losses(run: Recording) -> list[bool]:
    """Which steps have a loss."""
    return [has(record, StepFlag.LOSS) for record in run.steps()]


def wrapped(original: Any) -> Any:
    """What another tool puts in front."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return wrapper


def by_closure(original: Any) -> Any:
    """The same, without a word on what it wraps."""
    return lambda *args, **kwargs: original(*args, **kwargs)  # noqa: PLW0108  # a wrapper is what is wanted


class ByObject:
    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs)


WRAPPERS: list[Callable[[Any], Any]] = [
    wrapped, by_closure, ByObject, functools.partial, lambda original: ByObject(original).__call__,
]  # fmt: skip


def test_a_hook_that_another_tool_has_taken_away_is_put_back(flight_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It restored what it had found before us; the sampler's next look says so, once; no loss is missing."""
    before = torch.autograd.backward
    for run in recording(flight_dir):
        train = trainer()
        train(2)
        ours = torch.autograd.backward
        torch.autograd.backward = before
        train(1)
        run.look()
        assert torch.autograd.backward is ours
        train(1)
        assert losses(run) == [True] * 4  # backward passes are seen at the engine meanwhile
        run.look()
    assert torch.autograd.backward is before
    assert [record.message for record in caplog.records if "another tool had replaced" in record.message] == [
        "torchobs: another tool had replaced torch.autograd.backward, so that probe 'step' saw nothing of it; it does again"
    ]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapper_is_kept(flight_dir: Path, wrap: Callable[[Any], Any]) -> None:
    """Of the function that was there before ``init()``: both are called from the next look on. Of ours: it is left alone."""
    theirs = wrap(torch.autograd.backward)
    for run in recording(flight_dir):
        train = trainer()
        torch.autograd.backward = theirs
        train(1)
        run.look()
        train(1)
        assert losses(run) == [True, True]  # the first is seen at the engine
    assert torch.autograd.backward is theirs
    for run in recording(flight_dir):
        torch.autograd.backward = theirs = wrap(torch.autograd.backward)
        run.look()
        assert torch.autograd.backward is theirs
        trainer()(2)
        assert losses(run) == [True, True]
    assert torch.autograd.backward is theirs


def test_what_cannot_be_put_back_is_told(flight_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A function that may or may not call ours gets none of ours around it; probe, place and culprit are reported, once."""

    def stranger(_: object) -> Any:
        return iter(())

    for run in recording(flight_dir):
        ours, DataLoader.__iter__ = DataLoader.__iter__, stranger  # type: ignore[method-assign]
        run.look()
        values = run.look()
        assert values[catalog.PROBE_DISABLED.name, "loaders"] == 1
        assert values[catalog.PROBE_DISABLED.name, "data"] == 0
        (frame,) = run.frames(catalog.EVENT_PROBE_DISABLED.name)
        assert frame["attrs"]["probe"] == "loaders"
        assert frame["attrs"]["location"].startswith("torch.utils.data.dataloader.DataLoader.__iter__ by tests.")
        DataLoader.__iter__ = ours  # type: ignore[method-assign]
        assert run.look()[catalog.PROBE_DISABLED.name, "loaders"] == 0
    assert len([record for record in caplog.records if "DataLoader.__iter__ was replaced" in record.message]) == 1


def test_an_excepthook_of_the_scripts_own_does_not_hide_its_exceptions(flight_dir: Path) -> None:
    """It does not call the one that it has replaced; after shutdown it stands there again."""
    shown: list[type[BaseException]] = []

    def its_own(kind: type[BaseException], *_: object) -> None:
        shown.append(kind)

    for run in recording(flight_dir):
        sys.excepthook = its_own
        run.look()
        sys.excepthook(KeyError, KeyError("x"), None)
        assert shown == [KeyError]
        assert [frame["attrs"]["exception.type"] for frame in run.frames(catalog.EVENT_EXCEPTION.name)] == ["builtins.KeyError"]
    assert sys.excepthook is its_own


def layers(function: Any) -> int:
    """How many functions of ours calling it goes through."""
    count = 0
    while function is not None:
        code = getattr(function, "__code__", None)
        count += code is not None and "/torchobs/" in code.co_filename
        function = getattr(function, "__wrapped__", None)
    return count


@pytest.mark.parametrize(("owner", "name"), [(torch.autograd, "backward"), (torch.nn.Module, "train"), (torch, "save")])
def test_sessions_under_another_tools_wrapper_leave_one_function_of_ours(flight_dir: Path, owner: Any, name: str) -> None:
    """The tool wraps anew in each of five sessions; the one function that cannot be taken out works in all of them."""
    before = vars(owner)[name]
    for _ in range(5):
        for run in recording(flight_dir):
            setattr(owner, name, wrapped(vars(owner)[name]))
            trainer()(2)
            assert losses(run) == [True, True]
            mlp().eval()
            assert len(run.context.recorder.trace) == 1, "told of once"
    assert layers(torch.nn.Module.train if name == "train" else vars(owner)[name]) <= 1
    assert patch.leads_to(vars(owner)[name], before)
    torchobs.shutdown()


STEPS, BAD = 40, 30
CPU = torch.device("cpu")


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.names[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


def train_on_cpu() -> list[torch.Tensor]:
    """Some steps, one with a NaN; return the parameters."""
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
        train_on_cpu()
    with torchobs.init(flight_dir=flight_dir, level=level, grad_interval=2) as session, Calls() as observed:
        train_on_cpu()
        assert Recording(session).errors() == []
    more = observed.names - plain.names
    assert not plain.names - observed.names
    assert more.keys() <= {"item", "__get__"}
    assert more.total() <= 2 * (STEPS // 2)


@pytest.fixture
def default_device() -> Iterator[None]:
    """Another than the CPU, which any machine has: what is made on it has no values."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("default_device")
def test_with_another_default_device_trainings_are_recorded_and_tools_compute(flight_dir: Path) -> None:
    """With norms, and what is done about a NaN; where the values are: elsewhere a tool would fail, or wait for a GPU."""
    with torchobs.init(flight_dir=flight_dir, level="extreme", grad_interval=2) as session:
        train_on_cpu()
        run = Recording(session)
        run.look()
        assert run.errors() == []
        steps = run.steps()
    assert len(steps) == STEPS
    assert sum(has(step, StepFlag.GRAD_NORM) for step in steps) >= STEPS // 2
    with CPU:
        inputs, _ = batch(size=64)
    assert number_of((inputs,)) == number_of((inputs.clone(),))
    packed = pack_padded_sequence(inputs.reshape(4, 16, 8), torch.tensor([16, 8, 4, 2], device="cpu"), batch_first=True)
    assert resized(packed, 4, 8).data.device == CPU
    Contract(max=0.1).check(torch.full((4,), 0.1, device=CPU))
    assert check_outputs(inputs).ok
