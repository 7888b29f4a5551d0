"""``torchobs run``: a training script as it is, watched from its first line."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING, NoReturn

from torchobs import guarding, settings, values
from torchobs.cli import program
from torchobs.cli.summary import Summary
from torchobs.process import exit_status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from _typeshed import SupportsWrite

_DESCRIPTION = """\
Run a training script, or a module, as Python would, with torchobs watching it. The script is not changed; its arguments, exit
status, signals, input and output are its own. One exporter per node serves what is seen on http://127.0.0.1:10960 (if the port
is taken the next one; the flight directory's exporter.json says which) and leaves after the last training. On a terminal rank 0
says where the live page is and, at the end, what became of the run (--quiet: neither)."""

_EXAMPLES = """\
examples:
  torchobs run train.py --lr 3e-4             instead of: python train.py --lr 3e-4
  torchobs run -m package.train               instead of: python -m package.train
  torchrun --nproc-per-node 2 --no-python torchobs run train.py
                                              instead of: torchrun --nproc-per-node 2 train.py
  torchobs run --no-exporter train.py         without the exporter (`torchobs exporter` serves the files of others)
  torchobs run -- --odd-name.py               a script whose name begins with a dash

Every setting is also a variable, TORCHOBS_LEVEL and so on; an option beats its variable."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"torchobs run: {message}\n{self.format_usage()}`torchobs run --help` has examples\n")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Print the help, or a mistake, as the other commands do. Nothing of the user's runs after that."""
        from torchobs.cli import output

        if status := output.guarded(lambda: int(not (file or sys.stderr).write(message)), "torchobs run"):
            sys.exit(status)


def main(arguments: Sequence[str], begin: Callable[..., object] | None = None) -> None:
    """Run ``torchobs run`` with these arguments; ``begin`` is :func:`torchobs.init` unless a test says otherwise.

    Returns when the script ends by itself. Raises what the script raises, ``SystemExit`` included.
    """
    options, what = _parse(list(arguments))
    program.enter(what)
    fuse, summary = guarding.Fuse("run"), Summary(quiet=options.quiet)
    guarding.call(fuse, begin or _init, **_overrides(options))
    for trip in fuse.trips:
        logging.getLogger("torchobs").warning(
            "torchobs could not start (%s at %s): the script runs without it", trip.exception, trip.location
        )
    guarding.call(guarding.Fuse("summary"), _say_address, summary)
    try:
        program.execute(what)
    except SystemExit as leaving:
        guarding.call(fuse, _note_exit, exit_status(leaving.code))
        raise


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return our own options, and the command: from the script's name or ``-m`` on, where nothing is ours."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and not arguments[at].startswith("-m"):
        if arguments[at] == "--":
            return arguments[:at], arguments[at + 1 :]
        at += 2 if arguments[at] in _WITH_VALUE else 1
    return arguments[:at], arguments[at:]


_WITH_VALUE = ("--dir", "--level", "--address")
_OPTIONS = (*_WITH_VALUE, "--no-exporter", "--quiet", "--help", "-m")


def parser() -> _Parser:
    """Return the parser of what stands before the script."""
    made = _Parser(
        "torchobs run", "torchobs run [options] script.py [arguments …]\n       torchobs run [options] -m module [arguments …]",
        _DESCRIPTION, _EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    made.add_argument("--no-exporter", action="store_true", help="start no exporter on this node")
    made.add_argument(
        "--address",
        type=_checked(values.ADDRESS),
        metavar="HOST:PORT",
        help="where that exporter listens, and nowhere else (127.0.0.1:10960, or the next free port)",
    )
    made.add_argument("--quiet", action="store_true", help="say nothing on the terminal at the start and at the end")
    made.add_argument("--dir", metavar="DIR", help="directory of the flight files (the best that the machine offers)")
    made.add_argument("--level", type=_checked(values.LEVEL), help=f"how much is watched: {values.LEVEL.allowed} (basic)")
    return made


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, program.Program]:
    own, command = split(arguments)
    made = parser()
    options, unknown = made.parse_known_args(own)
    if unknown:
        made.error(f"unknown option {unknown[0]!r}, allowed is {values.either(_OPTIONS)}; the script's own come after its name")
    if not command or command == ["-m"]:
        made.error("a script or `-m module` is missing")
    try:
        return options, _program(command)
    except program.NoSuchProgramError as problem:
        made.exit(2, f"torchobs run: {problem}\n")


def _program(command: list[str]) -> program.Program:
    first, *rest = command
    if first == "-m":
        first, *rest = f"-m{rest[0]}", *rest[1:]
    if first.startswith("-m"):
        return program.Program(program.Kind.MODULE, first[2:], tuple(rest))
    return program.find(first, tuple(rest))


def _checked(kind: values.Kind) -> Callable[[str], object]:
    def parse(text: str) -> object:
        try:
            return kind.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed is {kind.allowed}") from None

    return parse


def _overrides(options: argparse.Namespace) -> dict[str, object]:
    """Return the arguments of ``init()``; the exporter is on here, unless somebody has said something about it."""
    decided = settings.environment().get("TORCHOBS_EXPORTER", "").strip()
    return {
        "exporter": False if options.no_exporter else None if decided else True,
        "exporter_address": options.address,
        "flight_dir": options.dir,
        "level": options.level,
    }


def _init(**overrides: object) -> object:
    import torchobs

    return torchobs.init(**overrides)


def _say_address(summary: Summary) -> None:
    from torchobs import session

    summary.begin(session.current())


def _note_exit(status: int) -> None:
    from torchobs import session

    if (running := session.current()) is not None:
        running.note_exit(status)
