"""The README's tables say what the rules and the measurements say."""

import re
from pathlib import Path

import pytest


def section(checkout: Path, heading: str) -> str:
    """The text below a heading of the README, up to the next one."""
    return (checkout / "README.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]


def test_every_alert_is_in_the_table_of_findings_with_its_runbook(checkout: Path) -> None:
    """No alert is missing from the README, and none there is missing from the rules."""
    rules = (checkout / "deploy" / "prometheus" / "rules" / "torchobs-alerts.yml").read_text()
    alerts = re.findall(r"^ *- alert: (\w+)$", rules, re.MULTILINE)
    linked = re.findall(r"\[(\w+)\]\(docs/runbooks/(\w+)\.md\)", section(checkout, "What it finds"))
    assert sorted(linked) == sorted((alert, alert) for alert in alerts)
    assert len(alerts) >= 12


def test_the_figures_of_overhead_are_those_that_were_measured(checkout: Path) -> None:
    """Training, step and share of each row are those of docs/overhead.md at the default level."""
    measured = (checkout / "docs" / "overhead.md").read_text()
    rows = re.findall(r"^\| (.+?) \| ([\d.]+ ms) \| ([\d.]+ %) \|$", section(checkout, "What it costs"), re.MULTILINE)
    assert len(rows) >= 3
    for training, step, share in rows:
        assert re.search(rf"^\| {re.escape(training)} \| basic \| {step} \|.*\| {share} \|$", measured, re.MULTILINE)


@pytest.mark.parametrize("name", ["restartPolicy: Always", "mountPath: /var/run/torchobs/flight", "containerPort: 10960"])
def test_the_lines_for_kubernetes_are_those_of_the_manifest(checkout: Path, name: str) -> None:
    """What the README shows is a part of the Job that is tested."""
    assert name in section(checkout, "In Kubernetes")
    assert name in (checkout / "deploy" / "kubernetes" / "job-with-sidecar.yaml").read_text()
