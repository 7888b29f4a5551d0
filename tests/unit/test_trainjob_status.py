"""What the exporter reports to Kubeflow Trainer of a run, from the files of its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.rank_files import Clock, File
from tests.scanners import scanner_of
from torchobs import catalog
from torchobs.exporter import config as exporter_config
from torchobs.exporter.trainjob import reporting, status_of
from torchobs.flight.format.layout import Exit
from torchobs.flight.metrics.throughput import RECORDS

NOW = datetime(2026, 6, 12, 3, tzinfo=timezone.utc)
STEPS = 40


def reported(directory: Path, end_s: float = STEPS / 10) -> dict[str, Any] | None:
    """The status of the run in a directory; None if nobody there reports."""
    clock = Clock(end_s)
    with closing(scanner_of(directory, clock)) as scanner:
        rank = reporting(scanner.scan().ranks)
        if rank is None:
            return None
        with scanner.flight_file(rank.incarnation) as file:
            return status_of(rank, file.latest(RECORDS), NOW)


def rank(directory: Path, *, planned: int = 0, resumed_from: int = 0, loss: float = 2.0, **given: Any) -> File:
    """A living rank that has made 40 steps of 0.1 s; `given`: see :class:`File`."""
    file = File(directory, **given).hold()
    for number in range(1, STEPS + 1):
        file.step(number, number / 10, loss=loss)
    file.writer.fold()
    for metric, value in ((catalog.STEPS_PLANNED, planned), (catalog.STEPS_RESUMED_FROM, resumed_from)):
        if value:
            file.set(metric, value)
    file.beat(STEPS / 10)
    return file


@contextmanager
def running(directory: Path, **given: Any) -> Iterator[None]:
    """Such a rank, which is gone after a `with` block; `given`: see :func:`rank`."""
    file = rank(directory, **given).save()
    try:
        yield
    finally:
        file.release()


def metrics_of(status: dict[str, Any]) -> dict[str, str]:
    """A status' metrics by name."""
    return {one["name"]: one["value"] for one in status["metrics"]}


@pytest.mark.parametrize(
    ("planned", "resumed_from", "progress"), [(100, 0, 40), (100, 500, 90), (30, 0, 99), (40, 0, 99), (1_000_000, 0, 0)]
)
def test_progress_is_of_the_whole_run(flight_dir: Path, planned: int, resumed_from: int, progress: int) -> None:
    """After a checkpoint, too; and a living run is never complete, whatever it has planned."""
    with running(flight_dir, planned=planned, resumed_from=resumed_from):
        status = reported(flight_dir)
    assert status is not None
    assert status["progressPercentage"] == progress
    assert status["lastUpdatedTime"] == "2026-06-12T03:00:00Z"
    assert metrics_of(status) == {"step": f"{resumed_from + STEPS}", "loss": "2", "learning_rate": "0.001"}


def test_the_time_left_is_that_of_the_steps_left(flight_dir: Path) -> None:
    """60 steps of 0.1 s."""
    with running(flight_dir, planned=100):
        status = reported(flight_dir)
    assert status is not None
    assert status["estimatedRemainingSeconds"] == 6


def test_what_is_not_known_is_left_out(flight_dir: Path) -> None:
    """A run without a plan; a loss that is not finite is told as such, for it is a text."""
    with running(flight_dir, loss=float("nan")):
        status = reported(flight_dir)
    assert status is not None
    assert not {"progressPercentage", "estimatedRemainingSeconds"} & status.keys()
    assert metrics_of(status)["loss"] == "NaN"


@pytest.mark.parametrize(
    ("exit_reason", "expected"), [(Exit.FINISHED, (100, 0)), (Exit.EXCEPTION, (40, None)), (Exit.TERMINATED, (40, None))]
)
def test_only_a_training_that_has_finished_is_complete(
    flight_dir: Path, exit_reason: int, expected: tuple[int, int | None]
) -> None:
    """And of one that failed nothing is left to wait for."""
    file = rank(flight_dir, planned=100)
    file.writer.exit(exit_reason, 0)
    file.save().release()
    status = reported(flight_dir)
    assert status is not None
    assert (status["progressPercentage"], status.get("estimatedRemainingSeconds")) == expected


def test_a_hung_run_has_no_time_left(flight_dir: Path) -> None:
    """Its last steps say nothing of the next ones."""
    file = rank(flight_dir, planned=100)
    file.beat(4000.0)
    file.save()
    status = reported(flight_dir, end_s=4000.0)
    file.release()
    assert status is not None
    assert "estimatedRemainingSeconds" not in status
    assert status["progressPercentage"] == 40


def test_one_pod_reports_for_the_run(flight_dir: Path) -> None:
    """That of rank 0. Its last incarnation counts, if none lives."""
    with running(flight_dir, rank=1):
        assert reported(flight_dir) is None
    for seed, planned in ((2, 50), (3, 80)):
        file = rank(flight_dir, planned=planned, seed=seed, born_s=seed)  # the second when the first ends
        file.writer.exit(Exit.EXCEPTION, 1)
        file.save().release()
    status = reported(flight_dir)
    assert status is not None
    assert status["progressPercentage"] == 50


@pytest.mark.parametrize(
    "url", ["http://server/status", "https://user@server/status", "https://", "server:10443", "https://a/?b=c"]
)
def test_a_token_is_sent_nowhere_else(url: str) -> None:
    """To a server that is not proven to be the one: not without TLS."""
    environ = {"KUBEFLOW_TRAINER_SERVER_URL": url, "KUBEFLOW_TRAINER_SERVER_TOKEN": "/token"}
    parsed = exporter_config.parse({}, environ)
    assert parsed.trainjob_url is None
    assert any("KUBEFLOW_TRAINER_SERVER_URL" in problem for problem in parsed.problems)
