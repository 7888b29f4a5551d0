"""OpenTelemetry's own command switches torchobs on: the real `opentelemetry-instrument` and its distribution."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, clean_environment
from torchobs.flight.reader import reader
from torchobs.integrations.instrumentor import TorchInstrumentor
from torchobs.support.command_line import starts_others

COMMAND = Path(sys.executable).parent / "opentelemetry-instrument"

SCRIPT = """
import torch
from torch.utils.data import DataLoader

if __name__ == "__main__":
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for batch in DataLoader([1.0, 2.0, 3.0], num_workers=1, multiprocessing_context="spawn"):
        (weight * batch).sum().backward()
        optimizer.step()
    from opentelemetry import trace
    print(type(trace.get_tracer_provider()).__module__)
"""


def test_the_command_switches_it_on_in_the_trainer_alone(flight_dir: Path, tmp_path: Path) -> None:
    """The script knows nothing; its workers, which inherit the command's environment, are no ranks; the SDK stays in place."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    quiet = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}
    done = subprocess.run(
        [str(COMMAND), sys.executable, str(script)], check=False, capture_output=True, text=True, cwd=tmp_path,
        env=clean_environment() | quiet | {"TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "opentelemetry.sdk.trace\n"), done.stderr
    assert "Attempting" not in done.stderr
    (path,) = flight_dir.glob("*.flight")
    file = reader.open_path(str(path))
    values = {point.series.name: point.value for point in file.read(final=True).points}
    assert (values["torchobs.steps"], file.header.resource["script"]) == (3, "train.py")
    file.close()


def test_instrumenting_by_hand_can_be_undone(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command does, from a program: on, and off again."""
    monkeypatch.setenv("TORCHOBS_DIR", str(flight_dir))
    instrumentor = TorchInstrumentor()
    instrumentor.instrument()
    try:
        assert len(list(flight_dir.glob("*.flight"))) == 1
        assert instrumentor.instrumentation_dependencies() == ("torch >= 2.4",)
    finally:
        instrumentor.uninstrument()
    (path,) = flight_dir.glob("*.flight")
    file = reader.open_path(str(path))
    assert file.read(final=True).live.exit_reason is not None
    file.close()


@pytest.mark.parametrize(
    ("command", "others"),
    [
        ("python train.py", False),
        ("python -m package.train --c 3", False),
        ("python -W ignore -X dev -u train.py", False),
        ("python -c train()", False),
        ("python", False),
        ("python accelerate_me.py", False),
        ("/usr/bin/python3 /opt/venv/bin/torchrun --nproc-per-node 8 train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("python -W error -m torch.distributed.launch train.py", True),
        ("python /opt/venv/bin/accelerate launch train.py", True),
        ("python -m accelerate.commands.launch train.py", True),
        ("python -c from\u00a0multiprocessing.spawn\u00a0import\u00a0spawn_main;\u00a0spawn_main()", True),
        ("python -m torch._inductor.compile_worker", True),
        ("python /opt/venv/lib/torch/_inductor/compile_worker/__main__.py --pickler=x", True),
    ],
)
def test_what_only_starts_or_helps_a_training_is_left_alone(command: str, others: bool) -> None:  # noqa: FBT001  # a parameter
    """A launcher would be a second rank 0 that never steps."""
    assert starts_others(command.split(" ")) is others
