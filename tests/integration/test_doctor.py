"""`torchobs doctor` on this machine: it changes nothing, tells programs too, and its trial is a real training."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torchobs.cli import doctor
from torchobs.config import settings

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_trial_finds_every_probe_at_work(
    flight_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps in a process of its own; nothing is left in the flight directory."""
    monkeypatch.setenv("TORCHOBS_DIR", str(flight_dir))
    assert doctor.main(["--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["version"] == 1
    assert {tuple(check) for check in made["checks"]} == {("name", "status", "text", "remedy")}
    names = {check["name"] for check in made["checks"]}
    assert names >= {
        "system",
        "torch",
        "variables",
        "directory",
        "room",
        "exporter",
        "shared memory",
        "cgroup",
        "clock",
        "nvml",
    }
    (trial,) = [check for check in made["checks"] if check["text"].startswith("a training of five steps")]
    assert trial["status"] == "ok"
    assert set(settings.PROBES) <= set(trial["text"].partition("at work: ")[2].split(", "))
    assert list(flight_dir.iterdir()) == []


def test_a_failed_check_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For scripts; the remedy is beside it."""
    (tmp_path / "file").write_text("no directory can be made below it")
    monkeypatch.setenv("TORCHOBS_DIR", str(tmp_path / "file" / "flight"))
    assert doctor.main(["--no-training"]) == 1
    out = capsys.readouterr().out
    assert "FAIL  directory: " in out
    assert "-> set TORCHOBS_DIR" in out
