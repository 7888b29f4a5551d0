"""One file, one speed: on the page, in the terminal, in the API, after the end, and by the counters that Prometheus scrapes."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from tests.exporters import Service
from tests.rank_files import PHASES_S, live_rank
from tests.support import wait_until
from torchobs import catalog
from torchobs.cli import inspect, top
from torchobs.cli.text import TerminalStyle
from torchobs.cli.top_view import Screen, frame
from torchobs.diagnosis import text_format
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.format.step_record import RecordKind, StepFlag
from torchobs.flight.writer.series_table import CORE
from torchobs.ranks import state
from torchobs.ranks.scanner import Scanner

if TYPE_CHECKING:
    from pathlib import Path

    from torchobs.flight.writer.writer import FlightWriter

TOKENS = 512


def step(writer: FlightWriter, number: int, end_ns: int) -> None:
    """A step of a quarter of a second, and then an evaluation before the next."""
    writer.append(number, end_ns, RecordKind.STEP, StepFlag.LOSS, 1, 0.25, 2.0, 0.0, 0.0, PHASES_S, TOKENS, 8)


def publish(writer: FlightWriter) -> None:
    """As the sampler does."""
    writer.heartbeat()
    writer.fold()
    writer.publish()


def test_everybody_who_shows_a_speed_shows_the_same(
    flight_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty steps, unevenly: the page, top, inspect, the API, and the increase of the counters over the same time."""
    monkeypatch.setattr(state, "UNRESPONSIVE_AFTER_S", 600.0)  # who is not alive has no speed, and nobody beats here
    writer = live_rank(flight_dir)
    total = writer.table.open(catalog.STEPS_PLANNED, {}, CORE)
    assert total is not None
    total.set(1000.0)
    ends = [time.monotonic_ns() - 40 * 10**9 + (10 * number + number % 3) * 10**8 for number in range(40)]
    step(writer, 1, ends[0])
    publish(writer)
    config = ExporterConfig(flight_dir=str(flight_dir), mode="node")
    with Service(config) as exporter:
        names = ("torchobs_steps_total", "torchobs_last_step_timestamp_seconds", "torchobs_tokens_total")
        before = [exporter.value(name) or 0.0 for name in names]
        for number, end_ns in enumerate(ends[1:], 2):
            step(writer, number, end_ns)
        publish(writer)
        wait_until(lambda: exporter.value(names[0]) == 40)
        gained = [(exporter.value(name) or 0.0) - then for name, then in zip(names, before, strict=True)]
        told = json.loads(exporter.get("/api/v1/ranks/0/steps?last=1").body)["speed"]
        page = exporter.page("/")
    seen, _ = top.views(Scanner(config))
    assert inspect.main(["--json", str(writer.path)]) == 0
    afterwards = json.loads(capsys.readouterr().out)["ranks"][0]["speed"]
    assert (told["steps"], told["window_s"]) == (40, pytest.approx(gained[1]))
    assert told["steps_per_s"] == pytest.approx(gained[0] / gained[1], rel=1e-6)
    assert told["tokens_per_s"] == pytest.approx(gained[2] / gained[1], rel=1e-6)
    assert afterwards == told
    assert [one.pace.per_s for one in seen if one.pace] == [told["steps_per_s"]]
    assert f'<data value="{told["steps_per_s"]}">{text_format.rate(told["steps_per_s"], "steps")}</data>' in page
    assert "<span>4 min</span>" in page  # of 960 steps
    shown = frame(seen, TerminalStyle(120), Screen(40), "12:00:00")
    assert "4 min left" in shown[0]
    assert f" {text_format.rate(told['steps_per_s'])} " in shown[-1]
    writer.close()
