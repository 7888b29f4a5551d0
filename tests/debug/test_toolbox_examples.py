"""The programs in examples/toolbox: each runs as it is, and is short enough to be read at a glance."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import torchobs
from torchobs import debug

PROGRAMS = {
    "watch_training": ["gradient_norms", "total_steps", "step  "],
    "profile_training": ["aten::addmm", "KiB", "forward"],
    "switches": ["gradient_norms", "norm ", "1 layer, 0 not finite"],
    "denoising": ["final_norm", "drift"],
    "tuned_training": ["Plan: mode amp", "recommended", "losses"],
    "guarded_training": ["batch 7: x: finite", "39 steps"],
}
"""Names, each with what it prints among other things"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_runs(
    name: str, checkout: Path, flight_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: at most 20 lines; it prints what it is for."""
    monkeypatch.setenv("TORCHOBS_DIR", str(flight_dir))
    monkeypatch.setenv("TORCHOBS_EXPORTER", "false")
    monkeypatch.chdir(flight_dir)
    path = checkout / "examples" / "toolbox" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 20
    try:
        with torch.random.fork_rng(devices=[]):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        debug.disable()
        torchobs.shutdown()
    printed = capsys.readouterr().out
    assert [text for text in PROGRAMS[name] if text not in printed] == []
