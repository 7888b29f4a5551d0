"""The node's exporter: how it is started, how long it lives, its log file."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from torchobs.node import election, launch, lifetime
from torchobs.node.lifetime import VIEWER_WAIT_S, Departure, ServiceStatus

if TYPE_CHECKING:
    from pathlib import Path


LOG = logging.getLogger("torchobs.test")


@pytest.fixture(autouse=True)
def _nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_warned", set())


def test_a_missing_extra_is_one_line_that_names_the_command(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No exporter installed: training goes on, and the log says what to type, once in a run that asks again and again."""
    monkeypatch.setattr(launch, "NEEDED", ("no_such_server", "json"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            launch.ensure_exporter(str(flight_dir), "127.0.0.1:0", LOG)
    assert caplog.messages == ["no exporter: no_such_server missing; pip install 'torchobs[exporter]'"]
    assert list(flight_dir.iterdir()) == []


def test_none_is_started_in_kubernetes(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There the sidecar is the exporter; a second one would live in the trainer's container and die with it."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    launch.ensure_exporter(str(flight_dir), "127.0.0.1:0", LOG)
    assert "Kubernetes" in caplog.text
    assert list(flight_dir.iterdir()) == []


def test_a_directory_that_is_gone_is_logged_and_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever keeps the exporter from starting, the training begins."""
    launch.ensure_exporter(str(tmp_path / "gone"), "127.0.0.1:0", LOG)
    assert "could not be started" in caplog.text


Look = tuple[float, ServiceStatus, bool]
"""Seconds since the look before, what there is, and whether the exporter leaves"""


def status(alive: int, scraped_s: float | None, unscraped: int, viewers: int = 0) -> ServiceStatus:
    """What an exporter is given to decide by."""
    return ServiceStatus(alive=alive, last_scrape_age_s=scraped_s, unscraped_final=unscraped, viewers=viewers)


WATCHED = status(0, 1.0, 0, viewers=1)
LIVES: dict[str, list[Look]] = {
    "a living rank is served, whoever scrapes": [(0, status(1, None, 0), False), (0, status(1, 1e6, 1), False)],
    "once the last state was scraped nothing is waited for": [(0, status(0, 3.0, 2), False), (0, status(0, 0.1, 0), True)],
    "a last state waits a grace, from the last rank's end, for a scraper that never came": [
        (0, status(1, None, 0), False), (3600, status(0, None, 1), False), (59, status(0, None, 1), False),
        (1, status(0, None, 1), True),
    ],
    "the grace begins again with every scrape, also with one that failed half-way": [
        (0, status(0, 30.0, 1), False), (1000, status(0, 44.0, 1), False), (1000, status(0, 1.0, 1), False),
        (1000, status(0, 45.0, 1), False), (1000, status(0, 60.0, 1), True),
    ],
    "an elastic restart within the grace ends the wait": [
        (0, status(0, None, 1), False), (59, status(1, None, 1), False), (59, status(0, None, 1), False),
    ],
    "it stays for who looks at the page of a run that has ended, and not for ever": [
        (0, WATCHED, False), (VIEWER_WAIT_S - 1, WATCHED, False), (0, status(0, 1.0, 0), True), (1, WATCHED, True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("life", LIVES)
def test_when_it_leaves(life: str) -> None:
    """As the case says."""
    now = [1000.0]
    departure = Departure(60.0, lambda: now[0])
    for seconds, service, leaves in LIVES[life]:
        now[0] += seconds
        assert departure(service) is leaves
        assert departure.decided is leaves


def test_the_older_half_goes_when_the_log_is_too_long(tmp_path: Path) -> None:
    """Whole lines are left, the newest among them, and what is written next comes after them."""
    directory = os.open(tmp_path, os.O_RDONLY)
    file = launch.open_log(directory)
    fd = file.number()
    for number in range(1000):
        os.write(fd, b"line %03d\n" % number)
    lifetime.shorten(fd, limit=9000)
    assert os.fstat(fd).st_size == 9000
    lifetime.shorten(fd, limit=1000)
    os.write(fd, b"next\n")
    lines = (tmp_path / launch.LOG).read_text().splitlines()
    file.close()
    os.close(directory)
    assert lines == [*(f"line {number}" for number in range(945, 1000)), "next"]


@pytest.mark.parametrize("name", [election.LOCK, launch.LOG])
def test_a_planted_link_is_not_followed(directory_fd: int, flight_dir: Path, name: str) -> None:
    """It would have us create, lock or append to any file of this user."""
    (flight_dir / name).symlink_to(flight_dir / "target")
    with pytest.raises(OSError, match="symbolic links"):
        launch.open_log(directory_fd) if name == launch.LOG else election.Election(directory_fd).win()
    assert not (flight_dir / "target").exists()
