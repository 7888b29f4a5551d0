"""The rules as a whole: what every alert has to have, that each name in them exists, and the command that writes them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests import dashboards
from tests.dashboards import panels, shipped
from tests.support import for_each
from torchobs import catalog
from torchobs.catalog import Kind, prometheus_label
from torchobs.cli.__main__ import main
from torchobs.detect import spikes
from torchobs.rules import alerts_machine, recordings, values
from torchobs.rules.files import ALERTS, alert_groups, recording_groups, rendered
from torchobs.rules.promql import ONE_RANK, ONE_RUN, RUN
from torchobs.rules.recordings import POSITION, RECENT
from torchobs.rules.rule_file import WINDOW, WINDOW_S, Alert

if TYPE_CHECKING:
    from pathlib import Path

CHOSEN = values.Values(runbooks="https://example.org/runbooks", grafana_url="https://grafana.example.org")
PERCENTILES = (*recordings.percentiles(native=False), *recordings.percentiles(native=True))
SHIPPED = (*alert_groups(), *recording_groups(), *PERCENTILES)
GROUPS = [group.rendered(CHOSEN) for group in SHIPPED]
PAGES = {
    "TorchobsRunDown", "TorchobsRunHung", "TorchobsCrashLoop", "TorchobsGpuFault", "TorchobsLossNotFinite",
    "TorchobsCheckpointFailed",
}  # fmt: skip
DASHBOARDS = shipped()
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
ALERT_RULES = [rule for rule in RULES if "alert" in rule]

BY_NAME = {metric.prometheus + suffix: metric for metric in catalog.METRICS for suffix in ("", "_bucket", "_count", "_sum")}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
FOREIGN = {alerts_machine.INFINIBAND, alerts_machine.UNAME, "node_infiniband_link_downed_total"}
"""Series of node_exporter"""
BY_NODE = [["cluster", "instance"], ["cluster", "nodename"]]
"""Labels by which machines differ where node_exporter is asked"""

each_rule = for_each({f"{number}: {rule.get('alert') or rule['record']}": (rule,) for number, rule in enumerate(RULES)})
each_alert = for_each({rule["alert"]: (rule,) for rule in ALERT_RULES})


@each_rule
def test_every_rule(rule: dict[str, Any]) -> None:
    """Metrics that are recorded, closed values, counters by their increase, joins by run and rank; names by the convention."""
    if "record" in rule:
        level, name, operation = rule["record"].split(":")
        assert level.split("_")[0] in {"rank", "node", "run"}
        assert operation
        assert name == "torchobs_goodput" or name in {metric.prometheus.removesuffix("_total") for metric in catalog.METRICS}
    looks_for_what_is_new = rule.get("record", "").endswith((RECENT, POSITION))  # or for the step that a run has come to
    for selector in dashboards.selectors(rule["expr"]):
        if selector.name in RECORDED | FOREIGN:
            continue
        metric = BY_NAME[selector.name]
        allowed = {prometheus_label(attribute.name): attribute.values for attribute in metric.attributes}
        assert all(set(value.split("|")) <= set(allowed[label]) for label, value in selector.matchers.items())
        if metric.kind in {Kind.COUNTER, Kind.HISTOGRAM} and not looks_for_what_is_new:
            assert selector.function in {"rate", "increase", "max_over_time"}
    for by in re.findall(r"\b(?:on|by) \(([^)]*)\)", rule["expr"]):
        named = by.split(", ")
        assert named[:4] in (list(RUN), ["cluster", "namespace", "pod", "instance"]) or named[:2] in BY_NODE
    assert {ONE_RANK.split(", ")[-1], ONE_RUN.split(", ")[0]} == {"instance", "cluster"}
    assert "ignoring" not in rule["expr"]


@each_alert
def test_alerts_name_the_culprit_by_queries_of_their_own_run(rule: dict[str, Any]) -> None:
    """Each query in a text is PromQL about metrics that exist, with every selector limited to the run."""
    for query in re.findall(r'query \(printf "((?:[^"\\]|\\.)*)" \$run\)', rule["annotations"]["description"]):
        asked = query.replace('\\"', '"').replace("%[1]s", 'run_id="a"')
        selectors = [selector for selector in dashboards.selectors(asked) if selector.name not in FOREIGN]
        assert selectors
        for selector in selectors:
            assert selector.name in BY_NAME or selector.name in RECORDED
            assert selector.matchers["run_id"] == "a"


@each_alert
def test_alerts_say_what_is_wrong_and_come_once_per_run(rule: dict[str, Any]) -> None:
    """A severity, the run or the exporter, links to runbook and dashboard; no `for` that a job's exit could cut short."""
    assert rule["for"] == ("3m" if rule["alert"] in {"TorchobsRunDown", "TorchobsTelemetryGone"} else "0s")
    assert rule["keep_firing_for"] == "10m"
    run, exporter = ONE_RUN, "cluster, namespace, pod, instance"
    assert rule["expr"].startswith((f"max by ({run}) (", f"min by ({run}) (", f"max by ({exporter}"))
    assert "absent" not in rule["expr"]
    notes = rule["annotations"]
    assert rule["labels"]["severity"] == ("page" if rule["alert"] in PAGES else "ticket")
    assert "$value" in notes["summary"] + notes["description"] or rule["alert"] in {
        "TorchobsExporterConfig", "TorchobsGradientVanishing", "TorchobsRanksDisagree", "TorchobsRecompileStorm",
    }  # fmt: skip
    assert notes["runbook_url"] == f"https://example.org/runbooks/{rule['alert']}.md"
    if "run_id" not in rule["expr"].split(")")[0]:
        assert "$labels.instance" in notes["summary"]
        assert "dashboard_url" not in notes
        return
    assert {"$labels.run_id", "$labels.job_name", "$labels.cluster"} <= set(re.findall(r"\$labels\.\w+", notes["summary"]))
    assert notes["dashboard_url"].startswith("https://grafana.example.org/d/torchobs-run?from={{")
    assert "&var-run_id={{ . | urlquery }}" in notes["dashboard_url"]


