"""``debug.context`` and ``@debug.operation`` measure a part of a program and leave it as it was."""

# mypy: disable-error-code="no-untyped-call, union-attr, operator, index, comparison-overlap"
# a parameter may have no gradient, and here it has one; torch has no types for `backward`

import asyncio
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils import _python_dispatch

from tests.debug.models import MODELS, step
from tests.training import Recording, loss_of, mlp, norm_of
from torchobs import debug


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No hook, no mode: after every test of this file."""
    before = dict(torch_optimizer._global_optimizer_pre_hooks)
    yield
    assert dict(torch_optimizer._global_optimizer_pre_hooks) == before
    assert _python_dispatch._get_current_dispatch_mode() is None
    assert not torch.is_anomaly_enabled()


def test_the_info_is_filled_at_the_end() -> None:
    """Time, memory, the norm that the optimizer's step started from; no anomaly."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with debug.context("train", model_name="MLP", epoch=1, batch=2) as info:
        assert (info.time_s, info.memory, info.operation) == (None, None, "train")
        loss_of(model).backward()
        expected = norm_of(model)
        optimizer.step()
        optimizer.zero_grad()
    assert info.gradient_norm == pytest.approx(expected, rel=1e-6)
    assert info.time_s is not None
    assert info.time_s > 0
    assert info.memory is not None
    assert info.memory.peak_bytes >= max(info.memory.before_bytes, info.memory.after_bytes) > 0
    assert (info.model_name, info.epoch, info.batch, info.gpu_memory) == ("MLP", 1, 2, None)
    assert (info.ok, info.problems, info.error) == (True, (), None)
    assert "train" in str(info)
    assert info.to_dict()["memory"]["before_bytes"] > 0


def test_without_a_step_the_model_s_gradients_count() -> None:
    """At the end, where ``model=`` is given; none is none."""
    for model, expected in ((mlp(), None), (mlp(), 1)):
        with debug.context("backward", model=model) as info:
            if expected:
                loss_of(model).backward()
        assert info.gradient_norm == (pytest.approx(norm_of(model), rel=1e-6) if expected else None)


def test_contexts_nest_and_count() -> None:
    """An inner one has its parent's name; the summary counts both, until ``clear()``."""
    with debug.context("outer") as outer, debug.context("inner") as inner:
        pass
    for _ in range(2):
        with debug.context("inner"):
            pass
    assert (inner.parent, outer.parent) == ("outer", None)
    assert outer.time_s is not None
    assert inner.time_s is not None
    assert outer.time_s >= inner.time_s
    summary = debug.summary()
    assert summary.total_operations == 4
    assert {row.operation: row.count for row in summary.operations} == {"inner": 3, "outer": 1}
    assert summary.maximum_s is not None
    assert summary.mean_s is not None
    assert summary.maximum_s >= summary.mean_s > 0
    assert summary.memory_peak_bytes > 0
    debug.clear()
    assert (debug.summary().total_operations, debug.summary().maximum_s) == (0, None)
    for number in range(40):
        with debug.context(f"step {number}"):
            pass
    assert {row.operation: row.count for row in debug.summary().operations}["other"] == 24


def test_tasks_of_an_event_loop_do_not_mix() -> None:
    """Contexts of two tasks end in any order; each has its own parent, findings and norm."""

    async def task(name: str, *, bad: bool, first: asyncio.Event, then: asyncio.Event) -> Any:
        with debug.context(name, anomaly="warn") as outer:
            first.set()
            await then.wait()
            with debug.context(f"{name} inner") as inner:
                torch.tensor([-1.0 if bad else 1.0]).sqrt()
            await asyncio.sleep(0)
        return outer, inner

    async def program() -> Any:
        one, two = asyncio.Event(), asyncio.Event()
        bad = task("bad", bad=True, first=one, then=two)
        return await asyncio.gather(bad, task("good", bad=False, first=two, then=one))

    (bad, bad_inner), (good, good_inner) = asyncio.run(program())
    assert (bad_inner.parent, good_inner.parent) == ("bad", "good")
    assert (bad.ok, good.ok) == (False, True)


@debug.operation("named", model_name="M")
def decorated(x: int) -> int:
    """Double it."""
    return 2 * x


@debug.operation()
async def coroutine(x: int) -> int:
    """Double it, later."""
    await asyncio.sleep(0)
    return 2 * x


def test_functions_are_decorated() -> None:
    """They keep name and result, and are counted at each call."""
    assert [decorated(1), decorated(2), asyncio.run(coroutine(3))] == [2, 4, 6]
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Double it.")
    assert {row.operation: row.count for row in debug.summary().operations} == {"named": 2, "coroutine": 1}
    with pytest.raises(TypeError, match=r"is a generator: use debug\.context"):
        debug.operation("g")(lambda: (yield))


# -- anomalies -----------------------------------------------------------------------------------------------------------------


