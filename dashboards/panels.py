"""Panels in a uniform style: each has a title, a description, a unit, a visible legend, and queries to the data source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import barchart, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as choices
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = choices.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""The data source chosen by the variable `datasource`."""

GOOD, FAIR, BAD, OUT = "green", "orange", "red", "text"


@dataclass(frozen=True, slots=True)
class Query:
    """An expression and the legend of its series, e.g. ``rank {{rank}}``. ``instant``: only the present value.

    ``exemplars``: with the exemplars of the selected series.
    """

    expr: str
    legend: str = ""
    instant: bool = False
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A threshold: values from ``value`` on (``None``: all below the others) are shown in ``color``."""

    value: float | None
    color: str


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    log_base: int = 0,
    steps: Sequence[Step] = (),
    width: int = 12,
) -> model.Panel:
    """Return a time series graph, optionally with ``stacked`` areas, a logarithmic axis, and a line at each threshold."""
    panel = timeseries.Panel().title(title).description(description).unit(unit).datasource(DATASOURCE)
    panel.targets([_target(number, query) for number, query in enumerate(queries)])
    panel.legend(_legend()).tooltip(_tooltip()).span_nulls(span_nulls=False)
    panel.show_points(choices.VisibilityMode.AUTO).fill_opacity(70 if stacked else 8).line_width(0 if stacked else 1)
    if stacked:
        panel.stacking(common.StackingConfig().mode(choices.StackingMode.NORMAL).group("A")).min(0)
    if log_base:
        panel.scale_distribution(common.ScaleDistributionConfig().type(choices.ScaleDistribution.LOG).log(log_base))
    if steps:
        panel.thresholds(_thresholds(steps))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(choices.GraphThresholdsStyleMode.DASHED))
    return _sized(panel.build(), width)


def number(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    steps: Sequence[Step] = (),
    texts: Mapping[str, str] | None = None,
) -> model.Panel:
    """Return a stat panel of the newest value, coloured by thresholds; ``texts`` replaces values by words."""
    panel = stat.Panel().title(title).description(description).unit(unit).datasource(DATASOURCE)
    panel.targets([_target(number, query) for number, query in enumerate(queries)])
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(values=False))
    panel.graph_mode(choices.BigValueGraphMode.NONE).thresholds(_thresholds(steps or (Step(None, OUT),)))
    panel.color_mode(choices.BigValueColorMode.VALUE).no_value("–")
    if texts:
        options = {value: model.ValueMappingResult(text=text) for value, text in texts.items()}
        panel.mappings([model.ValueMap(options)])
    return _sized(panel.build(), width=4, height=4)


def distribution(title: str, description: str, query: Query) -> model.Panel:
    """Return a heatmap of a histogram over time; the query returns counts by the label `le`, or native histograms."""
    panel = heatmap.Panel().title(title).description(description).unit("short").datasource(DATASOURCE)
    panel.targets([_target(0, query).format(PromQueryFormat.HEATMAP)]).calculate(calculate=False)
    panel.color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Spectral").exponent(0.5).steps(64))
    panel.y_axis(heatmap.YAxisConfig().unit("short").axis_placement(choices.AxisPlacement.LEFT)).cell_gap(1)
    panel.cell_values(heatmap.CellValues().unit("short")).show_legend()
    panel.filter_values(heatmap.FilterValueRange().le(1e-9))
    panel.tooltip(heatmap.HeatmapTooltip().mode(choices.TooltipDisplayMode.SINGLE).y_histogram(y_histogram=True))
    return _sized(panel.build(), width=12)


def shares(title: str, description: str, query: Query, row: str, column: str) -> model.Panel:
    """Return stacked bars of the present values: one for each value of the label ``row``, divided by ``column``."""
    panel = barchart.Panel().title(title).description(description).unit("percentunit").datasource(DATASOURCE)
    panel.targets([_target(0, query).format(PromQueryFormat.TABLE)])
    matrix = {"columnField": column, "rowField": row, "valueField": "Value", "emptyValue": "zero"}
    panel.transformations([model.DataTransformerConfig(id_val="groupingToMatrix", options=matrix)])
    panel.x_field(f"{row}\\{column}").stacking(choices.StackingMode.PERCENT).legend(_legend()).tooltip(_tooltip())
    panel.orientation(choices.VizOrientation.HORIZONTAL).show_value(choices.VisibilityMode.NEVER).bar_width(0.9)
    return _sized(panel.fill_opacity(70).line_width(0).build(), width=8)


def rows(
    title: str, description: str, unit: str, queries: Sequence[Query], hide: Sequence[str], names: Mapping[str, str]
) -> model.Panel:
    """Return a table of the present values, one row for each set of labels that the queries share.

    ``hide``: columns to leave out; ``names``: new names of columns (`Value #A` is the first query's).
    """
    panel = table.Panel().title(title).description(description).unit(unit).datasource(DATASOURCE)
    panel.targets([_target(number, query).format(PromQueryFormat.TABLE) for number, query in enumerate(queries)])
    organize = {"excludeByName": dict.fromkeys(hide, True), "renameByName": dict(names)}
    panel.transformations(
        [
            model.DataTransformerConfig(id_val="merge", options={}),
            model.DataTransformerConfig(id_val="organize", options=organize),
        ]
    )
    return _sized(panel.filterable(filterable=True).show_header(show_header=True).build(), width=12)


def color(panel: model.Panel, colors: Mapping[str, str]) -> model.Panel:
    """Set fixed colours for the series named in ``colors``, whatever their order."""
    panel.field_config.overrides = [
        model.DashboardFieldConfigSourceOverrides(
            matcher=model.MatcherConfig(id_val="byName", options=name),
            properties=[model.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": shade})],
        )
        for name, shade in colors.items()
    ]
    return panel


def _sized(panel: model.Panel, width: int, height: int = 8) -> model.Panel:
    panel.grid_pos = model.GridPos(h=height, w=width)
    return panel


def _target(number: int, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number))
    target.datasource(DATASOURCE)
    if query.exemplars:
        target.exemplar(exemplar=True)
    if query.instant:
        target.instant()
    else:
        target.range()
    return target


def _thresholds(steps: Sequence[Step]) -> dashboard.ThresholdsConfig:
    config = dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE)
    config.steps([model.Threshold(value=step.value, color=step.color) for step in steps])
    return config


def _legend() -> common.VizLegendOptions:
    # The SDK's default is a hidden legend.
    legend = common.VizLegendOptions().show_legend(show_legend=True).display_mode(choices.LegendDisplayMode.LIST)
    legend.placement(choices.LegendPlacement.BOTTOM)
    return legend


def _tooltip() -> common.VizTooltipOptions:
    return common.VizTooltipOptions().mode(choices.TooltipDisplayMode.MULTI).sort(choices.SortOrder.DESCENDING)
