"""Parts common to all dashboards: variables, links between the dashboards, annotations."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Flag, auto

from grafana_foundation_sdk.builders import dashboard, prometheus
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import Dataquery, PromQueryFormat

from dashboards.grafana.layout import Section, arrange
from dashboards.grafana.panels import DATASOURCE, coarse
from dashboards.grafana.queries import FLEET, RANKS, RUNS, apart, per_run, series_of_a_rank
from torchobs import catalog
from torchobs.rules.promql import select

TAG = "torchobs"
FIRST_RANK = "0"
MANY = 3
"""Series of each rank; a panel that reads so many has few points in time, or takes more than a second at a thousand ranks."""


class Choice(Flag):
    """Variables that a dashboard has beside data source, cluster, namespace and job."""

    NONE = 0
    RUN = auto()
    RANK = auto()
    """all ranks, unless others are chosen"""
    FIRST_RANK = auto()
    """rank 0, unless others are chosen: where ranks say the same, and a thousand of them too much"""
    LAYER = auto()
    EXPORTER = auto()
    """the chosen run's exporters; not shown"""


def page(uid: str, title: str, description: str, choices: Choice, sections: Sequence[Section]) -> model.Dashboard:
    """Return a dashboard. ``title``: what it is about, without the name of torchobs."""
    builder = dashboard.Dashboard(f"torchobs: {title}").uid(uid).description(description).tags([TAG]).readonly()
    builder.tooltip(model.DashboardCursorSync.CROSSHAIR).time("now-1h", "now").refresh("30s").timezone("browser")
    builder.variables([_datasource(), *_variables(choices)]).links([_links()])
    builder.annotations(_annotations(RUNS if Choice.RUN in choices else FLEET))
    for panel in (panel for section in sections for panel in section.panels):
        if Choice.FIRST_RANK not in choices and _series(panel) >= MANY:
            coarse(panel)
        if Choice.RUN in choices:
            _keep_clusters_apart(panel)
    built = builder.build()
    built.panels = arrange(sections)
    return built


def _series(panel: model.Panel) -> int:
    """Return how many series of each rank the panel reads at each point in time."""
    return sum(
        series_of_a_rank(target.expr) for target in panel.targets or () if isinstance(target, Dataquery) and target.range_val
    )


def _keep_clusters_apart(panel: model.Panel) -> None:
    """Let the panel show a run id that is in two clusters as two runs, each named by its cluster."""
    for target in panel.targets or ():
        # A heat map's buckets are one histogram: its description says so.
        if isinstance(target, Dataquery) and target.format_val is not PromQueryFormat.HEATMAP:
            target.expr = apart(target.expr)
            target.legend_format = f"{target.legend_format} {{{{cluster}}}}" if target.legend_format else ""


def link(uid: str, run: str = "run", job: str = "job") -> str:
    """Return a URL from a table's row, with columns of these names, to a dashboard of that run."""
    kept = "${__url_time_range}&${datasource:queryparam}&${cluster:queryparam}&${namespace:queryparam}"
    return f"/d/{uid}?{kept}&var-job_name=${{__data.fields.{job}}}&var-run_id=${{__data.fields.{run}}}"


def _links() -> dashboard.DashboardLink:
    # The variables that another dashboard lacks are ignored there.
    links = dashboard.DashboardLink("torchobs").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    return links.as_dropdown(as_dropdown=True).keep_time(keep_time=True).include_vars(include_vars=True)