@each_alert
def test_alerts_have_a_runbook(rule: dict[str, Any], checkout: Path) -> None:
    """A page with the four questions of somebody who was woken up, panels and queries that exist, and when it is wrong."""
    page = (checkout / "docs" / "runbooks" / f"{rule['alert']}.md").read_text()
    assert page.startswith(f"# {rule['alert']}\n")
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE)[:4] == ["Meaning", "Impact", "Diagnosis", "Mitigation"]
    assert f"Severity: {rule['labels']['severity']}." in page
    assert re.search(r"wrong|false", page.partition("## Mitigation")[2])
    (named,) = re.findall(r"^## Diagnosis\n\nPanels: (.*)\.$", page, re.MULTILINE)
    for part in named.split("; "):
        titles, uid = part.split(" of the dashboard ")
        there = {panel["title"] for panel in panels(DASHBOARDS[f"torchobs-{uid.strip('*')}"])}
        assert set(re.findall(r"\*(.+?)\*", titles)) <= there
    queries = [
        line for block in re.findall(r"```promql\n(.*?)```", page, re.DOTALL) for line in block.split("\n") if line.strip()
    ]
    assert queries
    for query in [*queries, *re.findall(r"`(rate\(.*?\))`", page)]:
        assert all(selector.name in BY_NAME.keys() | RECORDED | FOREIGN | {"up"} for selector in dashboards.selectors(query))


def test_the_runbook_s_figures_are_the_rule_s(checkout: Path) -> None:
    """Three explosions, five leaps of the loss, more than twenty skips, ten minutes: said where they are decided."""
    page = " ".join((checkout / "docs" / "runbooks" / "TorchobsGradientExplosion.md").read_text().split())
    assert (spikes.LEAST_EXPLOSIONS, spikes.LEAST_LOSS_SPIKES, values.DEFAULT.thresholds.skipped) == (3, 5, 20)
    assert (WINDOW, WINDOW_S) == ("10m", 600)
    words = ("at least **three** steps", "at least **five** steps", "more than 20 steps and more than half", "last ten minutes")
    assert [phrase for phrase in words if phrase not in page] == []


