"""Parts common to all dashboards: variables for the data source, job, run and rank, and annotations."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, prometheus
from grafana_foundation_sdk.models import dashboard as model

from dashboards.panels import DATASOURCE
from dashboards.promql import select
from torchobs import catalog

RUNS = ('job_name=~"$job_name"', 'run_id=~"$run_id"')
"""Matchers for the chosen runs; series recorded over all ranks have no `rank`."""
RANKS = (*RUNS, 'rank=~"$rank"')
EXPORTERS = ('instance=~"$instance"',)
"""Matchers for the own metrics of the chosen runs' exporters, which carry no job, run or rank."""

RUN = "{{run_id}}"
"""Legend of a run."""


def frame(uid: str, title: str, description: str) -> model.Dashboard:
    """Return a dashboard without panels."""
    builder = dashboard.Dashboard(title).uid(uid).description(description).tags(["torchobs"]).readonly()
    builder.tooltip(model.DashboardCursorSync.CROSSHAIR).time("now-1h", "now").refresh("30s").timezone("browser")
    builder.variables([_datasource(), *_choices()]).annotations([_anomalies(), _starts()])
    return builder.build()


def _datasource() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _choices() -> list[dashboard.QueryVariable]:
    # "All" is `.*`, not a list of all values, which for a thousand ranks would be a regular expression of kilobytes; except for
    # exporters, where it is those of the chosen runs.
    return [
        _choice("job_name", "Job").all_value(".*"),
        _choice("run_id", "Run", RUNS[0]).all_value(".*"),
        _choice("rank", "Rank", *RUNS).all_value(".*").sort(model.VariableSort.NUMERICAL_ASC),
        _choice("instance", "Exporter", *RUNS).hide(model.VariableHide.HIDE_VARIABLE),
    ]


def _choice(label: str, title: str, *matchers: str) -> dashboard.QueryVariable:
    query = f"label_values({select(catalog.RANK_UP, *matchers)}, {label})"
    variable = dashboard.QueryVariable(label).label(title).datasource(DATASOURCE)
    variable.query({"query": query, "refId": label, "qryType": 1}).definition(query)
    variable.multi(multi=True).include_all(include_all=True)
    variable.current(model.VariableOption(selected=True, text="All", value="$__all"))
    return variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.ALPHABETICAL_ASC)


def _anomalies() -> dashboard.AnnotationQuery:
    anomalies = select(catalog.ANOMALIES, *RANKS)
    expr = f"max by (job_name, run_id, kind) (increase({anomalies}[$__rate_interval])) > 0"
    return _annotation("Anomalies", expr, "{{kind}}", "red")


def _starts() -> dashboard.AnnotationQuery:
    started = select(catalog.RANK_START_TIME, *RANKS)
    expr = f"max by (job_name, run_id) (changes({started}[$__rate_interval])) > 0"
    return _annotation("Restarts", expr, "restart", "blue")


def _annotation(name: str, expr: str, title: str, color: str) -> dashboard.AnnotationQuery:
    query = dashboard.AnnotationQuery().name(name).datasource(DATASOURCE).enable(enable=True).icon_color(color)
    query.expr(expr).title_format(title).text_format("run {{run_id}} of {{job_name}}").step("")
    return query.target(prometheus.Dataquery().expr(expr).range().ref_id("A"))
