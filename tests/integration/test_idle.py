"""A rank that has left its training loop, by whatever it does instead, has not hung."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.training import Recording, loss_of, mlp, recording
from torchobs.probes import phases
from torchobs.probes.context import _COLLECTIVES_FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

session = contextmanager(recording)


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is long at once: the stack alone decides."""
    monkeypatch.setattr(phases, "idle_from", lambda _: 0.0)


def doing(run: Recording) -> str | None:
    """What the file says that the training thread does."""
    run.look()
    run.look()  # what one round finds out, the next one says
    return run.view().live.phase


def train(steps: int, within: Callable[[], object] = lambda: None) -> None:
    """A loop of one's own; `within` is called in it after every step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for index in range(steps):
        loss_of(model, index).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        within()


def test_who_has_left_the_loop_is_idle(flight_dir: Path) -> None:
    """A notebook between two cells, a server, an upload."""
    with session(flight_dir) as run:
        train(3)
        assert doing(run) == "idle"


def test_who_stands_still_in_the_loop_is_not(flight_dir: Path) -> None:
    """However deep: that may be a hang."""
    with session(flight_dir) as run:
        seen: list[str | None] = []
        train(3, lambda: seen.append(doing(run)))
        assert seen == ["other"] * 3


def test_a_loop_at_the_level_of_the_script_ends_like_any_other(flight_dir: Path) -> None:
    """The frame stays, its line moves on."""
    with session(flight_dir) as run:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for index in range(3):
            loss_of(model, index).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert doing(run) == "idle"


def test_who_waits_for_other_ranks_behind_the_loop_is_not_idle(flight_dir: Path) -> None:
    """A last barrier that never ends is a hang like any other."""
    with session(flight_dir) as run:
        train(3)
        assert inspect.getsourcefile(inspect.unwrap(dist.barrier)).endswith(_COLLECTIVES_FILE)  # type: ignore[union-attr]
        found: dict[str, Any] = {}
        exec(compile("def barrier(look):\n    return look()\n", f"/{_COLLECTIVES_FILE}", "exec"), found)  # noqa: S102  # a frame of that file
        assert found["barrier"](lambda: doing(run)) == "other"


def test_where_there_is_no_loop_nothing_is_claimed(flight_dir: Path) -> None:
    """Steps made one by one, by hand."""
    with session(flight_dir) as run:
        model = mlp()
        loss_of(model).backward()  # type: ignore[no-untyped-call]
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        assert doing(run) == "other"


def test_before_the_first_step_nobody_is_idle(flight_dir: Path) -> None:
    """Data are read, models made."""
    with session(flight_dir) as run:
        assert doing(run) == "other"
