"""The API does what its description says: requests made from it, good and bad, against a running exporter.

Schemathesis makes the requests: it fills in parameters and bodies as the description allows and as it does not, and compares
each answer's status, content type and content with what is described.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.api import Caller
from tests.exporters import Service
from tests.rank_files import live_rank, train
from tests.support import wait_until
from torchobs.exporter.api import openapi
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.files.artifacts import STACKS, named

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "a-token-of-some-length"
# As a program: as a plug-in it costs every run of pytest five seconds, whichever tests that is for (see `addopts`).
SCHEMATHESIS = (sys.executable, "-m", "schemathesis.cli", "run", "--header", f"Authorization: Bearer {TOKEN}")
HOW = ("--phases", "examples,coverage,fuzzing", "--max-examples", "25", "--generation-deterministic")


def test_every_answer_is_as_described(flight_dir: Path, tmp_path: Path) -> None:
    """No server error, no status, content type or content that the description does not have; what it forbids is refused.

    Asked is a node's exporter with two ranks, steps, events and evidence.
    """
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "openapi.json").write_text(openapi.TEXT)
    writers = [live_rank(flight_dir, rank=rank) for rank in (0, 1)]
    for writer in writers:
        train(writer, [1, 2, 3])
        writer.level(1)
        writer.event("torchobs.anomaly", {"kind": "loss_spike", "value": float("nan")}, 3)
    (flight_dir / named(writers[0].name, STACKS, 1).name).write_text("Thread 0x1\n")
    config = ExporterConfig(flight_dir=str(flight_dir), mode="node", api_token_file=str(tmp_path / "token"))
    with Service(config) as exporter:
        wait_until(lambda: len(Caller(exporter.address).get("/ranks")["ranks"]) == 2)
        argv = [*SCHEMATHESIS, *HOW, "--url", f"http://{exporter.address}/api/v1", "openapi.json"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240)
    for writer in writers:
        writer.close()
    assert done.returncode == 0, done.stdout + done.stderr
    operations = sum(map(len, json.loads(openapi.TEXT)["paths"].values()))
    assert f"Tested: {operations}\n" in done.stdout
