"""The shipped Alertmanager configuration in a real one, behind a real Prometheus with the shipped rules."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.alertmanager_server import alertmanager_command, serving, start_alertmanager
from tests.prometheus_server import PrometheusServer
from tests.support import ROOT, wait_until
from torchobs.rules.files import alert_groups
from torchobs.rules.rule_file import Alert

if TYPE_CHECKING:
    from collections.abc import Callable
    from http.server import BaseHTTPRequestHandler
    from pathlib import Path

SEVERITIES = {rule.alert: rule.severity for group in alert_groups() for rule in group.rules if isinstance(rule, Alert)}
INHIBIT_RULES = yaml.safe_load((ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text())["inhibit_rules"]
RUN_OF = 'job_name="gpt", run_id="{run}"'
SICK = """\
torchobs_rank_exit{{{a}, rank="0", reason="exception"}} 1
torchobs_rank_info{{{a}, rank="0", host="gpu-7"}} 1
torchobs_rank_up{{{a}, rank="0"}} 0
torchobs_rank_up{{{a}, rank="1"}} 1
torchobs_rank_state{{{a}, rank="1", state="hung"}} 1
torchobs_rank_progress_age_seconds{{{a}, rank="1"}} 90
torchobs_rank_exit{{{b}, rank="0", reason="terminated"}} 1
torchobs_rank_exit{{{b}, rank="1", reason="finished"}} 1
torchobs_rank_up{{{b}, rank="0"}} 0
torchobs_rank_up{{{b}, rank="1"}} 0
torchobs_rank_up{{{c}, rank="3"}} 1
hw_status{{{c}, rank="3", hw_id="GPU-1", hw_type="gpu", hw_state="failed"}} {lost}
hw_errors_total{{{c}, rank="3", hw_id="GPU-1", hw_type="gpu", error_type="xid_application"}} 7
""".format  # fmt: skip


def test_amtool_is_content(program: Callable[[str], str], checkout: Path) -> None:
    """And a page goes to the pager, everything else to the tickets."""
    path = checkout / "deploy" / "alertmanager" / "alertmanager.yml"
    subprocess.run([program("amtool"), "check-config", path], check=True, capture_output=True)
    for severity, receiver in (("page", "pager"), ("ticket", "tickets")):
        arguments = ["config", "routes", "test", f"--config.file={path}", f"severity={severity}", "run_id=a"]
        done = subprocess.run([program("amtool"), *arguments], check=True, capture_output=True, text=True)
        assert done.stdout.strip() == receiver


def test_only_alerts_that_exist_are_named_and_no_ticket_silences_a_page() -> None:
    """A run that hangs because a rank died wakes somebody up all the same."""
    for rule in INHIBIT_RULES:
        sources, targets = (
            {SEVERITIES[name] for name in rule[side][0].split('"')[1].split("|")}
            for side in ("source_matchers", "target_matchers")
        )
        assert sources == {"page"} or targets == {"ticket"}


def test_a_run_that_nobody_sees_is_told_once() -> None:
    """That it is down or gone explains the ranks that are missing, and the machines that it does not use."""
    follows = {
        (source, target)
        for rule in INHIBIT_RULES
        for source in rule["source_matchers"][0].split('"')[1].split("|")
        for target in rule["target_matchers"][0].split('"')[1].split("|")
    }
    for source in ("TorchobsRunDown", "TorchobsTelemetryGone"):
        assert {(source, "TorchobsRanksMissing"), (source, "TorchobsGoodputLow")} <= follows


@pytest.mark.parametrize("name", ["prometheus", "prometheus3"])
def test_the_right_alert_arrives_once_with_its_culprit_and_resolves(
    name: str,
    program: Callable[[str], str],
    free_port: Callable[[], int],
    start: Callable[..., subprocess.Popen[str]],
    checkout: Path,
    tmp_path: Path,
) -> None:
    """Of a run with a dead rank the hang is not told; of two clusters each its own; of a run that was told to end nothing."""
    binary = alertmanager_command(program("prometheus-alertmanager"))
    runs = {run: RUN_OF.format(run=run) for run in "abc"}
    page = {"text": SICK(**runs, lost=1)}
    told: list[dict[str, Any]] = []

    def webhook(request: BaseHTTPRequestHandler) -> bytes:
        told.append(json.loads(request.rfile.read(int(request.headers["Content-Length"]))))
        return b""

    def gpu(status: str) -> list[dict[str, Any]]:
        return [one for one in told if one["receiver"] == "pager" and one["status"] == status]

    with serving(lambda _: page["text"].encode()) as target, serving(webhook) as receiver:
        address = start_alertmanager(start, binary, tmp_path, free_port(), receiver)
        rules = []
        for path in sorted((checkout / "deploy" / "prometheus" / "rules").glob("torchobs-*.yml")):
            rules.append(tmp_path / path.name)  # an alert's end within the test, not after ten minutes
            rules[-1].write_text(path.read_text().replace("keep_firing_for: 10m", "keep_firing_for: 1s"))
        scrape = {
            "job_name": "torchobs",
            "static_configs": [{"targets": [target], "labels": {"cluster": cluster}} for cluster in ("east", "west")],
        }
        settings = {"scrape_configs": [scrape], "alerting": {"alertmanagers": [{"static_configs": [{"targets": [address]}]}]}}
        with PrometheusServer(program(name), rules=rules, interval="1s", settings=settings):
            wait_until(lambda: len(gpu("firing")) == 2 and len(told) >= 4, timeout_s=60)
            page["text"] = SICK(**runs, lost=0)
            wait_until(lambda: len(gpu("resolved")) == 2, timeout_s=60)
    firing = [one for one in told if one["status"] == "firing"]
    found = sorted(
        (one["receiver"], one["groupLabels"]["cluster"], one["groupLabels"]["run_id"], alert["labels"]["alertname"])
        for one in firing
        for alert in one["alerts"]
    )
    assert found == [
        ("pager", "east", "c", "TorchobsGpuFault"),
        ("pager", "west", "c", "TorchobsGpuFault"),
        ("tickets", "east", "a", "TorchobsRankFailed"),
        ("tickets", "west", "a", "TorchobsRankFailed"),
    ]
    notes = {alert["labels"]["alertname"]: alert["annotations"] for one in firing for alert in one["alerts"]}
    assert notes["TorchobsGpuFault"]["description"].endswith("Observed by: rank 3: GPU GPU-1, lost.")
    assert notes["TorchobsRankFailed"]["description"].endswith("Among them: rank 0 on gpu-7: exception.")
    assert "dashboard_url" not in notes["TorchobsRankFailed"]
