"""Alerts: which fire, since when, for which run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import BAD, FAIR, Column, Query, Step
from dashboards.grafana.template import Choice, link, page
from torchobs.rules.promql import RUN

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

# Not chosen by `cluster` and `namespace`: an alert has the labels of its rule, and not all rules keep them.
OURS = 'alertname=~"Torchobs.*", job_name=~"$job_name"'
FIRING = f'{OURS}, alertstate="firing"'
OF = ("alertname", "severity", *RUN)


def dashboard(runbooks: str) -> Dashboard:
    """Return the dashboard; ``runbooks`` is the URL of the folder with the runbooks."""
    sections = [Section("Now", now(runbooks)), Section("Over time", over_time())]
    about = "The alerts of torchobs: which fire, since when, for which run; with the way to the runbook."
    return page("torchobs-alerts", "alerts", about, Choice.NONE, sections)


def now(runbooks: str) -> tuple[Panel, ...]:
    """Return numbers and the table."""
    since = f"time() - max by ({', '.join(OF)}) (ALERTS_FOR_STATE{{{OURS}}}) and on ({', '.join(OF)}) ALERTS{{{FIRING}}}"
    return (
        panels.number(
            "Firing",
            "Alerts that fire now. Good: 0.",
            "short",
            Query(f"count(ALERTS{{{FIRING}}}) or vector(0)"),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Pages",
            "Alerts that fire with the severity page or critical: somebody is to look now. Good: 0.",
            "short",
            # the chart may name it as kube-prometheus-stack does
            Query(f'count(ALERTS{{{FIRING}, severity=~"page|critical"}}) or vector(0)'),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Runs with alerts",
            "Runs for which an alert fires now. Good: 0.",
            "short",
            Query(f"count(count by ({', '.join(RUN)}) (ALERTS{{{FIRING}}})) or vector(0)"),
            steps=thresholds.FEW_IS_FAIR,
        ),
        panels.rows(
            "Firing alerts",
            "Each alert with its run and for how long it has been active. A click on the alert leads to its runbook, one "
            "on the run to its story. Good: an empty table. Empty: while none fires.",
            (Column("for", since, "s"),),
            labels={"alertname": "alert", "severity": "severity", "job_name": "job", "run_id": "run"},
            links={
                "alert": {"Runbook": f"{runbooks}/${{__data.fields.alert}}.md"},
                "run": {"The story of this run": link("torchobs-run")},
            },
            height=10,
        ),
    )


def over_time() -> tuple[Panel, ...]:
    """Return history."""
    return (
        panels.timeline(
            "History",
            "When each alert fired, for which job in which cluster. Good: nothing. Empty: while none fires.",
            "short",
            Query(f"max by (alertname, cluster, job_name) (ALERTS{{{FIRING}}})", "{{alertname}} {{job_name}} {{cluster}}"),
            steps=(Step(None, FAIR), Step(1.0, BAD)),
            texts={"1": "firing"},
        ),
        panels.lines(
            "Alerts by severity",
            "Number of firing alerts. Good: 0. Empty: while none fires.",
            "short",
            Query(f"count by (severity) (ALERTS{{{FIRING}}})", "{{severity}}"),
            stacked=True,
            width=12,
        ),
        panels.lines(
            "Alerts by name",
            "Number of runs for which each alert fires. Good: 0. Empty: while none fires.",
            "short",
            Query(f"count by (alertname) (ALERTS{{{FIRING}}})", "{{alertname}}"),
            stacked=True,
            width=12,
        ),
    )
