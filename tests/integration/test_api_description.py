"""The API does what its description says: requests made from it, good and bad, against a running exporter.

Schemathesis makes the requests: it fills in parameters and bodies as the description allows and as it does not, and compares
each answer's status, content type and content with what is described.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.api import Caller
from tests.exporters import Service
from tests.rank_files import live_rank, train
from tests.support import wait_until
from torchobs.exporter.api import openapi
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.evidence import STACKS, named

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "a-token-of-some-length"
schema = schemathesis.openapi.from_dict(json.loads(openapi.TEXT))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A node's exporter with two ranks, steps, events and evidence."""
    directory: Path = tmp_path_factory.mktemp("flight")
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text(TOKEN)
    writers = [live_rank(directory, rank=rank) for rank in (0, 1)]
    for writer in writers:
        train(writer, [1, 2, 3])
        writer.level(1)
        writer.event("torchobs.anomaly", {"kind": "loss_spike", "value": float("nan")}, 3)
    (directory / named(writers[0].name, STACKS, 1).name).write_text("Thread 0x1\n")
    with Service(ExporterConfig(flight_dir=str(directory), mode="node", api_token_file=str(token))) as exporter:
        wait_until(lambda: len(Caller(exporter.address).get("/ranks")["ranks"]) == 2)
        yield exporter.address
    for writer in writers:
        writer.close()


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(case: schemathesis.Case[Any], address: str) -> None:
    """No server error, no status, content type or content that the description does not have; what it forbids is refused."""
    case.call_and_validate(base_url=f"http://{address}/api/v1", headers={"Authorization": f"Bearer {TOKEN}"})
