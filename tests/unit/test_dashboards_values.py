"""Dashboards with a person's own thresholds: `python -m dashboards --values my.yml --out DIR`, from a checkout."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import yaml

pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk, which needs Python 3.11")

from dashboards import grafana
from dashboards.__main__ import main
from tests.dashboards import panels
from torchobs.rules.values import DEFAULT

if TYPE_CHECKING:
    from pathlib import Path


def test_a_person_s_thresholds_are_in_panels_and_alerts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--values`: colours, what the descriptions call good, and rules, of one file; what is shipped stays as it is."""
    own = dict.fromkeys(("cpu", "memory", "gpu_memory", "shared_memory", "filesystem", "goodput", "fragmented"), 0.61)
    own |= {
        "cpu_throttled": 0.31,
        "gpu_throttled": 0.32,
        "straggler": 3.5,
        "time_to_limit_s": 900,
        "recompiles": 7,
        "skipped": 9,
    }
    (tmp_path / "my.yml").write_text(yaml.safe_dump({"thresholds": own, "runbooks": "https://r.example"}))
    assert main(["--values", str(tmp_path / "my.yml"), "--out", str(tmp_path / "out")]) == 0
    shown = {path.stem: path.read_text() for path in (tmp_path / "out" / "grafana" / "dashboards").glob("*.json")}
    shipped = grafana.render(DEFAULT)
    others = {"torchobs-gradients", "torchobs-data", "torchobs-itself"}
    assert {uid for uid, text in shipped.items() if text != shown[uid]} == shipped.keys() - others
    limits = {
        (uid, panel["title"], step["value"])
        for uid, text in shown.items()
        for panel in panels(json.loads(text))
        for step in panel["fieldConfig"]["defaults"].get("thresholds", {"steps": []})["steps"]
    }
    for uid, title, value in (
        ("fleet", "Goodput by run", 0.61), ("run", "Goodput", 0.61), ("memory", "Container or machine", 0.61),
        ("memory", "Shared memory", 0.61), ("memory", "Fragmentation", 0.61), ("memory", "Time to the limit", 900.0),
        ("node", "Busiest machines", 0.61), ("gpu", "Throttling", 0.32), ("ranks", "Stragglers across nodes", 3.5),
        ("compile", "Recompilations", 7.0), ("amp", "Skipped in a row", 9.0),
    ):  # fmt: skip
        assert (f"torchobs-{uid}", title, value) in limits
    text = "".join(shown.values())
    assert "Good: below 61 %." in text
    assert not re.search(r"Good: (one colour )?below 90 %", text)
    assert "https://r.example/" in shown["torchobs-alerts"]
    assert "> 0.61" in (tmp_path / "out" / "prometheus" / "rules" / "torchobs-alerts.yml").read_text()
    capsys.readouterr()
    for text, message in (
        ("thresholds: {memory: 61}", "memory is 61, not a share"),
        ("disabled: [Nothing]", "there is no alert"),
    ):
        (tmp_path / "my.yml").write_text(text)
        with pytest.raises(SystemExit):
            main(["--values", str(tmp_path / "my.yml"), "--out", str(tmp_path / "out")])
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--values", str(tmp_path / "my.yml")])
    assert "--values needs --out" in capsys.readouterr().err
