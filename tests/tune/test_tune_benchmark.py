"""torchobs.tune.benchmark: what it measures, leaves alone, recommends, and calls noise."""

from __future__ import annotations

import functools
import itertools
import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.tune.models import SlowUnlessAutocast, blocks
from torchobs import tune
from torchobs.tune.comparison import ModeResult, Quartiles, recommend


def mode(name: str, speedup: tuple[float, float, float], *, accepted: bool = True) -> ModeResult:
    """Measurements with this speed-up; the rest does not matter."""
    once = Quartiles(1.0, 1.0, 1.0)
    return ModeResult(name, (), once, Quartiles(*speedup), 1.0, None, None, 0.0, accepted)


def test_a_real_gain_is_found_and_recommended() -> None:
    """Promise: a mode that is faster beyond noise is recommended, with its factor and quartiles."""
    result = tune.benchmark(SlowUnlessAutocast(), torch.ones(2, 4), modes=("none", "amp"), rounds=20, amp=torch.bfloat16)
    amp = result["amp"]
    assert result.recommended == "amp"
    assert 1 < amp.speedup_factor.low <= amp.speedup_factor.median <= amp.speedup_factor.high
    assert amp.speedup_factor.median > 2
    assert not amp.is_noise
    assert amp.difference is not None
    assert 0 < amp.difference < 0.1
    assert amp.used == ("autocast",)
    assert result["none"].speedup_factor == Quartiles(1.0, 1.0, 1.0)
    assert json.loads(json.dumps(result.to_dict()))["recommended"] == "amp"
    assert "s [" in str(result), "the median of a step's time has its unit"
    assert amp.peak_bytes is amp.memory_savings is None  # known for a GPU's allocator alone


def test_model_optimizer_and_random_state_are_as_before() -> None:
    """Promise: training steps of a benchmark train nothing, and leave the next random number what it was."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(8, 16), torch.randn(8, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    result = tune.benchmark(
        model, batch, nn.functional.mse_loss, optimizer, modes=("none", "memory_efficient"), rounds=6, amp=torch.bfloat16
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not optimizer.state
    assert torch.equal(state, torch.get_rng_state())
    assert all(weight.grad is None for weight in model.parameters())
    assert type(model) is nn.Sequential
    assert "checkpointing" in result["memory_efficient"].used


def test_compilation_is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: compiling is in the first step's time, and in no other."""
    # dynamo and autograd as ever, without a C++ compiler's minute
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    result = tune.benchmark(nn.Linear(16, 4), torch.randn(8, 16), modes=("none", "compile"), rounds=6)
    compiled = result["compile"]
    assert "compile" in compiled.used
    assert compiled.first_step_s > 10 * compiled.step_s.median


class _FailsUnderAutocast(nn.Module):
    error: Exception = torch.OutOfMemoryError("no room")

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise self.error
        return x + 1


def test_a_mode_that_fails_is_left_out() -> None:
    """Promise: what torch raises in one mode is its reason, and the others are measured; of the first mode it is raised."""
    options: dict[str, Any] = {"amp": torch.bfloat16, "rounds": 6}
    result = tune.benchmark(_FailsUnderAutocast(), torch.ones(2), modes=("none", "amp"), **options)
    assert [(problem.where, problem.text) for problem in result.problems] == [("amp", "OutOfMemoryError: no room")]
    assert result.recommended == "none"
    with pytest.raises(KeyError, match="there is no 'amp'; there is none"):
        result["amp"]
    picky = _FailsUnderAutocast()
    picky.error = ValueError("float32 alone")
    (left_out,) = tune.benchmark(picky, torch.ones(2), modes=("none", "amp"), **options).problems
    assert left_out.text == "ValueError: float32 alone"
    with pytest.raises(torch.OutOfMemoryError):
        tune.benchmark(_FailsUnderAutocast(), torch.ones(2), modes=("amp", "none"), **options)


def test_recommendations() -> None:
    """Promise: noise is called noise; what is fast and wrong is not recommended; the fastest of the good is."""
    none = mode("none", (1, 1, 1))
    assert recommend([none, mode("amp", (1.2, 0.9, 1.5))]) == ("none", "amp: the difference is within the noise")
    good, best = mode("amp", (1.5, 1.4, 1.6)), mode("full", (1.8, 1.2, 2.0))
    assert recommend([none, good, best])[0] == "full"
    assert recommend([none, mode("amp", (2, 1.9, 2.1), accepted=False)])[1].startswith("amp: faster, but with outputs")
    assert recommend([none, mode("amp", (0.5, 0.4, 0.6))]) == ("none", "no other mode is faster")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modes": ("amp", "amp")}, "one or more different names"),
        ({"modes": ("none", "fast")}, "unknown mode 'fast'"),
        ({"rounds": 3}, "a whole number, at least 6, not 3"),
        ({"warmup": -1}, "number of steps"),
        ({"modes": "amp"}, "a tuple of names, such as .'none', 'amp'."),
        ({"optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)])}, "pass loss_fn|none of the model's"),
        ({"loss_fn": lambda model, batch: batch.sum() + 0 * len(list(model.parameters()))}, "loss_fn does not call the model"),
    ],
)
def test_wrong_arguments_say_what_to_do(options: dict[str, Any], words: str) -> None:
    """Promise: a wrong argument is an error before anything is timed."""
    with pytest.raises(ValueError, match=words):
        tune.benchmark(nn.Linear(2, 2), torch.ones(1, 2), **options)
    with pytest.raises(TypeError, match=r"model is a torch.nn.Module, not str"):
        tune.benchmark("model", torch.zeros(2, 16))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the loader has no batch"):
        tune.benchmark(nn.Linear(2, 2), DataLoader(TensorDataset(torch.empty(0, 2))))


