"""The shipped rules in real promtools: Debian's 2.42, the oldest supported, and 3; runs that end, clusters, 64 ranks."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests import rule_cases
from tests.support import ROOT
from torchobs.cli.__main__ import main
from torchobs.rules.files import ALERTS as ALERT_FILE
from torchobs.rules.files import rendered
from torchobs.rules.values import DEFAULT, Thresholds, Values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ALERTS = sorted(path.stem for path in (ROOT / "tests" / "rules").glob("Torchobs*.yml"))
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
PROGRAMS = pytest.mark.parametrize("name", ["promtool", "promtool3"])


def promtool(program: str, *arguments: str | Path) -> str:
    """Run it; what it says if it is not content, else nothing."""
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def judged(program: str, checkout: Path, folder: Path, alert: str, cases: dict[str, Any]) -> str:
    """What promtool has against a document of cases of an alert, by the shipped rules; nothing if they hold."""
    rules = checkout / "deploy" / "prometheus" / "rules"
    files = [(rules / name).read_text() for name in ("torchobs-recordings.yml", "torchobs-alerts.yml")]
    groups = rule_cases.groups_of(files, alert)
    order = [group["name"] for group in groups["groups"]]
    (folder / "rules.yml").write_text(yaml.dump(groups, Dumper=DUMPER))
    document = {"rule_files": ["rules.yml"], **cases, "group_eval_order": order}
    (folder / "cases.yml").write_text(yaml.dump(document, Dumper=DUMPER, width=4096))
    return promtool(program, "test", "rules", folder / "cases.yml")


@PROGRAMS
def test_every_rule_file_is_valid(name: str, program: Callable[[str], str], checkout: Path) -> None:
    """Promtool's own checks, its lints (duplicate rules) as errors."""
    files = sorted((checkout / "deploy" / "prometheus").rglob("torchobs-*.yml"))
    assert len(files) == 4
    for path in files:
        assert promtool(program(name), "check", "rules", "--lint-fatal", path) == ""


@pytest.mark.parametrize(("name", "interval"), [("promtool", "15s"), ("promtool3", "1m")])
@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_fires_and_stays_quiet(
    name: str, program: Callable[[str], str], checkout: Path, tmp_path: Path, alert: str, interval: str
) -> None:
    """Every case of tests/rules/Torchobs*.yml, however often rules are evaluated."""
    cases = rule_cases.document(checkout / "tests" / "rules" / f"{alert}.yml", interval)
    assert judged(program(name), checkout, tmp_path, alert, cases) == ""


@PROGRAMS
def test_rules_with_other_values_are_valid(name: str, program: Callable[[str], str], tmp_path: Path) -> None:
    """Every threshold changed, each severity, and one alert left out."""
    thresholds = {one.name: getattr(DEFAULT.thresholds, one.name) * 1.1 for one in fields(Thresholds)}
    severities = {"TorchobsRankFailed": "page", "TorchobsRunDown": "ticket"}
    own = {"thresholds": thresholds, "severities": severities, "disabled": ["TorchobsGoodputLow"]}
    (tmp_path / "my.yml").write_text(yaml.safe_dump(own))
    assert main(["rules", "render", "--values", str(tmp_path / "my.yml"), str(tmp_path)]) == 0
    for path in sorted(tmp_path.rglob("torchobs-*.yml")):
        assert promtool(program(name), "check", "rules", "--lint-fatal", path) == ""


