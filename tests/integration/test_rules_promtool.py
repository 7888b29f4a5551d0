"""The shipped rules in real promtools: Debian's 2.42, which is the oldest supported, and 3."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support import ROOT

ALERTS = sorted(path.stem for path in (ROOT / "tests" / "rules").glob("Torchobs*.yml"))
PROGRAMS = pytest.mark.parametrize("name", ["promtool", "promtool3"])


def promtool(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it; it makes a store for each case, and collecting the garbage of them is a quarter of its time."""
    environ = {**os.environ, "GOGC": "800"}
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False, env=environ)


def check(program: str, *arguments: str | Path) -> None:
    """Run it, and show what it says if it is not content."""
    result = promtool(program, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr


def group_of(rules: str, alert: str) -> str:
    """The one group of a rule file that has this alert: groups are evaluated by themselves, and others cost time only."""
    (found,) = (group for group in yaml.safe_load(rules)["groups"] if alert in {rule.get("alert") for rule in group["rules"]})
    return yaml.safe_dump({"groups": [found]})


@PROGRAMS
def test_every_rule_file_is_valid(name: str, program: Callable[[str], str], checkout: Path) -> None:
    """Promtool's own checks, its lints (duplicate rules) as errors."""
    files = sorted((checkout / "deploy" / "prometheus").rglob("torchobs-*.yml"))
    assert len(files) == 3
    for path in files:
        check(program(name), "check", "rules", "--lint-fatal", path)


@PROGRAMS
@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_fires_and_stays_quiet(
    name: str, program: Callable[[str], str], checkout: Path, tmp_path: Path, alert: str
) -> None:
    """Every case of tests/rules/Torchobs*.yml."""
    rules = (checkout / "deploy" / "prometheus" / "rules" / "torchobs-alerts.yml").read_text()
    document = yaml.safe_load((checkout / "tests" / "rules" / f"{alert}.yml").read_text())
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(document | {"rule_files": ["rules.yml"]}))
    (tmp_path / "rules.yml").write_text(group_of(rules, alert))
    check(program(name), "test", "rules", tmp_path / "cases.yml")


def test_every_alert_has_cases(checkout: Path) -> None:
    """One file for each."""
    rules = yaml.safe_load((checkout / "deploy" / "prometheus" / "rules" / "torchobs-alerts.yml").read_text())
    assert {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule} == set(ALERTS)


@PROGRAMS
def test_percentiles_of_classic_histograms(name: str, program: Callable[[str], str], checkout: Path) -> None:
    """By rank and by run; a rank without steps has none."""
    check(program(name), "test", "rules", checkout / "tests" / "rules" / "percentiles.yml")


def test_percentiles_of_native_histograms(program: Callable[[str], str], checkout: Path) -> None:
    """The same values under the same names."""
    check(program("promtool3"), "test", "rules", checkout / "tests" / "rules" / "percentiles-native.yml")


# What is wrong, and the case that notices it.
MUTATIONS = [
    ("torchobs_anomalies_total and on", "torchobs_nothing and on", "never scraped before"),
    ("time() - torchobs_rank_start_time_seconds < 600", "torchobs_rank_start_time_seconds", "after an outage"),
    ("increase(torchobs_anomalies_total[10m])", "torchobs_anomalies_total", "after an outage"),
    (
        "increase(torchobs_anomalies_total[10m])",
        "increase(torchobs_anomalies_total[2m])",
        "two scrapes, a minute apart, were missed",
    ),
    ("increase(torchobs_anomalies_total[10m])", "torchobs_nothing", "before the job crashed"),
    ("unless on (run_id, rank, instance)", "and on (run_id, rank, instance)", "no loss scaler is at work"),
    ("unless on (run_id, rank, instance)", "unless on (rank, instance)", "not for the one beside it"),
    ("max_over_time(torchobs_amp_steps_skipped_total[10m])", "torchobs_amp_steps_skipped_total", "ends in order soon after"),
    (">= 3", ">= 2", "two lone spikes"),
    (">= 3", ">= 5", "explodes on every rank"),
    (">= 5", ">= 4", "two lone spikes of the norm and four of the loss"),
    (">= 5", ">= 7", "the loss leaps and stays up"),
    ("> 20", "> 2000", "skips nearly every step"),
    ("> 20", "> 10", "of a slow job calibrates"),
    ("rank:torchobs_amp_steps_skipped:recent > 0.5", "rank:torchobs_steps:recent > 0.5", "for a fast job"),
    ("torchobs_amp_steps_skipped_total and on", "torchobs_nothing and on", "every step before the first scrape"),
    ("max by (namespace, job_name, run_id)", "max by (namespace, job_name, run_id, rank)", "explodes on every rank"),
    ("max by (namespace, job_name, run_id)", "sum by (namespace, job_name, run_id)", "explodes on every rank"),
    ("max by (namespace, job_name, run_id)", "max by (job_name, run_id)", "explodes on every rank"),
    ("keep_firing_for: 10m", "keep_firing_for: 1m", "explodes on every rank"),
    ("for: 0s", "for: 5m", "before the job crashed"),
]


LATE = [
    ("torchobs_compile_recompiles_total and on", "torchobs_nothing and on", "before the first scrape"),
    ("unless torchobs_compile_failures_total", "and torchobs_compile_failures_total", "between two scrapes"),
    ("torchobs_rank_start_time_seconds < 600", "torchobs_rank_start_time_seconds < 60000", "before the first scrape"),
    ("and on (run_id, rank, instance) torchobs_rank_start_time_seconds offset 10m", "", "scraped again after an outage"),
]


@pytest.mark.parametrize(
    ("alert", "part", "instead", "case"),
    [
        *(("TorchobsGradientExplosion", *mutation) for mutation in MUTATIONS),
        *(("TorchobsRecompileStorm", *mutation) for mutation in LATE),
    ],
)
def test_every_part_of_the_alert_is_needed(
    program: Callable[[str], str], checkout: Path, tmp_path: Path, alert: str, part: str, instead: str, case: str
) -> None:
    """The cases are able to fail: each part of the rule, made wrong, is noticed by the case that stands for it."""
    rules = (checkout / "deploy" / "prometheus" / "rules" / "torchobs-alerts.yml").read_text()
    document = yaml.safe_load((checkout / "tests" / "rules" / f"{alert}.yml").read_text())
    document |= {"rule_files": ["rules.yml"], "tests": [test for test in document["tests"] if case in test["name"]]}
    assert len(document["tests"]) == 1
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(document))
    (tmp_path / "rules.yml").write_text(group_of(rules, alert))
    check(program("promtool"), "test", "rules", tmp_path / "cases.yml")
    (tmp_path / "rules.yml").write_text(group_of(rules.replace(part, instead), alert))
    assert promtool(program("promtool"), "test", "rules", tmp_path / "cases.yml").returncode != 0
