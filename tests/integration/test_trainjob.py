"""The real exporter reports to a server that stands for Kubeflow Trainer's, over TLS, with the token of the moment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.exporters import Program, start_program
from tests.rank_files import live_rank, train
from tests.support import wait_until, why_missing
from tests.trainjob_server import PATH, Trainer, serving
from tests.web_configs import certify
from torchobs import catalog
from torchobs.flight.format.layout import Exit
from torchobs.flight.writer.series_table import CORE
from torchobs.flight.writer.writer import FlightWriter

Start = Callable[..., subprocess.Popen[str]]
PLANNED = 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of this machine, with its key beside it."""
    if reason := why_missing("openssl"):
        pytest.skip(reason)
    return certify(str(shutil.which("openssl")), tmp_path_factory.mktemp("trainer"), "server")


@pytest.fixture
def trainer(certificate: Path) -> Iterator[Trainer]:
    """The server."""
    made = Trainer(certificate)
    with serving(made):
        yield made


@pytest.fixture
def writer(flight_dir: Path) -> Iterator[FlightWriter]:
    """A living rank 0 that has made 50 of its 200 steps."""
    with closing(live_rank(flight_dir)) as made:
        planned = made.table.open(catalog.STEPS_PLANNED, {}, CORE)
        assert planned is not None
        planned.set(PLANNED)
        train(made, range(1, 51))
        yield made


@pytest.fixture
def exporter(
    start: Start, tmp_path: Path, flight_dir: Path, free_port: Callable[[], int], trainer: Trainer
) -> Callable[..., Program]:
    """Starts the real program with the variables that Kubeflow Trainer gives to a container; others replace these."""
    (tmp_path / "token").write_text("first\n")
    names = {"URL": trainer.url, "CA_CERT": str(trainer.certificate), "TOKEN": str(tmp_path / "token")}

    def run(**others: str) -> Program:
        environ = {f"KUBEFLOW_TRAINER_SERVER_{name}": text for name, text in {**names, **others}.items()}
        return start_program(start, tmp_path / "log", free_port(), "--flight-dir", str(flight_dir), **environ)

    return run


def test_the_trainjob_is_told_of_its_progress_and_its_end(
    exporter: Callable[..., Program], trainer: Trainer, writer: FlightWriter, tmp_path: Path
) -> None:
    """At once, not only after an interval; and of the end, with the token that kubelet has written meanwhile."""
    exporter()
    wait_until(lambda: trainer.got, timeout_s=60)
    path, authorization, _ = trainer.got[0]
    assert (path, authorization) == (PATH, "Bearer first")
    assert trainer.last["progressPercentage"] == 25
    assert {"name": "step", "value": "50"} in trainer.last["metrics"]
    (tmp_path / "token").write_text("second\n")
    train(writer, range(51, PLANNED + 1))
    writer.exit(Exit.FINISHED, 0)
    writer.publish()
    writer.close()
    wait_until(lambda: trainer.last.get("progressPercentage") == 100, timeout_s=60)
    assert trainer.last["estimatedRemainingSeconds"] == 0
    assert trainer.got[-1][1] == "Bearer second"


def test_an_exporter_that_ends_tells_the_last_state(
    exporter: Callable[..., Program], trainer: Trainer, writer: FlightWriter
) -> None:
    """As when a pod is deleted, long before the next report is due."""
    program = exporter()
    wait_until(lambda: trainer.got, timeout_s=60)
    train(writer, range(51, 101))
    program.process.terminate()
    assert program.process.wait(timeout=60) == 0
    assert trainer.last["progressPercentage"] == 50


@pytest.mark.usefixtures("writer")
@pytest.mark.parametrize(
    ("answer", "others", "said"),
    [
        (403, {}, "403 Forbidden"),
        (307, {}, "307 Temporary Redirect"),
        (200, {"CA_CERT": "/nowhere/ca.crt"}, "FileNotFoundError"),
        (200, {"TOKEN": "/nowhere/token"}, "FileNotFoundError"),
        (200, {"TOKEN": os.devnull}, "/dev/null is empty"),
        (200, {"URL": "https://127.0.0.1:9/status"}, "ConnectionRefusedError"),
    ],
    ids=["refused", "moved", "no certificate", "no token", "empty token", "nobody"],
)
def test_a_server_that_takes_nothing_is_one_line_and_a_count(
    exporter: Callable[..., Program], trainer: Trainer, answer: int, others: dict[str, str], said: str
) -> None:
    """Scrapes go on, a redirect is not followed, and at the end nobody waits for it."""
    trainer.answer = answer
    program = exporter(**others)
    wait_until(lambda: program.value("torchobs_exporter_write_errors_total", what="trainjob") == 1, timeout_s=60)
    assert program.value("torchobs_steps_total") == 50
    assert program.log.count("Kubeflow Trainer does not take") == 1
    assert said in program.log
    assert len(trainer.got) == int(not others)
    program.process.terminate()
    assert program.process.wait(timeout=60) == 0


@pytest.mark.usefixtures("writer")
def test_a_server_that_is_not_the_one_gets_no_token(
    exporter: Callable[..., Program], trainer: Trainer, program: Callable[[str], str], tmp_path: Path
) -> None:
    """Its certificate is of another authority."""
    running = exporter(CA_CERT=str(certify(program("openssl"), tmp_path, "other")))
    wait_until(lambda: running.value("torchobs_exporter_write_errors_total", what="trainjob") == 1, timeout_s=60)
    assert "certificate verify failed" in running.log
    assert trainer.got == []
