"""torchobs top, on a terminal that is one."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.rank_files import Clock, File, S, live_rank, scanner_of, train
from tests.support import ROOT, clean_environment, wait_until
from torchobs import catalog
from torchobs.cli import top
from torchobs.cli.top import Watch, screen
from torchobs.document.text import TerminalStyle
from torchobs.flight.layout import HEADER_SIZE, Live
from torchobs.ranks.rank_view import RankView, RunView, run_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

HOSTILE = "gpt\x1b]0;owned\x07\x1b[2J\r\n\u202e"
PROGRAM = (sys.executable, "-m", "torchobs", "top")
Ranks = Callable[..., list[File]]


class Terminal:
    """A program in a terminal of its own, and a process group of this session: in an orphaned one no Ctrl-Z stops it."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(24, 100)
        self.before = termios.tcgetattr(theirs)
        self._theirs = theirs
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments], stdin=theirs, stdout=theirs, stderr=theirs,
            preexec_fn=os.setpgrp,  # noqa: PLW1509  # Python 3.10 has no `process_group`
            env={**clean_environment(), "TERM": "xterm", "PYTHONPATH": str(ROOT), **environ},
        )  # fmt: skip
        self.said = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def read(self) -> str:
        """All that it has said so far."""
        while select.select([self._ours], [], [], 0.05)[0]:
            self.said += self._decoder.decode(os.read(self._ours, 65536))  # which may end within a character
        return self.said

    def resize(self, lines: int, columns: int) -> None:
        """Make the window another size, as a terminal does."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def frames(self) -> list[list[str]]:
        """Each look, as lines without colours."""
        looks = self.read().split("\x1b[H")[1:]
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", look).split("\r\n") for look in looks]

    def is_as_before(self) -> bool:
        """Whether the terminal has its modes back."""
        return termios.tcgetattr(self._theirs) == self.before

    def close(self) -> None:
        """End it all."""
        self.process.kill()
        self.process.wait(timeout=60)
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Start `torchobs top` in a terminal."""
    started: list[Terminal] = []

    def start(*arguments: str, **environ: str) -> Terminal:
        started.append(Terminal(*arguments, **environ))
        return started[-1]

    yield start
    for program in started:
        program.close()


@pytest.fixture
def ranks(flight_dir: Path) -> Iterator[Ranks]:
    """Make living ranks with a hundred steps, ten a second."""
    files: list[File] = []

    def make(count: int, **fields: Any) -> list[File]:
        for number in range(count):
            file = File(flight_dir, seed=number + 1, rank=number, **fields)
            for step in range(1, 101):
                file.step(step, step / 10)
            file.set(catalog.MEMORY_HOST_RSS, 2.0**30)
            file.beat(10.0)
            files.append(file.save().hold())
        return files

    yield make
    for file in files:
        file.release()


def test_it_shows_a_living_rank_and_leaves_on_q(flight_dir: Path, terminal: Callable[..., Terminal]) -> None:
    """On the alternate screen, which is left; the terminal has its modes back."""
    writer = live_rank(flight_dir)
    train(writer, range(1, 50))
    shown = terminal("--dir", str(flight_dir), "--interval", "0.2")
    wait_until(lambda: any(" 49 " in line for look in shown.frames() for line in look), timeout_s=60)
    train(writer, [50])
    wait_until(lambda: any(" 50 " in line for line in shown.frames()[-1]))
    shown.type("q")
    assert shown.process.wait(timeout=60) == 0
    writer.close()
    assert shown.read().startswith("\x1b[?1049h\x1b[?25l")
    assert shown.said.endswith("\x1b[?25h\x1b[?1049l")
    assert shown.is_as_before()