@each_alert
def test_alerts_have_cases_that_fire_and_cases_that_stay_quiet(rule: dict[str, Any], checkout: Path) -> None:
    """For promtool, in tests/rules/<alert>.yml; a case says by its name which it is."""
    cases = yaml.safe_load((checkout / "tests" / "rules" / f"{rule['alert']}.yml").read_text())["tests"]
    fires = {case["name"]: any(check["exp_alerts"] for check in case["alert_rule_test"]) for case in cases}
    assert {check["alertname"] for case in cases for check in case["alert_rule_test"]} == {rule["alert"]}
    assert {name: name.startswith("fires ") for name in fires} == fires
    assert {name: not name.startswith("stays quiet ") for name in fires} == fires
    assert set(fires.values()) == {True, False}


NAMES = {rule.alert for group in alert_groups() for rule in group.rules if isinstance(rule, Alert)}
OWN = """\
thresholds: {memory: 0.8}
severities: {TorchobsRankFailed: page}
disabled: [TorchobsCheckpointNever]
grafana_url: https://g.example/
runbooks: https://r.example/
"""


def alerts_in(text: str) -> dict[str, dict[str, Any]]:
    """The alerts of a rule file by name."""
    return {rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"] if "alert" in rule}


def written(folder: Path) -> dict[str, str]:
    """The files of a folder by their path in it."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_export_writes_the_files_of_the_checkout(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte: what the pages say about deploy/ holds for whoever has only the wheel."""
    folder = tmp_path / "prometheus" / "torchobs"
    assert main(["rules", "export", str(folder)]) == 0
    assert capsys.readouterr().out == f"4 files in {folder}\n"
    prometheus = checkout / "deploy" / "prometheus"
    assert written(folder) == {name: text for name, text in written(prometheus).items() if name.startswith("rules")}


def test_a_person_sets_thresholds_and_severities_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And where Grafana and the runbooks are, and what to leave out; only the alerts are changed by it."""
    (tmp_path / "my.yml").write_text(OWN)
    assert main(["rules", "render", "--values", str(tmp_path / "my.yml"), str(tmp_path / "out")]) == 0
    files, shipped = written(tmp_path / "out"), rendered()
    assert {name for name in shipped if files[name] != shipped[name]} == {ALERTS}
    alerts = alerts_in(files[ALERTS])
    assert "> 0.8\n" in alerts["TorchobsOutOfMemoryNear"]["expr"]
    assert alerts["TorchobsRankFailed"]["labels"] == {"severity": "page"}
    assert alerts["TorchobsRankFailed"]["annotations"]["runbook_url"] == "https://r.example/TorchobsRankFailed.md"
    assert alerts["TorchobsRankFailed"]["annotations"]["dashboard_url"].startswith("https://g.example/d/")
    assert alerts.keys() == NAMES - {"TorchobsCheckpointNever"}
    capsys.readouterr()
    assert main(["rules", "render", "--values", str(tmp_path / "my.yml")]) == 0
    assert capsys.readouterr().out == files[ALERTS]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("thresholds: {memmory: 1}", "unknown field `memmory` - at `$.thresholds`"),
        ("thresholds: {memory: 90}", "Expected `float` < 1.0 - at `$.thresholds.memory`"),
        ("grafana_url: grafana.example.org", "https?://"),
        ("severities: {TorchobsRankFailed: critical}", "'critical' - at `$.severities"),
        ("severities: {TorchobsRankFaild: page}", "there is no alert TorchobsRankFaild; there are TorchobsCgroupOomKill, "),
        ("thresholds: {", "line 1, column 14"),
    ],
)
def test_an_entry_that_means_nothing_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    """A threshold with a typing error must not leave the default in force; nothing is written."""
    (tmp_path / "my.yml").write_text(text)
    assert main(["rules", "render", "--values", str(tmp_path / "my.yml"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"torchobs rules: {tmp_path / 'my.yml'}: ")
    assert message in said.err
    assert not (tmp_path / "out").exists()
