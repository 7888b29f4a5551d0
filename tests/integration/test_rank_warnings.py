"""Warnings of several ranks: each names its rank, equal ones come once from each node."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

import torchobs
from torchobs.flight.files import create
from torchobs.runtime import session

if TYPE_CHECKING:
    from pathlib import Path


def warned(caplog: pytest.LogCaptureFixture, flight_dir: Path, rank: int, world_size: int = 8) -> list[str]:
    """What a rank says of a setting that is wrong, of gradients that explode, of its own loss and of its own file."""
    caplog.clear()
    told: dict[str, Any] = {"rank": rank, "local_rank": rank % 4, "world_size": world_size, "run_id": "x", "total_steps": -1}
    with torchobs.init(flight_dir=flight_dir, **told) as running:
        assert running.context is not None
        say = running.context.warn_limited
        assert say is not None
        say("layers", "7 of 8 layers learn nothing")
        say("memory", "memory grows", own=True)
    assert session.logger.filters == []
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("rank", [0, 4])
def test_the_first_rank_of_a_node_speaks_for_it(caplog: pytest.LogCaptureFixture, flight_dir: Path, rank: int) -> None:
    """All that it has to say, with its rank."""
    setting, layers, memory = warned(caplog, flight_dir, rank)
    assert setting.startswith(f"torchobs: rank {rank}: ")
    assert "total_steps" in setting.lower()
    assert layers == f"torchobs: rank {rank}: 7 of 8 layers learn nothing"
    assert memory == f"torchobs: rank {rank}: memory grows"


@pytest.mark.parametrize("rank", [1, 7])
def test_another_rank_says_what_is_its_own(caplog: pytest.LogCaptureFixture, flight_dir: Path, rank: int) -> None:
    """And nothing that the first one says, too; at DEBUG all of it can be had."""
    assert warned(caplog, flight_dir, rank) == [f"torchobs: rank {rank}: memory grows"]
    with caplog.at_level(logging.DEBUG, "torchobs"):
        warned(caplog, flight_dir, rank)
        quiet = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
    assert f"torchobs: rank {rank}: 7 of 8 layers learn nothing" in quiet


def test_a_single_rank_names_none(caplog: pytest.LogCaptureFixture, flight_dir: Path) -> None:
    """As before."""
    assert warned(caplog, flight_dir, 0, 1)[1:] == ["torchobs: 7 of 8 layers learn nothing", "torchobs: memory grows"]


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        (PermissionError(13, "Permission denied"), "make it writable for this user, or set TORCHOBS_DIR"),
        (OSError(24, "Too many open files"), "allow more open files (ulimit -n), or set TORCHOBS_DIR"),
        (create.NoRoomError("the file system has 3 bytes left"), "make room there, or set TORCHOBS_DIR"),
    ],
)
def test_a_file_that_cannot_be_made_is_named_with_what_to_do(
    caplog: pytest.LogCaptureFixture, flight_dir: Path, monkeypatch: pytest.MonkeyPatch, problem: OSError, remedy: str
) -> None:
    """By path; and by every rank, for another one's may have been made."""

    def refuse(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(session, "open_writer", refuse)
    assert not torchobs.init(flight_dir=flight_dir, rank=3, local_rank=3, world_size=8).active
    torchobs.shutdown()
    (message,) = [record.message for record in caplog.records if "off" in record.message]
    assert message.startswith("torchobs: rank 3: off, ")
    assert str(flight_dir) in message
    assert remedy in message
    assert message.endswith("training is not affected")
    assert session.logger.filters == []
