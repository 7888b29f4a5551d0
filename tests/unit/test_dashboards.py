"""The dashboard, as Grafana's own linter would judge it, and as its queries would fare."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk, which needs Python 3.11")

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import percentiles, run
from dashboards.__main__ import main
from dashboards.layout import WIDTH
from tests import promql
from torchobs import catalog
from torchobs.catalog import Kind, Metric

DASHBOARD: dict[str, Any] = json.loads(run.render())
ROWS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(panel, target) for panel in PANELS for target in panel["targets"]]
ANNOTATIONS: list[dict[str, Any]] = DASHBOARD["annotations"]["list"]
VARIABLES: dict[str, dict[str, Any]] = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
QUERIES = [target["expr"] for _, target in TARGETS] + [annotation["expr"] for annotation in ANNOTATIONS]

BY_NAME = {metric.prometheus + suffix: metric for metric in catalog.METRICS for suffix in ("", "_bucket", "_count", "_sum")}
RECORDED = {rule.record for rule in (*percentiles.classic().rules, *percentiles.native().rules) if hasattr(rule, "record")}
RANK_LABELS = {"job_name", "run_id", "rank"}
TARGET_LABELS = {"cluster", "namespace", "instance", "le"}

each_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
each_query = pytest.mark.parametrize("query", QUERIES)


def metric_of(selector: promql.Selector) -> Metric | None:
    """The metric, or None for a recorded series."""
    return None if selector.name in RECORDED else BY_NAME[selector.name]


def is_exporter_s(metric: Metric | None) -> bool:
    """Whether it is said of an exporter and not of a rank."""
    return metric is not None and metric.name.startswith("torchobs.exporter.")


# --- queries


@each_query
def test_queries_are_about_metrics_that_are_recorded(query: str) -> None:
    """Every name is a metric of the catalog that something records, or a series that the rules record."""
    for selector in promql.selectors(query):
        metric_of(selector)  # raises for what is neither


@each_query
def test_queries_name_labels_and_values_that_exist(query: str) -> None:
    """A label is the metric's own, the rank's or the target's; a value that is asked for is one of the closed set."""
    known = RANK_LABELS | TARGET_LABELS | {"quantile"}
    for selector in promql.selectors(query):
        metric = metric_of(selector)
        own = {attribute.name: attribute.values for attribute in metric.attributes} if metric else {"quantile": ("0.5", "0.99")}
        assert selector.matchers.keys() <= RANK_LABELS | TARGET_LABELS | own.keys()
        for label, values in own.items():
            asked = selector.matchers.get(label, "")
            assert not asked or not values or set(asked.split("|")) <= set(values)
        known |= own.keys()
    assert promql.grouped_by(query) <= known


@each_query
def test_queries_are_limited_to_what_was_chosen(query: str) -> None:
    """Each selector has the variables of job, run and rank; what the exporter says of itself has its instances instead."""
    for found in re.findall(r"([a-z_:]+)\{([^}]*)\}", query):
        name, matchers = found
        expected = {'job_name=~"$job_name"', 'run_id=~"$run_id"'}
        if name in BY_NAME and is_exporter_s(BY_NAME[name]):
            expected = {'instance=~"$instance"'}
        assert expected <= set(matchers.split(", "))
    assert len(re.findall(r"\{", query)) == len(promql.selectors(query))


@each_query
def test_counters_are_only_looked_at_as_rates(query: str) -> None:
    """A counter's value is nobody's business, its growth is; a gauge has no rate."""
    for selector in promql.selectors(query):
        metric = metric_of(selector)
        if metric is None or query == STEPS_DONE:
            continue
        assert (selector.function in {"rate", "increase"}) == (metric.kind is not Kind.GAUGE)


STEPS_DONE = next(target["expr"] for panel, target in TARGETS if panel["title"] == "Steps")
"""The one exception: how far the run is since it was last started, which is just what the counter's value means."""


@each_query
def test_ranges_suit_the_graph(query: str) -> None:
    """`$__rate_interval` and nothing else: at least four scrapes, and no gap between two points of the graph."""
    assert set(re.findall(r"\[([^]]+)\]", query)) <= {"$__rate_interval"}


# --- panels


@each_panel
def test_panels_explain_themselves(panel: dict[str, Any]) -> None:
    """A title, a description that is a sentence, a unit, and a legend that is shown."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    if panel["type"] in {"timeseries", "barchart"}:
        assert panel["options"]["legend"]["showLegend"] is True


@each_panel
def test_panels_ask_the_chosen_data_source(panel: dict[str, Any]) -> None:
    """The panel and each of its queries; their names are A, B, C."""
    expected = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["datasource"] == expected
    assert [target["datasource"] for target in panel["targets"]] == [expected] * len(panel["targets"])
    assert [target["refId"] for target in panel["targets"]] == list("ABC"[: len(panel["targets"])])


@each_panel
def test_units_are_those_of_the_metrics(panel: dict[str, Any]) -> None:
    """Seconds are shown as seconds, shares of time as percentages, and a rate of seconds is such a share."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    for target in panel["targets"]:
        if "/" in target["expr"]:
            assert unit == "percentunit"
            continue
        selectors = promql.selectors(target["expr"])
        seconds = {"_seconds" in selector.name for selector in selectors}
        rates = {selector.function == "rate" for selector in selectors}
        assert (seconds == {True}) == (unit in {"s", "percentunit"}) or panel["type"] == "table"
        assert unit != "percentunit" or rates == {True}


