"""Help of the commands, and what they say of a mistake."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import clean_environment
from torchobs.cli.__main__ import COMMANDS


def torchobs(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m torchobs`."""
    argv = [sys.executable, "-m", "torchobs", *arguments]
    environ = {**clean_environment(), "COLUMNS": "128"}
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=environ)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_the_help_teaches(command: str) -> None:
    """What it is, and at least two commands to copy; `torchobs help COMMAND` is the same."""
    shown = torchobs(command, "--help")
    assert shown.returncode == 0
    examples = shown.stdout.partition("examples:")[2]
    assert len(re.findall(rf"torchobs .*{command}|torchobs {command}", examples)) >= 2
    assert max(map(len, shown.stdout.splitlines())) <= 128


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("tpo",), "no such command: 'tpo', did you mean top?"),
        (("--verison",), "no such option: '--verison', did you mean --version?"),
        (("top", "--interval", "0"), "expected a duration from 0.1s to 1h"),
        (("inspect", "--steps", "-3"), "expected an integer, from 0 to 1000000"),
        (("dashboards", "import", "."), "invalid choice: 'import'"),
        (("rules", "import", "."), "invalid choice: 'import'"),
        (("rules", "export"), "export needs the directory"),
        (
            ("rules", "export", ".", "--values", "my.yml"),
            "export writes the shipped rules; `torchobs rules render`",
        ),
        (("rules", "render", "."), "render needs --values FILE"),
    ],
)
def test_a_mistake_is_answered_with_what_is_allowed(arguments: tuple[str, ...], said: str) -> None:
    """Exit status 2."""
    refused = torchobs(*arguments)
    assert refused.returncode == 2
    assert said in " ".join(refused.stderr.split())


def test_the_plain_install_has_all_but_the_exporter(tmp_path: Path) -> None:
    """A training image has no extra: help, inspect, top and doctor do without."""
    without = (
        "import sys; sys.modules['msgspec'] = sys.modules['prometheus_client'] = None; from torchobs.cli.__main__ import main; "
    )
    calls = "[main(['--help']), main(['--version']), main(['doctor', '--no-training']), "
    calls += f"main(['inspect', {str(tmp_path)!r}]), main(['top', '--once', '--dir', {str(tmp_path)!r}]), main(['exporter'])]"
    code = f"{without}print({calls})"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=clean_environment()
    )
    assert shown.stdout.splitlines()[-1] == "[0, 0, 0, 2, 1, 1]"
