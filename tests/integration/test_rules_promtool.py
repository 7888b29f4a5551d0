"""The shipped rules in a real promtool: every alert fires and stays quiet; runs that end, clusters, 64 ranks; ordinary days."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from msgspec.structs import asdict

from tests import rule_cases
from tests.support import ROOT
from torchobs.cli.__main__ import main
from torchobs.rules.files import ALERTS as ALERT_FILE
from torchobs.rules.files import alert_groups, rendered
from torchobs.rules.rule_file import Alert
from torchobs.rules.values import DEFAULT, Values

if TYPE_CHECKING:
    from collections.abc import Iterator

ALERTS = sorted(path.stem for path in (ROOT / "tests" / "rules").glob("Torchobs*.yml"))
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
INTERVALS = ("15s", "1m")
"""At which rules are evaluated: one of ours, and Prometheus' default"""


def run(program: str, *arguments: str | Path) -> str:
    """Run promtool; what it says if it is not content, else nothing."""
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def judged(promtool: str, checkout: Path, folder: Path, alerts: tuple[str, ...], documents: list[dict[str, Any]]) -> str:
    """What promtool has against documents of cases of alerts, by the shipped rules; nothing if they hold."""
    rules = checkout / "deploy" / "prometheus" / "rules"
    files = [(rules / name).read_text() for name in ("torchobs-recordings.yml", "torchobs-alerts.yml")]
    groups = rule_cases.groups_of(files, *alerts)
    order = [group["name"] for group in groups["groups"]]
    (folder / "rules.yml").write_text(yaml.dump(groups, Dumper=DUMPER))
    paths = [folder / f"cases-{number}.yml" for number in range(len(documents))]
    for path, cases in zip(paths, documents, strict=True):
        document = {**cases, "rule_files": ["rules.yml"], "group_eval_order": order}
        path.write_text(yaml.dump(document, Dumper=DUMPER, width=4096))
    return run(promtool, "test", "rules", *paths)


def test_every_rule_file_is_valid(promtool: str, checkout: Path) -> None:
    """Promtool's own checks, its lints (duplicate rules) as errors."""
    files = sorted((checkout / "deploy" / "prometheus").rglob("torchobs-*.yml"))
    assert len(files) == 4
    assert run(promtool, "check", "rules", "--lint-fatal", *files) == ""


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_fires_and_stays_quiet(promtool: str, checkout: Path, tmp_path: Path, alert: str) -> None:
    """Every case of tests/rules/Torchobs*.yml, however often rules are evaluated; and in two clusters, which are two.

    There each case that says nothing of clusters has an alert of each, with its own culprits and numbers.
    """
    documents = [rule_cases.document(checkout / "tests" / "rules" / f"{alert}.yml", interval) for interval in INTERVALS]
    twice = [of_clusters(case) for case in documents[-1]["tests"] if "cluster=" not in str(case["input_series"])]
    assert any(check["exp_alerts"] for case in twice for check in case["alert_rule_test"])
    assert judged(promtool, checkout, tmp_path, (alert,), [*documents, {**documents[-1], "tests": twice}]) == ""


def test_rules_with_other_values_are_valid(promtool: str, tmp_path: Path) -> None:
    """Every threshold changed, each severity, and one alert left out."""
    thresholds = {name: value * 1.1 for name, value in asdict(DEFAULT.thresholds).items()}
    severities = {"TorchobsRankFailed": "page", "TorchobsRunDown": "ticket"}
    own = {"thresholds": thresholds, "severities": severities, "disabled": ["TorchobsGoodputLow"]}
    (tmp_path / "my.yml").write_text(yaml.safe_dump(own))
    assert main(["rules", "render", "--values", str(tmp_path / "my.yml"), str(tmp_path)]) == 0
    assert run(promtool, "check", "rules", "--lint-fatal", *sorted(tmp_path.rglob("torchobs-*.yml"))) == ""


