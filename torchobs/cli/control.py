"""``torchobs stacks``, ``level`` and ``profile``: commands to ranks, over the Unix socket of this node's exporter."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from torchobs.cli import arguments
from torchobs.cli.arguments import CommandError
from torchobs.config import settings
from torchobs.config.options import PATH, Option, duration, integer
from torchobs.exporter import access
from torchobs.flight.control import LEVELS, MAX_PROFILE_STEPS
from torchobs.flight.directory import find_existing

_STACKS = """\
Print the Python stacks of all threads of a rank, or of all ranks, to see where they are: above all, where one hangs. A rank
that is stuck in native code and holds the GIL cannot answer; it has written its stacks to a file by itself, which is printed.
Stacks have names of files and functions, and no values. This machine's exporter has to run: it passes the command on."""
_STACKS_EXAMPLES = """\
examples:
  torchobs stacks                 all ranks of this machine
  torchobs stacks 3               rank 3
  torchobs stacks | grep -A3 MainThread

Exit status: 1 if the stacks of a rank could not be obtained."""

_LEVEL = """\
Change how much is recorded of a running training, from its next step on: of one rank, or of all ranks of this machine. It holds
until the next change or the rank's end. This machine's exporter has to run: it passes the command on."""
_LEVEL_EXAMPLES = """\
levels:
  off       nothing: every hook is removed from the training
  basic     the default: steps, loss, gradient norms, memory and so on
  advanced  also norms of weights and of updates, four times as many layers, proportional memory (PSS)
  extreme   also what every layer puts out

examples:
  torchobs level advanced          all ranks of this machine
  torchobs level extreme --rank 3  rank 3 alone
  torchobs level off               stop recording"""

_PROFILE = """\
Profile some steps of a running training with torch.profiler, and save the trace for https://ui.perfetto.dev or chrome://tracing.
The training goes on meanwhile, somewhat slower. This machine's exporter has to run: it passes the command on."""
_PROFILE_EXAMPLES = """\
examples:
  torchobs profile 0                          3 steps of rank 0, to trace-rank0.json.gz
  torchobs profile 3 --steps 10 -o slow.json.gz
  torchobs profile 0 --wait 10m               if a step takes minutes"""

_SOCKET = Option(
    "socket", PATH, "The exporter's Unix socket.", "exporter.sock beside the flight files", flag="--socket", metavar="PATH"
)
_ADVICE = {
    "no-such-rank": "there is no such rank on this machine: `torchobs top --once` shows those there are",
    "ambiguous-rank": "several ranks are meant: name one by its incarnation, the digits in the name of its flight file",
}
"""Texts for a terminal in place of the API's, by the type of the problem"""
_RANK = "A rank's number, or its incarnation (the id of one process)."
TIMEOUT_S = 30.0
POLL_S = 0.2
_STACKS_WAIT_S = 5.0
_STEPS = Option("steps", integer(1, MAX_PROFILE_STEPS), "Number of steps.", "3", flag="--steps", metavar="N")
_WAIT = Option("wait", duration("0.1s", "1h"), "How long to wait for it.", "2m", flag="--wait", metavar="DURATION")


def stacks_parser() -> argparse.ArgumentParser:
    """Return the parser of ``torchobs stacks``."""
    parser = arguments.parser("stacks", "torchobs stacks [RANK] [options]", _STACKS, _STACKS_EXAMPLES)
    parser.add_argument("rank", metavar="RANK", nargs="?", help=f"{_RANK} [default: all]")
    return _with_common(parser)


def stacks(argv: Sequence[str]) -> int:
    """Run ``torchobs stacks`` with these arguments and return its exit status."""
    options, status = stacks_parser().parse_args(list(argv)), 0
    path = socket_of(options)
    for answer in post(path, "/stacks", {}, options.rank)["ranks"]:
        try:
            late = answer["refused"] or f"rank {answer['rank']} did not write its stacks within {_STACKS_WAIT_S:g} s"
            body = evidence(path, answer["evidence"], _STACKS_WAIT_S, late)
        except CommandError as problem:  # other ranks may have written theirs
            sys.stderr.write(f"torchobs stacks: {problem}\n")
            status = problem.status
        else:
            sys.stdout.write(f"==> rank {answer['rank']} of {answer['run_id']} <==\n{body.decode(errors='replace')}\n")
    return status


def level_parser() -> argparse.ArgumentParser:
    """Return the parser of ``torchobs level``."""
    parser = arguments.parser("level", f"torchobs level {'|'.join(LEVELS)} [options]", _LEVEL, _LEVEL_EXAMPLES)
    parser.add_argument("level", choices=LEVELS, help="How much is recorded, see below.")
    parser.add_argument("--rank", metavar="RANK", help=f"{_RANK} [default: all]")
    return _with_common(parser)


