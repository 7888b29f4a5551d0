"""The line of status in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.training import Recording, loss_of, mlp, recording
from torchobs.runtime import notebook
from torchobs.runtime.notebook import NotebookStatus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Display:
    """Takes what IPython would show."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, line: str, *, display_id: bool) -> Display:
        """Show a first line, which can be updated."""
        assert display_id
        self.update(line)
        return self

    def HTML(self, line: str) -> str:  # noqa: N802  # IPython's name
        """What is shown."""
        return line

    def update(self, line: str) -> None:
        """Show another line in its place."""
        self.shown.append(line)


@pytest.fixture
def run(flight_dir: Path) -> Iterator[Recording]:
    """A recording."""
    yield from recording(flight_dir)


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> Display:
    """What a notebook shows."""
    made = Display()
    monkeypatch.setattr(notebook, "_display", lambda: made)
    return made


def test_a_run_that_stands_still_is_marked_and_has_no_speed(
    run: Recording, display: Display, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the page, by the same rule; the clock is the test's."""
    now_s = [1000.0]
    monkeypatch.setattr(notebook, "live_phase", lambda _: (4, 0))
    assert run.session.context is not None
    status = NotebookStatus(run.session.context, "gpt", clock=lambda: now_s[0])
    status.begin()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def look(seconds: float, steps: int = 0) -> Any:
        now_s[0] += seconds
        for _ in range(steps):
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        status.sample()
        return display.shown[-1]

    look(1.0, steps=1)
    look(1.0, steps=10)
    for _ in range(3):
        assert "10 steps/s" in look(1.0, steps=10)
    assert "10 steps/s" in look(9.0)
    line = look(30.0)
    assert "<b>⚠ no step for 39 s</b> (usual: 0.1 s), step 41" in line
    assert "– steps/s" in line
    assert "no step for" not in look(1.0, steps=10)
