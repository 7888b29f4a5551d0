"""Render dashboards and rules into `deploy/`: `python -m dashboards`; with `--check`, check that they are up to date.

With `--values FILE --out DIR` both have a person's own thresholds: a panel turns red where the alert fires. It is the file that
`torchobs rules render` takes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from yaml import YAMLError

from torchobs.rules import files
from torchobs.rules.values import DEFAULT, RUNBOOKS, Values, ValuesError, load

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def rendered(values: Values = DEFAULT) -> dict[str, str]:
    """Return every file by its path under `deploy/`. Raises :class:`ValuesError` where an alert is named that there is not."""
    rules = files.rendered(values)
    return {**_dashboards(values), **{f"prometheus/{name}": text for name, text in rules.items()}}


def _dashboards(values: Values) -> dict[str, str]:
    if find_spec("grafana_foundation_sdk") is None:
        print("No dashboards without grafana-foundation-sdk, which needs Python 3.11: only the rules.")
        return {}
    from dashboards import grafana

    return grafana.files(values)


def main(argv: list[str] | None = None) -> int:
    """Write the files that differ; with `--check`, list them and return 1."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is stale")
    parser.add_argument("--out", type=Path, default=DEPLOY, help="folder to write to (default: deploy)")
    parser.add_argument("--runbooks", metavar="URL", help=f"folder of the runbooks (default: {RUNBOOKS})")
    parser.add_argument(
        "--values", metavar="FILE", type=Path, help="YAML with thresholds and severities (torchobs rules --help)"
    )
    options = parser.parse_args(argv)
    if options.values and options.out == DEPLOY:
        parser.error("--values needs --out: deploy/ has what is shipped")
    try:
        values = load(options.values) if options.values else DEFAULT
        found = rendered(replace(values, runbooks=options.runbooks.rstrip("/")) if options.runbooks else values)
    except (OSError, ValuesError, YAMLError) as error:
        parser.error(f"--values: {error}")
    stale = [(options.out / name, text) for name, text in found.items()]
    stale = [(path, text) for path, text in stale if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        if options.check:
            print(f"{path} is stale: run `make docs`")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return int(bool(stale) and options.check)


if __name__ == "__main__":
    sys.exit(main())
