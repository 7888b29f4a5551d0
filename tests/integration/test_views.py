"""What a script logs, and how fast it is: the same on the page, in the API, in top and in inspect."""

from __future__ import annotations

import json
import math
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch

import torchobs
from tests.diagnosis_files import shorten_seconds
from tests.exporters import Caller, Service
from tests.rank_files import PHASES_S, live_rank, live_span, train
from tests.support import wait_until
from tests.training import loss_of, mlp, recording
from torchobs import catalog
from torchobs.cli import inspect
from torchobs.cli.top import Watch, screen
from torchobs.document.text import TerminalStyle
from torchobs.exporter.config import ExporterConfig
from torchobs.flight.layout import Region
from torchobs.flight.step_record import RecordKind, StepFlag
from torchobs.flight.value_blocks import CORE
from torchobs.probes.scalars import EVERY_S, POINTS, Scalars
from torchobs.ranks import state
from torchobs.ranks.live import DetailsReader
from torchobs.ranks.scanner import Scanner
from torchobs.support import text as text_format

if TYPE_CHECKING:
    from pathlib import Path

    from torchobs.flight.writer import FlightWriter


DAY_S = 86_400


@pytest.fixture
def kept(flight_dir: Path) -> Scalars:
    """What a rank logs, of a rank of its own."""
    return Scalars(live_rank(flight_dir).table)


def test_a_day_of_a_scalar_that_every_step_logs_is_some_hundred_points(kept: Scalars) -> None:
    """They share the ring with the first cause of what goes wrong: in twice the time there are only so many more."""
    points = dict.fromkeys(("acc", "val_loss"), 0)
    for second in range(0, DAY_S, 4):
        kept.set("acc", second, 0.5)
        if second % 600 == 0:
            kept.set("val_loss", second, 2.0)
        for name in (kept.points(float(second)) or {"names": []})["names"]:
            points[name] += 1
    assert POINTS < points["acc"] < 12 * POINTS
    assert points["val_loss"] == DAY_S // 600  # what is rare is never too often


def test_what_is_left_is_kept_at_the_end(kept: Scalars) -> None:
    """The last value is what a run is judged by."""
    kept.set("acc", 1, 0.1)
    assert kept.points(0.0) == {"names": ["acc"], "steps": [1], "values": [0.1]}
    kept.set("acc", 2, 0.2)
    assert kept.points(EVERY_S / 2) is None
    assert kept.points(EVERY_S / 2, last=True) == {"names": ["acc"], "steps": [2], "values": [0.2]}


def test_what_is_read_bit_by_bit_is_what_is_read_at_once(flight_dir: Path) -> None:
    """Steps with late values, events, spans and curves of the rings, also once these have been overwritten."""
    writer = live_rank(flight_dir)
    bit_by_bit, head = DetailsReader(), writer.header.regions[Region.EVENTS].length
    with closing(Scanner(ExporterConfig(flight_dir=str(flight_dir)))) as scanner:
        for batch in range(8):
            numbers = range(1 + 700 * batch, 701 + 700 * batch)
            train(writer, numbers)
            writer.append(numbers[-3], 0, RecordKind.LATE, StepFlag.GRAD_NORM, 0, 0.0, 0.0, batch, 0.0, PHASES_S, 0, 0)
            train(writer, [])
            for number in range(head // 4000):  # twice the ring in all
                attributes = {"names": ["acc"], "steps": [number], "values": [0.5], "padding": "x" * 900}
                time_ns = time.monotonic_ns()
                writer.events.append({"k": "event", "name": "torchobs.scalars", "t": time_ns, "attrs": attributes})
                live_span(writer, number)
            writer.heartbeat()
            snapshot = scanner.scan()
            focused = [snapshot.ranks[0].incarnation] if batch % 3 else []
            (kept,) = bit_by_bit.gather(scanner, snapshot, focused).values()
            (fresh,) = DetailsReader().gather(scanner, snapshot, focused).values()
            assert kept.pace == fresh.pace
            assert kept.steps == fresh.steps
            assert kept.events.facts == fresh.events.facts
            assert kept.events.spans == fresh.events.spans
            assert kept.events.scalars == fresh.events.scalars
    writer.close()


def test_what_a_script_logs_is_a_curve_everywhere(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the page, in the API, in `top`, and from the file alone in `inspect`; none of it is in the list of events."""
    shorten_seconds(monkeypatch)
    for run in recording(flight_dir):
        sampler = run.session._sampler
        assert sampler is not None
        sampler.stop()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            torchobs.log(val_loss=2.0 - step, acc=math.nan)
            run.context.scalars._written.clear()  # so that no second need pass
            sampler.round()
        with Service(ExporterConfig(flight_dir=str(flight_dir), mode="node")) as exporter:
            wait_until(lambda: "val_loss" in exporter.page("/"))
            page = exporter.page("/")
            assert "val_loss from step 1 to 3: from 2 to 0" in page
            assert "Scalars" not in page
            api = Caller(exporter.address)
            curves = {curve["name"]: curve["points"] for curve in api.get("/ranks/0/scalars")["scalars"]}
            assert curves["val_loss"] == [{"step": step + 1, "value": 2.0 - step} for step in range(3)]
            assert curves["acc"][0] == {"step": 1, "value": "NaN"}
        runs, _ = Watch(Scanner(ExporterConfig(flight_dir=str(flight_dir)))).look()
        assert any(line.startswith("val_loss ") for line in screen(runs, TerminalStyle(100), 40).lines)
    assert inspect.main([str(flight_dir), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["ranks"][0]
    assert [point["value"] for point in document["scalars"]["val_loss"]] == [2.0, 1.0, 0.0]
    assert catalog.EVENT_SCALARS.name not in {event["name"] for event in document["events"]}
    inspect.main([str(flight_dir)])
    assert "0 to 2, last 0" in capsys.readouterr().out


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
        speed = json.loads(exporter.get("/api/v1/ranks/0/steps?last=1").body)["speed"]
        page = exporter.page("/")
    (run,), _ = Watch(Scanner(config)).look()
    assert inspect.main(["--json", str(writer.path)]) == 0
    afterwards = json.loads(capsys.readouterr().out)["ranks"][0]["speed"]
    assert (speed["steps"], speed["window_s"]) == (40, pytest.approx(gained[1]))
    assert speed["steps_per_s"] == pytest.approx(gained[0] / gained[1], rel=1e-6)
    assert speed["tokens_per_s"] == pytest.approx(gained[2] / gained[1], rel=1e-6)
    assert afterwards == speed
    assert [rank.pace.per_s for rank in run.ranks if rank.pace] == [speed["steps_per_s"]]
    assert f'<data value="{speed["steps_per_s"]}">{text_format.rate(speed["steps_per_s"], "steps")}</data>' in page
    assert "<dt>Time left</dt><dd>4 min</dd>" in page  # of 960 steps
    shown = screen([run], TerminalStyle(120), 40).lines
    assert "4 min left" in shown[0]
    assert f" {text_format.rate(speed['steps_per_s'])} " in shown[-1]
    writer.close()
