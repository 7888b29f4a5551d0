"""The commands: help, options, mistakes, a plain install; output without a reader, room, stream or characters, and Ctrl-C."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rank_files import live_rank, train
from tests.support import ROOT, clean_environment
from torchobs import _version
from torchobs.cli import __main__ as dispatch
from torchobs.exporter import config
from torchobs.flight.layout import Exit

PROGRAM = (sys.executable, "-m", "torchobs")
CALLS = {"doctor": ["doctor", "--no-training"], "inspect": ["inspect"]}


def command(name: str, directory: Path) -> list[str]:
    """The program and its arguments: all commands write by the same function, and one of them reads a directory."""
    return [*PROGRAM, *CALLS[name], *([str(directory)] if name == "inspect" else [])]


@pytest.fixture
def rank(flight_dir: Path) -> Path:
    """A directory with a rank of three hundred steps: its report is longer than any buffer."""
    writer = live_rank(flight_dir)
    train(writer, range(1, 300))
    writer.exit(Exit.FINISHED, 0)
    writer.close()
    return flight_dir


def environment(**more: str) -> dict[str, str]:
    """Of a child, wherever it runs."""
    return {**clean_environment(), "PYTHONPATH": str(ROOT), **more}


def run(line: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it; its output is read as text."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), **options}
    return subprocess.run(line, text=True, check=False, timeout=60, **streams)


EACH = "<&- >&- 2>&-"
BUFFERS = [("doctor", "1"), ("inspect", "")]
"""Commands, and whether their output is unbuffered"""


@pytest.mark.parametrize(("name", "unbuffered"), BUFFERS)
def test_a_reader_that_has_gone_ends_it_without_a_word(name: str, unbuffered: str, rank: Path) -> None:
    """`torchobs doctor | head -3`: what SIGPIPE does to a shell's own programs."""
    reading, writing = os.pipe()
    os.close(reading)
    done = run(command(name, rank), stdout=writing, env=environment(PYTHONUNBUFFERED=unbuffered))
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("name", "unbuffered"), BUFFERS)
def test_a_full_disk_is_told_in_one_line(name: str, unbuffered: str, rank: Path) -> None:
    """With the reason."""
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = run(command(name, rank), stdout=full, env=environment(PYTHONUNBUFFERED=unbuffered))
    assert done.returncode == 1
    assert done.stderr.endswith(": the output cannot be written: No space left on device\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [">&-", EACH])
def test_a_stream_that_is_closed_is_none(closed: str, rank: Path) -> None:
    """`torchobs inspect >&-` for its exit status: that of a rank that has finished. Nobody reads the output."""
    done = run(["bash", "-c", f'exec "$@" {closed}', "bash", *command("inspect", rank)])
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_no_other_file_gets_the_number_of_a_closed_stream() -> None:
    """Or what a library prints goes into a socket."""
    program = "import os; from torchobs.cli.arguments import guarded; os._exit(guarded(lambda: os.open('/', os.O_RDONLY)))"
    assert run(["bash", "-c", f'exec "$@" {EACH}', "bash", sys.executable, "-c", program]).returncode == 3


@pytest.mark.parametrize("name", CALLS)
def test_what_the_encoding_has_not_is_a_question_mark(name: str, rank: Path) -> None:
    """In a container without a locale."""
    done = run(command(name, rank), env=environment(PYTHONIOENCODING="ascii"))
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


@pytest.mark.parametrize("module", ["arguments", "inspect"])
def test_an_interrupt_while_it_imports_shows_nothing(module: str) -> None:
    """Ctrl-C at once, when the wrong command was typed."""
    done = run([sys.executable, "-c", SLOW.format(module=f"torchobs.cli.{module}"), "inspect"])
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


Shown = tuple[int, str, str]


@pytest.fixture
def torchobs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shown]:
    """Run the program in this process; its exit status and what it has written."""
    monkeypatch.setenv("COLUMNS", "128")

    def main(*arguments: str) -> Shown:
        try:
            status = dispatch.main([*arguments])
        except SystemExit as left:
            status = int(left.code or 0)
        return (status, *capsys.readouterr())

    return main


