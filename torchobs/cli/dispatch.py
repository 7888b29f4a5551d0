"""The commands of ``torchobs`` by name; one is imported when it is called.

All but exporter and rules work in a plain install, because they are needed in a training image after a crash.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from torchobs._version import __version__
from torchobs.cli import stdio_guard
from torchobs.cli.arguments import CommandError
from torchobs.config import option_types

BRIEFS = {
    "run": "Run a training script and record what happens in it.",
    "top": "Show the ranks (training processes) of this machine live.",
    "inspect": "Report what happened to a run, also after it died.",
    "report": "Write a report on a run as one file.",
    "compare": "Show what differs between two runs.",
    "runs": "List the runs on this machine.",
    "stacks": "Print the stacks of a rank's threads, to see where it hangs.",
    "profile": "Profile some steps of a running rank with torch.profiler.",
    "level": "Change how much is recorded of a running training.",
    "doctor": "Check whether torchobs can work here, with remedies.",
    "exporter": "Serve the metrics of a machine's trainings to Prometheus.",
    "dashboards": "Write the Grafana dashboards into a directory.",
    "rules": "Write alerts and rules for Prometheus into a directory.",
}
OPTIONS = ("--help", "--version")

_HELP = """\
Usage: torchobs COMMAND [options] …

Watch PyTorch training runs: what every rank does, and when one goes bad. Each rank records itself in a flight file,
a small file that outlives it, and the commands read these files.

Commands:
{commands}

examples:
  torchobs run train.py --lr 3e-4            watch a training without changing it
  torchobs top                               see its ranks from another terminal, also over ssh
  torchobs inspect                           what happened to it, also after it died
  torchobs report -o report.html             the same with charts, as a page to keep or to send
  torchobs stacks 3                          where rank 3 hangs
  torchobs doctor                            what keeps torchobs from working here, and the remedy

`torchobs COMMAND --help` explains a command. Options: --help, --version."""

_EXTRA = frozenset({"prometheus_client", "starlette", "uvicorn", "h11", "anyio", "opentelemetry", "msgspec", "yaml"})


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
        return int(import_module(f"torchobs.cli.{name}").main(arguments))
    except CommandError as problem:
        sys.stderr.write(f"torchobs {name}: {problem}\n")
        return problem.status
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if name == "run" or package not in _EXTRA:
            raise
        sys.stderr.write(f"torchobs {name}: {package} is not installed: pip install 'torchobs[exporter]'\n")
        return 1
