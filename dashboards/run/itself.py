"""Panels about torchobs itself: its overhead, and what it could not record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards import panels
from dashboards.layout import Section
from dashboards.panels import BAD, FAIR, GOOD, Query, Step
from dashboards.promql import increase, rate, select
from dashboards.template import EXPORTERS, RANKS
from torchobs import catalog

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Panel


def section() -> Section:
    """Return the section."""
    return Section("torchobs itself", (overhead(), errors(), dropped(), files(), read_errors(), scans(), configuration()))


def overhead() -> Panel:
    """Overhead of the hooks in the training thread."""
    return panels.lines(
        "Overhead",
        "Share of a training thread's time that torchobs takes, by probe, on average over the ranks. "
        "Its budget is 0.5 % at steps of 50 ms and 1 % at steps of 1 ms.",
        "percentunit",
        Query(f"avg by (probe) ({rate(catalog.OVERHEAD, *RANKS)})", "{{probe}}"),
        stacked=True,
        steps=(Step(None, GOOD), Step(0.005, FAIR), Step(0.01, BAD)),
        width=8,
    )


def errors() -> Panel:
    """Errors in the training process."""
    return panels.lines(
        "Errors in probes",
        "Exceptions raised inside a probe; the first disables it on its rank.",
        "short",
        Query(f"sum by (probe) ({increase(catalog.PROBE_ERRORS, *RANKS)})", "{{probe}}"),
        width=8,
    )


def dropped() -> Panel:
    """Items dropped by the flight files and by the exporter."""
    return panels.lines(
        "Dropped",
        "What did not fit the flight file, and series that the exporter did not serve.",
        "short",
        Query(f"sum by (what) ({increase(catalog.FLIGHT_DROPPED, *RANKS)})", "flight file: {{what}}"),
        Query(f"sum by (reason) ({increase(catalog.EXPORTER_SERIES_DROPPED, *EXPORTERS)})", "series: {{reason}}"),
        width=8,
    )


def files() -> Panel:
    """Flight files found by the exporter."""
    return panels.lines(
        "Flight files",
        "Flight files by what became of them. Bad ones could not be read.",
        "short",
        Query(f"sum by (status) ({select(catalog.EXPORTER_FILES, *EXPORTERS)})", "{{status}}"),
        stacked=True,
        width=8,
    )


def read_errors() -> Panel:
    """Flight files that the exporter could not read."""
    return panels.lines(
        "Read errors",
        "Flight files that could not be read, by reason.",
        "short",
        Query(f"sum by (reason) ({increase(catalog.EXPORTER_READ_ERRORS, *EXPORTERS)})", "{{reason}}"),
        width=6,
    )


def scans() -> Panel:
    """Duration of the exporter's scans."""
    return panels.lines(
        "Scan duration",
        "Time that an exporter took to read all its flight files.",
        "s",
        Query(f"max by (instance) ({select(catalog.EXPORTER_SCAN_DURATION, *EXPORTERS)})", "{{instance}}"),
        width=6,
    )


def configuration() -> Panel:
    """Whether the exporter's configuration is valid."""
    return panels.number(
        "Configuration",
        "Whether every exporter honours the whole of its configuration; else its log says which part it cannot.",
        "short",
        Query(f"min({select(catalog.EXPORTER_CONFIG_OK, *EXPORTERS)})"),
        steps=(Step(None, BAD), Step(1.0, GOOD)),
        texts={"0": "not honoured", "1": "honoured"},
    )
