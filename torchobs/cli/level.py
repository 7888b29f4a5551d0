"""``torchobs level``: change the debug level of a running training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchobs.cli import arguments, exporter_client
from torchobs.flight.files.control import LEVELS

_DESCRIPTION = """\
Change how much is recorded of a running training, from its next step on: of one rank, or of all ranks of this machine. It holds
until the next change or the rank's end. This machine's exporter has to run: it passes the command on."""

_EXAMPLES = """\
levels:
  off       nothing: every hook is removed from the training
  basic     the default: steps, loss, gradient norms, memory and so on
  advanced  also norms of weights and of updates, four times as many layers, proportional memory (PSS)
  extreme   also what every layer puts out, and its history around an anomaly

examples:
  torchobs level advanced          all ranks of this machine
  torchobs level extreme --rank 3  rank 3 alone
  torchobs level off               stop recording"""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("level", f"torchobs level {'|'.join(LEVELS)} [options]", _DESCRIPTION, _EXAMPLES)
    made.add_argument("level", choices=LEVELS, help="How much is recorded, see below.")
    made.add_argument("--rank", metavar="RANK", help=f"{exporter_client.RANK} [default: all]")
    exporter_client.add_options(made)
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs level`` with these arguments and return its exit status."""
    options = parser().parse_args(list(given))
    answer = exporter_client.post(exporter_client.socket_of(options), f"/debug/level/{options.level}", {}, options.rank)
    ranks = ", ".join(rank["rank"] for rank in answer["ranks"])
    sys.stdout.write(f"{options.level} from now on: rank {ranks}\n")
    return 0
