"""`torchobs completion`: real shells complete by it, and every command teaches."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import clean_environment
from torchobs.cli import completion
from torchobs.cli.commands import BRIEFS

SCRIPTS = {"bash": completion.bash, "zsh": completion.zsh, "fish": completion.fish}
CASES = [
    (["in"], {"inspect"}),
    (["top", "--int"], {"--interval"}),
    (["run", "--level", "ad"], {"advanced"}),
    (["exporter", "--web.listen"], {"--web.listen-address"}),
    (["completion", "z"], {"zsh"}),
    (["doctor", "--js"], {"--json"}),
]


def torchobs(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m torchobs`."""
    argv = [sys.executable, "-m", "torchobs", *arguments]
    environ = {**clean_environment(), "COLUMNS": "128"}
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=environ)


@pytest.mark.parametrize(("words", "offered"), CASES)
def test_bash_completes(tmp_path: Path, words: list[str], offered: set[str]) -> None:
    """Commands, options, their values; no Python is started for it."""
    script = tmp_path / "c.bash"
    script.write_text(completion.bash())
    line = " ".join(f"'{word}'" for word in ["torchobs", *words])
    code = f'source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _torchobs; printf "%s\\n" "${{COMPREPLY[@]}}"'
    shown = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert (set(shown.stdout.split()), shown.stderr) == (offered, "")


@pytest.mark.parametrize(("words", "offered"), CASES)
def test_fish_completes(program: Callable[[str], str], tmp_path: Path, words: list[str], offered: set[str]) -> None:
    """The same, with what each is for behind it."""
    script = tmp_path / "c.fish"
    script.write_text(completion.fish())
    line = " ".join(["torchobs", *words])
    argv = [program("fish"), "--no-config", "-c", f'source {script}; complete -C "{line}"']
    shown = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30)
    assert {entry.partition("\t")[0] for entry in shown.stdout.splitlines()} == offered


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_a_shell_takes_the_script(program: Callable[[str], str], shell: str, tmp_path: Path) -> None:
    """Its own parser finds no fault."""
    script = tmp_path / "script"
    script.write_text(SCRIPTS[shell]())
    flag = "--no-execute" if shell == "fish" else "-n"
    checked = subprocess.run([program(shell), flag, str(script)], capture_output=True, text=True, check=False, timeout=30)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_command_and_option_is_in_it(shell: str) -> None:
    """What a parser takes, the TAB key offers."""
    script = SCRIPTS[shell]()
    for command in BRIEFS:
        assert re.search(rf"\b{command}\b", script)
        for flag in completion.flags_of(command):
            assert (flag.name if shell != "fish" else f"-l {flag.name[2:]}") in script


@pytest.mark.parametrize("command", list(BRIEFS))
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
        (("top", "--interval", "0"), "allowed is a duration from 0.1s to 1h"),
        (("inspect", "--steps", "-3"), "allowed is an integer, from 0 to 1000000"),
        (("completion", "tcsh"), "invalid choice: 'tcsh'"),
    ],
)
def test_a_mistake_is_answered_with_what_is_allowed(arguments: tuple[str, ...], said: str) -> None:
    """Exit status 2."""
    refused = torchobs(*arguments)
    assert refused.returncode == 2
    assert said in " ".join(refused.stderr.split())


def test_the_plain_install_has_all_but_the_exporter(tmp_path: Path) -> None:
    """A training image has no extra: help, completion, inspect, top and doctor do without."""
    without = (
        "import sys; sys.modules['msgspec'] = sys.modules['prometheus_client'] = None; from torchobs.cli.__main__ import main; "
    )
    calls = "[main(['--help']), main(['completion', 'bash']), main(['doctor', '--no-training']), "
    calls += f"main(['inspect', {str(tmp_path)!r}]), main(['top', '--once', '--dir', {str(tmp_path)!r}]), main(['exporter'])]"
    code = f"{without}print({calls})"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=clean_environment()
    )
    assert shown.stdout.splitlines()[-1] == "[0, 0, 0, 2, 1, 1]"
