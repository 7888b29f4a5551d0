"""``torchobs completion``: a shell completion script, generated from the commands' parsers by shtab.

The script contains every command and option, so that completion does not start Python. A new version of torchobs needs a new
script, which is why a shell's start file sources the output instead of a copy of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from torchobs.cli import arguments
from torchobs.cli.dispatch import BRIEFS

SHELLS = ("bash", "zsh", "fish", "tcsh")

_DESCRIPTION = """\
Print a script that completes commands, options and their values when TAB is pressed. Have the shell's start file run this
command, as below: then the script is always that of the installed version. It needs shtab, which the extra `exporter`
installs."""

_EXAMPLES = """\
examples:
  source <(torchobs completion bash)                                  this bash
  echo 'source <(torchobs completion bash)' >> ~/.bashrc              every bash
  echo 'eval "$(torchobs completion zsh)"' >> ~/.zshrc                every zsh, after compinit
  torchobs completion fish > ~/.config/fish/completions/torchobs.fish every fish
  torchobs completion tcsh > ~/.torchobs.tcsh                         every tcsh, with: source ~/.torchobs.tcsh"""


def parser() -> arguments.Parser:
    """Return the command's parser."""
    made = arguments.parser("completion", f"torchobs completion {'|'.join(SHELLS)}", _DESCRIPTION, _EXAMPLES)
    made.add_argument("shell", choices=SHELLS, help="The shell that will run the script.")
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs completion`` and return its exit status. Raises ``ModuleNotFoundError`` without shtab."""
    shell = parser().parse_args(list(given)).shell
    sys.stdout.write(script(shell))
    return 0


def script(shell: str) -> str:
    """Return the script for a shell. Raises ``ModuleNotFoundError`` where shtab is not installed."""
    import shtab

    completed: str = shtab.complete(whole_parser(), shell)
    return completed


def whole_parser() -> arguments.Parser:
    """Return one parser with all commands as subparsers, as shtab requires."""
    import shtab

    offered = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE, "PATH": shtab.FILE, "FILE|DIR": shtab.FILE}
    whole = arguments.Parser("torchobs")
    whole.add_argument("--version", action="store_true", help="Show the version and end.")
    commands = whole.add_subparsers()
    for name, brief in BRIEFS.items():
        made = import_module(f"torchobs.cli.{name}").parser()
        for action in made._actions:  # noqa: SLF001  # argparse has no public list
            if action.metavar in offered:
                action.complete = offered[action.metavar]
        if name == "run":
            made.add_argument("script", nargs="*").complete = shtab.FILE
        commands.add_parser(name, help=brief, parents=[made], add_help=False)
    return whole