def test_a_link_leads_to_the_run_s_dashboard_from_an_hour_before_the_alert(promtool: str, tmp_path: Path) -> None:
    """Where it is known where Grafana is; what is in the labels is quoted."""
    (tmp_path / "rules.yml").write_text(rendered(Values(grafana_url="https://grafana.example.org"))[ALERT_FILE])
    series = 'torchobs_rank_exit{run_id="a b", job_name="gpt", rank="0", instance="n0:1", reason="lost"}'
    look = {"eval_time": "20m", "alertname": "TorchobsRankFailed", "exp_alerts": []}
    test = {"interval": "15s", "input_series": [{"series": series, "values": "1x100"}], "alert_rule_test": [look]}
    (tmp_path / "cases.yml").write_text(yaml.dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}))
    said = run(promtool, "test", "rules", tmp_path / "cases.yml")
    link = "https://grafana.example.org/d/torchobs-run?from=-2400000&to=now&var-job_name=gpt&var-run_id=a+b"
    assert f'dashboard_url="{link}"' in said


def test_what_is_recorded(promtool: str, checkout: Path) -> None:
    """Goodput over a gap, runs of two clusters, ranks that left, tokens of copies; percentiles of both kinds of histograms."""
    names = ["recordings", "percentiles", *(["percentiles-native"] if promtool.endswith("3") else [])]  # native since 3
    for name in names:
        assert run(promtool, "test", "rules", checkout / "tests" / "rules" / f"{name}.yml") == ""


AFTER_S = (60, 180, 480, 840, 1800)
"""Times after the end, past every window and every `keep_firing_for`"""
SHORT_S = 5400
COUNTED = (
    "TorchobsCgroupOomKill", "TorchobsExporterReadErrors", "TorchobsFlightDropped", "TorchobsGpuFault",
    "TorchobsGradientExplosion", "TorchobsLoaderWorkerDied", "TorchobsLossNotFinite", "TorchobsPushDropped",
    "TorchobsRankFailed", "TorchobsRecompileStorm", "TorchobsSeriesDropped",
)  # fmt: skip
"""Alerts about what has happened, as opposed to what lasts"""


def fired(promtool: str, checkout: Path, folder: Path, alerts: tuple[str, ...], tests: list[dict[str, Any]]) -> set[str]:
    """Which of the tests, each with times at which it looks for an alert, have it firing: `NAME at SECONDS INTERVAL`."""
    documents = []
    for interval in INTERVALS:
        named = [{**test, "name": f"{test['name']}/{interval}"} for test in tests if interval in intervals_of(test)]
        documents.append({"evaluation_interval": interval, "tests": named})
    said = judged(promtool, checkout, folder, alerts, documents)
    found = re.findall(r"name: (.+)/(.+),\n\s+alertname: (\w+), time: (\S+),", said)
    assert bool(found) == bool(said), said
    return {f"{name} {alert} at {rule_cases.seconds(time)} every {interval}" for name, interval, alert, time in found}


def intervals_of(test: dict[str, Any]) -> tuple[str, ...]:
    """The intervals at which rules are evaluated in it: hours are long at the shorter one, and hold nothing that is short."""
    last_s = max(rule_cases.seconds(check["eval_time"]) for check in test["alert_rule_test"])
    return INTERVALS if last_s <= SHORT_S else INTERVALS[1:]


def every(alert: str, expected: set[str], tests: list[dict[str, Any]]) -> set[str]:
    """`NAME at SECONDS` of an alert, as :func:`fired` has it at all intervals of these tests."""
    intervals = {test["name"]: intervals_of(test) for test in tests}
    parts = [one.partition(" ") for one in expected]
    return {f"{name} {alert} {at} every {interval}" for name, _, at in parts for interval in intervals[name]}


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


