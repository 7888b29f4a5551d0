"""The shipped rules in a real promtool: every alert fires and stays quiet; runs that end, clusters, 64 ranks; ordinary days."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import repeat
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Iterable, Iterator
    from pathlib import Path

CASES = ROOT / "tests" / "rules"
ALERTS = sorted(path.stem for path in CASES.glob("Torchobs*.yml"))
SHORT_S = 5400
"""Longer ones are evaluated every minute alone: they are costly, and hold nothing that is short"""
Case = dict[str, Any]
Document = tuple[tuple[str, ...], str, list[Case]]
"""Alerts, the interval at which their rules are evaluated, and cases"""


def run(program: str, *arguments: str | Path) -> str:
    """Run promtool; what it says if it is not content, else nothing."""
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def judged(promtool: str, folder: Path, documents: Iterable[Document]) -> str:
    """What promtool has against cases of alerts, by the shipped rules; nothing if they hold."""
    shipped, paths = rendered(), []
    files = [shipped[f"rules/torchobs-{part}.yml"] for part in ("recordings", "alerts")]
    for number, (alerts, interval, cases) in enumerate(documents):
        groups = rule_cases.groups_of(files, *alerts)
        order = [group["name"] for group in groups["groups"]]
        rules, path = folder / f"rules-{number}.json", folder / f"cases-{number}.json"
        rules.write_text(json.dumps(groups))
        document = {"rule_files": [rules.name], "evaluation_interval": interval, "group_eval_order": order, "tests": cases}
        path.write_text(json.dumps(document))
        paths.append(path)
    return run(promtool, "test", "rules", *paths)


def fired(said: str) -> set[tuple[str, str, int]]:
    """The alerts that promtool says it got instead of none: the case's name, the alert's, and the second."""
    matches = re.findall(r"name: (.+),\n\s+alertname: (\w+), time: (\S+),", said)
    assert bool(matches) == bool(said), said
    return {(name, alert, rule_cases.seconds(time)) for name, alert, time in matches}


def looks(alert: str, times_s: Iterable[int]) -> list[dict[str, Any]]:
    """Checks that expect nothing."""
    return [{"eval_time": f"{at_s}s", "alertname": alert, "exp_alerts": []} for at_s in times_s]


def is_short(case: Case) -> bool:
    """Whether it can be evaluated every 15 seconds."""
    return max(rule_cases.seconds(check["eval_time"]) for check in case["alert_rule_test"]) <= SHORT_S


def test_every_rule_file_is_valid(promtool: str, checkout: Path) -> None:
    """Promtool's own checks, its lints (duplicate rules) as errors."""
    files = sorted((checkout / "deploy" / "prometheus").rglob("torchobs-*.yml"))
    assert len(files) == 4
    assert run(promtool, "check", "rules", "--lint-fatal", *files) == ""


def test_every_alert_fires_and_stays_quiet(promtool: str, tmp_path: Path) -> None:
    """Every case of tests/rules/Torchobs*.yml: every 15 seconds, and every minute (Prometheus' default) in two clusters.

    There each case that says nothing of clusters has an alert of each, with its own culprits and numbers.
    """
    documents: list[Document] = []
    for alert in ALERTS:
        often, seldom = (rule_cases.document(CASES / f"{alert}.yml", interval)["tests"] for interval in ("15s", "1m"))
        documents.append(((alert,), "15s", [case for case in often if is_short(case)]))
        twice = [case if "cluster=" in str(case["input_series"]) else of_clusters(case) for case in seldom]
        assert any('"cluster": "west"' in json.dumps(case["alert_rule_test"]) for case in twice)
        documents.append(((alert,), "1m", twice))
    assert judged(promtool, tmp_path, documents) == ""


def test_rules_with_other_values_are_valid(promtool: str, tmp_path: Path) -> None:
    """Every threshold changed, each severity, and one alert left out."""
    thresholds = {name: value * 1.1 for name, value in asdict(DEFAULT.thresholds).items()}
    severities = {"TorchobsRankFailed": "page", "TorchobsRunDown": "ticket"}
    chosen = {"thresholds": thresholds, "severities": severities, "disabled": ["TorchobsGoodputLow"]}
    (tmp_path / "my.yml").write_text(yaml.safe_dump(chosen))
    assert main(["rules", "render", "--values", str(tmp_path / "my.yml"), str(tmp_path)]) == 0
    assert run(promtool, "check", "rules", "--lint-fatal", *sorted(tmp_path.rglob("torchobs-*.yml"))) == ""


def test_a_link_leads_to_the_run_s_dashboard_from_an_hour_before_the_alert(promtool: str, tmp_path: Path) -> None:
    """Where it is known where Grafana is; what is in the labels is quoted."""
    (tmp_path / "rules.yml").write_text(rendered(Values(grafana_url="https://grafana.example.org"))[ALERT_FILE])
    series = 'torchobs_rank_exit{run_id="a b", job_name="gpt", rank="0", instance="n0:1", reason="lost"}'
    checks = looks("TorchobsRankFailed", [1200])
    test = {"interval": "15s", "input_series": [{"series": series, "values": "1x100"}], "alert_rule_test": checks}
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "cases.json").write_text(json.dumps(document))
    said = run(promtool, "test", "rules", tmp_path / "cases.json")
    link = "https://grafana.example.org/d/torchobs-run?from=-2400000&to=now&var-job_name=gpt&var-run_id=a+b"
    assert f'dashboard_url="{link}"' in said


