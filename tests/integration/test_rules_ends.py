"""The alerts' cases of `tests/rules` again, for runs that end and of whose end one scrape is all that Prometheus has.

Scrapes are 15 s apart, and a rank's exporter may leave right after the rank: of how a run ended there may be a single sample,
which rules that are evaluated each minute find marked as stale.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import rule_cases
from tests.support import ROOT

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
ALERTS = sorted(path.stem for path in (ROOT / "tests" / "rules").glob("Torchobs*.yml"))
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
    rules = checkout / "deploy" / "prometheus" / "rules"
    files = [(rules / name).read_text() for name in ("torchobs-recordings.yml", "torchobs-alerts.yml")]
    groups = rule_cases.groups_of(files, alert)
    order = [group["name"] for group in groups["groups"]]
    (folder / "rules.yml").write_text(yaml.dump(groups, Dumper=DUMPER))
    document = {"rule_files": ["rules.yml"], "evaluation_interval": interval, "group_eval_order": order, "tests": tests}
    (folder / "cases.yml").write_text(yaml.dump(document, Dumper=DUMPER, width=4096))
    done = subprocess.run([program, "test", "rules", folder / "cases.yml"], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    found = re.findall(r"name: (.+),\n\s+alertname: \w+, time: (\S+),", said)
    assert bool(found) == bool(done.returncode), said
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
