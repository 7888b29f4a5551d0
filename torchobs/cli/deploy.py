"""``torchobs dashboards`` and ``torchobs rules``: files of the installed version for Grafana and Prometheus.

Dashboards were rendered when torchobs was built, rules are when the command runs: Grafana's SDK is not needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torchobs
from torchobs.cli import arguments
from torchobs.cli.arguments import CommandError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence


_DASHBOARDS = """\
Write the dashboards for Grafana into a directory, one JSON file each, which Grafana's file provider reads and people import.
Files of other names are left alone. docs/dashboards.md says what each is for."""

_DASHBOARDS_EXAMPLES = """\
examples:
  torchobs dashboards export /etc/grafana/dashboards/torchobs   where deploy/grafana/provisioning looks for them
  torchobs dashboards export .                                  to import by hand: Dashboards, New, Import"""


def dashboards_parser() -> argparse.ArgumentParser:
    """Return the parser of ``torchobs dashboards``."""
    parser = arguments.parser("dashboards", "torchobs dashboards export DIR", _DASHBOARDS, _DASHBOARDS_EXAMPLES)
    parser.add_argument("action", choices=("export",), help="what to do")
    parser.add_argument("directory", metavar="DIR", type=Path, help="where to write them; it is made if it is not there")
    return parser


def dashboards(argv: Sequence[str]) -> int:
    """Run ``torchobs dashboards`` with these arguments and return its exit status."""
    options = dashboards_parser().parse_args(list(argv))
    files = rendered()
    if not files:
        raise CommandError("this installation has none: it was built without deploy/grafana")
    return _written(options.directory, {file.name: file.read_bytes() for file in files}, "dashboards")


def _written(directory: Path, files: Mapping[str, bytes], what: str) -> int:
    """Write files below a directory, say so, and return the exit status. Raises :class:`CommandError`."""
    try:
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise CommandError(f"{error.filename or directory}: {error.strerror}") from None
    sys.stdout.write(f"{len(files)} {what} in {directory}\n")
    return 0


def rendered() -> list[Path]:
    """Return the rendered dashboards: of the wheel, which has them inside the package, or of a checkout."""
    package = Path(torchobs.__file__).parent
    for root in (package, package.parent):
        if files := sorted((root / "deploy" / "grafana" / "dashboards").glob("torchobs-*.json")):
            return files
    return []


_RULES = """\
Write alerts and recording rules for Prometheus. `export` writes them as shipped, `render` with thresholds and severities of
your own. Into DIR go rules/, which Prometheus loads, and rules-native/, to load instead of the file of that name where
histograms are stored as native ones. Files of other names are left alone."""

_RULES_EXAMPLES = """\
examples:
  torchobs rules export /etc/prometheus/torchobs                    then rule_files: [torchobs/rules/*.yml]
  torchobs rules render --values my.yml /etc/prometheus/torchobs    the same, with what my.yml sets
  torchobs rules render --values my.yml > torchobs-alerts.yml       only the alerts, which is all that it changes

my.yml, in which everything may be left out:
  thresholds: {{memory: 0.85, goodput: 0.9}}
  severities: {{TorchobsRankFailed: page}}          {severities}
  disabled: [TorchobsCheckpointNever]             alerts to leave out
  grafana_url: https://grafana.example.org        for the alerts' links to the dashboards
  runbooks: https://wiki.example.org/runbooks     where your copy of the runbooks is

thresholds and their defaults; shares are between 0 and 1 (not per cent), times in seconds:
{thresholds}"""


def rules_parser() -> argparse.ArgumentParser:
    """Return the parser of ``torchobs rules``."""
    from msgspec.structs import asdict  # no part of a plain install, which writes dashboards all the same

    from torchobs.rules.values import DEFAULT, SEVERITIES

    defaults = asdict(DEFAULT.thresholds)
    width = max(map(len, defaults))
    listed = "\n".join(f"  {name:<{width}} {default:g}" for name, default in defaults.items())
    examples = _RULES_EXAMPLES.format(severities=" or ".join(SEVERITIES), thresholds=listed)
    usage = "torchobs rules export DIR\n       torchobs rules render --values FILE [DIR]"
    parser = arguments.parser("rules", usage, _RULES, examples)
    parser.add_argument("action", choices=("export", "render"), help="what to do")
    directory = "where to write; it is made if it is not there. Without it, render prints the alerts."
    parser.add_argument("directory", metavar="DIR", type=Path, nargs="?", help=directory)
    parser.add_argument("--values", metavar="FILE", type=Path, help="YAML with your thresholds and severities, for render")
    return parser


def rules(argv: Sequence[str]) -> int:
    """Run ``torchobs rules`` with these arguments and return its exit status."""
    parser = rules_parser()
    options = parser.parse_intermixed_args(list(argv))  # DIR may follow --values FILE
    if options.action == "export" and options.values:
        parser.error("export writes the shipped rules; `torchobs rules render` takes --values")
    if options.action == "export" and not options.directory:
        parser.error("export needs the directory to write to")
    if options.action == "render" and not options.values:
        parser.error("render needs --values FILE")
    from torchobs.rules import files

    texts = _rendered(options.values)
    if options.directory is None:
        sys.stdout.write(texts[files.ALERTS])
        return 0
    return _written(options.directory, {name: text.encode() for name, text in texts.items()}, "files")


def _rendered(values: Path | None) -> dict[str, str]:
    """Return the files. Raises :class:`CommandError` for a file of values that cannot be read, or means nothing."""
    import yaml

    from torchobs.rules import files
    from torchobs.rules.values import DEFAULT, ValuesError, load

    try:
        return files.rendered(load(values) if values else DEFAULT)
    except OSError as error:
        raise CommandError(f"{values}: {error.strerror}", 2) from None
    except (ValuesError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise CommandError(f"{values}: {error}", 2) from None
