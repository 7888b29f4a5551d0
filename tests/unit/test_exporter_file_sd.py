"""The file that tells a Prometheus where the exporter is."""

import json
from pathlib import Path

import pytest

from torchobs.config.options import Address
from torchobs.exporter.file_sd import ScrapeTarget, TargetFile

EVERYWHERE = ScrapeTarget((Address("::", 10960),), "/metrics", tls=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A name for the file."""
    return tmp_path / "torchobs-node-1.json"


@pytest.fixture
def file(tmp_path: Path) -> TargetFile:
    """One whose machine is called node-1."""
    return TargetFile(str(tmp_path / "torchobs-%h.json"), "node-1")


def test_an_address_that_was_chosen_is_said_as_it_is(file: TargetFile, path: Path) -> None:
    """With brackets where it is IPv6, each once, and with the scheme that TLS has."""
    chosen = (Address("10.0.0.7", 1), Address("fd00::7", 2), Address("0.0.0.0", 3), Address("::", 3))
    file.update(ScrapeTarget(chosen, "/telemetry", tls=True))
    (group,) = json.loads(path.read_text())
    assert group["targets"] == ["10.0.0.7:1", "[fd00::7]:2", "node-1:3"]
    assert group["labels"] == {"torchobs_host": "node-1", "__metrics_path__": "/telemetry", "__scheme__": "https"}


def test_it_is_written_when_it_changes_and_removed_at_the_end(file: TargetFile, path: Path) -> None:
    """Prometheus reads it again whenever it is touched; an exporter without a port is no target."""
    file.update(EVERYWHERE)
    before = path.stat()
    file.update(EVERYWHERE)
    assert path.stat() == before
    file.update(EVERYWHERE._replace(addresses=()))
    assert json.loads(path.read_text()) == []
    file.remove()
    file.remove()
    assert not path.exists()


def test_another_s_file_is_not_removed(file: TargetFile, path: Path) -> None:
    """A successor has written its own meanwhile."""
    file.update(EVERYWHERE)
    other = path.with_name("other")
    other.write_text("[]")
    other.replace(path)
    file.remove()
    assert path.read_text() == "[]"


def test_what_cannot_be_written_is_a_problem_until_it_can(tmp_path: Path) -> None:
    """The directory may come later."""
    path = tmp_path / "later" / "x.json"
    file = TargetFile(str(path), "node-1")
    file.update(EVERYWHERE)
    assert file.problem == f"--web.file-sd {path}: No such file or directory"
    path.parent.mkdir()
    file.update(EVERYWHERE)
    assert not file.problem
    assert path.exists()