@pytest.mark.parametrize("alert", ALERTS)
def test_an_end_in_order_that_one_scrape_saw_begins_no_alert_and_ends_none_at_once(
    promtool: str, checkout: Path, tmp_path: Path, alert: str
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
    assert fired(promtool, checkout, tmp_path, (alert,), tests) == every(alert, expected, tests)


@pytest.mark.parametrize("alert", COUNTED)
def test_what_only_the_last_scrape_saw_fires(promtool: str, checkout: Path, tmp_path: Path, alert: str) -> None:
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
    assert fired(promtool, checkout, tmp_path, (alert,), tests) == every(alert, expected, tests)


ENDS: dict[str, set[str]] = {
    "finished": set(),
    "interrupted": set(),
    "terminated": set(),
    "exception": {"TorchobsRankFailed", "TorchobsRunDown"},
    "lost": {"TorchobsRankFailed", "TorchobsRunDown"},
    "gone": {"TorchobsTelemetryGone"},
}
"""What a run's end raises, by its reason; without one it is just gone"""
ABOUT_ENDS = ("TorchobsRankFailed", "TorchobsRunDown", "TorchobsTelemetryGone", "TorchobsRanksMissing", "TorchobsGoodputLow")


def ends(reason: str) -> list[dict[str, str]]:
    """Two ranks on two machines, which have trained for twenty minutes, and one scrape that sees how they end."""
    series = []
    for rank in range(2):
        labels = f'job_name="gpt", run_id="a", rank="{rank}", instance="n{rank}:1"'
        series += [
            {"series": f"torchobs_rank_up{{{labels}}}", "values": "1x80 stale" if reason == "gone" else "1x80 0 stale"},
            {"series": f"torchobs_rank_start_time_seconds{{{labels}}}", "values": "0x81 stale"},
            {"series": f"torchobs_world_size{{{labels}}}", "values": "2x81 stale"},
        ]
        if reason != "gone":
            series.append({"series": f'torchobs_rank_exit{{{labels}, reason="{reason}"}}', "values": "_x81 1 stale"})
    return series


def test_a_run_s_end_is_known_by_one_scrape(promtool: str, checkout: Path, tmp_path: Path) -> None:
    """At each interval, for each reason: the alerts that have fired by the next hour."""
    checks = [look for alert in ABOUT_ENDS for look in looks(alert, [at_min * 60 for at_min in range(15, 60)])]
    tests = [{"name": one, "interval": "15s", "input_series": ends(one), "alert_rule_test": checks} for one in ENDS]
    found = {re.sub(r" at \d+", "", one) for one in fired(promtool, checkout, tmp_path, ABOUT_ENDS, tests)}
    assert found == {f"{reason} {alert} every {interval}" for reason, alerts in ENDS.items() for alert in alerts
                     for interval in INTERVALS}  # fmt: skip


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


def rank(number: int) -> str:
    """The labels of a rank, eight of which are on a node."""
    return f'run_id="a", job_name="gpt", rank="{number}", instance="n{number // 8}:1"'


@pytest.mark.parametrize("down", [5, 64])
def test_of_64_ranks_three_are_named(promtool: str, checkout: Path, tmp_path: Path, down: int) -> None:
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
    said = judged(promtool, checkout, tmp_path, ("TorchobsRankFailed",), [{"evaluation_interval": "1m", "tests": [case]}])
    found = said.partition("got:")[2]  # which three of those that failed alike is not said by the rule, and so not expected
    assert found.count("alertname=") == 1, said
    assert f"{down} of its ranks ended" in found
    named = re.findall(r"rank (\d+) on gpu-(\d): exception", found)
    assert len(named) == 3
    assert all(int(number) >= RANKS - down and int(number) // 8 == int(node) for number, node in named)


SCRAPE_S = 15
MINUTES = 110
PAGES = [rule.alert for group in alert_groups() for rule in group.rules if isinstance(rule, Alert) and rule.severity == "page"]
Timeline = dict[int, str]
Series = dict[str, Timeline]


def series(metric: str, **labels: object) -> str:
    """A series' name."""
    of = {"job_name": "gpt", "namespace": "ml", "run_id": "a", "rank": "0", "instance": "n0:1"} | labels
    return f"{metric}{{{','.join(f'{name}={str(text)!r}' for name, text in of.items())}}}".replace("'", '"')


def life(at: int, scrapes: int, ended: str = "", *, steps: bool = True, world: int = 1, **labels: object) -> Series:
    """A rank from a scrape on, for so many; `ended`: how, which four more scrapes show. Without it its series just end."""
    alive = range(at, at + scrapes)
    shown = range(at, at + scrapes + (4 if ended else 0))
    found = {
        series("torchobs_rank_up", **labels): {one: str(int(one in alive)) for one in shown},
        series("torchobs_rank_start_time_seconds", **labels): dict.fromkeys(shown, str(at * SCRAPE_S)),
        series("torchobs_world_size", **labels): dict.fromkeys(shown, str(world)),
        series("torchobs_rank_info", host="n", torch_version="2", **labels): dict.fromkeys(shown, "1"),
        series("torchobs_rank_state", state="alive", **labels): dict.fromkeys(alive, "1"),
        series("torchobs_rank_progress_age_seconds", **labels): dict.fromkeys(alive, "1"),
        series("torchobs_steps_total", **labels): {one: str((min(one, alive[-1]) - at) * 30 * steps) for one in shown},
    }
    if ended:
        found[series("torchobs_rank_exit", reason=ended, **labels)] = dict.fromkeys(shown[scrapes:], "1")
    return found


def together(*lives: Series) -> Series:
    """All of them; of a series that several have, what the later one says."""
    found: Series = {}
    for one in lives:
        for name, points in one.items():
            found.setdefault(name, {}).update(points)
    return found


def pair(at: int, scrapes: int, *ended: str, **places: str) -> Iterator[Series]:
    """Two ranks of one training, on two nodes."""
    for rank, (place, how) in enumerate(zip(places.values(), ended or repeat(""), strict=False)):
        yield life(at, scrapes + 3 * rank, how, world=2, rank=rank, instance=place)


ORDINARY = {
    "a sweep, four at a time, under one run id": [
        life(12 * (number // 4) + number % 4, 11, "finished", instance=f"p{number}:1") for number in range(24)
    ],
    "a drained node; the other rank fails for it; both come back": [
        *pair(0, 80, "terminated", "exception", first="n0:1", second="n1:1"),
        *pair(110, 120, first="n2:1", second="n3:1"),
    ],
    "preempted, and queued for most of an hour": [life(0, 80, "terminated"), life(290, 60, instance="n2:1")],
    "an evaluation of an hour": [life(0, 240, "finished", steps=False)],
    "over within one scrape": [life(10, 1, "finished")],
    "deleted with no grace, after one scrape": [life(10, 1)],
    "a Job with a mistake, which Kubernetes tries seven times": [
        life(at, 2, "exception", steps=False, instance=f"p{at}:1") for at in (1, 6, 12, 20, 32, 52, 84)
    ],
    "no scrape for five minutes": [life(0, 100), life(120, 200)],
    "replicas of a StatefulSet, one after the other": [life(4 * number, 300, instance=f"s{number}:1") for number in range(4)],
    "a notebook, in which a script is started six times": [
        life(14 * number, 8, ("exception", "interrupted", "finished")[number % 3]) for number in range(6)
    ],
    "elastic, from four nodes to two": [
        *(life(0, 80, "terminated", world=4, rank=rank, instance=f"n{rank}:1") for rank in range(4)),
        *(life(90, 200, world=2, rank=rank, instance=f"m{rank}:1") for rank in range(2)),
    ],
}


def values(points: Timeline) -> str:
    """A series in promtool's notation: stale where it ends."""
    marked = {one + 1: "stale" for one in points} | points
    return " ".join(marked.get(one, "_") for one in range(max(marked) + 1))


def said_of(promtool: str, folder: Path, cases: dict[str, list[Series]], checks: list[dict[str, object]]) -> str:
    """What promtool says of the rules that page, and those that record; nothing if all is as the checks expect it."""
    for name, text in rendered().items():
        if name.startswith("rules/"):
            groups = rule_cases.load(text)["groups"]
            for group in groups:
                group["rules"] = [rule for rule in group["rules"] if rule.get("alert") in {None, *PAGES}]
            (folder / Path(name).name).write_text(json.dumps({"groups": groups}))
    tests = [
        {
            "name": name,
            "interval": f"{SCRAPE_S}s",
            "input_series": [{"series": one, "values": values(points)} for one, points in together(*lives).items()],
            "alert_rule_test": checks,
        }
        for name, lives in cases.items()
    ]
    document = {"rule_files": ["torchobs-*.yml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "cases.json").write_text(json.dumps(document))
    argv = [promtool, "test", "rules", str(folder / "cases.json")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def test_ordinary_life_wakes_nobody_up(promtool: str, tmp_path: Path) -> None:
    """No page in any minute, of any of these."""
    checks: list[dict[str, object]] = [
        {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []} for minute in range(MINUTES) for alert in PAGES
    ]
    said = said_of(promtool, tmp_path, ORDINARY, checks)
    fired = sorted(set(re.findall(r"name: (.+),\n\s+alertname: (\w+),", said)))
    assert (fired, said) == ([], "")


def test_a_run_that_is_lost_does(promtool: str, tmp_path: Path) -> None:
    """The rules see runs such as those above: one that trained and then failed for good pages."""
    checks: list[dict[str, object]] = [{"eval_time": "45m", "alertname": "TorchobsRunDown", "exp_alerts": []}]
    said = said_of(promtool, tmp_path, {"lost": [life(0, 80, "exception")]}, checks)
    assert "Training run a of gpt in namespace ml is down." in said
