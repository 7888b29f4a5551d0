"""The rule files for Prometheus, by the path at which `torchobs rules` writes them."""

from __future__ import annotations

from torchobs.rules import alerts, alerts_machine, alerts_runs, recordings
from torchobs.rules.rule_file import Alert, Group, render
from torchobs.rules.values import DEFAULT, Values, ValuesError

ALERTS = "rules/torchobs-alerts.yml"

_ABOUT_ALERTS = """\
The alerts. They work in Prometheus 2.42 (the first with `keep_firing_for`) and later, and need what torchobs-recordings.yml
records."""
_ABOUT_RECORDINGS = "What alerts and dashboards compare and add up: of ranks, nodes and runs, over all machines."
_ABOUT_CLASSIC = "Percentiles of classic histograms, which Prometheus makes of a scrape by default."
_ABOUT_NATIVE = """\
Percentiles of native histograms. Load this file instead of rules/torchobs-percentiles.yml where the scrape makes them,
for example with `convert_classic_histograms_to_nhcb: true`."""


def rendered(chosen: Values = DEFAULT) -> dict[str, str]:
    """Return the text of every file. Raises :class:`ValuesError` for an unknown alert."""
    groups = alert_groups()
    names = {rule.alert for group in groups for rule in group.rules if isinstance(rule, Alert)}
    if unknown := sorted({*chosen.severities, *chosen.disabled} - names):
        raise ValuesError(f"there is no alert {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    classic, native = (recordings.percentiles(native=native) for native in (False, True))
    return {
        ALERTS: render(groups, chosen, _ABOUT_ALERTS),
        "rules/torchobs-recordings.yml": render(recording_groups(), chosen, _ABOUT_RECORDINGS),
        "rules/torchobs-percentiles.yml": render(classic, chosen, _ABOUT_CLASSIC),
        "rules-native/torchobs-percentiles.yml": render(native, chosen, _ABOUT_NATIVE),
    }


def alert_groups() -> list[Group]:
    """Return the groups with alerts, each with the recent increases that its alerts query."""
    return [
        alerts.ANOMALIES,
        alerts.DISAGREEMENT,
        alerts_runs.RANKS,
        alerts_runs.HUNG,
        alerts_runs.SPEED,
        alerts_runs.COMPILATION,
        alerts_runs.CHECKPOINTS,
        alerts_machine.MEMORY,
        alerts_machine.RESOURCES,
        alerts_machine.LINKS,
        alerts_machine.ITSELF,
    ]


def recording_groups() -> list[Group]:
    """Return the groups that only record, but for the percentiles."""
    return [recordings.runs(), recordings.speed(), recordings.goodput()]
