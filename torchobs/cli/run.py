"""``torchobs run``: run an unmodified training script with torchobs from its first line."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchobs.cli import arguments, run_program
from torchobs.cli.run_program import NoSuchProgramError
from torchobs.cli.summary import Summary
from torchobs.config import option_types, settings
from torchobs.identity.process import exit_status
from torchobs.support import error_guard

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_DESCRIPTION = """\
Run a training script or a module as Python would, and record what happens in it. The script needs no change: its arguments,
exit status, signals, input and output stay its own.

The first rank on a machine starts an exporter, which serves metrics and a live page on http://127.0.0.1:10960 (or the next free
port; exporter.json in the flight directory has the address) and ends after the machine's last training. On a terminal, rank 0
prints the page's address at the start and a summary of the run at the end."""

_EXAMPLES = """\
examples:
  torchobs run train.py --lr 3e-4             instead of: python train.py --lr 3e-4
  torchobs run -m package.train               instead of: python -m package.train
  torchrun --nproc-per-node 2 --no-python torchobs run train.py
                                              instead of: torchrun --nproc-per-node 2 train.py
  torchobs run --no-exporter train.py         record only; `torchobs inspect` and `torchobs top` need no exporter
  torchobs run -- --odd-name.py               a script whose name begins with a dash

Every setting can also be given as an environment variable, such as TORCHOBS_LEVEL; an option overrides its variable."""


class _Parser(arguments.Parser):
    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Print the help or an error as the other commands do. No user code runs after that."""
        from torchobs.cli import stdio_guard

        if status := stdio_guard.guarded(lambda: int(not (file or sys.stderr).write(message)), "torchobs run"):
            sys.exit(status)


def main(given: Sequence[str], begin: Callable[..., object] | None = None) -> None:
    """Run ``torchobs run`` with these arguments; ``begin``: :func:`torchobs.init`, replaceable by tests.

    Returns when the script ends by itself. Raises what the script raises, ``SystemExit`` included.
    """
    options, what = _parse(list(given))
    run_program.enter(what)
    breaker, summary = error_guard.CircuitBreaker("run"), Summary(quiet=options.quiet)
    error_guard.call(breaker, begin or _init, **_overrides(options))
    for failure in breaker.failures:
        logging.getLogger("torchobs").warning(
            "torchobs could not start (%s at %s): the script runs without it", failure.exception, failure.location
        )
    error_guard.call(error_guard.CircuitBreaker("summary"), _say_address, summary)
    try:
        run_program.execute(what)
    except SystemExit as leaving:
        error_guard.call(breaker, _note_exit, leaving)
        raise


def split(given: list[str], valued: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Split into our options and the command, which begins at the script's name or ``-m``; ``valued`` options take a word."""
    valued = valued or [str(option.flag) for option in _VALUED]
    at = 0
    while at < len(given) and given[at].startswith("-") and not given[at].startswith("-m"):
        if given[at] == "--":
            return given[:at], given[at + 1 :]
        at += 2 if given[at] in valued else 1
    return given[:at], given[at:]


_VALUED = (
    settings.named("exporter_address")._replace(flag="--address", metavar="HOST:PORT"),
    arguments.DIRECTORY,
    settings.named("level")._replace(flag="--level"),
)
_OPTIONS = (*(option.flag for option in _VALUED), "--no-exporter", "--quiet", "--help", "-m")


def parser() -> arguments.Parser:
    """Return the parser for the options before the script."""
    usage = "torchobs run [options] script.py [arguments …]\n       torchobs run [options] -m module [arguments …]"
    made = arguments.parser("run", usage, _DESCRIPTION, _EXAMPLES, _Parser)
    made.add_argument("--no-exporter", action="store_true", help="Start no exporter on this machine.")
    made.add_argument("--quiet", action="store_true", help="Print neither the page's address nor the summary.")
    for option in _VALUED:
        arguments.add(made, option)
    return made


def _parse(given: list[str]) -> tuple[argparse.Namespace, run_program.Program]:
    own, command = split(given)
    made = parser()
    options, unknown = made.parse_known_args(own)
    if unknown:
        made.error(
            f"unknown option {unknown[0]!r}, expected {option_types.either(_OPTIONS)}; the script's own come after its name"
        )
    if not command or command == ["-m"]:
        made.error("a script or `-m module` is missing")
    try:
        return options, split_program(command)
    except NoSuchProgramError as problem:
        made.exit(2, f"torchobs run: {problem}\n")


_PYTHON = re.compile(r"python[\d.]*")
"""The program that people are used to write before a script"""


def split_program(command: list[str]) -> run_program.Program:
    """Return the program that a command line names; raises ``NoSuchProgramError`` if there is none."""
    first, *rest = command
    if first == "-m":
        first, *rest = f"-m{rest[0]}", *rest[1:]
    if first.startswith("-m"):
        return run_program.Program(run_program.ProgramKind.MODULE, first[2:], tuple(rest))
    if _PYTHON.fullmatch(Path(first).name) and rest and not Path(first).is_dir():
        raise NoSuchProgramError(f"the script is run by this Python, {sys.executable}: leave out {first!r}")
    return run_program.find(first, tuple(rest))


def _overrides(options: argparse.Namespace) -> dict[str, object]:
    """Return the arguments of ``init()``; the exporter is on by default here."""
    decided = settings.environment().get("TORCHOBS_EXPORTER", "").strip()
    return {
        "exporter": False if options.no_exporter else None if decided else True,
        "exporter_address": options.exporter_address,
        "flight_dir": options.flight_dir,
        "level": options.level,
    }


def _init(**overrides: object) -> object:
    import torchobs

    return torchobs.init(**overrides)


def _say_address(summary: Summary) -> None:
    from torchobs.runtime import session

    summary.begin(session.current())


def _note_exit(leaving: SystemExit) -> None:
    from torchobs.runtime import session

    if (running := session.current()) is not None:
        running.note_exit(exit_status(leaving.code), leaving)
