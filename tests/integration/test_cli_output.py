"""The commands where their output has no reader, no room, no stream or few characters, and under Ctrl-C: no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rank_files import live_rank, train
from tests.support import ROOT, clean_environment, wait_until
from torchobs.cli import control
from torchobs.flight.format.layout import Exit

PROGRAM = (sys.executable, "-m", "torchobs")
COMMANDS = {
    "help": ["--help"],
    "run": ["run", "--help"],
    "inspect_help": ["inspect", "--help"],
    "dashboards": ["dashboards", "--help"],
    "rules": ["rules", "--help"],
    "doctor": ["doctor", "--no-training"],
    "inspect": ["inspect", "--dir"],
    "json": ["inspect", "--json", "--dir"],
    "top": ["top", "--once", "--dir"],
}
"""Whatever ends in `--dir` is given the directory of a rank: `inspect` takes it without the option."""


def command(name: str, directory: Path) -> list[str]:
    """The program and its arguments."""
    *given, last = COMMANDS[name]
    if last != "--dir":
        return [*PROGRAM, *given, last]
    return [*PROGRAM, *given, *([] if given[0] == "inspect" else [last]), str(directory)]


@pytest.fixture
def rank(flight_dir: Path) -> Path:
    """A directory with a rank of three hundred steps, whose report is longer than any buffer."""
    writer = live_rank(flight_dir)
    train(writer, range(1, 300))
    writer.exit(Exit.FINISHED, 0)
    writer.close()
    return flight_dir


def environment(**more: str) -> dict[str, str]:
    """Of a child, wherever it runs."""
    return {**clean_environment(), "PYTHONPATH": str(ROOT), **more}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_gone_ends_it_without_a_word(name: str, unbuffered: str, rank: Path) -> None:
    """`torchobs doctor | head -3`: what SIGPIPE does to a shell's own programs."""
    reading, writing = os.pipe()
    os.close(reading)
    environ = environment(PYTHONUNBUFFERED=unbuffered)
    done = subprocess.run(
        command(name, rank), stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=60, env=environ
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_told_in_one_line(name: str, unbuffered: str, rank: Path) -> None:
    """With the reason."""
    environ = environment(PYTHONUNBUFFERED=unbuffered)
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            command(name, rank), stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60, env=environ
        )
    assert done.returncode == 1
    assert done.stderr.endswith(": the output cannot be written: No space left on device\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_stream_that_is_closed_is_none(name: str, closed: str, rank: Path) -> None:
    """`torchobs inspect >&-` for its exit status: that of a rank that has finished, whose output nobody reads."""
    line = ["bash", "-c", f'exec "$@" {closed}', "bash", *command(name, rank)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60, env=environment())
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or name == "doctor"


@pytest.mark.parametrize("name", COMMANDS)
def test_what_the_encoding_has_not_is_a_question_mark(name: str, rank: Path) -> None:
    """In a container without a locale."""
    environ = environment(PYTHONIOENCODING="ascii")
    done = subprocess.run(command(name, rank), capture_output=True, text=True, check=False, timeout=60, env=environ)
    assert done.stderr == ""
    assert done.stdout.isascii()
    assert len(done.stdout) > 100


SLOW = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Slow())
from torchobs.cli.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("name", "module"),
    [("inspect", "torchobs.cli.arguments"), ("inspect", "torchobs.cli.inspect_view"), ("top", "torchobs.cli.top_view"),
     ("exporter", "torchobs.cli.exporter"), ("doctor", "torchobs.cli.doctor")],
)  # fmt: skip
def test_an_interrupt_while_it_imports_shows_nothing(name: str, module: str) -> None:
    """Ctrl-C at once, when the wrong command was typed."""
    line = [sys.executable, "-c", SLOW.format(module=module), name]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_of_the_trial_shows_what_was_found_until_then(
    start: Callable[..., subprocess.Popen[str]], flight_dir: Path
) -> None:
    """`torchobs doctor`: its trial's directory is gone, too."""
    trials = flight_dir / "tmp"
    trials.mkdir()
    environ = environment(TMPDIR=str(trials), TORCHOBS_DIR=str(flight_dir))
    one = start(*PROGRAM, "doctor", env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: list(trials.iterdir()))
    one.send_signal(signal.SIGINT)
    out, said = one.communicate(timeout=60)
    assert (one.returncode, said) == (130, "")
    assert "torch" in out
    assert list(trials.iterdir()) == []


def test_an_interrupt_of_the_wait_for_a_trace_says_that_profiling_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has been asked already."""
    monkeypatch.setattr(control, "socket_of", lambda _: Path("socket"))
    monkeypatch.setattr(control, "post", lambda *_: {"rank": "3", "evidence": {"href": "/x"}})
    monkeypatch.setattr(control, "evidence", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        control.profile(["3", "--steps", "400"])
    assert "rank 3 goes on profiling" in capsys.readouterr().err
