"""torchobs itself: what it costs, what it could not record, and whether its exporters do well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import Column, Query
from dashboards.grafana.queries import EXPORTERS, MOST, RANKS, increase, rate, worst
from dashboards.grafana.template import Choice, page
from torchobs import catalog
from torchobs.rules.promql import select

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

NOT_PUSHED = "Empty: where nothing is pushed over OTLP."


def dashboard() -> Dashboard:
    """Return the dashboard."""
    sections = [
        Section("In the training", training()),
        Section("Exporters", exporters()),
        Section("Push over OTLP", push(), collapsed=True),
        Section("The machine's metrics", host(), collapsed=True),
    ]
    about = "What torchobs costs one run, what it could not record, and whether its exporters do well."
    return page("torchobs-itself", "torchobs itself", about, Choice.RUN | Choice.RANK | Choice.EXPORTER, sections)


def training() -> tuple[Panel, ...]:
    """Return cost and failures in the ranks."""
    return (
        panels.lines(
            "Overhead",
            "Share of a training thread's time that torchobs takes, by probe, on average over the ranks. Good: below 0.5 "
            "% at steps of 50 ms, 1 % at steps of 1 ms.",
            "percentunit",
            Query(f"avg by (probe) ({rate(catalog.OVERHEAD, *RANKS)})", "{{probe}}"),
            stacked=True,
            steps=thresholds.OVERHEAD,
        ),
        panels.lines(
            "Failed probes",
            "Exceptions raised inside a probe, of which the first disables it on its rank; and probes that are disabled. "
            "Good: 0. Empty: while none has failed.",
            "short",
            Query(f"sum by (probe) ({increase(catalog.PROBE_ERRORS, *RANKS)})", "errors in {{probe}}"),
            Query(f"sum by (probe) ({select(catalog.PROBE_DISABLED, *RANKS)})", "ranks without {{probe}}"),
        ),
        panels.lines(
            "Not recorded",
            "What did not fit the flight files, and series that the exporters did not serve. Good: 0; a drop list drops "
            "on purpose. Empty: the flight files, while nothing was too much for them.",
            "short",
            Query(f"sum by (what) ({increase(catalog.FLIGHT_DROPPED, *RANKS)})", "flight file: {{what}}"),
            Query(f"sum by (reason) ({increase(catalog.EXPORTER_SERIES_DROPPED, *EXPORTERS)})", "series: {{reason}}"),
        ),
    )


def exporters() -> tuple[Panel, ...]:
    """Return the exporters' health."""
    return (
        panels.number(
            "Configuration",
            "Whether every exporter honours the whole of its configuration; else its log says which part it cannot. "
            "Good: honoured.",
            "short",
            Query(f"min({select(catalog.EXPORTER_CONFIG_OK, *EXPORTERS)})"),
            steps=thresholds.ONE_IS_GOOD,
            texts={"0": "not honoured", "1": "honoured"},
        ),
        panels.number(
            "Slowest scan",
            "Time that an exporter took to read all its flight files. Good: far below the scrape interval.",
            "s",
            Query(f"max({select(catalog.EXPORTER_SCAN_DURATION, *EXPORTERS)})"),
        ),
        panels.rows(
            "Versions",
            "Versions of torchobs and Python, with the number of exporters that have them. Good: one row.",
            (Column("exporters", f"count by (version, python) ({select(catalog.BUILD_INFO, *EXPORTERS)})"),),
            labels={"version": "torchobs", "python": "Python"},
            width=16,
            height=4,
        ),
        panels.lines(
            "Flight files",
            "Flight files by what became of them. Good: no bad ones, which could not be read.",
            "short",
            Query(f"sum by (status) ({select(catalog.EXPORTER_FILES, *EXPORTERS)})", "{{status}}"),
            stacked=True,
        ),
        panels.lines(
            "Read errors",
            "Flight files that could not be read, by reason, and ranks that two living processes claim. Good: 0.",
            "short",
            Query(f"sum by (reason) ({increase(catalog.EXPORTER_READ_ERRORS, *EXPORTERS)})", "{{reason}}"),
            Query(f"sum({increase(catalog.EXPORTER_DUPLICATES, *EXPORTERS)})", "claimed twice"),
        ),
        panels.lines(
            "Scan duration",
            f"Time that the {MOST} slowest exporters took to read their flight files. Good: far below the scrape interval.",
            "s",
            Query(worst(f"max by (instance) ({select(catalog.EXPORTER_SCAN_DURATION, *EXPORTERS)})"), "{{instance}}"),
        ),
        panels.lines(
            "Scrapes",
            "Metrics pages that the exporters serve in a second. Good: the number of scrapers, divided by their interval.",
            "reqps",
            Query(f"sum({rate(catalog.EXPORTER_SCRAPES, *EXPORTERS)})", "scrapes"),
        ),
        panels.lines(
            "Duration of a scrape",
            f"Mean time from a request for the metrics page to its last byte, of the {MOST} slowest exporters. "
            "Good: far below the scrape timeout.",
            "s",
            Query(
                worst(
                    f"sum by (instance) ({rate(catalog.EXPORTER_SCRAPE_TIME, *EXPORTERS)})"
                    f" / sum by (instance) ({rate(catalog.EXPORTER_SCRAPES, *EXPORTERS)})"
                ),
                "{{instance}}",
            ),
        ),
        panels.lines(
            "Failed writes",
            "Writes of the exporters that failed, as on a full disk. Good: 0.",
            "short",
            Query(f"sum by (what) ({increase(catalog.EXPORTER_WRITE_ERRORS, *EXPORTERS)})", "{{what}}"),
        ),
    )


def push() -> tuple[Panel, ...]:
    """Return the push's accounts."""
    return (
        panels.lines(
            "Pushed",
            f"Data points, spans and log records that the receiver accepted. Good: metrics never fall to 0. {NOT_PUSHED}",
            "short",
            Query(f"sum by (signal) ({rate(catalog.OTLP_SENT, *EXPORTERS)})", "{{signal}}"),
        ),
        panels.lines(
            "Not pushed",
            f"Dropped by reason, and requests that failed. Good: 0. {NOT_PUSHED}",
            "short",
            Query(f"sum by (signal, reason) ({increase(catalog.OTLP_DROPPED, *EXPORTERS)})", "{{signal}} dropped: {{reason}}"),
            Query(f"sum by (signal) ({increase(catalog.OTLP_FAILURES, *EXPORTERS)})", "{{signal}} requests failed"),
        ),
        panels.lines(
            "Waiting to be pushed",
            f"Data points and spans in the queues. Good: it returns to 0. {NOT_PUSHED}",
            "short",
            Query(f"sum by (signal) ({select(catalog.OTLP_QUEUED, *EXPORTERS)})", "{{signal}}"),
        ),
    )


def host() -> tuple[Panel, ...]:
    """Return the collectors of the machine's metrics."""
    return (
        panels.lines(
            "Duration of the collection",
            "Time that the machine's metrics took, of the slowest exporters. Good: milliseconds. Empty: where collectors "
            "are off.",
            "s",
            Query(worst(f"max by (instance) ({select(catalog.EXPORTER_HOST_DURATION, *EXPORTERS)})"), "{{instance}}"),
        ),
        panels.lines(
            "Failed collectors",
            "Times that a collector failed. Good: 0. Empty: where collectors are off.",
            "short",
            Query(f"sum by (collector) ({increase(catalog.EXPORTER_HOST_ERRORS, *EXPORTERS)})", "{{collector}}"),
        ),
    )