def test_what_is_recorded(promtool: str) -> None:
    """Goodput over a gap, runs of two clusters, ranks that left, tokens of copies; percentiles of both kinds of histograms."""
    names = ["recordings", "percentiles", *(["percentiles-native"] if promtool.endswith("3") else [])]  # native since 3
    assert run(promtool, "test", "rules", *(CASES / f"{name}.yml" for name in names)) == ""


AFTER_S = (60, 180, 480, 840, 1800)
"""Times after the end, past every window and every `keep_firing_for`"""
COUNTED = (
    "TorchobsCgroupOomKill", "TorchobsExporterReadErrors", "TorchobsFlightDropped", "TorchobsGpuFault",
    "TorchobsGradientExplosion", "TorchobsLoaderWorkerDied", "TorchobsLossNotFinite", "TorchobsPushDropped",
    "TorchobsRankFailed", "TorchobsRecompileStorm", "TorchobsSeriesDropped",
)  # fmt: skip
"""Alerts about what has happened, as opposed to what lasts"""


def cases_of(alert: str) -> Iterator[tuple[str, Case, int, int]]:
    """Each case of an alert: name, case, when it first fires (0: never), and the next full minute after that."""
    for number, case in enumerate(rule_cases.load((CASES / f"{alert}.yml").read_text())["tests"]):
        times = [rule_cases.seconds(check["eval_time"]) for check in case["alert_rule_test"] if check["exp_alerts"]]
        fires_s = times[0] if times else 0
        yield f"{alert} {number}", case, fires_s, minute(fires_s)