@PROGRAMS
def test_a_link_leads_to_the_run_s_dashboard_from_an_hour_before_the_alert(
    name: str, program: Callable[[str], str], tmp_path: Path
) -> None:
    """Where it is known where Grafana is; what is in the labels is quoted."""
    (tmp_path / "rules.yml").write_text(rendered(Values(grafana_url="https://grafana.example.org"))[ALERT_FILE])
    series = 'torchobs_rank_exit{run_id="a b", job_name="gpt", rank="0", instance="n0:1", reason="lost"}'
    look = {"eval_time": "20m", "alertname": "TorchobsRankFailed", "exp_alerts": []}
    test = {"interval": "15s", "input_series": [{"series": series, "values": "1x100"}], "alert_rule_test": [look]}
    (tmp_path / "cases.yml").write_text(yaml.dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}))
    said = promtool(program(name), "test", "rules", tmp_path / "cases.yml")
    link = "https://grafana.example.org/d/torchobs-run?from=-2400000&to=now&var-job_name=gpt&var-run_id=a+b"
    assert f'dashboard_url="{link}"' in said


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        *((name, cases) for name in ("promtool", "promtool3") for cases in ("recordings", "percentiles")),
        ("promtool3", "percentiles-native"),
    ],
)
def test_what_is_recorded(name: str, cases: str, program: Callable[[str], str], checkout: Path) -> None:
    """Goodput over a gap, runs of two clusters, ranks that left, tokens of copies; percentiles of both kinds of histograms."""
    assert promtool(program(name), "test", "rules", checkout / "tests" / "rules" / f"{cases}.yml") == ""


each_interval = pytest.mark.parametrize("interval", ["15s", "30s", "1m"])
AFTER_S = (60, 180, 480, 840, 1800)
"""Times after the end, past every window and every `keep_firing_for`"""
COUNTED = (
    "TorchobsCgroupOomKill", "TorchobsExporterReadErrors", "TorchobsFlightDropped", "TorchobsGpuFault",
    "TorchobsGradientExplosion", "TorchobsLoaderWorkerDied", "TorchobsLossNotFinite", "TorchobsPushDropped",
    "TorchobsRankFailed", "TorchobsRecompileStorm", "TorchobsSeriesDropped",
)  # fmt: skip
"""Alerts about what has happened, as opposed to what lasts"""


def fired(program: str, checkout: Path, folder: Path, alert: str, interval: str, tests: list[dict[str, Any]]) -> set[str]:
    """Which of the tests, each with times at which it looks for the alert, have it firing: `NAME at SECONDS`."""
    said = judged(program, checkout, folder, alert, {"evaluation_interval": interval, "tests": tests})
    found = re.findall(r"name: (.+),\n\s+alertname: \w+, time: (\S+),", said)
    assert bool(found) == bool(said), said
    return {f"{name} at {rule_cases.seconds(time)}" for name, time in found}


def looks(alert: str, times_s: Iterator[int] | list[int]) -> list[dict[str, Any]]:
    """Checks that expect nothing."""
    return [{"eval_time": f"{at_s}s", "alertname": alert, "exp_alerts": []} for at_s in times_s]


def cases_of(checkout: Path, alert: str) -> list[dict[str, Any]]:
    """The cases of an alert."""
    cases: list[dict[str, Any]] = yaml.safe_load((checkout / "tests" / "rules" / f"{alert}.yml").read_text())["tests"]
    return cases