def level(argv: Sequence[str]) -> int:
    """Run ``torchobs level`` with these arguments and return its exit status."""
    options = level_parser().parse_args(list(argv))
    answer = post(socket_of(options), f"/debug/level/{options.level}", {}, options.rank)
    ranks = ", ".join(rank["rank"] for rank in answer["ranks"])
    sys.stdout.write(f"{options.level} from now on: rank {ranks}\n")
    return 0


def profile_parser() -> argparse.ArgumentParser:
    """Return the parser of ``torchobs profile``."""
    parser = arguments.parser("profile", "torchobs profile [RANK] [options]", _PROFILE, _PROFILE_EXAMPLES)
    parser.add_argument("rank", metavar="RANK", nargs="?", help=f"{_RANK} [default: the only one]")
    parser.add_argument("--output", "-o", metavar="FILE", help="File to write. [default: trace-rankRANK.json.gz]")
    arguments.add(parser, _STEPS, default=3)
    arguments.add(parser, _WAIT, default=120.0)
    return _with_common(parser)


def profile(argv: Sequence[str]) -> int:
    """Run ``torchobs profile`` with these arguments and return its exit status."""
    options = profile_parser().parse_args(list(argv))
    path = socket_of(options)
    answer = post(path, "/profile", {"steps": options.steps}, options.rank)
    late = f"there is no trace after {options.wait:g} s: too few steps have ended, or --wait is too short"
    body = evidence(path, answer["evidence"], options.wait, late)
    output = Path(options.output or f"trace-rank{answer['rank']}.json.gz")
    try:
        output.write_bytes(body)
    except OSError as problem:
        raise CommandError(f"{output}: {problem.strerror or problem}") from None
    sys.stdout.write(f"{output}: {len(body)} bytes, {options.steps} steps of rank {answer['rank']}\n")
    return 0


def _with_common(parser: arguments.Parser) -> arguments.Parser:
    arguments.add(parser, arguments.DIRECTORY)
    arguments.add(parser, _SOCKET)
    return parser


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """See :class:`http.client.HTTPConnection`."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def socket_of(options: argparse.Namespace) -> Path:
    """Return the path of the exporter's socket. Raises ``CommandError``."""
    if options.socket:
        return Path(options.socket)
    environ = settings.environment()
    chosen, _ = settings.resolve({"flight_dir": options.flight_dir}, environ)
    directory = find_existing(str(chosen.flight_dir) if chosen.flight_dir else None, environ.get("XDG_RUNTIME_DIR"))
    if directory is None:
        raise CommandError("no training of this user has run here yet; --dir names another flight directory")
    return Path(directory) / access.SOCKET_NAME


def post(path: Path, what: str, content: object, rank: str | None) -> Any:
    """Send a command and return the answer. Raises ``CommandError``."""
    query = f"?{urlencode({'rank': rank})}" if rank is not None else ""
    status, body = _ask(path, "POST", f"/api/v1{what}{query}", json.dumps(content))
    answer = json.loads(body)
    if status >= http.client.BAD_REQUEST:
        kind = str(answer.get("type", "")).rpartition(":")[2]
        raise CommandError(_ADVICE.get(kind, answer.get("detail", str(status))))
    return answer


def evidence(path: Path, link: Mapping[str, str] | None, timeout_s: float, late: str) -> bytes:
    """Wait for an artifact and return it.

    Raises ``CommandError``: the rank reports that it could not be written, or ``late`` if it has not come in time, or will not.
    """
    if link is None:
        raise CommandError(late)
    deadline_s = time.monotonic() + timeout_s
    while True:
        status, body = _ask(path, "GET", link["href"])
        if status == http.client.OK:
            return body
        if status == http.client.GONE:
            raise CommandError(json.loads(body)["detail"])
        if time.monotonic() > deadline_s:
            raise CommandError(late)
        time.sleep(POLL_S)


def _ask(path: Path, method: str, target: str, content: str | None = None) -> tuple[int, bytes]:
    connection = _Connection(path)
    try:
        connection.request(method, target, content, {"Content-Type": "application/json"} if content else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as problem:  # the latter: it ended in the midst of its answer
        reason = getattr(problem, "strerror", None) or problem
        hint = "`torchobs run` starts an exporter, `torchobs exporter --mode node` is one; a sidecar needs --api.socket"
        raise CommandError(f"no exporter answers at {path}: {reason}. {hint}") from None
    finally:
        connection.close()
