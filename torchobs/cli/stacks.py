"""``torchobs stacks``: the present stacks of a rank's threads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchobs.cli import arguments, exporter_client
from torchobs.cli.arguments import CommandError

_WAIT_S = 5.0
_DESCRIPTION = """\
Print the Python stacks of all threads of a rank, or of all ranks, to see where they are: above all, where one hangs. A rank
that is stuck in native code and holds the GIL cannot answer; it has written its stacks to a file by itself, which is printed.
Stacks have names of files and functions, and no values. This machine's exporter has to run: it passes the command on."""

_EXAMPLES = """\
examples:
  torchobs stacks                 all ranks of this machine
  torchobs stacks 3               rank 3
  torchobs stacks | grep -A3 MainThread

Exit status: 1 if the stacks of a rank could not be obtained."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("stacks", "torchobs stacks [RANK] [options]", _DESCRIPTION, _EXAMPLES)
    made.add_argument("rank", metavar="RANK", nargs="?", help=f"{exporter_client.RANK} [default: all]")
    exporter_client.add_options(made)
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs stacks`` with these arguments and return its exit status."""
    options, status = parser().parse_args(list(given)), 0
    path = exporter_client.socket_of(options)
    for answer in exporter_client.post(path, "/stacks", {}, options.rank)["ranks"]:
        try:
            body = _written(path, answer)
        except CommandError as problem:  # other ranks may have written theirs
            sys.stderr.write(f"torchobs stacks: {problem}\n")
            status = problem.status
        else:
            sys.stdout.write(f"==> rank {answer['rank']} of {answer['run_id']} <==\n{body.decode(errors='replace')}\n")
    return status


def _written(path: Path, answer: Mapping[str, Any]) -> bytes:
    link = answer["evidence"]
    if link is None:
        raise CommandError(answer["refused"])
    if (body := exporter_client.evidence(path, link["href"], _WAIT_S)) is None:
        raise CommandError(f"rank {answer['rank']} did not write its stacks within {_WAIT_S:g} s")
    return body
