"""The dashboards, as Grafana's own linter would judge them, and as their queries would fare."""

from __future__ import annotations

import json
import re
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk, which needs Python 3.11")


from dashboards import grafana
from dashboards.__main__ import main
from dashboards.grafana.layout import WIDTH
from tests import dashboards, simulated_run
from tests.dashboards import panels, targets, variables
from tests.support import for_each
from torchobs import catalog
from torchobs.catalog import Kind, Metric, prometheus_label
from torchobs.rules.promql import REPLICA_GROUP, RUN
from torchobs.rules.values import DEFAULT, RUNBOOKS

if TYPE_CHECKING:
    from collections.abc import Mapping

DASHBOARDS: dict[str, dict[str, Any]] = {uid: json.loads(text) for uid, text in grafana.render(DEFAULT).items()}
PANELS = [(uid, panel) for uid, dashboard in DASHBOARDS.items() for panel in panels(dashboard)]
QUERIES = [(uid, panel["title"], target["expr"]) for uid, board in DASHBOARDS.items() for panel, target in targets(board)]
QUERIES += [(uid, note["name"], note["expr"]) for uid, board in DASHBOARDS.items() for note in board["annotations"]["list"]]

BY_NAME = {metric.prometheus + suffix: metric for metric in catalog.METRICS for suffix in ("", "_bucket", "_count", "_sum")}
RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"
RECORDED = {name for path in RULES.glob("*.yml") for name in re.findall(r"^ *- record: (\S+)$", path.read_text(), re.MULTILINE)}
FOREIGN = {"ALERTS", "ALERTS_FOR_STATE", *grafana.gpu.DCGM}
"""Series that Prometheus itself or dcgm-exporter makes."""
FOREIGN_LABELS = {"alertname", "alertstate", "severity", "UUID"}
RANK_LABELS = {*RUN, "rank", "instance"}
INFO_LABELS = {"host", "script", "launcher", "torch_version", "python_version"}
"""Labels of `torchobs_rank_info`, which the catalog does not name."""
SAMPLES = 800_000
"""Of a query over an hour; a real Prometheus answered the dearest in a second of a processor."""
OWN_COUNTS = (catalog.STEPS, catalog.EPOCHS, catalog.RANK_RESTARTS)
"""Counters that are also shown by their value: how far the run is since it was last started."""

ONE_ROW_EACH = {"GPUs of the ranks", "What runs"}
"""Tables that are a list of the ranks: one row for each, to be searched by a person."""

each_dashboard = for_each({uid: (uid,) for uid in DASHBOARDS})
each_panel = for_each({f"{uid}: {panel['title']}": (uid, panel) for uid, panel in PANELS})
each_query = for_each({f"{uid}: {title} {number}": (uid, query) for number, (uid, title, query) in enumerate(QUERIES)})


def metric_of(selector: dashboards.Selector) -> Metric | None:
    """The metric, or None for a series that is recorded or not ours."""
    return None if selector.name in RECORDED | FOREIGN else BY_NAME[selector.name]


def is_exporter_s(metric: Metric) -> bool:
    """Whether it is said of an exporter or its machine and not of a rank."""
    return metric.name.startswith(("torchobs.exporter.", "torchobs.build.", "torchobs.host.", "system."))


def test_every_metric_has_a_panel_or_a_reason() -> None:
    """What has no panel stands in a list that says why; a dashboard for each question, with an address that stays."""
    named = {selector.name for _, _, query in QUERIES for selector in dashboards.selectors(query)}
    without = {metric for metric in catalog.METRICS if not any(BY_NAME.get(name) == metric for name in named)}
    assert without == set(grafana.WITHOUT_PANEL)
    assert all(reason.endswith(".") for reason in grafana.WITHOUT_PANEL.values())
    assert [uid.removeprefix("torchobs-") for uid in DASHBOARDS] == [
        *("fleet", "run", "ranks", "gradients", "memory", "data", "amp", "compile", "gpu", "node", "itself", "alerts"),
    ]


