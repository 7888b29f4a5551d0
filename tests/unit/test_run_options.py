"""What `torchobs run` takes for itself and what it leaves to the script."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT
from torchobs.cli import run, run_program
from torchobs.identity.process import exit_status
from torchobs.support.error_guard import CircuitBreaker

SCRIPT = ["train.py", "--level", "off", "-m", "--", "--help"]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `torchobs run` with arguments that it refuses, and return what it says on standard error."""

    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as refused:
            run.main(arguments)
        assert refused.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    return call


@pytest.mark.parametrize(
    ("own", "command"),
    [
        ([], SCRIPT),
        (["--no-exporter"], SCRIPT),
        (["--dir", "d", "--level=basic", "--address", ":1"], SCRIPT),
        (["--level", "basic"], ["-m", "package.train", "--no-exporter"]),
        (["--level", "basic"], ["-mpackage.train", "--no-exporter"]),
        ([], []),
        (["--no-exporter"], []),
    ],
)
def test_what_follows_the_script_s_name_is_the_script_s(own: list[str], command: list[str]) -> None:
    """Even if it is spelled like an option of ours."""
    assert run.split([*own, *command]) == (own, command)


def test_a_separator_lets_a_script_s_name_begin_with_a_dash() -> None:
    """Only the first one is ours."""
    assert run.split(["--no-exporter", "--", "-x.py", "--", "--dir"]) == (["--no-exporter"], ["-x.py", "--", "--dir"])


def test_an_unknown_option_is_named_with_the_known_ones(fails: Callable[..., str]) -> None:
    """A script's option before its name is the usual mistake, and a typing error the other."""
    said = fails("--lr", "3", "train.py")
    assert "unknown option '--lr'" in said
    assert "the script's own come after its name" in said
    for option in ("--no-exporter", "--address", "--dir", "--level", "-m"):
        assert option in said
    assert "unknown option '--no-export'" in fails("--no-export", "train.py")


@pytest.mark.parametrize("python", ["python", "python3.11", sys.executable])
def test_an_interpreter_before_the_script_is_one_too_many(python: str, fails: Callable[..., str]) -> None:
    """Out of habit, and as other tools want it."""
    assert f"leave out {python!r}" in fails(python, "train.py")


@pytest.mark.parametrize("arguments", [(), ("-m",), ("--no-exporter",), ("--",)])
def test_nothing_to_run_is_said_so(arguments: tuple[str, ...], fails: Callable[..., str]) -> None:
    """Options alone are no command."""
    assert "a script or `-m module` is missing" in fails(*arguments)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--level", "loud", "off, basic, advanced or extreme"),
        ("--address", "here", "host:port"),
        ("--address", "h:99999", "host:port"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(option: str, value: str, allowed: str, fails: Callable[..., str]) -> None:
    """A person who types an option is there to read the answer."""
    said = fails(option, value, "train.py")
    assert option in said
    assert value in said
    assert allowed in said


def test_a_script_that_is_not_there_is_named_as_python_names_it(
    fails: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its whole path: the wrong directory is the usual reason."""
    monkeypatch.chdir(tmp_path)
    said = fails("nowhere/train.py")
    assert said == f"torchobs run: can't open file '{tmp_path}/nowhere/train.py': [Errno 2] No such file or directory\n"


@pytest.mark.parametrize("code", [None, 0, 1, 3, 255, 256, 300, -1, True, False, "message", "", 2.5, [1]])
def test_the_status_is_the_one_that_python_ends_with(code: object) -> None:
    """As `handle_system_exit` in CPython's pythonrun.c has it."""
    expected = {None: 0, 256: 0, 300: 44, -1: 255, True: 1, False: 0}
    if isinstance(code, int) or code is None:
        assert exit_status(code) == expected.get(code, code)
    else:
        assert exit_status(code) == 1


def test_help_teaches_by_examples(capsys: pytest.CaptureFixture[str]) -> None:
    """Every way of calling it, torchrun's included, each beside what it replaces."""
    with pytest.raises(SystemExit) as left:
        run.main(["--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    for example in ("torchobs run train.py", "torchobs run -m package.train", "--no-python torchobs run train.py"):
        assert example in said
    assert "instead of: python train.py" in said


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [
        ([], None, True),
        ([], "", True),
        ([], "0", None),
        ([], "1", None),
        (["--no-exporter"], None, False),
        (["--no-exporter"], "1", False),
    ],
)
def test_the_exporter_is_on_unless_somebody_has_spoken(
    arguments: list[str], variable: str | None, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option beats the variable; what the variable says is for `init()` to read."""
    if variable is not None:
        monkeypatch.setenv("TORCHOBS_EXPORTER", variable)
    (tmp_path / "x.py").touch()
    options, what = run._parse([*arguments, str(tmp_path / "x.py"), "--lr", "1"])
    assert run._overrides(options)["exporter"] is expected
    assert what == run_program.Program(run_program.ProgramKind.SCRIPT, str(tmp_path / "x.py"), ("--lr", "1"))


def test_a_handler_that_raises_within_a_hook_has_no_frame_of_the_hook() -> None:
    """A signal may come at any time: what its handler raises is the script's, and so is the traceback."""

    def handler(*_: object) -> None:
        raise LookupError

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(LookupError) as raised:
            CircuitBreaker("test").guard(lambda: signal.raise_signal(signal.SIGUSR2))()
    finally:
        signal.signal(signal.SIGUSR2, before)
    own = traceback.extract_tb(run_program._without_hooks(raised.tb))
    assert not [frame for frame in own if frame.filename.startswith(f"{ROOT / 'torchobs'}{os.sep}")]
    assert own[-1].name == "handler"
