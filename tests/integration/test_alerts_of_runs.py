"""The alerts about whole runs, by the real rule engine, and what a real Alertmanager makes of them."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections import defaultdict
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.exporters import start_program
from tests.prometheus_server import DIRECT, alertmanager_command, serving, start_alertmanager
from tests.rule_cases import Life, RecordedRun, Recording, Told, cases, record, told
from tests.support import ROOT, wait_until
from torchobs.rules.files import alert_groups, rendered
from torchobs.rules.promql import RUN
from torchobs.rules.rule_file import Alert
from torchobs.rules.values import Thresholds, Values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from http.server import BaseHTTPRequestHandler


GOLDEN = Path(__file__).parent / "golden" / "runs.json.gz"
LONG = ("memory-leak", "starvation", "hang", "long-evaluation", "long-compile", "slow-first-step", "idle")
"""Runs to begin with: the others go on meanwhile."""
HEALTHY = (
    RecordedRun("long-evaluation", [Life("evaluate")], 15),
    RecordedRun("long-compile", [Life("compile_long")], 15),
    RecordedRun("slow-first-step", [Life("slow_first_step")], 15),
    RecordedRun("idle", [Life("idle")], 15),
    RecordedRun("preempted", [Life("train", 16)], 20),
    RecordedRun("finished", [Life("train_briefly")], 20),
    RecordedRun("warm-up", [Life("warm_up")]),
    RecordedRun("accumulation", [Life("accumulate")]),
    RecordedRun("resumed", [Life("resume", 14), Life("resume")], 20),
    RecordedRun("amp", [Life("scaler_calibrates")]),
)
SICK = (
    RecordedRun("starvation", [Life("starve")], 15),
    RecordedRun("hang", [Life("hang")], 18),
    RecordedRun(
        "rank-crash", [Life("train", 20), Life("train", 12), Life("crash", rank=1), Life("train", 16, rank=1)], 20, ranks=2
    ),
    RecordedRun("crash-loop", [*(Life("crash_soon") for _ in range(5)), Life("train", 14)], 20),
    RecordedRun("persistent-nan", [Life("persistent_nan", 22), Life("train", 14)], 20),
    RecordedRun("single-nan", [Life("single_nan")], 20),
    RecordedRun("explosion", [Life("explosion")], 20),
    RecordedRun("scaler-stuck", [Life("scaler_stuck")], 20),
    RecordedRun("straggler", [Life("straggle", rank=rank) for rank in range(3)], ranks=3),
    RecordedRun("slowdown", [Life("slow_down")]),
    RecordedRun("memory-leak", [Life("leak", 300)], 2),
    RecordedRun("checkpoints", [Life("fail_to_save")]),
)
EXPECTED: dict[str, list[tuple[str, str, str]]] = {
    "starvation": [("tickets", "TorchobsDataStarvation", r"Worst: rank 0 on node-0: \d+")],
    "hang": [
        ("tickets", "TorchobsRankHung", r"Longest without a step: rank 0 on node-0: \d+m"),
        ("pager", "TorchobsRunHung", r"Longest without a step: rank 0 on node-0: \d+m"),
    ],
    "rank-crash": [("tickets", "TorchobsRankFailed", r"Among them: rank 1 on node-0: exception\.$")],
    "crash-loop": [
        ("tickets", "TorchobsRankFailed", r"Among them: rank 0 on node-0: exception\.$"),
        ("pager", "TorchobsCrashLoop", r"Among them: rank 0 on node-0: exception\.$"),
    ],
    "persistent-nan": [
        ("tickets", "TorchobsGradientExplosion", r"By kind: (\d+ whose \w+ is NaN or infinite(; )?)+\.$"),
        ("pager", "TorchobsLossNotFinite", "Most on: rank 0 on node-0: "),
    ],
    "single-nan": [],
    "explosion": [("tickets", "TorchobsGradientExplosion", r"By kind: .*\d+ whose gradient is far above its past")],
    "scaler-stuck": [
        ("tickets", "TorchobsLossScaleStuck", "Longest: rank 0 on node-0: "),
        ("pager", "TorchobsLossNotFinite", "Most on: rank 0 on node-0: "),  # at a scale of 0 the weights are lost, too
    ],
    "straggler": [("tickets", "TorchobsStraggler", r"Slowest: rank 2 on node-1: \d")],
    "slowdown": [("tickets", "TorchobsSlowdown", r"A step's time now is: \d")],
    "memory-leak": [("tickets", "TorchobsMemoryGrowth", r"First: rank 0 on node-0: .* left \(host\)")],
    "checkpoints": [("pager", "TorchobsCheckpointFailed", "On: rank 0 on node-0: ")],
}
"""What arrives: receiver, alert, and the culprit in its description. A first symptom is a ticket; the page comes once
it is known to be worse."""
OUTLIVED = {"crash-loop": {"tickets"}}
"""Receivers that hear of no end, since the worse alert outlives the ticket: Alertmanager mutes the ends, too."""


def active_sets(firing: Sequence[Told]) -> dict[str, list[dict[str, Told]]]:
    """Of each run, the sets of alerts that were active at once, in order: only changes, the last of them to none."""
    minutes: dict[str, dict[int, dict[str, Told]]] = defaultdict(lambda: defaultdict(dict))
    for alert in firing:
        minutes[alert.labels["run_id"]][alert.at_s][alert.labels["alertname"]] = alert
    changes: dict[str, list[dict[str, Told]]] = {}
    for run, by_minute in minutes.items():
        sets = [by_minute.get(at_s, {}) for at_s in range(min(by_minute), max(by_minute) + 61, 60)]
        changes[run] = [now for before, now in pairwise([{}, *sets]) if before.keys() != now.keys()]
    return changes


def sent(labels: Mapping[str, str], annotations: Mapping[str, str], *, active: bool) -> dict[str, Any]:
    """An alert as Prometheus sends it: one that has ended once more, with the time of its end."""
    now = datetime.now(timezone.utc)
    times = {"startsAt": now, "endsAt": now + timedelta(hours=2 if active else 0)}
    return {"labels": labels, "annotations": annotations, **{name: at.isoformat() for name, at in times.items()}}


def deliver(address: str, changes: Mapping[str, list[dict[str, Told]]], arrived: Sequence[Mapping[str, Any]]) -> None:
    """Send what changes for each run, all first changes, then all second ones, waiting until Alertmanager has sent them on.

    It has when an alert of a new group, sent after them, has arrived at both receivers: for it Alertmanager waits as long as
    for other new groups, and three times as long as for known ones.
    """

    def post(alerts: Sequence[dict[str, Any]]) -> None:
        request = urllib.request.Request(  # to this machine
            f"http://{address}/api/v2/alerts", json.dumps(alerts).encode(), {"Content-Type": "application/json"}
        )
        with DIRECT.open(request, timeout=10):
            pass

    before: dict[str, dict[str, Told]] = {}
    for number in range(max(map(len, changes.values()))):
        for run, sets in changes.items():
            if number < len(sets):
                alerts = {**before.get(run, {}), **sets[number]}
                post([sent(alert.labels, alert.annotations, active=name in sets[number]) for name, alert in alerts.items()])
                before[run] = sets[number]
        last = f"round-{number}"
        post(
            [
                sent({"alertname": "Sent", "run_id": last, "severity": severity}, {}, active=True)
                for severity in ("page", "ticket")
            ]
        )
        wait_until(partial(_has_arrived_twice, arrived, last))


def _has_arrived_twice(arrived: Sequence[Mapping[str, Any]], run: str) -> bool:
    return [notification["groupLabels"].get("run_id") for notification in arrived].count(run) == 2  # the receivers


def of_run(arrived: Sequence[Mapping[str, Any]], run: str, status: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The alerts of the notifications about a run that are in that status, as the notifications are: receiver and alert."""
    about = [note for note in arrived if (note["status"], note["groupLabels"].get("run_id")) == (status, run)]
    return [(note["receiver"], alert) for note in about for alert in note["alerts"] if alert["status"] == status]


