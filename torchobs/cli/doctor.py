"""``torchobs doctor``: checks whether everything works here, with remedies."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from torchobs._version import __version__
from torchobs.cli import arguments, doctor_checks, doctor_system
from torchobs.cli.doctor_checks import FAIL, OK, WARN, Check
from torchobs.cli.selftest import places, selftest
from torchobs.cli.table import bullets
from torchobs.cli.terminal_style import TerminalStyle, style_for, tolerant
from torchobs.config import settings
from torchobs.diagnosis import text_format
from torchobs.flight.files.location import find_existing

_DESCRIPTION = """\
Check whether torchobs can do its work on this machine, in this container or pod, and print a remedy for each problem: torch,
which probes work (by a training of five steps in another process), which flight directory is used and why, its permissions and
free space, the exporter, clock, shared memory, cgroup, GPUs, optional packages, misspelt environment variables. It changes
nothing."""

_EXAMPLES = """\
examples:
  torchobs doctor                                  with the Python that trains
  kubectl exec pod -c trainer -- torchobs doctor   in a pod: volumes, modes and fsGroup
  TORCHOBS_DIR=/data/flight torchobs doctor        would this directory do?
  torchobs doctor --system                         also torch's build, CUDA, driver, processor, package conflicts
  torchobs doctor --no-training --json | jq '.checks[] | select(.status != "ok")'

Exit status: 1 if a check failed, else 0, also with warnings."""

_MARKS = {OK: ("green", "ok  "), WARN: ("yellow", "warn"), FAIL: ("red", "FAIL")}
VERSION = 1


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("doctor", "torchobs doctor [options]", _DESCRIPTION, _EXAMPLES)
    made.add_argument("--no-training", action="store_true", help="Leave out the training of five steps, which imports torch.")
    made.add_argument("--system", action="store_true", help="Check also torch's build, CUDA, processor, package conflicts.")
    made.add_argument("--json", action="store_true", help="Print JSON for programs.")
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs doctor`` with these arguments and return its exit status."""
    options = parser().parse_args(list(given))
    out, found = tolerant(sys.stdout), []
    style = style_for(out)
    for check in examine(training=not options.no_training, system=options.system):
        found.append(check)
        if not options.json:
            out.write("".join(f"{line}\n" for line in lines_of(check, style)))
            out.flush()
    if options.json:
        out.write(json.dumps({"version": VERSION, "checks": [check._asdict() for check in found]}, indent=2) + "\n")
    else:
        out.write(f"\n{summary(found)}\n")
    return int(any(check.status == FAIL for check in found))


def examine(*, training: bool, system: bool = False) -> Iterator[Check]:
    """Run the checks, the quick ones first."""
    environ = settings.environment()
    chosen, _ = settings.resolve({}, environ)
    flight_dir, runtime_dir = str(chosen.flight_dir) if chosen.flight_dir else None, environ.get("XDG_RUNTIME_DIR")
    yield Check("torchobs", OK, __version__)
    yield doctor_checks.system()
    version = doctor_checks.torch_version()
    yield doctor_checks.torch(version)
    if not chosen.enabled:
        yield Check("torchobs", WARN, "switched off by the environment", "unset TORCHOBS_ENABLED and OTEL_SDK_DISABLED")
    yield from doctor_checks.variables(environ)
    pod = doctor_checks.kubernetes(environ)
    yield from [pod] if pod else []
    yield doctor_checks.directory(flight_dir, runtime_dir)
    path = find_existing(flight_dir, runtime_dir)
    yield doctor_checks.space(path, chosen.file_size)
    yield doctor_checks.exporter(path, str(chosen.exporter_address or settings.EXPORTER_ADDRESS))
    yield doctor_checks.shared_memory()
    yield doctor_checks.cgroup()
    yield doctor_checks.clock()
    yield doctor_checks.gpus()
    yield from doctor_checks.extras()
    if system:
        yield from doctor_system.examine()
    if training and version is not None:
        yield from selftest(places(path or flight_dir))


def lines_of(check: Check, style: TerminalStyle) -> list[str]:
    """Return a check as lines: result and remedy."""
    colour, mark = _MARKS[check.status]
    first, *rest = bullets([f"{check.name}: {text_format.clean(check.text)}"], style.width, " " * 6)
    shown = [f"{style(colour, mark)}  {first[6:]}", *rest]
    return shown + bullets([text_format.clean(check.remedy)], style.width, "      -> ") if check.remedy else shown


def summary(found: Sequence[Check]) -> str:
    """Return the last line, which counts the problems."""
    fails, warns = (sum(check.status == status for check in found) for status in (FAIL, WARN))
    if not fails and not warns:
        return "All is well."
    told = [text_format.plural(fails, "failure")] if fails else []
    return f"{text_format.joined([*told, text_format.plural(warns, 'warning')] if warns else told)}: each has its remedy above."
