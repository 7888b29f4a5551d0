"""Render dashboards and rules into `deploy/`: `python -m dashboards`; with `--check`, check that they are up to date."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from dashboards import alerts, alerts_ranks, alerts_resources, percentiles, rules

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
RUNBOOKS = "https://github.com/torchobs/torchobs/blob/main/docs/runbooks"

ALERTS = "The alerts. They work in Prometheus 2.42 (the first with `keep_firing_for`) and later."
CLASSIC = "Percentiles of classic histograms, which is what Prometheus makes of a scrape unless told otherwise."
NATIVE = """\
Percentiles of native histograms. Load this file instead of rules/torchobs-percentiles.yml where the scrape makes them,
for example with `convert_classic_histograms_to_nhcb: true`."""


def rendered(runbooks: str = RUNBOOKS) -> dict[str, str]:
    """Return every file by its path under `deploy/`; ``runbooks`` is the URL that alerts link to."""
    return {
        **_dashboards(runbooks),
        "prometheus/rules/torchobs-alerts.yml": rules.render(
            [alerts.anomalies(), alerts_ranks.ranks(), alerts_resources.resources()], runbooks, ALERTS
        ),
        "prometheus/rules/torchobs-percentiles.yml": rules.render([percentiles.classic()], runbooks, CLASSIC),
        "prometheus/rules-native/torchobs-percentiles.yml": rules.render([percentiles.native()], runbooks, NATIVE),
    }


def _dashboards(runbooks: str) -> dict[str, str]:
    if find_spec("grafana_foundation_sdk") is None:
        print("No dashboards without grafana-foundation-sdk, which needs Python 3.11: only the rules.")
        return {}
    from dashboards import grafana

    return grafana.files(runbooks)


def main(argv: list[str] | None = None) -> int:
    """Write the files that differ; with `--check`, list them and return 1."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is stale")
    parser.add_argument("--out", type=Path, default=DEPLOY, help="folder to write to (default: deploy)")
    parser.add_argument("--runbooks", default=RUNBOOKS, metavar="URL", help="folder of the runbooks (default: %(default)s)")
    options = parser.parse_args(argv)
    stale = [(options.out / name, text) for name, text in rendered(options.runbooks.rstrip("/")).items()]
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