@pytest.fixture
def recording(
    pytestconfig: pytest.Config,
    start: Callable[..., subprocess.Popen[str]],
    flight_dir: Path,
    tmp_path: Path,
    free_port: Callable[[], int],
    rules: Sequence[Path],
) -> Recording:
    """The pages of all runs; with `--update-golden` the runs take place, in some minutes."""
    if pytestconfig.getoption("--update-golden"):
        nodes = []
        for number in range(2):
            folder = flight_dir / str(number)
            folder.mkdir(mode=0o700)
            log = tmp_path / f"exporter-{number}.log"
            nodes.append((folder, start_program(start, log, free_port(), "--flight-dir", str(folder))))
        names = set(re.findall(r"\w+", "".join(path.read_text() for path in rules)))
        runs = [replace(run, port=free_port()) for run in sorted((*HEALTHY, *SICK), key=lambda run: run.name not in LONG)]
        record(runs, nodes, start, names).save(GOLDEN)
    return Recording.load(GOLDEN)


@pytest.fixture
def rules(tmp_path: Path) -> Sequence[Path]:
    """The shipped ones but for a value: the run that crashes again and again does so from its first second."""
    written = rendered(Values(Thresholds(lived_s=60)))
    paths = [tmp_path / name for name in ("torchobs-recordings.yml", "torchobs-alerts.yml")]
    for path in paths:
        path.write_text(written[f"rules/{path.name}"])
    return paths


