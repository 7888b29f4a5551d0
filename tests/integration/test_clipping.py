"""Clipping in a long run: the total norm stands in every record, also where nobody looks at the gradients any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.training import Recording, StepFlag, has, loss_of, mlp, recording

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=[0.005, 0.2], ids=["seldom", "often"])
def run(flight_dir: Path, request: pytest.FixtureRequest) -> Iterator[Recording]:
    """A recording with the interval that a user gets: by the default budget seldom, by a generous one in every step."""
    yield from recording(flight_dir, grad_interval=None, overhead_budget=request.param)


def test_every_clipped_step_has_its_norm_before_clipping(run: Recording) -> None:
    """Whatever changes on the way: a layer is frozen and thawed, a step clips twice, one not at all, a gradient overflows."""
    model = mlp(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    norms, clipped = dict[int, float](), list[bool]()
    for step in range(1, 301):
        frozen = 100 <= step < 130
        for parameter in parameters[:2]:
            parameter.requires_grad_(not frozen)
        optimizer.zero_grad()
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        if step == 200:
            assert parameters[2].grad is not None
            parameters[2].grad[0, 0] = torch.inf
        limit = 1e-6 if step % 3 else 1e6
        norms[step] = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
        if step % 50 == 7:
            torch.nn.utils.clip_grad_norm_(parameters, 1e6)
        if step % 40 != 11:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        clipped.append(step % 40 != 11 and limit < norms[step] < torch.inf)
        optimizer.step()
        if step == 200:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.nan_to_num_(0.1)
    records = run.steps()
    assert len(records) == 300
    for record in records:
        if record.step % 40 != 11:
            assert has(record, StepFlag.GRAD_NORM), record.step
            assert record.grad_norm == pytest.approx(norms[record.step], rel=1e-5)
    assert [has(record, StepFlag.CLIPPED) for record in records] == clipped


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("clip_grad_norm_", ("half",), ValueError),
        ("clip_grad_norm_", (None,), TypeError),
        ("clip_grad_norm_", (torch.tensor(1.0, device="meta"),), RuntimeError),
        ("clip_grad_norm_", (torch.tensor([1.0, 2.0]),), (ValueError, RuntimeError)),
        ("clip_grad_norm_", (1.0, "half"), ValueError),
        ("clip_grad_norm_", (1.0, None), TypeError),
        ("clip_grad_norm_", (1.0, torch.tensor(2.0, device="meta")), RuntimeError),
        ("clip_grad_value_", ("half",), ValueError),
        ("clip_grad_value_", (None,), TypeError),
    ],
)
def test_an_argument_that_is_no_number_is_torch_s_to_refuse(
    run: Recording, name: str, arguments: tuple[object, ...], error: type[Exception]
) -> None:
    """The user gets torch's own error; the probe goes on (``run`` checks that none failed) and the next step is measured."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step).backward()  # type: ignore[no-untyped-call]
        if step == 4:
            with pytest.raises(error) as raised:
                getattr(torch.nn.utils, name)(model.parameters(), *arguments)
            assert "torch/nn/utils/clip_grad.py" in str(raised.traceback[-2].path) + str(raised.traceback[-1].path)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
        optimizer.step()
    steps = run.steps()
    assert [has(step, StepFlag.CLIPPED) for step in steps] == [index != 4 for index in range(8)]
    assert has(steps[-1], StepFlag.GRAD_NORM)
