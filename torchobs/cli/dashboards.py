"""``torchobs dashboards``: the dashboards for Grafana that belong to the installed version, as files to provision or import.

They are rendered when torchobs is built, so that neither Grafana's SDK nor a checkout is needed.
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
    from collections.abc import Sequence

_DESCRIPTION = """\
Write the dashboards for Grafana into a directory, one JSON file each, which Grafana's file provider reads and people import.
Files of other names are left alone. docs/dashboards.md says what each is for."""

_EXAMPLES = """\
examples:
  torchobs dashboards export /etc/grafana/dashboards/torchobs   where deploy/grafana/provisioning looks for them
  torchobs dashboards export .                                  to import by hand: Dashboards, New, Import"""


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = arguments.parser("dashboards", "torchobs dashboards export DIR", _DESCRIPTION, _EXAMPLES)
    made.add_argument("action", choices=("export",), help="what to do")
    made.add_argument("directory", metavar="DIR", type=Path, help="where to write them; it is made if it is not there")
    return made


def main(given: Sequence[str]) -> int:
    """Run ``torchobs dashboards`` with these arguments and return its exit status."""
    options = parser().parse_args(list(given))
    files = rendered()
    if not files:
        raise CommandError("this installation has none: it was built without deploy/grafana")
    try:
        options.directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            (options.directory / file.name).write_bytes(file.read_bytes())
    except OSError as error:
        raise CommandError(f"{error.filename or options.directory}: {error.strerror}") from None
    sys.stdout.write(f"{len(files)} dashboards in {options.directory}\n")
    return 0


def rendered() -> list[Path]:
    """Return the rendered dashboards: of the wheel, which has them inside the package, or of a checkout."""
    package = Path(torchobs.__file__).parent
    for root in (package, package.parent):
        if found := sorted((root / "deploy" / "grafana" / "dashboards").glob("torchobs-*.json")):
            return found
    return []