def test_it_follows_the_window_s_size(flight_dir: Path, ranks: Ranks, terminal: Callable[..., Terminal]) -> None:
    """At once, without waiting for the next look; no line is wider and no look is higher. With NO_COLOR there is no colour."""
    ranks(1)
    shown = terminal("--dir", str(flight_dir), "--interval", "60", NO_COLOR="1")
    wait_until(shown.frames, timeout_s=60)
    shown.resize(10, 44)
    shown.process.send_signal(signal.SIGWINCH)
    wait_until(lambda: shown.read().count("\x1b[J") >= 2)  # the end of a look
    last = shown.frames()[-1]
    assert len(last) <= 10
    assert max(map(len, last)) <= 44
    shown.type("\x1b[B")
    wait_until(lambda: len(shown.frames()) >= 3)
    assert not re.search(r"\x1b\[[1-9][0-9]*m", shown.said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_gives_the_terminal_back(flight_dir: Path, terminal: Callable[..., Terminal], number: signal.Signals) -> None:
    """Ctrl-C, a closed connection, a kill: the screen and the modes are as before, the status is the signal."""
    shown = terminal("--dir", str(flight_dir))
    wait_until(shown.frames, timeout_s=60)
    shown.process.send_signal(number)
    assert shown.process.wait(timeout=60) == 128 + number
    assert shown.read().endswith("\x1b[?25h\x1b[?1049l")
    assert shown.is_as_before()


def test_suspending_lends_the_terminal_to_the_shell(flight_dir: Path, terminal: Callable[..., Terminal]) -> None:
    """Ctrl-Z: the screen is left before the program stops, and taken again when it goes on."""
    shown = terminal("--dir", str(flight_dir), "--interval", "0.2")
    wait_until(shown.frames, timeout_s=60)
    shown.process.send_signal(signal.SIGTSTP)
    wait_until(lambda: "\x1b[?1049l" in shown.read())
    process = psutil.Process(shown.process.pid)  # what continues a process takes back a stop that is still to come
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    shown.process.send_signal(signal.SIGCONT)  # here there is no shell that would send it
    wait_until(lambda: shown.read().count("\x1b[?1049h") == 2)
    assert shown.said.index("\x1b[?1049l") < shown.said.rindex("\x1b[?1049h")
    shown.type("q")
    assert shown.process.wait(timeout=60) == 0
    assert shown.is_as_before()


def test_in_a_pipe_it_prints_one_look(flight_dir: Path) -> None:
    """Plain text for scripts and mails; exit status 1 when there is nothing."""
    argv, environ = [*PROGRAM, "--dir", str(flight_dir)], {**clean_environment(), "COLUMNS": "100"}
    empty = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert (empty.returncode, empty.stderr) == (1, "")
    assert "torchobs run train.py" in empty.stdout
    writer = live_rank(flight_dir)
    train(writer, range(1, 30))
    writer.memory.word(HEADER_SIZE // 8 + Live.HEARTBEAT_NS, time.monotonic_ns() + 60 * S)  # alive, however slow the start is
    shown = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=environ)
    writer.close()
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\x1b" not in shown.stdout
    assert re.search(r"^ +0  alive +29 ", shown.stdout, re.MULTILINE)


def test_one_look_tells_who_has_just_died(flight_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its heartbeat is young still, and its lock is free: the one look waits until that is proof."""
    writer = live_rank(flight_dir)
    (lock,) = flight_dir.glob("*.lock")
    train(writer, range(1, 30))
    lock.unlink()  # as free as the kernel makes it
    assert top.main(["--once", "--dir", str(flight_dir)]) == 0
    assert re.search(r"^ +0  lost +29 ", capsys.readouterr().out, re.MULTILINE)
    writer.close()


def looked(directory: Path, seconds: float = 10.0) -> tuple[RunView, ...]:
    """The runs of a directory, so many seconds after its ranks were born."""
    return Watch(scanner_of(directory, Clock(seconds))).look()[0]


def frame(runs: Sequence[RunView], width: int, height: int = 24, first: int = 0) -> list[str]:
    """The lines of a screen without colours."""
    return screen(runs, TerminalStyle(width), height, first).lines


def cells(lines: Sequence[str], row: int = -1) -> dict[str, str]:
    """The cells of a row by their columns, of the last table."""
    heading = next(line for line in reversed(lines) if line.split()[:1] == ["rank"])
    return dict(zip(re.split(r" {2,}", heading.strip()), re.split(r" {2,}", lines[row].strip()), strict=True))


def test_every_width_holds_the_state_and_the_step(flight_dir: Path, ranks: Ranks) -> None:
    """What matters less goes first; no name commands the terminal."""
    ranks(3, job_name=HOSTILE)
    runs = looked(flight_dir)
    for width in range(40, 201, 20):
        lines = frame(runs, width)
        assert max(map(len, lines)) <= width
        assert [line.split()[:3] for line in lines[-3:]] == [[str(n), "alive", "100"] for n in range(3)]
        assert not {*"".join(lines)} & {"\x1b", "\x07", "\r", "\n", "\u202e"}


def test_more_ranks_than_lines_show_those_in_trouble(flight_dir: Path, ranks: Ranks) -> None:
    """And the others by moving down; a look is never higher than the window."""
    files = ranks(40)
    files[17].release()
    for file in {*files} - {files[17]}:
        file.beat(12.0)
        file.save()
    runs = looked(flight_dir, 12.0)
    for height in (3, 8, 12, 24, 60):
        lines = frame(runs, 100, height)
        assert max(len(lines), len(frame(runs, 100, height, first=20))) <= height
        assert height == 3 or any(line.split()[:2] == ["17", "lost"] for line in lines)


def paced(rank: RankView, **fields: Any) -> RankView:
    """The same rank with another throughput."""
    assert rank.pace is not None
    return replace(rank, slowness=None, pace=rank.pace._replace(**fields))


def test_it_shows_the_work_of_a_second_and_the_share_of_the_peak(flight_dir: Path, ranks: Ranks) -> None:
    """Tokens, or samples where there are none; a column that has nothing in it is not there."""
    (file,) = ranks(1)

    def shown(**pace: Any) -> dict[str, str]:
        (run,) = looked(flight_dir)
        return cells(frame([run_of([paced(run.ranks[0], **pace)])], 160))

    assert shown()["tokens/s"] == "10,240"
    assert {"samples/s", "MFU"}.isdisjoint(shown())
    file.set(catalog.MFU, 0.43)
    file.save()
    columns = shown(tokens_per_s=None)
    assert (columns["samples/s"], columns["MFU"], columns["steps/s"]) == ("80.0", "43 %", "10.0")
    assert "tokens/s" not in columns
    assert {"tokens/s", "samples/s", "MFU"}.isdisjoint(shown(per_s=None))


def test_a_run_that_stands_still_is_worth_a_look(flight_dir: Path, ranks: Ranks) -> None:
    """In the words of the page, without a speed; the column says how old the last step is."""
    files = ranks(2)
    for file in files:
        file.beat(55.0)
        file.save()
    _, verdict, *lines = frame(looked(flight_dir, 55.0), 120)
    assert verdict == "Worth a look: No step for 45 s (usual: 100 ms): 2 of 2 ranks alive, step 100, loss 2."
    for row in (-2, -1):
        cell = cells(lines, row)
        assert (cell["state"], cell["step"], cell["steps/s"], cell["last step"]) == ("alive", "100", "-", "45 s ago")


def test_more_runs_than_lines_are_moved_through(tmp_path: Path) -> None:
    """The newest come first, each with a row; by moving down every run is seen."""
    for number in range(12):
        file = File(tmp_path, seed=number + 1, born_s=number // 3, rank=0, run_id=f"run-{number:02}", local_world_size=1)
        file.beat(10.0)
        file.save()
    runs = looked(tmp_path)
    run_ids: dict[str, None] = {}
    for first in range(12):
        lines = frame(runs, 100, 24, first)
        shown = [line.split()[1] for line in lines if line.startswith("gpt")]
        assert len(lines) <= 24
        assert sum(line.split()[:1] == ["0"] for line in lines) == len(shown) >= 6
        run_ids |= dict.fromkeys(shown)
    assert set(list(run_ids)[:3]) == {"run-09", "run-10", "run-11"}
    assert len(run_ids) == 12
