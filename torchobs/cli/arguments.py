"""What all commands share: layout of the help, error messages, options, and errors of their output."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

from torchobs.config import settings
from torchobs.config.options import Option

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


DIRECTORY = settings.named("flight_dir")._replace(flag="--dir", metavar="DIR")
"""The option for the flight directory, which most commands have."""

NOTHING = 2
"""Exit status if there was nothing to read"""

_WIDEST = 128
T = TypeVar("T")
INTERRUPTED = 128 + signal.SIGINT
NO_READER = 128 + signal.SIGPIPE


class CommandError(Exception):
    """A command cannot do what was asked; the message says why, and what to do. It ends with ``status``."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def read(reader: Callable[[], T]) -> T:
    """Return the reader's result; its errors over runs and files become the command's, with exit status 2."""
    from torchobs.ranks.runs import NoRunError, reason  # slow to import, and most commands need no file

    try:
        return reader()
    except NoRunError as problem:
        raise CommandError(str(problem), NOTHING) from None
    except OSError as problem:
        raise CommandError(reason(problem), NOTHING) from None


class Parser(argparse.ArgumentParser):
    """A parser with a short message on errors: one line, the usage, and where to find examples."""

    def error(self, message: str) -> NoReturn:
        """See :class:`argparse.ArgumentParser`."""
        self.exit(2, f"{self.prog}: {message}\n{self.format_usage()}`{self.prog} --help` has examples\n")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Print and let exceptions propagate to the handler of all commands, where argparse would suppress them."""
        (file or sys.stderr).write(message)


class Formatter(argparse.HelpFormatter):
    """Wraps prose to the terminal's width and keeps indented lines, which are examples."""

    def __init__(self, prog: str, **more: Any) -> None:
        import shutil  # needed only for help texts

        width = min(shutil.get_terminal_size().columns, _WIDEST) - 2
        super().__init__(prog, width=width, max_help_position=min(32, width // 3), **more)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(block if "\n " in block else fill(block, width, indent) for block in text.split("\n\n"))

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        """Show no brackets around the value of a lenient option that needs one."""
        shown = super()._format_args(action, default_metavar)
        return shown.strip("[]") if action.const == "" else shown


def parser(name: str, usage: str, description: str, examples: str, cls: type[Parser] = Parser) -> Parser:
    """Return a parser for a command."""
    return cls(f"torchobs {name}", usage, description, examples, formatter_class=Formatter, allow_abbrev=False)


def add(to: argparse._ActionsContainer, option: Option, *, default: object = None, lenient: bool = False) -> None:
    """Add an option to a parser, or to a group of one.

    ``lenient``: values are kept unchecked, as a list of texts, for :func:`torchobs.config.options.values_of`; else an invalid
    value ends the program.
    """
    kind, more = option.kind, dict[str, Any]()
    if lenient:
        more = {"action": "append", "nargs": "?", "const": option.bare}
    else:
        more = {"type": _checked(option), "choices": kind.choices or None}
    metavar = option.metavar or "|".join(kind.choices) or None
    to.add_argument(option.flag, dest=option.name, metavar=metavar, default=default, help=described(option), **more)


def described(option: Option) -> str:
    """Return an option's help text: purpose, environment variables, default."""
    variables = [
        *option.variables,
        *(f"{name} ({kind.allowed})" if kind != option.kind else name for name, kind in option.also),
    ]
    parts = [option.brief, "May be given several times." if option.several else ""]
    parts += [f"[env: {', '.join(variables)}]" if variables else "", f"[default: {option.default}]" if option.default else ""]
    return " ".join(filter(None, parts)).replace("%", "%%")


def _checked(option: Option) -> Callable[[str], object]:
    def parse(text: str) -> object:
        try:
            return option.kind.parse(text)
        except ValueError:
            shown = "" if option.hidden_if is not None and option.hidden_if in text else f"{text!r}: "
            raise argparse.ArgumentTypeError(f"{shown}expected {option.kind.allowed}") from None

    return parse


def guarded(command: Callable[[], int], name: str = "torchobs") -> int:
    """Run a command and return its exit status; on output errors that of standard Unix programs.

    Never used around a user's script.
    """
    _open_missing()
    tolerant(sys.stdout)
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()  # here, where errors are handled: at exit the interpreter would print them
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _let_go()
        return NO_READER
    except OSError as problem:
        if problem.filename is not None:
            raise  # errors of streams have no filename
        _let_go()
        sys.stderr.write(f"{name}: the output cannot be written: {problem.strerror or problem}\n")
        return 1


def tolerant(out: TextIO) -> TextIO:
    """Make ``out`` replace unencodable characters by question marks, and return it."""
    reconfigure = getattr(out, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return out


def _open_missing() -> None:
    """Open standard streams that the caller has closed (``>&-``), so that no other file gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  # stays open


def _let_go() -> None:
    """Redirect standard output to /dev/null: buffered data would raise again at interpreter exit."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