def test_raise_is_torch_s_anomaly_mode() -> None:
    """It raises at the backward function that returns NaN, and the info says so."""
    x = torch.tensor([0.0], requires_grad=True)
    y = x.sqrt()
    with pytest.raises(RuntimeError, match="SqrtBackward0"), debug.context("step", anomaly="raise") as info:
        (y * 0).sum().backward()
    assert (info.ok, info.error, debug.summary().total_operations) == (False, "RuntimeError", 1)
    assert info.time_s is not None
    assert "SqrtBackward0" in info.problems[0].text
    assert (debug.summary().with_problems, debug.summary().errors) == (1, 1)


def test_the_user_s_own_anomaly_mode_is_restored() -> None:
    """It is not switched off, whichever of the three is used."""
    with torch.autograd.set_detect_anomaly(mode=True, check_nan=False):
        modes: list[Any] = ["off", "warn", "raise"]
        for anomaly in modes:
            with debug.context("step", anomaly=anomaly):
                assert torch.is_anomaly_check_nan_enabled() == (anomaly == "raise")
            assert (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()) == (True, False)


def test_warn_names_the_forward_operator_and_goes_on() -> None:
    """The first one with finite inputs, by its line; what follows from it is no finding."""
    with debug.context("forward", anomaly="warn") as info:
        x = torch.tensor([1.0, -1.0])
        y = (torch.log(x) * 2 + 1).sum()
    assert y.isnan()
    (problem,) = info.problems
    assert problem.text == "1 NaN from log"
    assert f"{Path(__file__).name}:" in problem.where


def test_warn_names_the_backward_operator_by_its_node_and_the_forward_line() -> None:
    """The square root of 0 has a fine value and an infinite gradient."""
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    with debug.context("step", anomaly="warn") as info:
        y = x.sqrt()
        line = y.grad_fn
        y.sum().backward()
    assert line is not None
    (problem,) = info.problems
    assert problem.text == "1 Inf from div in the backward of SqrtBackward0"
    here = Path(__file__).read_text().splitlines()
    assert here[int(problem.where.rpartition(":")[2]) - 1].strip() == "y = x.sqrt()"


def test_masks_and_unwritten_memory_are_no_anomalies() -> None:
    """-inf as a constant, and what ``empty`` returns."""
    with debug.context("masks", anomaly="warn") as info:
        scores = torch.randn(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
        scores = scores + torch.full((4, 4), float("-inf")).triu(1)
        scores.softmax(-1).sum()
        torch.empty(1000).fill_(1.0).sum()
        torch.empty(10).new_empty(1000).normal_()
        query = torch.randn(1, 2, 4, 8)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert info.problems == ()


@pytest.mark.parametrize("name", MODELS)
def test_healthy_models_have_no_anomaly_and_train_bit_identically(name: str) -> None:
    """Whatever is looked for."""
    results = {}
    modes: list[Any] = [None, "off", "warn", "raise"]
    for anomaly in modes:
        make, batch = MODELS[name]
        torch.manual_seed(1)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for number in range(3):
            torch.manual_seed(number)
            if anomaly is None:
                step(model, optimizer, batch())
            else:
                with debug.context("step", anomaly=anomaly) as info:
                    step(model, optimizer, batch())
                assert info.problems == ()
        results[anomaly] = [parameter.detach().clone() for parameter in model.parameters()]
    for anomaly in ("off", "warn", "raise"):
        assert all(map(torch.equal, results[None], results[anomaly]))


def test_a_session_counts_operations_and_records_anomalies(run: Recording) -> None:
    """As metrics by operation, and as events."""
    for _ in range(3):
        with debug.context("step", anomaly="warn", epoch=4):
            torch.zeros(1).log()
    with debug.context("rest"):
        pass
    values = run.look()
    assert (values["torchobs.debug.operations", "step"], values["torchobs.debug.operations", "rest"]) == (3, 1)
    assert values["torchobs.debug.operation.anomalies", "step"] == 3
    assert values["torchobs.debug.operation.time", "step"] >= values["torchobs.debug.operation.longest", "step"] > 0
    assert values["torchobs.debug.operation.memory", "rest", "host"] > 0
    attributes = run.frames("torchobs.debug.finding")[0]["attrs"]
    assert (attributes["kind"], attributes["operation"], attributes["epoch"]) == ("nonfinite_result", "step", 4)
    assert "1 Inf from log" in attributes["message"]


def test_the_system_is_what_the_doctor_says() -> None:
    """Row by row; a check that fails is a problem."""
    system = debug.system()
    assert system["torch"].text.startswith(torch.__version__)
    assert {row.name for row in system.checks if row.status == "fail"} == {problem.where for problem in system.problems}


def test_memory_that_is_kept_is_seen() -> None:
    """64 MiB more after than before; from the system, since the allocator may have as much left of an earlier test."""
    with debug.context("allocate") as info:
        kept = torch.frombuffer(mmap(-1, 64 << 20), dtype=torch.float32).fill_(1.0)
    assert info.memory is not None
    assert info.memory.after_bytes - info.memory.before_bytes >= 60 << 20
    assert kept.numel()
