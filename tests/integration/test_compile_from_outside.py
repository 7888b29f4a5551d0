"""A script that is compiled again and again, its code unchanged: the log and the report say so, where, and why."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from tests import fork_server
from tests.support import ROOT, clean_environment
from torchobs.cli import inspect

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SCRIPT = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 1)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        print("", end="")
        return self.inner(inputs) * self.calls


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
compiled = torch.compile(net, backend="eager")
for _ in range(20):
    optimizer.zero_grad()
    compiled(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_storm_and_a_graph_break_are_told_with_place_and_cause(
    flight_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attribute that is compiled in as a constant, torch's giving up, the call that ends the graph; the alert's counter."""
    script = tmp_path / "storm.py"
    script.write_text(SCRIPT)
    environ = {**clean_environment(), "TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torchobs", "run", "--no-exporter", str(script)]
    ran = fork_server.run(command, env=environ, capture_output=True, text=True, check=True)
    assert f"torch.compile compiled {script}:11 again and again (4 times in ten minutes)" in ran.stderr
    assert " To avoid it, " in ran.stderr
    assert inspect.main([str(flight_dir), "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    said = [finding["text"] for finding in rank["findings"]]
    begins = (
        f"torch.compile compiled {script}:13 again and again (4 times in ten minutes): its guard on value failed, self.calls",
        f"torch.compile has given {script}:1",
        f"torch.compile ends a graph at {script}:13 (",
    )
    for begin in begins:
        assert any(text.startswith(begin) for text in said), said
    assert rank["compile"]["failures"]["recompile_limit"] >= 1
