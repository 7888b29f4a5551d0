"""Render dashboards and rules into `deploy/`: `python -m dashboards`; with `--check`, check that they are up to date."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import yaml

from dashboards import (
    alertmanager,
    alerts,
    alerts_checkpoints,
    alerts_exporter,
    alerts_ranks,
    alerts_resources,
    alerts_speed,
    percentiles,
    recordings,
    rules,
    values,
)
from dashboards.values import Values, ValuesError

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"

ALERTS = """\
The alerts. They work in Prometheus 2.42 (the first with `keep_firing_for`) and later, and need what torchobs-recordings.yml
records."""
RECORDINGS = "What alerts and dashboards compare and add up: of ranks, nodes and runs, over all machines."
CLASSIC = "Percentiles of classic histograms, which is what Prometheus makes of a scrape unless told otherwise."
NATIVE = """\
Percentiles of native histograms. Load this file instead of rules/torchobs-percentiles.yml where the scrape makes them,
for example with `convert_classic_histograms_to_nhcb: true`."""


def rendered(chosen: Values = values.DEFAULT) -> dict[str, str]:
    """Return every file by its path under `deploy/`. Raises :class:`ValuesError` for an alert that there is not."""
    groups = alert_groups(chosen)
    known = {rule.alert for group in groups for rule in group.rules if isinstance(rule, rules.Alert)}
    if unknown := sorted({*chosen.severities, *chosen.disabled} - known):
        raise ValuesError(f"there is no alert {', '.join(unknown)}")
    return {
        **_dashboards(chosen.runbooks),
        "alertmanager/alertmanager.yml": alertmanager.render(),
        "prometheus/rules/torchobs-alerts.yml": rules.render(groups, chosen, ALERTS),
        "prometheus/rules/torchobs-recordings.yml": rules.render(recording_groups(), chosen, RECORDINGS),
        "prometheus/rules/torchobs-percentiles.yml": rules.render(percentiles.split(percentiles.classic()), chosen, CLASSIC),
        "prometheus/rules-native/torchobs-percentiles.yml": rules.render(
            percentiles.split(percentiles.native()), chosen, NATIVE
        ),
    }


def alert_groups(chosen: Values = values.DEFAULT) -> list[rules.Group]:
    """Return the groups with alerts, each with the recent increases that its alerts ask for."""
    return [
        alerts.anomalies(chosen),
        alerts_ranks.ranks(chosen),
        alerts_speed.speed(chosen),
        alerts_checkpoints.checkpoints(chosen),
        alerts_resources.memory(chosen),
        alerts_resources.resources(chosen),
        alerts_exporter.itself(),
    ]


def recording_groups() -> list[rules.Group]:
    """Return the groups that only record, but for the percentiles."""
    return [recordings.runs(), recordings.speed(), recordings.goodput()]


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
    parser.add_argument("--runbooks", metavar="URL", help=f"folder of the runbooks (default: {values.RUNBOOKS})")
    parser.add_argument("--values", type=Path, metavar="FILE", help="YAML with other thresholds and severities")
    options = parser.parse_args(argv)
    try:
        chosen = values.load(options.values) if options.values else values.DEFAULT
        files = rendered(replace(chosen, runbooks=options.runbooks.rstrip("/")) if options.runbooks else chosen)
    except (ValuesError, OSError, yaml.YAMLError) as error:
        parser.error(str(error))
    stale = [(options.out / name, text) for name, text in files.items()]
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