def minute(duration: str) -> int:
    """The next full minute, at which rules are evaluated at every interval."""
    return -(-rule_cases.seconds(duration) // 60) * 60


@each_interval
@pytest.mark.parametrize("alert", ALERTS)
def test_an_end_in_order_that_one_scrape_saw_begins_no_alert_and_ends_none_at_once(
    program: Callable[[str], str], checkout: Path, tmp_path: Path, alert: str, interval: str
) -> None:
    """Of each case the run ends where it is looked at: what fires goes on for a while, what is quiet stays so."""
    tests, expected = [], set()
    for number, case in enumerate(cases_of(checkout, alert)):
        firing = [check for check in case["alert_rule_test"] if check["exp_alerts"]]
        if firing:
            at_s = minute(firing[0]["eval_time"])
            expected.add(f"{number} at {at_s + 60}")
            times_s = [at_s + 60]
        else:
            at_s = min(minute(case["alert_rule_test"][-1]["eval_time"]), rule_cases.lasts_s(case) // 60 * 60)
            times_s = [at_s + after_s for after_s in AFTER_S]
        series = rule_cases.ending(case, at_s)
        tests.append({**case, "name": str(number), "input_series": series, "alert_rule_test": looks(alert, times_s)})
    assert fired(program("promtool"), checkout, tmp_path, alert, interval, tests) == expected


@each_interval
@pytest.mark.parametrize("alert", COUNTED)
def test_what_only_the_last_scrape_saw_fires(
    program: Callable[[str], str], checkout: Path, tmp_path: Path, alert: str, interval: str
) -> None:
    """Of each case that fires, what was counted until then is first seen a quarter of a minute before the series end."""
    tests, expected = [], set()
    for number, case in enumerate(cases_of(checkout, alert)):
        firing = [check for check in case["alert_rule_test"] if check["exp_alerts"]]
        if firing:
            scraped_s = rule_cases.seconds(case["interval"])
            begun_s = minute(firing[0]["eval_time"])
            series = rule_cases.seen_once(case, begun_s + scraped_s, rule_cases.seconds(firing[0]["eval_time"]))
            if series:
                checks = looks(alert, [begun_s + 60])
                tests.append({**case, "name": str(number), "input_series": series, "alert_rule_test": checks})
                expected.add(f"{number} at {begun_s + 60}")
    assert tests
    assert fired(program("promtool"), checkout, tmp_path, alert, interval, tests) == expected


@each_interval
@pytest.mark.parametrize(
    ("reason", "alerts"),
    [
        ("finished", set()),
        ("interrupted", set()),
        ("terminated", set()),
        ("exception", {"TorchobsRankFailed", "TorchobsRunDown"}),
        ("lost", {"TorchobsRankFailed", "TorchobsRunDown"}),
        ("", {"TorchobsTelemetryGone"}),
    ],
)
def test_a_run_s_end_is_known_by_one_scrape(
    program: Callable[[str], str], checkout: Path, tmp_path: Path, interval: str, reason: str, alerts: set[str]
) -> None:
    """Of two ranks on two machines, which have trained for twenty minutes; without a reason they are just gone."""
    series = []
    for rank in range(2):
        labels = f'job_name="gpt", run_id="a", rank="{rank}", instance="n{rank}:1"'
        series += [
            {"series": f"torchobs_rank_up{{{labels}}}", "values": "1x80 0 stale" if reason else "1x80 stale"},
            {"series": f"torchobs_rank_start_time_seconds{{{labels}}}", "values": "0x81 stale"},
            {"series": f"torchobs_world_size{{{labels}}}", "values": "2x81 stale"},
        ]
        if reason:
            series.append({"series": f'torchobs_rank_exit{{{labels}, reason="{reason}"}}', "values": "_x81 1 stale"})
    found = set()
    for alert in (
        "TorchobsRankFailed",
        "TorchobsRunDown",
        "TorchobsTelemetryGone",
        "TorchobsRanksMissing",
        "TorchobsGoodputLow",
    ):
        checks = looks(alert, [at_min * 60 for at_min in range(15, 60)])
        test = {"name": alert, "interval": "15s", "input_series": series, "alert_rule_test": checks}
        found |= {name.split(" at ")[0] for name in fired(program("promtool"), checkout, tmp_path, alert, interval, [test])}
    assert found == alerts


CLUSTERS = ("east", "west")
WHOSE = re.compile(r"^(Training run \S+ of \S+?(?: in namespace \S+?)?)( (?!in namespace)|$)")
RANKS = 64


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
    cases = rule_cases.document(checkout / "tests" / "rules" / f"{alert}.yml", "1m")["tests"]
    tests = [of_clusters(case) for case in cases if "cluster=" not in str(case["input_series"])]
    assert any(check["exp_alerts"] for case in tests for check in case["alert_rule_test"])
    assert judged(program("promtool"), checkout, tmp_path, alert, {"evaluation_interval": "1m", "tests": tests}) == ""


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
    said = judged(program("promtool"), checkout, tmp_path, "TorchobsRankFailed", {"evaluation_interval": "1m", "tests": [case]})
    found = said.partition("got:")[2]  # which three of those that failed alike is not said by the rule, and so not expected
    assert found.count("alertname=") == 1, said
    assert f"{down} of its ranks ended" in found
    named = re.findall(r"rank (\d+) on gpu-(\d): exception", found)
    assert len(named) == 3
    assert all(int(number) >= RANKS - down and int(number) // 8 == int(node) for number, node in named)