@each_query
def test_every_query(uid: str, query: str) -> None:
    """Names, labels and values that exist; limited to what was chosen; counters as rates; joins and sums by run, or by rank."""
    allowed_labels = RANK_LABELS | {"quantile", "le", "row", REPLICA_GROUP}
    for selector in dashboards.selectors(query):
        metric = metric_of(selector)  # raises for a metric that nothing records
        attributes = metric.attributes if metric else ()
        allowed = {prometheus_label(attribute.name): attribute.values for attribute in attributes}
        foreign = FOREIGN_LABELS if selector.name in FOREIGN else set()
        assert selector.matchers.keys() <= RANK_LABELS | {"quantile"} | allowed.keys() | foreign, uid
        for label, values in allowed.items():
            wanted = selector.matchers.get(label, ".*")
            assert wanted == ".*" or not values or set(wanted.split("|")) <= set(values)
        allowed_labels |= allowed.keys() | foreign | (INFO_LABELS if metric is catalog.RANK_INFO else set())
    assert dashboards.grouped_by(query) <= allowed_labels
    offered = set(variables(DASHBOARDS[uid]))
    for name, text in re.findall(r"([A-Za-z_:]\w*(?::\w+)*)\{([^}]*)\}", query):
        matchers = set(text.split(", "))
        limits = {f'{label}=~"${label}"' for label in RUN if label in offered}
        if name in BY_NAME and is_exporter_s(BY_NAME[name]):
            limits = {'instance=~"$instance"'}
        elif name in FOREIGN:
            limits &= {'job_name=~"$job_name"', 'run_id=~"$run_id"'}  # an alert has the labels of its rule
        assert limits <= matchers
        assert set(re.findall(r"\$(\w+)", text)) <= offered
    unlimited = len(dashboards.selectors(query)) - len(re.findall(r"\{[^}]*\"", query))
    assert unlimited == sum(query.count(f"({name})") for name in FOREIGN)
    for selector in dashboards.selectors(query):
        metric = metric_of(selector)
        if metric is not None and not (metric in OWN_COUNTS and not selector.function):
            counted = metric.kind in {Kind.COUNTER, Kind.HISTOGRAM}
            assert (selector.function in {"rate", "increase"}) == counted, uid
    alert_s = {"10m"} if uid == "torchobs-compile" else set()
    assert set(re.findall(r"\[([^]]+)\]", query)) <= {"$__rate_interval", "$__range", "$__range:$__interval"} | alert_s
    run = ", ".join(RUN)
    joins = {run, f"{run}, rank", f"{run}, rank, instance", "UUID", "", ", ".join(grafana.alerts.OF)}
    group = f"{run}, {REPLICA_GROUP}"
    joins |= {group, f"{group}, backend, group", f"{run}, rank, instance, backend, group"}  # process groups, a rank in one
    assert set(re.findall(r"\bon \(([^)]*)\)", query)) <= joins, uid
    assert "ignoring" not in query
    if "run_id" in variables(DASHBOARDS[uid]) and "@ 0" not in query and not re.match(r"sum by \(le\)", query):
        for labels in dashboards.groupings(query):
            assert {*RUN} <= labels or "UUID" in labels, query


