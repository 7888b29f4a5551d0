"""``torchobs completion``: what the TAB key offers, as a script for bash, zsh or fish.

The script holds every command and option, so that a TAB starts no Python; a new version of torchobs wants a new one, which is
why a shell's start file sources the output instead of a copy of it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from torchobs.cli import arguments
from torchobs.cli.commands import BRIEFS, OPTIONS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

SHELLS = ("bash", "zsh", "fish")
_DIRECTORIES = frozenset({"--dir", "--flight-dir"})

_DESCRIPTION = """\
Print a script that makes the TAB key complete commands, options and their values. The shell's start file runs it, so that it is
always that of the installed version."""

_EXAMPLES = """\
examples:
  source <(torchobs completion bash)                                  this bash
  echo 'source <(torchobs completion bash)' >> ~/.bashrc              every bash
  echo 'source <(torchobs completion zsh)' >> ~/.zshrc                every zsh, after compinit
  torchobs completion fish > ~/.config/fish/completions/torchobs.fish every fish"""


class Flag(NamedTuple):
    """An option: what it is for, whether a value follows, and which values there are."""

    name: str
    brief: str
    takes_value: bool
    choices: tuple[str, ...] = ()


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("completion", "torchobs completion bash|zsh|fish", _DESCRIPTION, _EXAMPLES)
    made.add_argument("shell", choices=SHELLS, help="the shell to make it for")
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs completion`` with these arguments and return its exit status."""
    shell = parser().parse_args(list(given)).shell
    sys.stdout.write({"bash": bash, "zsh": zsh, "fish": fish}[shell]())
    return 0


def flags_of(command: str) -> list[Flag]:
    """Return a command's options, from the parser that reads them."""
    made: argparse.ArgumentParser = import_module(f"torchobs.cli.{command}").parser()
    return list(_of_parser(made))


def _of_parser(made: argparse.ArgumentParser) -> Iterator[Flag]:
    for action in made._actions:  # noqa: SLF001  # argparse lists its options nowhere else
        for name in action.option_strings:
            if name.startswith("--"):
                yield Flag(name, action.help or "", action.nargs != 0, tuple(action.choices or ()))


def bash() -> str:
    """Return the script for bash (3.2 and newer)."""
    cases, values = [], []
    for command in BRIEFS:
        flags = flags_of(command)
        cases.append(f"    {command}) flags='{' '.join(flag.name for flag in flags)}' ;;")
        for flag in flags:
            if flag.choices:
                values.append(f"    {flag.name}) offered='{' '.join(flag.choices)}' ;;")
            elif flag.name in _DIRECTORIES:
                values.append(f'    {flag.name}) COMPREPLY=($(compgen -d -- "$word")); return ;;')
    return _BASH.format(
        commands=" ".join([*BRIEFS, *OPTIONS]), cases="\n".join(cases), values="\n".join(dict.fromkeys(values)),
        shells=" ".join(SHELLS),
    )  # fmt: skip


_BASH = """\
_torchobs() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} flags='' offered=''
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{commands}' -- "$word"))
    return
  fi
  case $before in
{values}
  esac
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  if [ -n "$offered" ]; then
    COMPREPLY=($(compgen -W "$offered" -- "$word"))
  elif [ "${{word#-}}" != "$word" ]; then
    COMPREPLY=($(compgen -W "$flags" -- "$word"))
  elif [ "${{COMP_WORDS[1]}}" = completion ]; then
    COMPREPLY=($(compgen -W '{shells}' -- "$word"))
  else
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -o filenames -F _torchobs torchobs
"""


def zsh() -> str:
    """Return the script for zsh."""
    commands = " ".join(_quoted(f"{name}:{brief}") for name, brief in BRIEFS.items())
    cases = []
    for command in BRIEFS:
        specs = [_zsh_spec(flag) for flag in flags_of(command)]
        rest = f"'1:shell:({' '.join(SHELLS)})'" if command == "completion" else "'*:file:_files'"
        cases.append(f"    {command}) _arguments {' '.join([*specs, rest])} ;;")
    return _ZSH.format(commands=commands, cases="\n".join(cases))


_ZSH = """\
#compdef torchobs
_torchobs() {{
  local -a commands
  commands=({commands})
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  local command=${{words[2]}}
  shift words
  (( CURRENT-- ))
  case $command in
{cases}
  esac
}}
compdef _torchobs torchobs
"""


def _zsh_spec(flag: Flag) -> str:
    brief = flag.brief.replace("[", "(").replace("]", ")").replace(":", " ")
    value = (
        f":value:({' '.join(flag.choices)})"
        if flag.choices
        else ":directory:_files -/"
        if flag.name in _DIRECTORIES
        else ":value:"
    )
    return _quoted(f"{flag.name}[{brief}]{value if flag.takes_value else ''}")


def fish() -> str:
    """Return the script for fish."""
    lines = [
        f"complete -c torchobs -n __fish_use_subcommand -f -a {name} -d {_quoted(brief)}" for name, brief in BRIEFS.items()
    ]
    for command in BRIEFS:
        within = f"-n '__fish_seen_subcommand_from {command}'"
        for flag in flags_of(command):
            value = f" -x -a {_quoted(' '.join(flag.choices))}" if flag.choices else " -r" if flag.takes_value else ""
            lines.append(f"complete -c torchobs {within} -l {flag.name[2:]}{value} -d {_quoted(flag.brief)}")
    lines.append(f"complete -c torchobs -n '__fish_seen_subcommand_from completion' -f -a {_quoted(' '.join(SHELLS))}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a text in single quotes, for all three shells."""
    return "'" + text.replace("'", "’").replace("\\", "") + "'"
