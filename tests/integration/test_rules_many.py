"""The alerts' cases of `tests/rules` again, for two clusters with the same job at the same time; and alerts of 64 ranks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import rule_cases
from tests.support import ROOT

CLUSTERS = ("east", "west")
INTERVAL = "1m"
ALERTS = sorted(path.stem for path in (ROOT / "tests" / "rules").glob("Torchobs*.yml"))
WHOSE = re.compile(r"^(Training run \S+ of \S+?(?: in namespace \S+?)?)( (?!in namespace)|$)")
RANKS = 64


def judged(program: str, checkout: Path, folder: Path, alert: str, tests: list[dict[str, Any]]) -> str:
    """What promtool has against these cases of an alert; nothing if they hold."""
    rules = checkout / "deploy" / "prometheus" / "rules"
    files = [(rules / name).read_text() for name in ("torchobs-recordings.yml", "torchobs-alerts.yml")]
    groups = rule_cases.groups_of(files, alert)
    order = [group["name"] for group in groups["groups"]]
    cases = {"rule_files": ["rules.yml"], "evaluation_interval": INTERVAL, "group_eval_order": order, "tests": tests}
    (folder / "rules.yml").write_text(yaml.safe_dump(groups))
    (folder / "cases.yml").write_text(yaml.safe_dump(cases, width=4096))
    done = subprocess.run([program, "test", "rules", folder / "cases.yml"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def of_clusters(case: dict[str, Any]) -> dict[str, Any]:
    """The case with each series once in each cluster, and each alert once for each."""
    series = [
        {**one, "series": re.sub(r"\{|$", f'{{cluster="{cluster}", ', one["series"], count=1)}
        for one in case["input_series"]
        for cluster in CLUSTERS
    ]
    checks = [
        {**check, "exp_alerts": [_of_cluster(alert, cluster) for alert in check["exp_alerts"] for cluster in CLUSTERS]}
        for check in case["alert_rule_test"]
    ]
    return {**case, "input_series": series, "alert_rule_test": checks}


def _of_cluster(alert: dict[str, Any], cluster: str) -> dict[str, Any]:
    notes = dict(alert["exp_annotations"])
    notes["summary"] = WHOSE.sub(rf"\1 ({cluster})\2", notes["summary"])
    return {"exp_labels": {**alert["exp_labels"], "cluster": cluster}, "exp_annotations": notes}


@pytest.mark.parametrize("alert", ALERTS)
def test_two_clusters_are_two(program: Callable[[str], str], checkout: Path, tmp_path: Path, alert: str) -> None:
    """Every case that says nothing of clusters: each has its own alert, with its own culprits and numbers."""
    cases = rule_cases.document(checkout / "tests" / "rules" / f"{alert}.yml", INTERVAL)["tests"]
    tests = [of_clusters(case) for case in cases if "cluster=" not in str(case["input_series"])]
    assert any(check["exp_alerts"] for case in tests for check in case["alert_rule_test"])
    assert judged(program("promtool"), checkout, tmp_path, alert, tests) == ""


def rank(number: int) -> str:
    """The labels of a rank, eight of which are on a node."""
    return f'run_id="a", job_name="gpt", rank="{number}", instance="n{number // 8}:1"'


@pytest.mark.parametrize("down", [5, 64])
def test_of_64_ranks_three_are_named(program: Callable[[str], str], checkout: Path, tmp_path: Path, down: int) -> None:
    """However many fail: one alert, their number, three of them with their node."""
    series = []
    for number in range(RANKS):
        labels = rank(number)
        fails = number >= RANKS - down
        series += [
            {"series": f"torchobs_rank_up{{{labels}}}", "values": "1x20 0x20" if fails else "1x40"},
            {"series": f'torchobs_rank_info{{{labels}, host="gpu-{number // 8}"}}', "values": "1x40"},
        ]
        if fails:
            series.append({"series": f'torchobs_rank_exit{{{labels}, reason="exception"}}', "values": "_x20 1x20"})
    nothing = {"eval_time": "6m", "alertname": "TorchobsRankFailed", "exp_alerts": []}
    case = {"interval": "15s", "input_series": series, "alert_rule_test": [nothing]}
    said = judged(program("promtool"), checkout, tmp_path, "TorchobsRankFailed", [case])
    found = said.partition("got:")[2]  # which three of those that failed alike is not said by the rule, and so not expected
    assert found.count("alertname=") == 1, said
    assert f"{down} of its ranks ended" in found
    named = re.findall(r"rank (\d+) on gpu-(\d): exception", found)
    assert len(named) == 3
    assert all(int(number) >= RANKS - down and int(number) // 8 == int(node) for number, node in named)
