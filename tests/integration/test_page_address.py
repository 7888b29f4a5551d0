"""The live page's address, as `init(exporter=True)` says it."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import clean_environment, free_port, wait_until
from torchobs.flight.files.location import open_directory
from torchobs.node import announcement
from torchobs.runtime.notebook import NotebookStatus
from torchobs.runtime.page_address import PageAddress

TRAINING = """
import sys
import torchobs
session = torchobs.init(exporter=True, exporter_address=sys.argv[1], rank=int(sys.argv[2]))
sys.stdin.readline()
print(repr(session))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_script_says_where_its_page_is(
    rank: int, flight_dir: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Rank 0 logs it once, as soon as the exporter listens, though nothing configures logging; the session has it, too."""
    address, log = f"127.0.0.1:{free_port()}", tmp_path / "log"
    with log.open("w") as out:
        process = start(
            sys.executable, "-c", TRAINING, address, str(rank), torch=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=out, env={**clean_environment(), "TORCHOBS_DIR": str(flight_dir)},
        )  # fmt: skip
    directory = open_directory(str(flight_dir))
    announced = wait_until(lambda: announcement.read(directory), timeout_s=60)
    assert announced is not None
    url = announced.url
    assert address in url
    line = f"torchobs: this run is shown live on {url}\n"
    assert process.stdin is not None
    assert process.stdout is not None
    if rank == 0:
        wait_until(lambda: line in log.read_text(), timeout_s=60)
    process.stdin.close()
    said = process.stdout.read()
    assert process.wait(timeout=60) == 0, log.read_text()
    assert log.read_text().count("shown live") == (1 if rank == 0 else 0)
    if rank == 0:
        assert re.search(rf"run \S+, rank 0, step 0, live on {re.escape(url)}>", said), said


def test_a_notebook_has_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its line of status, from when the address is there."""
    shown: list[str] = []
    page = PageAddress("/nowhere/r0.flight", says=False)
    status = NotebookStatus(None, "job run", page)  # type: ignore[arg-type]  # the line alone
    status._handle = type("Handle", (), {"update": staticmethod(shown.append)})()
    monkeypatch.setattr(NotebookStatus, "_html", lambda _, words: words)
    status.update("step 1")
    page.url = "http://127.0.0.1:9/"
    status.update("step 1")
    assert shown == ["step 1", 'step 1 · <a href="http://127.0.0.1:9/" target="_blank" rel="noopener">live page</a>']
