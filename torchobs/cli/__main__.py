"""Entry point of ``torchobs`` and of ``python -m torchobs``: the table of commands; only the one called is imported.

All but exporter and rules work in a plain install, because they are needed in a training image after a crash.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import NamedTuple


class Command(NamedTuple):
    """A command: its file, its function there, and what it does."""

    file: str
    function: str
    brief: str


COMMANDS = {
    "run": Command("run", "main", "Run a training script and record what happens in it."),
    "top": Command("top", "main", "Show the ranks (training processes) of this machine live."),
    "inspect": Command("inspect", "main", "Report what happened to a run, also after it died."),
    "report": Command("report", "main", "Write a report on a run as one file."),
    "compare": Command("report", "compare", "Show what differs between two runs."),
    "runs": Command("runs", "main", "List the runs of this machine, also those before its last start."),
    "keep": Command("runs", "keep", "Keep what a report shows of a run beyond a reboot."),
    "stacks": Command("control", "stacks", "Print the stacks of a rank's threads, to see where it hangs."),
    "profile": Command("control", "profile", "Profile some steps of a running rank with torch.profiler."),
    "level": Command("control", "level", "Change how much is recorded of a running training."),
    "doctor": Command("doctor", "main", "Check whether torchobs can work here, with remedies."),
    "exporter": Command("exporter", "main", "Serve the metrics of a machine's trainings to Prometheus."),
    "dashboards": Command("deploy", "dashboards", "Write the Grafana dashboards into a directory."),
    "rules": Command("deploy", "rules", "Write alerts and rules for Prometheus into a directory."),
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name and return its exit status.

    ``run`` is handled before anything else is imported, so that the script finds the interpreter in its initial state.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["run"]:
        from torchobs.cli import run

        run.main(words[1:])
        return 0
    name, *rest = words or ["--help"]
    try:
        with _sigterm_kept_back() if name == "exporter" else nullcontext():
            from torchobs.cli.arguments import guarded

            return guarded(lambda: _run(name, rest), f"torchobs {name}" if name in COMMANDS else "torchobs")
    except KeyboardInterrupt:  # during the import
        return 130


@contextmanager
def _sigterm_kept_back() -> Iterator[None]:
    """Block SIGTERM until the exporter handles it, from the first moment on.

    The kernel discards unhandled signals to a container's first process. If training fails at once, while its sidecar still
    imports (7 s on a tenth of a core), the pod would stay for its whole grace period.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(name: str, arguments: Sequence[str]) -> int:
    if name in {"--help", "-h", "help"}:
        return _help(arguments)
    if name == "--version":
        from torchobs._version import __version__

        sys.stdout.write(f"torchobs {__version__}\n")
        return 0
    if name not in COMMANDS:
        from torchobs.config.options import closest

        what = "option" if name.startswith("-") else "command"
        hint = closest(name, [*COMMANDS, *OPTIONS])
        sys.stderr.write(f"torchobs: no such {what}: {name!r}{hint}\n`torchobs --help` lists them\n")
        return 2
    return _call(name, arguments)


def _help(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        return _call(arguments[0], ["--help"])
    commands = "\n".join(f"  {name:<12}{brief}" for name, (_, _, brief) in COMMANDS.items())
    sys.stdout.write(_HELP.format(commands=commands) + "\n")
    return 0


def _call(name: str, arguments: Sequence[str]) -> int:
    from torchobs.cli.arguments import CommandError

    command = COMMANDS[name]
    try:
        return int(getattr(import_module(f"torchobs.cli.{command.file}"), command.function)(arguments))
    except CommandError as problem:
        sys.stderr.write(f"torchobs {name}: {problem}\n")
        return problem.status
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if name == "run" or package not in _EXTRA:
            raise
        sys.stderr.write(f"torchobs {name}: {package} is not installed: pip install 'torchobs[exporter]'\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
