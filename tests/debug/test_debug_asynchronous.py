"""The checks for ``asyncio`` do not block the event loop, and findings reach the loggers."""

# mypy: disable-error-code="no-untyped-call, union-attr, operator, index, comparison-overlap"
# a parameter may have no gradient, and here it has one; torch has no types for `backward`

import asyncio
import logging
import threading
from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch

from tests.training import loss_of, mlp
from torchobs import debug
from torchobs.debug import asynchronous, findings


def test_small_and_large_tensors_give_the_same_as_the_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once or in a thread."""
    x = torch.arange(100.0)
    expected = debug.analyze_tensor(x, "x")
    assert asyncio.run(debug.acheck_tensor(x, "x")) == expected
    monkeypatch.setattr(asynchronous, "LARGE", 10)
    assert asyncio.run(debug.acheck_tensor(x, "x")) == expected
    model = mlp()
    loss = loss_of(model)
    loss.backward()
    whole = str(debug.check_gradients(model, loss))
    assert str(asyncio.run(debug.acheck_gradients(model, loss))) == whole
    monkeypatch.setattr(asynchronous, "LARGE", 1_000_000)
    assert str(asyncio.run(debug.acheck_gradients(model, loss))) == whole


def test_other_tasks_run_while_a_large_tensor_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computation waits until another task of the loop has run: a blocked loop would never let it end."""
    turned, threads = threading.Event(), []

    def slow(_: Any, name: str) -> str:
        threads.append(threading.current_thread())
        assert turned.wait(30)
        return name

    monkeypatch.setattr(asynchronous, "analyze_tensor", slow)

    async def program() -> Any:
        async def other() -> None:
            turned.set()

        return await asyncio.gather(debug.acheck_tensor(torch.zeros(asynchronous.LARGE), "x"), other())

    assert asyncio.run(program())[0] == "x"
    assert threads[0] is not threading.main_thread()


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_a_bridge_hands_findings_to_the_training_s_logger() -> None:
    """Once each, with their fields, until it is closed; then they go where they went before."""
    kept, own = Kept(), logging.getLogger("training of one's own")
    own.addHandler(kept)
    try:
        with debug.logging_bridge(own):
            debug.analyze_tensor(torch.tensor([nan]), "x")
            debug.analyze_tensor(torch.tensor([nan]), "x")  # held back
            own.setLevel(logging.ERROR)
            debug.analyze_tensor(torch.tensor([nan]), "y")
        own.setLevel(logging.NOTSET)
        debug.analyze_tensor(torch.tensor([nan]), "z")
    finally:
        own.removeHandler(kept)
    assert [(record.getMessage(), vars(record)["torchobs_kind"]) for record in kept.records] == [
        ("analyze_tensor: x: 1 NaN of 1 elements", "nonfinite_tensor")
    ]
    assert (findings.logger.handlers, findings.logger.propagate) == ([], True)


@pytest.mark.parametrize("check", [debug.analyze_tensor, lambda x: asyncio.run(debug.acheck_tensor(x))])
def test_a_repeated_finding_is_logged_once_a_minute(check: Callable[[Any], Any], caplog: pytest.LogCaptureFixture) -> None:
    """A loop that finds it in every step does not flood the log."""
    for _ in range(50):
        check(torch.tensor([nan]))
    assert len(caplog.records) == 1
