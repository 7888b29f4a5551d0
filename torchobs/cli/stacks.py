"""``torchobs stacks``: what the threads of a rank are doing at this moment."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torchobs.cli import arguments, command

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_WAIT_S = 5.0
_DESCRIPTION = """\
Print the stacks of all threads of a rank, or of all ranks: of one that hangs, and of one that is stuck in native code with
Python's lock held, which has written them down by itself. Names of files and functions, no values."""

_EXAMPLES = """\
examples:
  torchobs stacks                 all ranks of this node
  torchobs stacks 3               rank 3
  torchobs stacks | grep -A3 MainThread

Exit status: 1 if a rank's stacks could not be had."""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("stacks", "torchobs stacks [RANK] [options]", _DESCRIPTION, _EXAMPLES)
    made.add_argument("rank", metavar="RANK", nargs="?", help="a rank, or its incarnation [default: all]")
    command.add_options(made)
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs stacks`` with these arguments and return its exit status."""
    options, missing = parser().parse_args(list(given)), 0
    try:
        path = command.socket_of(options)
        for answer in command.post(path, "/stacks", {}, options.rank)["ranks"]:
            try:
                body = _written(path, answer)
            except command.RefusedError as why:
                missing += command.refused("stacks", why)
                continue  # others may have theirs
            sys.stdout.write(f"==> rank {answer['rank']} of {answer['run_id']} <==\n{body.decode(errors='replace')}\n")
    except command.RefusedError as why:
        return command.refused("stacks", why)
    return int(missing > 0)


def _written(path: Path, answer: Mapping[str, Any]) -> bytes:
    link = answer["evidence"]
    if link is None:
        raise command.RefusedError(answer["refused"])
    if (body := command.evidence(path, link["href"], _WAIT_S)) is None:
        raise command.RefusedError(f"rank {answer['rank']} has not written them down within {_WAIT_S:g} s")
    return body