class _Temperature(nn.Module):
    """A loss with a parameter and statistics of its own, and a weight that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(())), nn.BatchNorm1d(4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.computed = nn.utils.weight_norm(nn.Linear(4, 4))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.computed(self.norm(output)) * self.scale, target)


@pytest.mark.parametrize("kind", ["module", "partial", "function"])
def test_what_a_loss_function_has_is_as_before(kind: str) -> None:
    """Promise: gradients, parameters and buffers of a loss function, and of the model that it refers to, are as before."""
    model, loss = nn.Linear(8, 4), _Temperature()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], 0.1)
    x, target = torch.randn(16, 8), torch.randn(16, 4)
    loss(model(x), target).backward()

    def penalised(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target) + model.weight.square().sum()

    functions: dict[str, Any] = {"module": loss, "partial": functools.partial(loss.forward), "function": penalised}
    values = [*model.state_dict().values(), *loss.state_dict().values()]
    values += [leaf.grad for leaf in (*model.parameters(), *loss.parameters()) if leaf.grad is not None]
    before = [value.clone() for value in values]
    tune.benchmark(model, (x, target), functions[kind], optimizer, modes=("none", "amp"), rounds=6, amp=torch.bfloat16)
    assert all(map(torch.equal, before, values))


class _Chancy(nn.Module):
    """Draws from every generator, also where a plan is made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        factor = random.random() + float(np.random.rand()) + float(torch.rand(()))  # noqa: NPY002  # the global one
        return self.layer(x) * factor  # type: ignore[no-any-return]


def test_random_states_are_as_before_with_a_loader() -> None:
    """Promise: Python's, NumPy's and torch's random states are as before, and so is a generator of the loader's own."""
    data, generator = TensorDataset(torch.randn(16, 8), torch.randn(16, 4)), torch.Generator()
    model = _Chancy()
    options: dict[str, Any] = {"modes": ("none", "amp"), "amp": torch.bfloat16}

    def states() -> list[Any]:
        numpy: Any = np.random.get_state()  # noqa: NPY002  # the global one
        return [random.getstate(), numpy[1].tolist(), torch.get_rng_state().tolist(), generator.get_state().tolist()]

    for loader in (DataLoader(data, 4, shuffle=True), DataLoader(data, 4, shuffle=True, generator=generator)):
        before = states()
        tune.benchmark(model, loader, nn.functional.mse_loss, rounds=6, **options)
        assert states() == before


def test_modes_that_do_the_same_are_seldom_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: what is faster by its place in a round alone is no gain, nor is what differs by chance."""
    chance, calls = random.Random(2), itertools.count()

    def timed(*_: Any) -> float:
        return (0.985 if next(calls) % 2 else 1.0) * chance.lognormvariate(0, 0.01)

    monkeypatch.setattr("torchobs.tune.comparison._timed", timed)
    options: dict[str, Any] = {"modes": ("none", "amp"), "level": "off", "warmup": 0}
    results = [tune.benchmark(nn.Identity(), torch.ones(1), rounds=20, **options) for _ in range(60)]
    assert sum(result.recommended == "amp" for result in results) <= 1  # in 480 such calls none was
    assert sum(result["amp"].speedup_factor.high < 1 for result in results) <= 1


def test_a_benchmark_is_drawn_and_says_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: the picture is a whole file of the ending asked for, others are an error; a line on stderr if wanted."""
    result = tune.benchmark(nn.Linear(4, 2), torch.ones(2, 4), modes=("none", "amp"), rounds=6, warmup=0, progress=True)
    assert capsys.readouterr().err.endswith("\rround 6 of 6 of none, amp\n")
    assert Path(result.plot(tmp_path / "a.svg")).read_text().rstrip().endswith("</svg>")
    assert Path(result.plot(str(tmp_path / "a.png"))).read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match=r"'a.gif' ends in none of these: .pdf, .png, .svg"):
        result.plot("a.gif")
