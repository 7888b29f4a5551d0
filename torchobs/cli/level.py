"""``torchobs level``: change the debug level of a running training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchobs.cli import arguments, exporter_client
from torchobs.flight.files.control import LEVELS

_DESCRIPTION = """\
Change the debug level of a running training, of one rank or of all on this node. It holds until the next change, or the rank's
end."""

_EXAMPLES = """\
examples:
  torchobs level advanced          from now on all ranks of this node
  torchobs level extreme --rank 3  rank 3 alone
  torchobs level off               nothing is watched any more, and every hook is gone"""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("level", f"torchobs level {'|'.join(LEVELS)} [options]", _DESCRIPTION, _EXAMPLES)
    made.add_argument("level", choices=LEVELS, help="how much is watched")
    made.add_argument("--rank", metavar="RANK", help="a rank, or its incarnation [default: all]")
    exporter_client.add_options(made)
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs level`` with these arguments and return its exit status."""
    options = parser().parse_args(list(given))
    answer = exporter_client.post(exporter_client.socket_of(options), f"/debug/level/{options.level}", {}, options.rank)
    ranks = ", ".join(rank["rank"] for rank in answer["ranks"])
    sys.stdout.write(f"{options.level} from now on: rank {ranks}\n")
    return 0
