"""The commands of ``torchobs`` by name; one is imported when it is called.

All but the exporter and the completion work in a plain install, because they are needed in a training image after a crash.
"""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING

from torchobs._version import __version__
from torchobs.cli import stdio_guard
from torchobs.config import option_types

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BRIEFS = {
    "run": "Run a training script with torchobs watching it.",
    "top": "Watch the ranks of this machine live.",
    "inspect": "Say what became of a run, from its flight files.",
    "stacks": "Print what the threads of a rank are doing.",
    "profile": "Save a profiler's trace of some steps of a rank.",
    "level": "Change how much is watched while training runs.",
    "doctor": "Check this machine, and say what to do.",
    "exporter": "Serve the flight files of a directory to Prometheus.",
    "dashboards": "Write the dashboards for Grafana into a directory.",
    "completion": "Print the completion script of a shell.",
}
OPTIONS = ("--help", "--version")

_HELP = """\
Usage: torchobs COMMAND [options] …

Watch PyTorch training runs: what every rank does, and when one goes bad.

Commands:
{commands}

examples:
  torchobs run train.py --lr 3e-4            watch a training without changing it
  torchobs top                               see its ranks from another terminal, also over ssh
  torchobs inspect                           after it died: what happened, and when it began
  torchobs stacks 3                          it hangs: where
  torchobs doctor                            when something is not shown: what is missing here, and the remedy
  source <(torchobs completion bash)         the TAB key completes commands and options

`torchobs COMMAND --help` has more examples. Options: --help, --version."""

_EXTRA = frozenset({"shtab", "prometheus_client", "starlette", "uvicorn", "h11", "anyio", "opentelemetry", "msgspec", "yaml"})


def main(given: Sequence[str]) -> int:
    """Run the command that the arguments name and return its exit status."""
    name, *arguments = given or ["--help"]
    return stdio_guard.guarded(lambda: _run(name, arguments), f"torchobs {name}" if name in BRIEFS else "torchobs")


def _run(name: str, arguments: Sequence[str]) -> int:
    if name in {"--help", "-h", "help"}:
        return _help(arguments)
    if name == "--version":
        sys.stdout.write(f"torchobs {__version__}\n")
        return 0
    if name not in BRIEFS:
        what = "option" if name.startswith("-") else "command"
        hint = option_types.closest(name, [*BRIEFS, *OPTIONS])
        sys.stderr.write(f"torchobs: no such {what}: {name!r}{hint}\n`torchobs --help` lists them\n")
        return 2
    return _call(name, arguments)


def _help(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in BRIEFS:
        return _call(arguments[0], ["--help"])
    commands = "\n".join(f"  {name:<12}{brief}" for name, brief in BRIEFS.items())
    sys.stdout.write(_HELP.format(commands=commands) + "\n")
    return 0


def _call(name: str, arguments: Sequence[str]) -> int:
    try:
        with _sigterm_kept_back() if name == "exporter" else nullcontext():
            return int(import_module(f"torchobs.cli.{name}").main(arguments))
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if name == "run" or package not in _EXTRA:
            raise
        sys.stderr.write(f"torchobs {name}: {package} is not installed: pip install 'torchobs[exporter]'\n")
        return 1


@contextmanager
def _sigterm_kept_back() -> Iterator[None]:
    """Block SIGTERM until the exporter handles it.

    The kernel discards unhandled signals to a container's first process. If training fails at once, while its sidecar still
    imports (7 s on a tenth of a core), the pod would stay for its whole grace period.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
