"""What `torchobs run` says on a terminal, at the start and at the end, and to whom it says nothing."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fork_server import Python
from tests.support import ROOT, clean_environment, free_port
from torchobs.flight.files.location import open_directory
from torchobs.node import announcement

RUN = (sys.executable, "-m", "torchobs", "run")
TRAIN = """
import sys, time
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    loss = model(torch.ones(2, 4)).pow(2).mean()
    if step >= 8:
        loss = loss * float("nan")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
sys.stderr.write("mine\\n")
{wait}
raise ValueError("at its end")
"""
CLOSE = """
import os
os.close(2)
assert os.open("own.txt", os.O_CREAT | os.O_RDWR) == 2
sys.exit()
"""
WAIT = """
import glob, os
while not glob.glob(os.environ["TORCHOBS_DIR"] + "/exporter.json"):
    time.sleep(0.05)
time.sleep(1.0)
"""


class Said(NamedTuple):
    """What a script in a terminal left."""

    status: int
    output: str
    terminal: str


def run(tmp_path: Path, flight_dir: Path, *options: str, wait: str = "", **environ: str) -> Said:
    """Run a script whose standard error is a terminal."""
    (tmp_path / "train.py").write_text(TRAIN.replace("{wait}", wait))
    ours, theirs = pty.openpty()
    child = Python(
        [*RUN, *options, "train.py"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, cwd=tmp_path, text=True,
        env=clean_environment()
        | {"TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT), "TORCHOBS_LOG_LEVEL": "ERROR", **environ},
    )  # fmt: skip
    os.close(theirs)
    read = b""
    with contextlib.suppress(OSError):  # Linux says so of a terminal that nobody holds any more
        while part := os.read(ours, 65536):
            read += part
    os.close(ours)
    output, _ = child.communicate(timeout=60)
    return Said(child.returncode, output, read.decode().replace("\r\n", "\n"))


def test_the_end_says_what_inspect_would_say_first(tmp_path: Path, flight_dir: Path) -> None:
    """After the traceback: how it ended, what was worst, where the time went, the command for more; nothing of the script's."""
    said = run(tmp_path, flight_dir, "--no-exporter")
    assert (said.status, said.output) == (1, "trained\n")
    script, _, summary = said.terminal.partition("ValueError: at its end\n")
    assert script.startswith("mine\nTraceback")
    assert "torchobs:" not in script
    lines = summary.splitlines()
    assert lines[0] == "torchobs: Trouble. Ended: 1 rank, 12 steps, last loss NaN."
    assert lines[1].startswith('torchobs: Rank 0 ended by ValueError "at its end" at ')
    assert lines[2].startswith("torchobs: The loss turned NaN in step 9")
    assert lines[-2].startswith("torchobs: time since the process began: ")
    assert lines[-1].startswith(f"torchobs: more: torchobs inspect {flight_dir} --run ")


@pytest.mark.parametrize(
    ("options", "environ"),
    [(("--quiet",), {}), ((), {"TORCHOBS_SUMMARY": "0"}), ((), {"RANK": "1", "WORLD_SIZE": "2"}), (("--level", "off"), {})],
)
def test_who_wants_it_quiet_has_it_quiet(
    options: tuple[str, ...], environ: dict[str, str], tmp_path: Path, flight_dir: Path
) -> None:
    """By an option or a variable; other ranks than the first one never say anything."""
    said = run(tmp_path, flight_dir, "--no-exporter", *options, **environ)
    assert (said.status, said.output) == (1, "trained\n")
    assert ("torchobs:" in said.terminal) == ("off" in options)


def test_where_no_terminal_reads_nothing_is_said(tmp_path: Path, flight_dir: Path) -> None:
    """A log file of a scheduler is not for it."""
    (tmp_path / "train.py").write_text("print('trained')")
    environ = clean_environment() | {"TORCHOBS_DIR": str(flight_dir), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*RUN, "--no-exporter", "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("trained\n", "")


def test_a_script_that_closed_the_terminal_has_its_file_to_itself(tmp_path: Path, flight_dir: Path) -> None:
    """A daemon's next file gets the number of standard error: the end is not said there."""
    said = run(tmp_path, flight_dir, "--no-exporter", wait=CLOSE)
    assert (said.status, said.output, said.terminal) == (0, "trained\n", "mine\n")
    assert (tmp_path / "own.txt").read_bytes() == b""


def test_the_start_says_where_the_page_is(tmp_path: Path, flight_dir: Path) -> None:
    """One line, with the address that the exporter has got."""
    port = free_port()
    said = run(tmp_path, flight_dir, "--address", f"127.0.0.1:{port}", wait=WAIT)
    try:
        line = f"torchobs: this run is shown live on http://127.0.0.1:{port}/\n"
        assert said.terminal.count(line) == 1
        assert said.terminal.index(line) < said.terminal.index("Traceback")
    finally:
        fd = open_directory(str(flight_dir))
        found = announcement.read(fd)
        os.close(fd)
        if found is not None:
            os.kill(found.pid, signal.SIGKILL)
