"""The README's tables say what the rules and the measurements say."""

import re
from pathlib import Path
from types import ModuleType

import pytest

from torchobs import debug, guard, tune


def section(checkout: Path, heading: str) -> str:
    """The text below a heading of the README, up to the next one."""
    return (checkout / "README.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]


def test_every_alert_is_in_the_table_of_the_rules_with_its_runbook(checkout: Path) -> None:
    """No alert is missing from it, none there is missing from the rules, and what the README picks is among them."""
    deployed = checkout / "deploy" / "prometheus"
    alerts = re.findall(r"^ *- alert: (\w+)$", (deployed / "rules" / "torchobs-alerts.yml").read_text(), re.MULTILINE)
    link = r"\[(\w+)\]\((?:\.\./\.\./)?docs/runbooks/(\w+)\.md\)"
    linked = re.findall(link, (deployed / "README.md").read_text())
    assert sorted(linked) == sorted((alert, alert) for alert in alerts)
    assert len(alerts) >= 12
    assert set(re.findall(link, section(checkout, "What it finds"))) <= set(linked)


def test_the_figures_of_overhead_are_those_that_were_measured(checkout: Path) -> None:
    """Training, step and share of each row are those of docs/overhead.md at the default level."""
    measured = (checkout / "docs" / "overhead.md").read_text()
    rows = re.findall(r"^\| (.+?) \| ([\d.]+ ms) \| ([\d.]+ %) \|$", section(checkout, "What it costs"), re.MULTILINE)
    assert len(rows) >= 3
    for training, step, share in rows:
        assert re.search(rf"^\| {re.escape(training)} \| basic \| {step} \|.*\| {share} \|$", measured, re.MULTILINE)


def test_the_label_for_kubernetes_is_the_one_that_the_policy_matches(checkout: Path) -> None:
    """What the README shows is what the chart's policy, which is tested on a cluster, goes by."""
    shown = section(checkout, "In Kubernetes")
    policy = (checkout / "deploy" / "kubernetes" / "injection-policy.yaml").read_text()
    assert "torchobs.io/inject:" in shown
    assert "torchobs.io/inject" in policy
    assert "helm upgrade --install torchobs helm/torchobs" in shown


@pytest.mark.parametrize("toolbox", [debug, guard, tune], ids=lambda toolbox: toolbox.__name__)
def test_the_functions_that_are_shown_exist(checkout: Path, toolbox: ModuleType) -> None:
    """A reader can call what the README names."""
    named = re.findall(rf"\b{toolbox.__name__.rpartition('.')[2]}\.(\w+)\(", section(checkout, "By hand"))
    assert named
    assert set(named) <= set(dir(toolbox))
