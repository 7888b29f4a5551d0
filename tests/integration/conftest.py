"""Fixtures of the tests in which several parts run together."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.exporters import Service
from tests.otlp import Receiver
from tests.prometheus_server import newest_prometheus
from tests.rank_files import live_rank, train
from torchobs.exporter.config import ExporterConfig

if TYPE_CHECKING:
    from tests.training import Extreme
    from torchobs.flight.writer import FlightWriter

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def golden(pytestconfig: pytest.Config) -> Callable[[str, str], None]:
    """Compare a text with the golden file of that name; with `--update-golden` write it, to be looked at in the diff."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if pytestconfig.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"`pytest --update-golden` writes {name} again"

    return compare


@pytest.fixture
def prometheus_program(program: Callable[[str], str]) -> str:
    """Prometheus 3 where it is on PATH, else Debian's."""
    return newest_prometheus(2) or program("prometheus")


@pytest.fixture
def promtool(program: Callable[[str], str]) -> str:
    """The tool of that Prometheus."""
    return shutil.which("promtool3") or program("promtool")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Of OTLP, one that takes everything."""
    with Receiver() as running:
        yield running


@pytest.fixture
def seeded() -> None:
    """For models that are the same each time."""
    import torch  # most tests of the exporter do without

    torch.manual_seed(0)


@pytest.fixture
def extreme(flight_dir: Path) -> Iterator[Extreme]:
    """A recording at level extreme."""
    from tests.training import Extreme, recording

    for run in recording(flight_dir, level="extreme"):
        yield Extreme(run)


@pytest.fixture
def writer(flight_dir: Path) -> Iterator[FlightWriter]:
    """A living rank that has taken three steps."""
    rank = live_rank(flight_dir)
    train(rank, [1, 2, 3])
    yield rank
    rank.close()


@pytest.fixture
def exporter(flight_dir: Path) -> Iterator[Service]:
    """A node's exporter of the flight directory."""
    with Service(ExporterConfig(flight_dir=str(flight_dir), mode="node")) as running:
        yield running
