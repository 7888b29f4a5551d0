"""Panels in a uniform style: each has a title, a description, a unit, a visible legend, and queries to the data source.

A description says what is shown, then ``Good:`` what a healthy run looks like, and where it applies ``Empty:`` when there is
nothing to show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import (
    barchart,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as choices
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.grafana.queries import by_padded_rank

DATASOURCE = choices.DataSourceRef(type_val="prometheus", uid="${datasource}")
"""The data source chosen by the variable `datasource`."""

GOOD, FAIR, BAD, OUT = "green", "orange", "red", "text"
COARSE = 50
"""Points in time of a comparison of all ranks: at a thousand ranks each takes milliseconds, and is a thousand cells."""


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


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column of the values of a query; without a name only the labels of its series are shown."""

    name: str
    expr: str
    unit: str = "short"
    steps: Sequence[Step] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    stacked: bool = False,
    log_base: int = 0,
    steps: Sequence[Step] = (),
    width: int = 8,
) -> model.Panel:
    """Return a time series graph, optionally with ``stacked`` areas, a logarithmic axis, and a line at each threshold."""
    panel = timeseries.Panel().title(title).description(description).unit(unit).datasource(DATASOURCE)
    panel.targets([_target(number, query) for number, query in enumerate(queries)])
    panel.legend(_legend()).tooltip(_tooltip()).span_nulls(span_nulls=False)
    panel.show_points(choices.VisibilityMode.AUTO).fill_opacity(70 if stacked else 8).line_width(0 if stacked else 1)
    if stacked:
        panel.stacking(common.StackingConfig().mode(choices.StackingMode.NORMAL).group("A"))
    if stacked or unit == "percentunit":
        panel.min(0)
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
    width: int = 4,
    height: int = 4,
) -> model.Panel:
    """Return a stat panel of the newest value, coloured by thresholds; ``texts`` replaces values by words."""
    panel = stat.Panel().title(title).description(description).unit(unit).datasource(DATASOURCE)
    panel.targets([_target(number, query) for number, query in enumerate(queries)])
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(values=False))
    panel.graph_mode(choices.BigValueGraphMode.NONE).thresholds(_thresholds(steps or (Step(None, OUT),)))
    panel.color_mode(choices.BigValueColorMode.VALUE).no_value("–")
    if texts:
        panel.mappings([_words(texts)])
    if unit == "short":
        panel.decimals(0)  # an increase is extrapolated to the ends of its window, and so has a fraction
    return _sized(panel.build(), width=width, height=height)


def distribution(title: str, description: str, query: Query) -> model.Panel:
    """Return a heatmap of a histogram over time; the query returns counts by the label `le`, or native histograms."""
    panel = _heatmap(title, f"{description} A run id that is in several clusters is added up: choose one.", "short", 12)
    panel.targets([_target(0, query).format(PromQueryFormat.HEATMAP)])
    panel.color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Spectral").exponent(0.5).steps(64))
    panel.filter_values(heatmap.FilterValueRange().le(1e-9))
    return panel.build()


def by_rank(
    title: str, description: str, unit: str, of: str, *, reverse: bool = False, highest: float | None = None, width: int = 12
) -> model.Panel:
    """Return a heatmap of ranks (upward) over time (to the right), coloured by the greatest value of each.

    ``reverse``: low values, instead of high ones, are in red. ``highest``: the value of the last colour, from 0; else
    colours are of what there is, so that little stands out, too.
    """
    panel = _heatmap(title, description, unit, width)
    panel.targets([_target(0, Query(by_padded_rank(of), "{{row}}"))]).max_data_points(COARSE)
    color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("RdYlGn").steps(64)
    if highest is not None:
        color.min(0).max(highest)
    panel.color(color.reverse(reverse=not reverse))
    return panel.build()


def _heatmap(title: str, description: str, unit: str, width: int) -> heatmap.Panel:
    panel = heatmap.Panel().title(title).description(description).unit(unit).datasource(DATASOURCE).calculate(calculate=False)
    panel.y_axis(heatmap.YAxisConfig().unit("short").axis_placement(choices.AxisPlacement.LEFT)).cell_gap(1)
    panel.cell_values(heatmap.CellValues().unit(unit)).show_legend()
    panel.tooltip(heatmap.HeatmapTooltip().mode(choices.TooltipDisplayMode.SINGLE).y_histogram(y_histogram=True))
    return panel.grid_pos(model.GridPos(h=8, w=width))


def shares(title: str, description: str, query: Query, row: str, column: str) -> model.Panel:
    """Return stacked bars of the present values: one for each value of the label ``row``, divided by ``column``."""
    panel = barchart.Panel().title(title).description(description).unit("percentunit").datasource(DATASOURCE)
    panel.targets([_target(0, query).format(PromQueryFormat.TABLE)])
    matrix = {"columnField": column, "rowField": row, "valueField": "Value", "emptyValue": "zero"}
    panel.transformations([model.DataTransformerConfig(id_val="groupingToMatrix", options=matrix)])
    panel.x_field(f"{row}\\{column}").stacking(choices.StackingMode.PERCENT).legend(_legend()).tooltip(_tooltip())
    panel.orientation(choices.VizOrientation.HORIZONTAL).show_value(choices.VisibilityMode.NEVER).bar_width(0.9)
    return _sized(panel.fill_opacity(70).line_width(0).build(), width=8)


