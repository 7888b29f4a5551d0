"""Alerts about torchobs itself: an observer that has gone blind must not look like a healthy run."""

from __future__ import annotations

from torchobs import catalog
from torchobs.catalog import Metric
from torchobs.rules.alert_texts import EXPORTER, THIS_RUN, Culprits, amount
from torchobs.rules.promql import BY_RUN, ONE_RUN, by_run, select
from torchobs.rules.recent import name, recent
from torchobs.rules.rule_file import WINDOW, Alert, Group

_EXPORTER = "cluster, namespace, pod, instance"


def itself() -> Group:
    """Return the rules."""
    return Group(
        "torchobs.itself",
        (recent(catalog.FLIGHT_DROPPED, born_later=True), _disabled(), _dropped(), _config(), _read(), _series(), _push()),
    )


def _disabled() -> Alert:
    probes = f"count by ({ONE_RUN}, probe) ({select(catalog.PROBE_DISABLED, THIS_RUN)} == 1)"
    return Alert(
        alert="TorchobsProbeDisabled",
        expr=by_run(f"count {BY_RUN} ({select(catalog.PROBE_DISABLED)} == 1)"),
        summary="is watched by fewer probes.",
        description=(
            f"{amount('probe is', 'probes are')} switched off after an exception: "
            "what is measured so is missing in those ranks. Training is not affected."
        ),
        culprits=Culprits(probes, f"{{{{ $l.probe }}}} on {amount('rank', 'ranks', '$v')}", "Most", named=False),
    )


def _dropped() -> Alert:
    dropped = name(catalog.FLIGHT_DROPPED)
    return Alert(
        alert="TorchobsFlightDropped",
        expr=by_run(f"sum {BY_RUN} ({dropped}) > 0"),
        summary="records more than its flight files hold.",
        description='{{ printf "%.0f" $value }} series, events or steps of the last 10 minutes did not fit and are missing.',
        culprits=Culprits(select(dropped, THIS_RUN), '{{ printf "%.0f" $v }} of kind {{ $l.what }}', "Most on"),
    )


def _config() -> Alert:
    ok = select(catalog.EXPORTER_CONFIG_OK)
    return _of_exporter(
        "TorchobsExporterConfig",
        f"count by ({_EXPORTER}) (max_over_time({ok}[{WINDOW}]) == 0)",
        f"The exporter {EXPORTER} runs with an invalid configuration.",
        "A part of it cannot be applied; the exporter serves what it can, and its log says what is wrong.",
    )


def _read() -> Alert:
    return _of_exporter(
        "TorchobsExporterReadErrors",
        _growing(catalog.EXPORTER_READ_ERRORS),
        f"The exporter {EXPORTER} cannot read flight files.",
        f"It failed {amount('time', 'times')} in the last 10 minutes: ranks are missing on its page.",
    )


def _series() -> Alert:
    return _of_exporter(
        "TorchobsSeriesDropped",
        _growing(catalog.EXPORTER_SERIES_DROPPED, 'reason!="drop_list"'),
        f"The exporter {EXPORTER} does not serve all series.",
        '{{ printf "%.0f" $value }} were left out in the last 10 minutes, for a limit on their number or a conflict of names.',
    )


def _push() -> Alert:
    return _of_exporter(
        "TorchobsPushDropped",
        _growing_sum(  # a receiver that takes no logs refuses them all its life, and is no fault
            select(catalog.OTLP_DROPPED, 'reason!="shutdown"', 'signal!="logs"'),
            select(catalog.OTLP_DROPPED, 'reason!~"shutdown|refused"', 'signal="logs"'),
        ),
        f"The exporter {EXPORTER} loses what it pushes.",
        '{{ printf "%.0f" $value }} data points, spans or log records of the last 10 minutes did not reach the receiver and '
        "were dropped.",
    )


def _growing(counter: Metric, *matchers: str) -> str:
    """Return a counter's increase, if there is some."""
    return _growing_sum(select(counter, *matchers))


def _growing_sum(*counters: str) -> str:
    """Return the increase of several selections of series, if there is some."""
    return f"sum by ({_EXPORTER}) ({' or '.join(f'increase({one}[{WINDOW}])' for one in counters)}) > 0"


def _of_exporter(alert: str, expr: str, summary: str, description: str) -> Alert:
    return Alert(alert, f"max by ({_EXPORTER}) (\n    {expr}\n)", summary, description, of_run=False)