def evaluated(promtool: str, text: str, folder: Path) -> list[Told]:
    """What the rule engine has firing in each minute."""
    path = folder / "cases.yml"
    path.write_text(text)
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    firing = told(output)
    assert firing or done.returncode == 0, output[-2000:]
    return firing


def alerts_of(rules: Sequence[Path]) -> list[str]:
    """The names of all alerts."""
    groups = [group for path in rules for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]


def accepts(address: str) -> bool:
    """Whether Alertmanager listens yet."""
    try:
        with DIRECT.open(f"http://{address}/-/ready", timeout=5):
            return True
    except OSError:
        return False


def test_of_healthy_runs_nothing_arrives(promtool: str, recording: Recording, rules: Sequence[Path], tmp_path: Path) -> None:
    """No alert is active in any minute."""
    firing = evaluated(promtool, cases(recording, HEALTHY, alerts_of(rules), rules), tmp_path)
    assert [(alert.at_s // 60, alert.labels["run_id"], alert.labels["alertname"]) for alert in firing] == []


def test_of_sick_runs_the_right_alert_arrives_once_with_its_culprit_and_resolves(
    promtool: str,
    program: Callable[[str], str],
    recording: Recording,
    rules: Sequence[Path],
    free_port: Callable[[], int],
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    """What arrives of each run, in order, is all that is expected of it; what follows from something worse does not arrive."""
    command = alertmanager_command(program("prometheus-alertmanager"))
    active = evaluated(promtool, cases(recording, SICK, alerts_of(rules), rules), tmp_path)
    arrived: list[dict[str, Any]] = []

    def webhook(request: BaseHTTPRequestHandler) -> bytes:
        arrived.append(json.loads(request.rfile.read(int(request.headers["Content-Length"]))))
        return b""

    with serving(webhook) as receiver:
        address = start_alertmanager(start, command, tmp_path, free_port(), receiver, group_wait_ms=1200)
        wait_until(lambda: accepts(address))
        deliver(address, active_sets(active), arrived)
    for run, expected in EXPECTED.items():
        firing = of_run(arrived, run, "firing")
        assert [(to, alert["labels"]["alertname"]) for to, alert in firing] == [(to, name) for to, name, _ in expected], run
        for (_, alert), (_, _, culprit) in zip(firing, expected, strict=True):
            assert re.search(culprit, alert["annotations"]["description"]), alert
        ended = {to for to, _ in of_run(arrived, run, "resolved")}
        assert ended == {to for to, _, _ in expected} - OUTLIVED.get(run, set()), run


SEVERITIES = {rule.alert: rule.severity for group in alert_groups() for rule in group.rules if isinstance(rule, Alert)}
ALERTMANAGER = yaml.safe_load((ROOT / "deploy" / "alertmanager" / "alertmanager.yml").read_text())


def test_amtool_is_content(program: Callable[[str], str], checkout: Path) -> None:
    """And a page goes to the pager, everything else to the tickets."""
    path = checkout / "deploy" / "alertmanager" / "alertmanager.yml"
    subprocess.run([program("amtool"), "check-config", path], check=True, capture_output=True)
    for severity, receiver in (("page", "pager"), ("ticket", "tickets")):
        arguments = ["config", "routes", "test", f"--config.file={path}", f"severity={severity}", "run_id=a"]
        done = subprocess.run([program("amtool"), *arguments], check=True, capture_output=True, text=True)
        assert done.stdout.strip() == receiver


def test_only_alerts_that_exist_are_named_and_no_ticket_silences_a_page() -> None:
    """A run that hangs because a rank died wakes somebody up all the same; each cluster's run is a notification of its own.

    That a run is down or gone explains the ranks that are missing, and the machines that it does not use.
    """
    assert ALERTMANAGER["route"]["group_by"] == [*RUN]
    follows = set()
    for rule in ALERTMANAGER["inhibit_rules"]:
        assert rule["equal"] == [*RUN]
        sources, targets = (rule[f"{side}_matchers"][0].split('"')[1].split("|") for side in ("source", "target"))
        assert {SEVERITIES[name] for name in sources} == {"page"} or {SEVERITIES[name] for name in targets} == {"ticket"}
        follows |= set(product(sources, targets))
    assert follows >= set(product(("TorchobsRunDown", "TorchobsTelemetryGone"), ("TorchobsRanksMissing", "TorchobsGoodputLow")))
