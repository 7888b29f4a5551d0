"""The program `torchobs`: its help, its options, its variables, and what a plain install can do with it."""

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import clean_environment
from torchobs import _version
from torchobs.cli import exporter
from torchobs.exporter import config

WITHOUT = "import sys; sys.modules[{module!r}] = None; from torchobs.cli.__main__ import main; sys.exit(main({arguments!r}))"


def torchobs(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m torchobs`."""
    return subprocess.run(
        [sys.executable, "-m", "torchobs", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={**clean_environment(), "COLUMNS": "128", **environ},
    )


def on_a_terminal(*arguments: str) -> tuple[int, str]:
    """Run `python -m torchobs` with standard error on a terminal, where a person reads it."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "torchobs", *arguments],
        stdout=theirs,
        stderr=theirs,
        stdin=subprocess.DEVNULL,
        env=clean_environment(),
    ) as process:
        os.close(theirs)
        code, said = process.wait(timeout=30), b""
        with contextlib.suppress(OSError):  # what Linux says at the end; until then a terminal gives what has come by then
            while part := os.read(ours, 100_000):
                said += part
        os.close(ours)
    return code, said.decode()


def test_the_help_names_the_commands_and_loads_none() -> None:
    """A list of commands is no reason to import a web server."""
    shown = torchobs("--help")
    assert shown.returncode == 0
    assert re.search(r"^  run +\w", shown.stdout, re.MULTILINE)
    assert re.search(r"^  exporter +\w", shown.stdout, re.MULTILINE)


def test_the_exporter_s_help_has_every_option_its_variable_and_examples() -> None:
    """One does not have to leave the terminal."""
    shown = torchobs("exporter", "--help")
    assert shown.returncode == 0
    for option in config.EVERY_OPTION:
        assert option.flag in shown.stdout
        assert all(name in shown.stdout.replace("\n", "").replace(" ", "") for name in option.every_variable)
    assert "  torchobs exporter --flight-dir /dev/shm/run7  " in shown.stdout
    assert "config_ok" in shown.stdout


@pytest.mark.parametrize("columns", [60, 100, 300])
def test_the_help_fits_the_terminal(columns: int) -> None:
    """Prose and options are wrapped to its width, 128 columns at most; examples are to be copied, and stay as they are."""
    shown = torchobs("exporter", "--help", COLUMNS=str(columns)).stdout
    explained, _, examples = shown.partition("examples:")
    assert max(map(len, explained.splitlines())) in range(min(columns, 128) - 12, min(columns, 128) - 1)
    assert "  torchobs exporter --flight-dir /dev/shm/run7        another directory\n" in examples


def test_the_help_is_in_groups_and_says_what_holds_by_default() -> None:
    """What belongs together stands together; where OpenTelemetry's variable has another unit, it is told."""
    shown = " ".join(torchobs("exporter", "--help").stdout.split())
    titles = ["where to serve:", "limits:", "commands to ranks:", "push over OTLP:", "log:"]
    assert all(title in shown for title in titles)
    assert "[env: TORCHOBS_EXPORTER_GRACE] [default: 5m]" in shown
    assert "OTEL_EXPORTER_OTLP_TIMEOUT (milliseconds, at least 1)] [default: 10s]" in shown


def test_the_version_is_told() -> None:
    """Of the program, and of the exporter with its Python, which matters for its page."""
    assert torchobs("--version").stdout == f"torchobs {_version.__version__}\n"
    assert re.fullmatch(
        rf"torchobs exporter {re.escape(_version.__version__)} \(Python 3\.\d+\.\S+\)\n",
        torchobs("exporter", "--version").stdout,
    )


WRONG = [
    (("--garce", "5m"), "no such option: '--garce', did you mean --grace?"),
    (("--grace", "soon"), "--grace 'soon': expected a duration such as 90s, 5m or 1h30m"),
    (("--grace",), "--grace '': expected a duration such as 90s, 5m or 1h30m"),
    (("somewhere",), "no such argument: 'somewhere'"),
    (("--log.level", "loud"), "--log.level 'loud': expected debug, info, warn or error"),
    (("--web.listen-address", "10960"), "--web.listen-address '10960': expected host:port with a port up to 65535"),
    (
        ("--web.listen-address", "127.0.0.1:109600"),
        "--web.listen-address '127.0.0.1:109600': expected host:port with a port",
    ),
    (("--version=1",), "ignored explicit argument '1'"),
    (("--otlp.endpoint", "collector"), "--otlp.endpoint 'collector': expected"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_what_is_wrong_ends_it_with_one_line_and_nothing_starts(arguments: tuple[str, ...], said: str) -> None:
    """What was given, and what is allowed; exit status 2, whether a person reads it or a log does."""
    done = torchobs("exporter", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("torchobs exporter: ")
    assert said in line
    assert line.endswith("`torchobs exporter --help` has all options and variables")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS": "0.0.0.0:x"}, "TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS='0.0.0.0:x': expected"),
        ({"TORCHOBS_EXPORTER_GARCE": "5m"}, "TORCHOBS_EXPORTER_GARCE is an unknown option"),
        ({"TORCHOBS_EXPORTER_SERIES_LIMIT": "0"}, "TORCHOBS_EXPORTER_SERIES_LIMIT='0': expected"),
    ],
)
def test_a_wrong_variable_ends_it_as_well(variables: dict[str, str], said: str) -> None:
    """It is an option in another place."""
    done = torchobs("exporter", **variables)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_person_is_told_on_a_terminal() -> None:
    """The same line."""
    code, shown = on_a_terminal("exporter", "--garce", "5m")
    assert code == 2
    assert "did you mean --grace?" in " ".join(shown.split())


def test_without_arguments_everything_is_the_default() -> None:
    """The first command that the documentation gives."""
    assert {value for value in vars(exporter.parser(lenient=True).parse_args([])).values() if value} == set()
    assert config.parse({}, {}) == config.ExporterConfig()


def test_a_command_that_does_not_exist_is_refused() -> None:
    """As every program does."""
    refused = torchobs("exprter")
    assert refused.returncode == 2
    assert "exprter" in refused.stderr


@pytest.mark.parametrize("module", ["uvicorn", "starlette", "prometheus_client"])
def test_a_missing_extra_is_one_line_that_names_the_command(module: str) -> None:
    """A plain install has no exporter, and says how to get it."""
    code = WITHOUT.format(module=module, arguments=["exporter", "--flight-dir", "/nowhere"])
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert said.returncode == 1
    assert said.stderr == f"torchobs exporter: {module} is not installed: pip install 'torchobs[exporter]'\n"


def test_run_needs_no_extra(tmp_path: Path) -> None:
    """A training image has the plain install: `torchobs run` comes before anything of the exporter is even looked for."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print('ran with', sys.argv[1:]); sys.exit(5)")
    arguments = ["run", "--no-exporter", str(script), "--lr", "1"]
    code = WITHOUT.format(module="msgspec", arguments=arguments)
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**clean_environment(), "TORCHOBS_ENABLED": "0"},
    )
    assert (ran.returncode, ran.stdout) == (5, "ran with ['--lr', '1']\n"), ran.stderr


def test_a_fault_of_ours_is_not_called_a_missing_extra(tmp_path: Path) -> None:
    """Another module that is missing is a bug, and has its traceback."""
    code = WITHOUT.format(module="torchobs.exporter.daemon", arguments=["exporter"])
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30, cwd=tmp_path)
    assert said.returncode == 1
    assert "Traceback" in said.stderr
    assert "pip install" not in said.stderr


def test_the_exporter_loads_neither_torch_nor_the_sdk() -> None:
    """Its image has no torch, and 45 MiB are its budget."""
    code = (
        "import sys, torchobs.cli.exporter, torchobs.exporter.daemon; "
        "print(sorted({'torch', 'numpy', 'psutil', 'pynvml', 'opentelemetry.sdk', 'google.protobuf'} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert shown.stdout == "[]\n"