@each_panel
def test_panels_explain_themselves_and_ask_the_chosen_data_source(uid: str, panel: dict[str, Any]) -> None:
    """A title, what good looks like, a unit, a legend; tables and bars show the values now."""
    assert panel["title"], uid
    description = panel["description"]
    assert description.endswith(".")
    assert "Good: " in description
    assert " Good:" not in description.partition("Good: ")[2]
    assert panel["targets"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    if panel["type"] in {"timeseries", "barchart", "state-timeline"}:
        assert panel["options"]["legend"]["showLegend"] is True
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["datasource"] == source, uid
    assert [target["datasource"] for target in panel["targets"]] == [source] * len(panel["targets"])
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGHIJKLMNOP"[: len(panel["targets"])])
    for target in panel["targets"]:
        instant = panel["type"] in {"table", "barchart"} or "$__range" in target["expr"]
        assert (target["instant"], target["range"]) == (instant, not instant), uid


@each_panel
def test_units_are_those_of_the_metrics(uid: str, panel: dict[str, Any]) -> None:
    """Bytes are shown as bytes, seconds as seconds, and a rate of seconds is a share."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    own_units = [override["matcher"]["options"].strip("/") for override in panel["fieldConfig"]["overrides"]]
    for target in () if panel["type"] == "table" else panel["targets"]:
        expr = target["expr"].partition(" or 0 * ")[0]  # where there is nothing it is 0
        selectors = [selector for selector in dashboards.selectors(expr) if selector.name in BY_NAME]
        if not selectors or re.search(r" / |@ 0|changes\(|\bcount\b|100 \*|UUID", expr):
            continue
        units = {BY_NAME[selector.name].unit for selector in selectors}
        rates = {selector.function for selector in selectors} <= {"rate"}
        share = {"percentunit", "short"}
        expected = {"By": {"Bps" if rates else "bytes"}, "s": share if rates else {"s"}, "1": share}
        expected |= {"W": {"watt"}, "Cel": {"celsius"}, "J": {"joule"}}
        for selector in units:
            if selector in expected and not target["legendFormat"].startswith(("seconds", "restarts")):
                assert unit in expected[selector], (uid, target["expr"])
            if selector.startswith("{") and not any(re.match(name, target["legendFormat"]) for name in own_units):  # a count
                assert unit not in {"s", "bytes", "percentunit"}, (uid, target["expr"])


@pytest.fixture(scope="module")
def of_a_rank() -> dict[str, list[Mapping[str, str]]]:
    """The labels of what an exporter shows of a rank of a sick run, by the name of the series."""
    by_series: dict[str, list[Mapping[str, str]]] = {}
    for labels, _, _ in simulated_run.series(simulated_run.Run(ranks=1, per_node=1, quiet=False), 0.0, 3300.0, 300.0):
        if labels.get("rank") == "0" and labels not in by_series.setdefault(labels["__name__"], []):
            by_series[labels["__name__"]].append(labels)
    return by_series


@each_panel
def test_a_thousand_ranks_are_neither_a_thousand_lines_nor_a_million_samples(
    uid: str, panel: dict[str, Any], of_a_rank: dict[str, list[Mapping[str, str]]]
) -> None:
    """The worst, or a heat map, in legends and rows; an hour of scrapes every 30 s is read in a second."""
    ranks = 8 if uid == "torchobs-gradients" else 1000  # there it is rank 0 unless others are chosen
    points = min(120, panel.get("maxDataPoints") or 120)
    read = 0
    for target in panel["targets"]:
        for selector in dashboards.selectors(target["expr"]):
            every = of_a_rank.get(selector.name, [])
            number = sum(selector.matches(labels) for labels in every)
            read += number * ranks * (1 if target["instant"] or "@ 0" in target["expr"] else points)
    assert read <= SAMPLES, (uid, panel["title"], read)
    listed = panel["transformations"][1]["options"]["renameByName"] if panel["type"] == "table" else {}
    for target in panel["targets"]:
        if re.search(r"\{\{(rank|hw_id|instance)\}\}", target["legendFormat"]):
            assert re.match(r"(topk|bottomk)\(", target["expr"]), uid
        if "rank" in listed and panel["title"] not in ONE_ROW_EACH:
            assert re.search(r"(topk|bottomk)\(|== 1", target["expr"]), uid


def test_links_lead_to_dashboards_and_columns_that_exist(checkout: Path) -> None:
    """A URL names a uid that is there, and the columns of its own table; a runbook is there for each alert."""
    count = 0
    for _, panel in PANELS:
        for override in panel["fieldConfig"]["overrides"]:
            for link in [address for part in override["properties"] if part["id"] == "links" for address in part["value"]]:
                count += 1
                shown = panel["transformations"][1]["options"]["renameByName"].values()
                assert set(re.findall(r"__data\.fields\.(\w+)", link["url"])) <= set(shown)
                if link["url"].startswith("/d/"):
                    uid = link["url"].removeprefix("/d/").partition("?")[0]
                    assert set(re.findall(r"var-(\w+)=", link["url"])) <= set(variables(DASHBOARDS[uid]))
                    assert "${__url_time_range}" in link["url"]
                    assert all(f"${{{name}:queryparam}}" in link["url"] for name in ("datasource", "cluster", "namespace"))
                else:
                    assert link["url"] == f"{RUNBOOKS}/${{__data.fields.alert}}.md"
                    assert RUNBOOKS.endswith("/docs/runbooks")
                    assert list((checkout / "docs" / "runbooks").glob("Torchobs*.md"))
    assert count >= 4


@each_dashboard
def test_every_dashboard(uid: str) -> None:
    """Its address, annotations, links and variables; no panel covers another, and ids and titles are unique."""
    dashboard = DASHBOARDS[uid]
    (link,) = dashboard["links"]
    assert (link["type"], link["tags"], dashboard["tags"]) == ("dashboards", ["torchobs"], ["torchobs"])
    assert (link["keepTime"], link["includeVars"], link["asDropdown"]) == (True, True, True)
    for shown in (dashboard["panels"], *(row.get("panels") or [] for row in dashboard["panels"])):
        places = [panel["gridPos"] for panel in shown]
        cells = [(place["x"] + x, place["y"] + y) for place in places for x in range(place["w"]) for y in range(place["h"])]
        assert len(cells) == len(set(cells))
        assert {x for x, _ in cells} <= set(range(WIDTH))
        assert places == sorted(places, key=itemgetter("y"))
    every = [panel for row in dashboard["panels"] for panel in (row, *(row.get("panels") or []))]
    assert [panel["id"] for panel in every] == list(range(1, len(every) + 1))
    titles = [panel["title"] for panel in every]
    assert len(titles) == len(set(titles))
    offered = variables(dashboard)
    assert list(offered)[:4] == ["datasource", "cluster", "namespace", "job_name"]
    assert (offered["datasource"]["type"], offered["datasource"]["query"]) == ("datasource", "prometheus")
    before: list[str] = []
    for name, variable in list(offered.items())[1:]:
        query = variable["query"]["query"]
        assert query == variable["definition"]
        assert (variable["refresh"], variable["datasource"]["uid"]) == (2, "${datasource}")
        assert [label for label in re.findall(r"\$([a-z]\w+)", query) if label != "__range"] == [
            label for label in before if label in RUN or name == "layer"
        ]
        if name == "run_id":
            assert (variable["multi"], variable["includeAll"], variable["sort"]) == (False, False, 0)
        else:
            assert (variable["multi"], variable["includeAll"]) == (True, True)
            assert query.endswith(f", {name})")
            assert variable.get("allValue") == (None if name == "instance" else ".*")
        assert dashboards.selectors(query.removeprefix("label_values(").removesuffix(f", {name})").removeprefix("query_result"))
        before.append(name)
    assert [annotation["name"] for annotation in dashboard["annotations"]["list"]] == ["Starts", "Anomalies", "Checkpoints"]
    assert len({board["title"] for board in DASHBOARDS.values()}) == len(DASHBOARDS)


def test_a_person_s_thresholds_are_in_panels_and_alerts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--values`: colours, what descriptions call good, and rules, of one file."""
    thresholds = dict.fromkeys(("cpu", "memory", "gpu_memory", "shared_memory", "filesystem", "goodput", "fragmented"), 0.61)
    thresholds |= {"cpu_throttled": 0.31, "gpu_throttled": 0.32, "straggler": 3.5}
    thresholds |= {"time_to_limit_s": 900, "recompiles": 7, "skipped": 9}
    (tmp_path / "my.yml").write_text(yaml.safe_dump({"thresholds": thresholds, "runbooks": "https://r.example"}))
    assert main(["--values", str(tmp_path / "my.yml"), "--out", str(tmp_path / "out")]) == 0
    shown = {path.stem: path.read_text() for path in (tmp_path / "out" / "grafana" / "dashboards").glob("*.json")}
    shipped = grafana.render(DEFAULT)
    others = {"torchobs-gradients", "torchobs-data", "torchobs-itself"}
    assert {uid for uid, text in shipped.items() if text != shown[uid]} == shipped.keys() - others
    drawn = [(uid, panel) for uid, text in shown.items() for panel in panels(json.loads(text))]
    defaults = {(uid, panel["title"]): panel["fieldConfig"]["defaults"] for uid, panel in drawn}
    for uid, title, value in (
        ("fleet", "Goodput by run", 0.61), ("run", "Goodput", 0.61), ("memory", "Container or machine", 0.61),
        ("memory", "Shared memory", 0.61), ("memory", "Fragmentation", 0.61), ("memory", "Time to the limit", 900.0),
        ("node", "Busiest machines", 0.61), ("gpu", "Throttling", 0.32), ("ranks", "Stragglers across nodes", 3.5),
        ("compile", "Recompilations", 7.0), ("amp", "Skipped in a row", 9.0),
    ):  # fmt: skip
        assert value in [step["value"] for step in defaults[f"torchobs-{uid}", title]["thresholds"]["steps"]]
    text = "".join(shown.values())
    assert "Good: below 61 %." in text
    assert not re.search(r"Good: (one colour )?below 90 %", text)
    assert "https://r.example/" in shown["torchobs-alerts"]
    assert "> 0.61" in (tmp_path / "out" / "prometheus" / "rules" / "torchobs-alerts.yml").read_text()
    with pytest.raises(SystemExit):
        main(["--values", str(tmp_path / "my.yml")])
    assert "--values needs --out" in capsys.readouterr().err
