"""``torchobs profile``: profile some steps of a rank with torch's profiler, as a Chrome trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchobs.cli import arguments, exporter_client
from torchobs.config import option_types
from torchobs.config.options import Option
from torchobs.flight.files.control import MAX_PROFILE_STEPS

_DESCRIPTION = """\
Profile some steps of a running training with torch.profiler, and save the trace for https://ui.perfetto.dev or chrome://tracing.
The training goes on meanwhile, somewhat slower. This machine's exporter has to run: it passes the command on."""

_EXAMPLES = """\
examples:
  torchobs profile 0                          3 steps of rank 0, to trace-rank0.json.gz
  torchobs profile 3 --steps 10 -o slow.json.gz
  torchobs profile 0 --wait 10m               if a step takes minutes"""

_STEPS = Option("steps", option_types.integer(1, MAX_PROFILE_STEPS), "Number of steps.", "3", flag="--steps", metavar="N")
_WAIT = Option("wait", option_types.duration("0.1s", "1h"), "How long to wait for it.", "2m", flag="--wait", metavar="DURATION")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("profile", "torchobs profile [RANK] [options]", _DESCRIPTION, _EXAMPLES)
    made.add_argument("rank", metavar="RANK", nargs="?", help=f"{exporter_client.RANK} [default: the only one]")
    made.add_argument("--output", "-o", metavar="FILE", help="File to write. [default: trace-rankRANK.json.gz]")
    arguments.add(made, _STEPS, default=3)
    arguments.add(made, _WAIT, default=120.0)
    exporter_client.add_options(made)
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs profile`` with these arguments and return its exit status."""
    options = parser().parse_args(list(given))
    path = exporter_client.socket_of(options)
    answer = exporter_client.post(path, "/profile", {"steps": options.steps}, options.rank)
    body = _trace(path, answer, options.wait)
    output = Path(options.output or f"trace-rank{answer['rank']}.json.gz")
    try:
        output.write_bytes(body)
    except OSError as problem:
        raise arguments.CommandError(f"{output}: {problem.strerror or problem}") from None
    sys.stdout.write(f"{output}: {len(body)} bytes, {options.steps} steps of rank {answer['rank']}\n")
    return 0


def _trace(path: Path, answer: Mapping[str, Any], wait_s: float) -> bytes:
    try:
        body = exporter_client.evidence(path, answer["evidence"]["href"], wait_s)
    except KeyboardInterrupt:
        sys.stderr.write(f"torchobs profile: no longer waiting for the trace; rank {answer['rank']} goes on profiling\n")
        raise
    if body is None:
        raise arguments.CommandError(f"there is no trace after {wait_s:g} s: too few steps have ended, or --wait is too short")
    return body