@each_panel
def test_panels_over_time_ask_for_a_range(panel: dict[str, Any]) -> None:
    """Tables and bars show the values now."""
    instant = panel["type"] in {"table", "barchart"}
    assert {(target["instant"], target["range"]) for target in panel["targets"]} == {(instant, not instant)}


@each_panel
def test_every_legend_names_a_label_that_the_query_leaves(panel: dict[str, Any]) -> None:
    """A legend of a label that was summed away would be empty."""
    for target in panel["targets"]:
        named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        recorded = {selector.name for selector in promql.selectors(target["expr"])} <= RECORDED
        assert named <= (RANK_LABELS | {"quantile"} if recorded else promql.grouped_by(target["expr"]))


def test_thresholds_that_colour_are_in_order() -> None:
    """From the least value up, the first without a bound."""
    for panel in PANELS:
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {"steps": []})["steps"]
        values = [step["value"] for step in steps]
        assert not values or values[0] is None
        assert values[1:] == sorted(values[1:])


# --- the whole


def test_no_panel_covers_another() -> None:
    """Every panel has its own place on the grid, below the heading it belongs to."""
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x, y in itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
    ]
    assert len(cells) == len(set(cells))
    assert {x for x, _ in cells} == set(range(WIDTH))
    tops = [panel["gridPos"]["y"] for panel in DASHBOARD["panels"]]
    assert tops == sorted(tops)


def test_ids_are_unique_and_stable() -> None:
    """Links to a panel name its id."""
    assert [panel["id"] for panel in DASHBOARD["panels"]] == list(range(1, len(DASHBOARD["panels"]) + 1))


def test_sections_and_titles() -> None:
    """What the dashboard is about; no title comes twice."""
    assert [row["title"] for row in ROWS] == ["Health", "Progress", "Phases", "Gradients", "torchobs itself"]
    titles = [panel["title"] for panel in PANELS]
    assert len(titles) == len(set(titles))


def test_variables_follow_the_data_source_and_one_another() -> None:
    """Job, run and rank: several or all of each, renewed with the time range, each limited by those before it."""
    assert list(VARIABLES) == ["datasource", "job_name", "run_id", "rank", "instance"]
    assert (VARIABLES["datasource"]["type"], VARIABLES["datasource"]["query"]) == ("datasource", "prometheus")
    for name, before in (("job_name", []), ("run_id", ["job_name"]), ("rank", ["job_name", "run_id"])):
        variable = VARIABLES[name]
        query = variable["query"]["query"]
        assert query == variable["definition"]
        assert re.findall(r"\$(\w+)", query) == before
        assert query.endswith(f", {name})")
        assert (variable["multi"], variable["includeAll"], variable["refresh"], variable["allValue"]) == (True, True, 2, ".*")
        assert variable["datasource"]["uid"] == "${datasource}"
        assert promql.selectors(query.removeprefix("label_values(").removesuffix(f", {name})"))[0].name in BY_NAME
    assert "allValue" not in VARIABLES["instance"]


def test_the_dashboard_as_a_whole() -> None:
    """Not editable (it is generated), a shared crosshair, a fixed address, and annotations of what happened."""
    assert DASHBOARD["editable"] is False
    assert DASHBOARD["graphTooltip"] == 1
    assert DASHBOARD["uid"] == "torchobs-run"
    assert DASHBOARD["schemaVersion"] >= 36
    assert [annotation["name"] for annotation in ANNOTATIONS] == ["Anomalies", "Restarts"]
    assert [annotation["target"]["expr"] for annotation in ANNOTATIONS] == [annotation["expr"] for annotation in ANNOTATIONS]


def test_the_json_is_the_model_s() -> None:
    """Reading it with Grafana's own model and writing it again changes nothing: no misspelt field."""
    assert json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD))) == DASHBOARD


# --- the files


def test_what_is_shipped_is_up_to_date(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A change of the catalog that changes a dashboard or a rule is in `deploy/`, or CI fails."""
    assert main(["--check", "--out", str(checkout / "deploy")]) == 0
    assert capsys.readouterr().out == ""


def test_stale_files_are_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--check` names what is stale or missing and changes nothing; without it the files are written once."""
    assert main(["--out", str(tmp_path)]) == 0
    stale = tmp_path / "prometheus" / "rules" / "torchobs-alerts.yml"
    missing = tmp_path / "grafana" / "dashboards" / "torchobs-run.json"
    stale.write_text("stale")
    missing.unlink()
    capsys.readouterr()
    assert main(["--check", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [f"{path} is stale: run `make docs`" for path in (missing, stale)]
    assert (stale.read_text(), missing.exists()) == ("stale", False)
    assert main(["--out", str(tmp_path)]) == 0
    assert main(["--check", "--out", str(tmp_path)]) == 0
