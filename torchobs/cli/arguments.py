"""What the commands' parsers share: they teach, and say what is allowed."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    """A parser whose message on a mistake has one line, the usage, and where the examples are."""

    def error(self, message: str) -> NoReturn:
        """See :class:`argparse.ArgumentParser`."""
        self.exit(2, f"{self.prog}: {message}\n{self.format_usage()}`{self.prog} --help` has examples\n")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Print it, and leave what that raises to whoever handles it for all commands; argparse says nothing of it."""
        (file or sys.stderr).write(message)


def parser(name: str, usage: str, description: str, examples: str) -> Parser:
    """Return the parser of a command."""
    return Parser(
        f"torchobs {name}", usage, description, examples, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip


def count(text: str) -> int:
    """Return a whole number from 0 on."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 1_000_000:  # noqa: PLR2004  # more than any file holds
        raise argparse.ArgumentTypeError(f"{text!r}; allowed is a whole number from 0 on")
    return number


def seconds(text: str) -> float:
    """Return a length of time from 0.1 s to an hour."""
    try:
        number = float(text.removesuffix("s"))
    except ValueError:
        number = -1.0
    if not 0.1 <= number <= 3600.0:  # noqa: PLR2004  # ten a second tire a terminal enough
        raise argparse.ArgumentTypeError(f"{text!r}; allowed are seconds from 0.1 to 3600")
    return number