def test_the_help_teaches(torchobs: Callable[..., Shown]) -> None:
    """What each command is, and at least two commands to copy."""
    for command in dispatch.COMMANDS:
        status, shown, _ = torchobs(command, "--help")
        examples = shown.partition("examples:")[2]
        assert (status, len(re.findall(rf"torchobs .*{command}|torchobs {command}", examples)) >= 2) == (0, True), command
        assert max(map(len, shown.splitlines())) <= 128, command


MISTAKES = {
    ("tpo",): "no such command: 'tpo', did you mean top?",
    ("--verison",): "no such option: '--verison', did you mean --version?",
    ("top", "--interval", "0"): "expected a duration from 0.1s to 1h",
    ("inspect", "--steps", "-3"): "expected an integer, from 0 to 1000000",
    ("dashboards", "import", "."): "invalid choice: 'import'",
    ("rules", "export"): "export needs the directory",
    ("rules", "render", "."): "render needs --values FILE",
}


def test_a_mistake_is_answered_with_what_is_allowed(torchobs: Callable[..., Shown]) -> None:
    """Exit status 2."""
    for arguments, said in MISTAKES.items():
        status, _, error = torchobs(*arguments)
        assert (status, said in " ".join(error.split())) == (2, True), error


def test_the_plain_install_has_all_but_the_exporter(tmp_path: Path) -> None:
    """A training image has no extra: help, inspect, top and doctor do without; the exporter says how to get it."""
    without = (
        "import sys; sys.modules['msgspec'] = sys.modules['prometheus_client'] = None; from torchobs.cli.__main__ import main; "
    )
    calls = "[main(['--help']), main(['--version']), main(['doctor', '--no-training']), "
    calls += f"main(['inspect', {str(tmp_path)!r}]), main(['top', '--once', '--dir', {str(tmp_path)!r}]), main(['exporter'])]"
    code = f"{without}print({calls})"
    shown = run([sys.executable, "-c", code])
    assert shown.stdout.splitlines()[-1] == "[0, 0, 0, 2, 1, 1]"
    said = shown.stderr.splitlines()[-1]
    assert re.fullmatch(r"torchobs exporter: \w+ is not installed: pip install 'torchobs\[exporter\]'", said)


def test_the_exporter_s_help_has_every_option_its_variable_and_examples(torchobs: Callable[..., Shown]) -> None:
    """One does not have to leave the terminal."""
    _, shown, _ = torchobs("exporter", "--help")
    for option in config.EVERY_OPTION:
        assert option.flag in shown
        assert all(name in shown.replace("\n", "").replace(" ", "") for name in option.every_variable)
    assert "  torchobs exporter --flight-dir /dev/shm/run7  " in shown
    assert "config_ok" in shown


def test_the_version_is_told(torchobs: Callable[..., Shown]) -> None:
    """Of the program, and of the exporter with its Python, which matters for its page."""
    version = _version.__version__
    assert torchobs("--version")[1] == f"torchobs {version}\n"
    exporter = torchobs("exporter", "--version")[1]
    assert re.fullmatch(rf"torchobs exporter {re.escape(version)} \(Python 3\.\d+\.\S+\)\n", exporter)


WRONG = {
    ("--garce", "5m"): "no such option: '--garce', did you mean --grace?",
    ("--grace", "soon"): "--grace 'soon': expected a duration such as 90s, 5m or 1h30m",
    ("--log.level", "loud"): "--log.level 'loud': expected debug, info, warn or error",
    ("--web.listen-address", "10960"): "--web.listen-address '10960': expected host:port with a port up to 65535",
    ("--otlp.endpoint", "collector"): "--otlp.endpoint 'collector': expected",
}


def test_what_is_wrong_ends_it_with_one_line_and_nothing_starts(torchobs: Callable[..., Shown]) -> None:
    """What was given, and what is allowed; exit status 2, whether a person reads it or a log does."""
    for arguments, said in WRONG.items():
        status, shown, error = torchobs("exporter", *arguments)
        assert (status, shown, error.count("\n")) == (2, "", 1), error
        assert error.startswith("torchobs exporter: ")
        assert said in error
        assert error.endswith("`torchobs exporter --help` has all options and variables\n")
