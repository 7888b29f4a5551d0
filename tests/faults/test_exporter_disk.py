"""A disk that is full: scrapes go on, what could not be written is counted, said, and written when there is room again."""

from __future__ import annotations

import errno
import http.client
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.api import Caller
from tests.exporters import EXPORTER, Program, Service
from tests.faults.test_flight_full import mounted
from tests.rank_files import live_rank, train
from tests.support import clean_environment, wait_until
from torchobs.exporter import daemon
from torchobs.exporter.config import ExporterConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def errors(program: Program, what: str) -> float:
    """How many writes of that failed."""
    return program.value("torchobs_exporter_write_errors_total", what=what) or 0


def test_a_full_disk_costs_no_scrape(
    start: Callable[..., subprocess.Popen[str]], flight_dir: Path, tmp_path: Path, free_port: Callable[[], int]
) -> None:
    """The log, the address for Prometheus, and commands on a full tmpfs."""
    full, port, socket = tmp_path / "full", free_port(), flight_dir / "api.sock"
    full.mkdir()
    writer = live_rank(flight_dir)
    train(writer, [1, 2, 3])
    prefix = mounted("size=64k", f'{{ cat /dev/zero > "{full}"/ballast 2> /dev/null || true; }}', full)
    arguments = ("--web.listen-address", f"127.0.0.1:{port}", "--flight-dir", flight_dir, "--api.socket", socket,
                 "--web.file-sd", full / "sd.json", "--control.dir", full / "control")  # fmt: skip
    logging = ("sh", "-c", f'exec "$@" 2> "{full}"/log', "sh")
    process = start(*prefix, *logging, *EXPORTER, *arguments, env=clean_environment())
    program = Program(process, f"127.0.0.1:{port}", tmp_path / "nothing")
    wait_until(lambda: process.poll() is None and program.is_ready(), timeout_s=60)
    wait_until(lambda: errors(program, "log") >= 1 and errors(program, "file_sd") >= 1)
    refused = Caller(socket).post("/debug/level/basic")
    assert (refused.status, "No space left" in refused.json["detail"]) == (503, True)
    wait_until(lambda: errors(program, "control") == 1)
    train(writer, [4])
    wait_until(lambda: program.value("torchobs_steps_total") == 4)
    assert program.value("torchobs_exporter_config_ok") == 0

    inside = Path(f"/proc/{process.pid}/root{full}")
    (inside / "ballast").unlink()
    wait_until((inside / "sd.json").exists)
    assert Caller(socket).post("/debug/level/basic").status == http.client.ACCEPTED
    wait_until(lambda: program.value("torchobs_exporter_config_ok") == 1)
    assert program.get().status == http.client.OK
    writer.close()


class _Full(list[str]):
    """An announcement's place that has no room at first."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._left = times

    def append(self, item: str) -> None:
        """Take it, when there is room."""
        if self._left:
            self._left -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().append(item)


def test_an_address_that_could_not_be_announced_is_announced_later(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's exporter whose directory is full does not fail by it: it serves, and says once where, when it can."""
    monkeypatch.setattr(daemon, "TICK_S", 0.05)
    exporter = Service(ExporterConfig(flight_dir=str(flight_dir), mode="node"))
    exporter.announced = _Full(3)
    with exporter:
        wait_until(lambda: exporter.value("torchobs_exporter_write_errors_total", what="announcement") == 3)
        assert exporter.announced == [exporter.address]