def _datasource() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _variables(choices: Choice) -> list[dashboard.QueryVariable]:
    # "All" is `.*`, which a series without the label matches, too; and not a list of all values, which for a thousand ranks
    # would be a regular expression of kilobytes. Except for exporters, where it is those of the chosen run.
    variables = [
        _several("cluster", "Cluster"),
        _several("namespace", "Namespace", FLEET[0]),
        _several("job_name", "Job", *FLEET[:2]),
    ]
    if Choice.RUN in choices:
        variables.append(_run())
    if Choice.RANK in choices:
        variables.append(_several("rank", "Rank", *RUNS).sort(model.VariableSort.NUMERICAL_ASC))
    if Choice.FIRST_RANK in choices:
        first = _several("rank", "Rank", *RUNS).sort(model.VariableSort.NUMERICAL_ASC)
        variables.append(first.current(model.VariableOption(selected=True, text=FIRST_RANK, value=FIRST_RANK)))
    if Choice.LAYER in choices:
        variables.append(_several("layer", "Layer", *RANKS, metric=catalog.GRAD_LAYER_NORM))
    if Choice.EXPORTER in choices:
        listed = _several("instance", "Exporter", *(RUNS if Choice.RUN in choices else FLEET), every=None)
        variables.append(listed.hide(model.VariableHide.HIDE_VARIABLE))
    return variables


def _several(
    label: str, title: str, *matchers: str, metric: catalog.Metric = catalog.RANK_UP, every: str | None = ".*"
) -> dashboard.QueryVariable:
    query = f"label_values({select(metric, *matchers)}, {label})"
    variable = _variable(label, title, {"query": query, "refId": label, "qryType": 1}, query)
    variable.multi(multi=True).include_all(include_all=True).sort(model.VariableSort.ALPHABETICAL_ASC)
    if every:
        variable.all_value(every)
    return variable.current(model.VariableOption(selected=True, text="All", value="$__all"))


def _run() -> dashboard.QueryVariable:
    """Return the variable of one run: newest first, shown by its job and by the end of its id, if that is long."""
    started = f"last_over_time({select(catalog.RANK_START_TIME, *FLEET)}[$__range])"
    whole = f'label_replace({started}, "short", "$1", "run_id", "(.*)")'
    short = f'label_replace({whole}, "short", "…$1", "run_id", ".{{4,}}(.{{12}})")'
    named = f'label_join({short}, "shown", " ", "job_name", "short")'
    query = f"query_result(sort_desc(max by (run_id, shown) ({named})))"
    variable = _variable("run_id", "Run", {"query": query, "refId": "run_id", "qryType": 3}, query)
    variable.regex('/run_id="(?<value>[^"]+)".*shown="(?<text>[^"]+)"/')
    return variable.multi(multi=False).include_all(include_all=False).sort(model.VariableSort.DISABLED)


def _variable(label: str, title: str, query: dict[str, object], definition: str) -> dashboard.QueryVariable:
    variable = dashboard.QueryVariable(label).label(title).datasource(DATASOURCE)
    variable.query(query).definition(definition)
    return variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)


def _annotations(runs: Sequence[str]) -> list[dashboard.AnnotationQuery]:
    return [_starts(runs), _anomalies(runs), _checkpoints(runs)]


def _starts(runs: Sequence[str]) -> dashboard.AnnotationQuery:
    """Mark starts and restarts at the time that the youngest rank says: also a replaced pod's, which is another series."""
    started = per_run("max", select(catalog.RANK_START_TIME, *runs))
    expr = f"1000 * floor({started} / 10) * 10"  # the ranks of one start are one mark
    return _annotation("Starts", expr, "start", "blue").use_value_for_time(use_value_for_time=True)


def _anomalies(runs: Sequence[str]) -> dashboard.AnnotationQuery:
    increase = f"increase({select(catalog.ANOMALIES, *runs)}[$__rate_interval])"
    return _annotation("Anomalies", f"{per_run('max', increase, 'kind')} > 0", "{{kind}}", "red")


def _checkpoints(runs: Sequence[str]) -> dashboard.AnnotationQuery:
    saved = per_run("max", select(catalog.CHECKPOINT_TIMESTAMP, *runs))
    return _annotation("Checkpoints", f"1000 * {saved}", "checkpoint", "green").use_value_for_time(use_value_for_time=True)


def _annotation(name: str, expr: str, title: str, color: str) -> dashboard.AnnotationQuery:
    query = dashboard.AnnotationQuery().name(name).datasource(DATASOURCE).enable(enable=True).icon_color(color)
    query.expr(expr).title_format(title).text_format("run {{run_id}} of {{job_name}}").step("")
    return query.target(prometheus.Dataquery().expr(expr).range().ref_id("A"))