def minute(at_s: int) -> int:
    """The next full minute, at which rules are evaluated at every interval."""
    return -(-at_s // 60) * 60


def test_an_end_in_order_that_one_scrape_saw_begins_no_alert_and_ends_none_at_once(promtool: str, tmp_path: Path) -> None:
    """Of each case the run ends where it is looked at: what fires goes on for a while, what is quiet stays so.

    What fires if it is evaluated every minute fires every 15 seconds, too, and what is quiet every 15 seconds every minute.
    """
    documents, expected = list[Document](), set()
    for alert in ALERTS:
        by_interval: dict[str, list[Case]] = {"15s": [], "1m": []}
        for name, case, fires_s, at_s in cases_of(alert):
            if fires_s:
                end_s, times_s = at_s, [at_s + 60]
                expected.add((name, alert, at_s + 60))
            else:
                last_s = rule_cases.seconds(case["alert_rule_test"][-1]["eval_time"])
                end_s = min(minute(last_s), rule_cases.lasts_s(case) // 60 * 60)
                times_s = [end_s + after_s for after_s in AFTER_S]
            ended = {**case, "input_series": rule_cases.ending(case, end_s), "alert_rule_test": looks(alert, times_s)}
            by_interval["15s" if not fires_s and is_short(ended) else "1m"].append({**ended, "name": name})
        documents += [((alert,), interval, cases) for interval, cases in by_interval.items()]
    assert fired(judged(promtool, tmp_path, documents)) == expected


def test_what_only_the_last_scrape_saw_fires(promtool: str, tmp_path: Path) -> None:
    """Of each case that fires, what was counted until then is first seen a quarter of a minute before the series end."""
    documents, expected = list[Document](), set()
    for alert in COUNTED:
        tests = []
        for name, case, fires_s, at_s in cases_of(alert):
            series = rule_cases.seen_once(case, at_s + rule_cases.seconds(case["interval"]), fires_s) if fires_s else []
            if series:
                tests.append({**case, "name": name, "input_series": series, "alert_rule_test": looks(alert, [at_s + 60])})
                expected.add((name, alert, at_s + 60))
        assert tests, alert
        documents.append(((alert,), "1m", tests))
    assert fired(judged(promtool, tmp_path, documents)) == expected


CLUSTERS = ("east", "west")
WHOSE = re.compile(r"^(Training run \S+ of \S+?(?: in namespace \S+?)?)( (?!in namespace)|$)")
RANKS = 64


def of_clusters(case: dict[str, Any]) -> dict[str, Any]:
    """The case with each series once in each cluster, and each alert once for each."""
    series = [
        {**entry, "series": re.sub(r"\{|$", f'{{cluster="{cluster}", ', entry["series"], count=1)}
        for entry in case["input_series"]
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
    """The labels of a rank; eight ranks are on a node."""
    return f'run_id="a", job_name="gpt", rank="{number}", instance="n{number // 8}:1"'


def test_of_64_ranks_three_are_named(promtool: str, tmp_path: Path) -> None:
    """However many fail: one alert, their number, three of them with their node."""
    series, down = [], 5
    for number in range(RANKS):
        labels = rank(number)
        fails = number >= RANKS - down
        series += [
            {"series": f"torchobs_rank_up{{{labels}}}", "values": "1x20 0x20" if fails else "1x40"},
            {"series": f'torchobs_rank_info{{{labels}, host="gpu-{number // 8}"}}', "values": "1x40"},
        ]
        if fails:
            series.append({"series": f'torchobs_rank_exit{{{labels}, reason="exception"}}', "values": "_x20 1x20"})
    case = {"interval": "15s", "input_series": series, "alert_rule_test": looks("TorchobsRankFailed", [360])}
    said = judged(promtool, tmp_path, [(("TorchobsRankFailed",), "1m", [case])])
    alert = said.partition("got:")[2]  # which three of those that failed alike is not said by the rule, and so not expected
    assert alert.count("alertname=") == 1, said
    assert f"{down} of its ranks ended" in alert
    named = re.findall(r"rank (\d+) on gpu-(\d): exception", alert)
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


def life(
    at: int, scrapes: int, ended: str = "", *, steps: bool = True, world: int = 1, shows: int = 4, **labels: object
) -> Series:
    """A rank from a scrape on, for so many; `ended`: how, which so many more show. Without it its series just end."""
    alive = range(at, at + scrapes)
    shown = range(at, at + scrapes + (shows if ended else 0))
    points = {
        series("torchobs_rank_up", **labels): {scrape: str(int(scrape in alive)) for scrape in shown},
        series("torchobs_rank_start_time_seconds", **labels): dict.fromkeys(shown, str(at * SCRAPE_S)),
        series("torchobs_world_size", **labels): dict.fromkeys(shown, str(world)),
        series("torchobs_rank_info", host="n", torch_version="2", **labels): dict.fromkeys(shown, "1"),
        series("torchobs_rank_state", state="alive", **labels): dict.fromkeys(alive, "1"),
        series("torchobs_rank_progress_age_seconds", **labels): dict.fromkeys(alive, "1"),
        series("torchobs_steps_total", **labels): {scrape: str((min(scrape, alive[-1]) - at) * 30 * steps) for scrape in shown},
    }
    if ended:
        points[series("torchobs_rank_exit", reason=ended, **labels)] = dict.fromkeys(shown[scrapes:], "1")
    return points


def together(*lives: Series) -> Series:
    """All of them; of a series that several have, what the later one says."""
    merged: Series = {}
    for rank_life in lives:
        for name, points in rank_life.items():
            merged.setdefault(name, {}).update(points)
    return merged


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
    marked = {scrape + 1: "stale" for scrape in points} | points
    return " ".join(marked.get(scrape, "_") for scrape in range(max(marked) + 1))


def cases_of_lives(cases: dict[str, list[Series]], alerts: Iterable[str], minutes: Iterable[int]) -> list[Case]:
    """Cases of these lives that look for each alert in each of these minutes."""
    times_s = [60 * at for at in minutes]
    return [
        {
            "name": name,
            "interval": f"{SCRAPE_S}s",
            "input_series": [{"series": one, "values": values(points)} for one, points in together(*lives).items()],
            "alert_rule_test": [look for alert in alerts for look in looks(alert, times_s)],
        }
        for name, lives in cases.items()
    ]


ENDS: dict[str, set[str]] = {
    "finished": set(),
    "interrupted": set(),
    "terminated": set(),
    "exception": {"TorchobsRankFailed", "TorchobsRunDown"},
    "lost": {"TorchobsRankFailed", "TorchobsRunDown"},
    "": {"TorchobsTelemetryGone"},
}
"""What a run's end raises, by its reason; without one it is just gone"""
ABOUT_ENDS = ("TorchobsRankFailed", "TorchobsRunDown", "TorchobsTelemetryGone", "TorchobsRanksMissing")


def test_a_run_s_end_is_known_by_one_scrape(promtool: str, tmp_path: Path) -> None:
    """Of two ranks on two machines, at each interval, for each reason: the alerts that have fired by the next hour."""
    lives = {
        f"ended {reason}": [life(0, 81, reason, world=2, shows=1, rank=rank, instance=f"n{rank}:1") for rank in range(2)]
        for reason in ENDS
    }
    cases = cases_of_lives(lives, ABOUT_ENDS, range(15, 60))
    expected = {(f"ended {reason}", alert) for reason, alerts in ENDS.items() for alert in alerts}
    for interval in ("15s", "1m"):
        raised = fired(judged(promtool, tmp_path, [(ABOUT_ENDS, interval, cases)]))
        assert {(name, alert) for name, alert, _ in raised} == expected


LOST = "one that trained and failed for good"


def test_ordinary_life_wakes_nobody_up(promtool: str, tmp_path: Path) -> None:
    """No page in any minute, of any of these; the rules see such runs, for one that is lost does page."""
    cases = cases_of_lives(ORDINARY | {LOST: [life(0, 80, "exception")]}, PAGES, range(MINUTES))
    said = judged(promtool, tmp_path, [(tuple(PAGES), "1m", cases)])
    assert {(name, alert) for name, alert, _ in fired(said)} == {(LOST, "TorchobsRunDown")}
    assert "Training run a of gpt in namespace ml is down." in said