def timeline(
    title: str, description: str, unit: str, *queries: Query, steps: Sequence[Step], texts: Mapping[str, str], width: int = 24
) -> model.Panel:
    """Return a bar for each series, coloured over time by thresholds; ``texts`` replaces values by words."""
    panel = statetimeline.Panel().title(title).description(description).unit(unit).datasource(DATASOURCE)
    panel.targets([_target(number, query) for number, query in enumerate(queries)])
    panel.thresholds(_thresholds(steps)).mappings([_words(texts)]).show_value(choices.VisibilityMode.NEVER)
    panel.color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS))
    panel.legend(_legend()).tooltip(_tooltip()).merge_values(merge_values=True).row_height(0.8)
    return _sized(panel.build(), width)


def rows(
    title: str,
    description: str,
    columns: Sequence[Column],
    *,
    labels: Mapping[str, str],
    links: Mapping[str, Mapping[str, str]] | None = None,
    width: int = 24,
    height: int = 8,
) -> model.Panel:
    """Return a table of the present values, one row for each set of labels that the queries share.

    ``labels``: the labels to show, in order, with the columns' names; ``links``: titles and URLs by a column's name.
    """
    panel = table.Panel().title(title).description(description).unit("short").datasource(DATASOURCE)
    targets = [_target(number, Query(column.expr, instant=True)) for number, column in enumerate(columns)]
    panel.targets([target.format(PromQueryFormat.TABLE) for target in targets])
    labels = {"cluster": "cluster", **labels}  # a column only where there is the label
    # The SDK numbers queries A, B, C; Grafana names their values so, or just "Value" if there is one query.
    values = [f"Value #{chr(ord('A') + at)}" if len(columns) > 1 else "Value" for at in range(len(columns))]
    shown = {**labels, **{value: column.name for value, column in zip(values, columns, strict=True) if column.name}}
    hidden = ["Time", *(value for value, column in zip(values, columns, strict=True) if not column.name)]
    organize = {
        "excludeByName": dict.fromkeys(hidden, True),
        "indexByName": {name: index for index, name in enumerate(shown)},
        "renameByName": shown,
    }
    only = {"include": {"names": [*shown.values()]}}
    panel.transformations(
        [
            model.DataTransformerConfig(id_val="merge", options={}),
            model.DataTransformerConfig(id_val="organize", options=organize),
            model.DataTransformerConfig(id_val="filterFieldsByName", options=only),
        ]
    )
    built = panel.filterable(filterable=True).show_header(show_header=True).build()
    built.field_config.overrides = [
        *(_column(column) for column in columns if column.name),
        *(_override(name, _link(titled)) for name, titled in (links or {}).items()),
    ]
    return _sized(built, width=width, height=height)


def coarse(panel: model.Panel) -> model.Panel:
    """Ask for few points in time: for a query that adds up or compares several series of each rank."""
    panel.max_data_points = COARSE
    return panel


def color(panel: model.Panel, colors: Mapping[str, str]) -> model.Panel:
    """Set fixed colours for the series named in ``colors``, in any cluster, whatever their order."""
    panel.field_config.overrides = [
        model.DashboardFieldConfigSourceOverrides(
            matcher=_of_name(name),
            properties=[model.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": shade})],
        )
        for name, shade in colors.items()
    ]
    return panel


def _of_name(name: str) -> model.MatcherConfig:
    """Return what matches a series of this name, in any cluster: the legend ends with it."""
    return model.MatcherConfig(id_val="byRegexp", options=f"/^{name}( .*)?$/")


def right_axis(panel: model.Panel, name: str) -> model.Panel:
    """Give the series of this name an axis of its own, as its values are much larger."""
    panel.field_config.overrides = [
        model.DashboardFieldConfigSourceOverrides(
            matcher=_of_name(name),
            properties=[
                model.DynamicConfigValue(id_val="unit", value="short"),
                model.DynamicConfigValue(id_val="custom.axisPlacement", value="right"),
            ],
        )
    ]
    return panel


def _column(column: Column) -> model.DashboardFieldConfigSourceOverrides:
    properties = [model.DynamicConfigValue(id_val="unit", value=column.unit)]
    if column.steps:
        steps = [{"value": step.value, "color": step.color} for step in column.steps]
        properties += [
            model.DynamicConfigValue(id_val="thresholds", value={"mode": "absolute", "steps": steps}),
            model.DynamicConfigValue(id_val="color", value={"mode": "thresholds"}),
            model.DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}),
        ]
    if column.texts:
        options = {value: {"text": text} for value, text in column.texts.items()}
        properties.append(model.DynamicConfigValue(id_val="mappings", value=[{"type": "value", "options": options}]))
    return _override(column.name, *properties)


def _link(titled: Mapping[str, str]) -> model.DynamicConfigValue:
    value = [{"title": title, "url": url, "targetBlank": False} for title, url in titled.items()]
    return model.DynamicConfigValue(id_val="links", value=value)


def _override(name: str, *properties: model.DynamicConfigValue) -> model.DashboardFieldConfigSourceOverrides:
    matcher = model.MatcherConfig(id_val="byName", options=name)
    return model.DashboardFieldConfigSourceOverrides(matcher=matcher, properties=list(properties))


def _words(texts: Mapping[str, str]) -> model.ValueMap:
    return model.ValueMap({value: model.ValueMappingResult(text=text) for value, text in texts.items()})


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
