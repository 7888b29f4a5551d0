"""The shipped rules in real promtools: Debian's 2.42, which is the oldest supported, and 3."""

import subprocess
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tests import rule_cases
from tests.support import ROOT
from torchobs.cli.__main__ import main
from torchobs.rules.files import ALERTS as ALERT_FILE
from torchobs.rules.files import rendered
from torchobs.rules.values import DEFAULT, Thresholds, Values

ALERTS = sorted(path.stem for path in (ROOT / "tests" / "rules").glob("Torchobs*.yml"))
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
PROGRAMS = pytest.mark.parametrize("name", ["promtool", "promtool3"])


def promtool(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it."""
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)


def check(program: str, *arguments: str | Path) -> None:
    """Run it, and show what it says if it is not content."""
    result = promtool(program, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr


def written(folder: Path, checkout: Path, alert: str, interval: str) -> Path:
    """Write the cases of an alert and its rules into a folder."""
    rules = checkout / "deploy" / "prometheus" / "rules"
    files = [(rules / name).read_text() for name in ("torchobs-recordings.yml", "torchobs-alerts.yml")]
    groups = rule_cases.groups_of(files, alert)
    order = [group["name"] for group in groups["groups"]]
    cases = rule_cases.document(checkout / "tests" / "rules" / f"{alert}.yml", interval)
    (folder / "rules.yml").write_text(yaml.dump(groups, Dumper=DUMPER))
    (folder / "cases.yml").write_text(yaml.dump(cases | {"group_eval_order": order}, Dumper=DUMPER, width=4096))
    return folder / "cases.yml"


@PROGRAMS
def test_every_rule_file_is_valid(name: str, program: Callable[[str], str], checkout: Path) -> None:
    """Promtool's own checks, its lints (duplicate rules) as errors."""
    files = sorted((checkout / "deploy" / "prometheus").rglob("torchobs-*.yml"))
    assert len(files) == 4
    for path in files:
        check(program(name), "check", "rules", "--lint-fatal", path)


@pytest.mark.parametrize(("name", "interval"), [("promtool", "15s"), ("promtool3", "1m")])
@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_fires_and_stays_quiet(
    name: str, program: Callable[[str], str], checkout: Path, tmp_path: Path, alert: str, interval: str
) -> None:
    """Every case of tests/rules/Torchobs*.yml, however often rules are evaluated."""
    check(program(name), "test", "rules", written(tmp_path, checkout, alert, interval))


@PROGRAMS
def test_rules_with_other_values_are_valid(name: str, program: Callable[[str], str], tmp_path: Path) -> None:
    """Every threshold changed, each severity, and one alert left out."""
    thresholds = {one.name: getattr(DEFAULT.thresholds, one.name) * 1.1 for one in fields(Thresholds)}
    severities = {"TorchobsRankFailed": "page", "TorchobsRunDown": "ticket"}
    own = {"thresholds": thresholds, "severities": severities, "disabled": ["TorchobsGoodputLow"]}
    (tmp_path / "my.yml").write_text(yaml.safe_dump(own))
    assert main(["rules", "render", "--values", str(tmp_path / "my.yml"), str(tmp_path)]) == 0
    for path in sorted(tmp_path.rglob("torchobs-*.yml")):
        check(program(name), "check", "rules", "--lint-fatal", path)


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
    result = promtool(program(name), "test", "rules", tmp_path / "cases.yml")
    link = "https://grafana.example.org/d/torchobs-run?from=-2400000&to=now&var-job_name=gpt&var-run_id=a+b"
    assert f'dashboard_url="{link}"' in result.stdout + result.stderr


def test_every_alert_has_cases(checkout: Path) -> None:
    """One file for each."""
    rules = yaml.safe_load((checkout / "deploy" / "prometheus" / "rules" / "torchobs-alerts.yml").read_text())
    assert {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule} == set(ALERTS)


@PROGRAMS
def test_what_is_recorded_of_runs(name: str, program: Callable[[str], str], checkout: Path) -> None:
    """Goodput over a gap, runs of two clusters, ranks that left, tokens of copies."""
    check(program(name), "test", "rules", checkout / "tests" / "rules" / "recordings.yml")


@PROGRAMS
def test_percentiles_of_classic_histograms(name: str, program: Callable[[str], str], checkout: Path) -> None:
    """By rank and by run; a rank without steps has none."""
    check(program(name), "test", "rules", checkout / "tests" / "rules" / "percentiles.yml")


def test_percentiles_of_native_histograms(program: Callable[[str], str], checkout: Path) -> None:
    """The same values under the same names."""
    check(program("promtool3"), "test", "rules", checkout / "tests" / "rules" / "percentiles-native.yml")
