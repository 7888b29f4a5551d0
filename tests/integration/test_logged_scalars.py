"""Scalars that a script logs, as curves: kept with the rank, and shown by the page, the API, `top` and `inspect`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

import torchobs
from tests.api import Caller
from tests.exporters import Service
from tests.rank_files import live_rank
from tests.support import wait_until
from tests.training import loss_of, mlp, recording
from tests.ui import shorten_seconds
from torchobs import catalog
from torchobs.cli import inspect, top
from torchobs.cli.text import TerminalStyle
from torchobs.cli.top_view import Screen, frame
from torchobs.diagnosis.rank_report import curves
from torchobs.exporter.config import ExporterConfig
from torchobs.probes.core.user_scalars import EVERY_S, POINTS, Scalars
from torchobs.ranks.scanner import Scanner

DAY_S = 86_400


@pytest.fixture
def kept(flight_dir: Path) -> Scalars:
    """What a rank logs, of a rank of its own."""
    return Scalars(live_rank(flight_dir).table)


def test_a_day_of_a_scalar_that_every_step_logs_is_some_hundred_points(kept: Scalars) -> None:
    """They share the ring with the first cause of what goes wrong: in twice the time there are only so many more."""
    told = dict.fromkeys(("acc", "val_loss"), 0)
    for second in range(DAY_S):
        kept.set("acc", second, 0.5)
        if second % 600 == 0:
            kept.set("val_loss", second, 2.0)
        for name in (kept.points(float(second)) or {"names": []})["names"]:
            told[name] += 1
    assert POINTS < told["acc"] < 12 * POINTS
    assert told["val_loss"] == DAY_S // 600  # what is rare is never too often


def test_what_is_left_is_kept_at_the_end(kept: Scalars) -> None:
    """The last value is what a run is judged by."""
    kept.set("acc", 1, 0.1)
    assert kept.points(0.0) == {"names": ["acc"], "steps": [1], "values": [0.1]}
    kept.set("acc", 2, 0.2)
    assert kept.points(EVERY_S / 2) is None
    assert kept.points(EVERY_S / 2, last=True) == {"names": ["acc"], "steps": [2], "values": [0.2]}


def test_an_event_of_the_same_name_is_no_curve() -> None:
    """Promise: what an application records under a name of ours breaks no view."""
    frames = [{"k": "event", "name": "torchobs.scalars", "attrs": attributes} for attributes in ({"text": "x"}, {"names": 1})]
    assert curves(frames) == {}


def test_what_a_script_logs_is_a_curve_everywhere(
    flight_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the page, in the API, in `top`, and from the file alone in `inspect`; none of it is in the list of events."""
    shorten_seconds(monkeypatch)
    for run in recording(flight_dir):
        sampler, host = run.session._sampler, run.session.context
        assert sampler is not None
        assert host is not None
        sampler.stop()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            torchobs.log(val_loss=2.0 - step, acc=math.nan)
            host.scalars._written.clear()  # so that no second need pass
            sampler.round()
        with Service(ExporterConfig(flight_dir=str(flight_dir), mode="node")) as exporter:
            wait_until(lambda: "val_loss" in exporter.page("/"))
            page = exporter.page("/")
            assert "val_loss from step 1 to 3: from 2 to 0" in page
            assert "Scalars" not in page
            api = Caller(exporter.address)
            found = {one["name"]: one["points"] for one in api.get("/ranks/0/scalars")["scalars"]}
            assert found["val_loss"] == [{"step": step + 1, "value": 2.0 - step} for step in range(3)]
            assert found["acc"][0] == {"step": 1, "value": "NaN"}
        seen, _ = top.views(Scanner(ExporterConfig(flight_dir=str(flight_dir))))
        assert any(line.startswith("val_loss ") for line in frame(seen, TerminalStyle(100), Screen(40), "12:00:00"))
    assert inspect.main([str(flight_dir), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["ranks"][0]
    assert [point["value"] for point in document["scalars"]["val_loss"]] == [2.0, 1.0, 0.0]
    assert catalog.EVENT_SCALARS.name not in {event["name"] for event in document["events"]}
    inspect.main([str(flight_dir)])
    assert "0 to 2, last 0 in step 3" in capsys.readouterr().out
