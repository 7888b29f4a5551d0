"""`torchobs completion`: real shells complete by it, and every command teaches."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import shtab

from tests.support import clean_environment
from torchobs.cli import completion
from torchobs.cli.dispatch import BRIEFS
from torchobs.exporter.config import EVERY_OPTION

CASES = [
    (["in"], {"inspect"}),
    (["top", "--int"], {"--interval"}),
    (["run", "--level", "ad"], {"advanced"}),
    (["exporter", "--web.listen"], {"--web.listen-address"}),
    (["exporter", "--mode", "n"], {"node"}),
    (["completion", "z"], {"zsh"}),
    (["doctor", "--js"], {"--json"}),
    (["dashboards", "ex"], {"export"}),
    (["rul"], {"rules"}),
    (["rules", "ren"], {"render"}),
    (["rules", "render", "--val"], {"--values"}),
]


def torchobs(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m torchobs`."""
    argv = [sys.executable, "-m", "torchobs", *arguments]
    environ = {**clean_environment(), "COLUMNS": "128"}
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=environ)


def in_bash(script: Path, words: list[str], cwd: Path) -> set[str]:
    """What bash offers for the last word, having read the script."""
    script.write_text(completion.script("bash"))
    line = " ".join(f"'{word}'" for word in ["torchobs", *words])
    code = f"""
        source {script}
        COMP_WORDS=({line}); COMP_CWORD={len(words)}
        found=$(complete -p torchobs); found=${{found##*-F }}; ${{found%% *}}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    shown = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, timeout=30, cwd=cwd)
    assert shown.stderr == ""
    return set(shown.stdout.split())


@pytest.mark.parametrize(("words", "offered"), CASES)
def test_bash_completes(tmp_path: Path, words: list[str], offered: set[str]) -> None:
    """Commands, options, their values; no Python is started for it."""
    assert in_bash(tmp_path / "c.bash", words, tmp_path) == offered


def test_files_are_offered_where_a_file_is_wanted(tmp_path: Path) -> None:
    """A training script; of directories only those."""
    (tmp_path / "train.py").touch()
    (tmp_path / "trash").mkdir()
    assert {name.rstrip("/") for name in in_bash(tmp_path / "c.bash", ["run", "tra"], tmp_path)} == {"train.py", "trash"}
    assert {name.rstrip("/") for name in in_bash(tmp_path / "c.bash", ["top", "--dir", "tra"], tmp_path)} == {"trash"}


@pytest.mark.parametrize(("words", "offered"), CASES)
def test_fish_completes(program: Callable[[str], str], tmp_path: Path, words: list[str], offered: set[str]) -> None:
    """The same, with what each is for behind it."""
    script = tmp_path / "c.fish"
    script.write_text(completion.script("fish"))
    line = " ".join(["torchobs", *words])
    argv = [program("fish"), "--no-config", "-c", f'source {script}; complete -C "{line}"']
    shown = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30)
    assert {entry.partition("\t")[0] for entry in shown.stdout.splitlines()} == offered


def test_zsh_registers_it_as_the_help_says(program: Callable[[str], str], tmp_path: Path) -> None:
    """By `eval`: to a script that is sourced shtab's is a call of the completion."""
    assert 'eval "$(torchobs completion zsh)"' in completion.parser().format_help()
    script = tmp_path / "script"
    script.write_text(completion.script("zsh"))
    argv = [program("zsh"), "-f", "-c", f'compdef() {{ print "registered $@" }}; eval "$(cat {script})"']
    shown = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30)
    assert shown.stdout == "registered _shtab_torchobs -N torchobs\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_the_script(program: Callable[[str], str], shell: str, tmp_path: Path) -> None:
    """Its own parser finds no fault."""
    script = tmp_path / "script"
    script.write_text(completion.script(shell))
    flag = "--no-execute" if shell == "fish" else "-n"
    checked = subprocess.run([program(shell), flag, str(script)], capture_output=True, text=True, check=False, timeout=30)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_command_and_option_is_in_it(shell: str) -> None:
    """What a parser takes, the TAB key offers; fish and tcsh leave the dashes out."""
    script = completion.script(shell)
    for command in BRIEFS:
        assert re.search(rf"\b{command}\b", script)
    for flag in [*(option.flag for option in EVERY_OPTION), "--interval", "--no-exporter", "--events", "--once", "--version"]:
        assert flag.removeprefix("--") in script


def test_the_command_prints_the_script() -> None:
    """With nothing around it: a shell reads all of it."""
    shown = torchobs("completion", "zsh")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("#compdef torchobs")
    assert set(completion.SHELLS) <= set(shtab.SUPPORTED_SHELLS)


def test_without_the_library_it_says_how_to_get_it() -> None:
    """A training image has no extra."""
    code = "import sys; sys.modules['shtab'] = None; import torchobs.cli.dispatch as c; sys.exit(c.main(['completion', 'zsh']))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
    assert (said.returncode, said.stdout) == (1, "")
    assert said.stderr == "torchobs completion: shtab is not installed: pip install 'torchobs[exporter]'\n"


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
        (("completion", "csh"), "invalid choice: 'csh'"),
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
