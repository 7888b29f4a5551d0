"""How pods with the sidecar end on a real cluster, with scrapes each 15 s and each 30 s, and rules once a minute.

Two Prometheus watch them from one address. Needs what `make kube-test` gives, and a cluster that serves
MutatingAdmissionPolicy.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from tests.kubernetes.cluster import PORT, get
from tests.kubernetes.injection import job, pod_template, require_policy
from tests.kubernetes.jobs import EXPORTER, IN_A_CLUSTER, scripts
from tests.kubernetes.stage import STARTS_S, Stage, monitored
from tests.support import wait_until
from torchobs.rules.recordings import LEFT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.prometheus_server import PrometheusServer

pytestmark = IN_A_CLUSTER

INTERVAL_S, TIMEOUT_S, OWN_S = 30.0, 10.0, 5.0
"""Of the slower Prometheus, and what the documentation adds to them for the end of a pod"""
STEPS, LONG = "4000", "100000"
"""The first takes more than two scrapes of the slower Prometheus"""
FAILS = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0]); raise RuntimeError('diverged')"
PATIENT_POLICY = {
    "rules": [
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [137, 143]}},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}},
    ]
}
"""A killed pod is tried again, and a script's own error is the Job's end: kubelet reads the exit codes of sidecars, too"""


def training(name: str, *command: str, grace_s: int | None = None, **spec: object) -> dict[str, Any]:
    """A labelled Job whose script is its container's first process."""
    template = pod_template("true", ["python3", *command])
    if grace_s is not None:
        template["spec"]["terminationGracePeriodSeconds"] = grace_s
    return job(name, template, **spec)


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "finishes": lambda: training("finishes", "/script/pod.py", STEPS),
    "fails": lambda: training(
        "fails", "-c", FAILS, "/script/pod.py", STEPS, grace_s=10, backoffLimit=3, podFailurePolicy=PATIENT_POLICY
    ),
    "deleted": lambda: training("deleted", "/script/pod.py", LONG),
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """All Jobs at once."""
    require_policy()
    folder, objects = tmp_path_factory.mktemp("alertmanager"), [scripts("pod.py"), *(make() for make in JOBS.values())]
    with monitored(folder, *objects, scrapes=("15s", "30s"), evaluation="1m", exporter=EXPORTER) as stage:
        yield stage


def pod_of(stage: Stage, name: str) -> str:
    """The name of a Job's first pod, once both Prometheus have scraped its steps twice. The pod may be gone by then."""
    query = f'count_over_time(torchobs_steps_total{{run_id="{stage.uid(name)}"}}[1h])'

    def scraped() -> bool:
        return all(any(series.value >= 2 for series in watching.query(query)) for watching in both(stage))

    wait_until(scraped, timeout_s=STARTS_S, interval_s=1.0)
    return stage.prometheus.query(query)[0].labels["pod"]


def both(stage: Stage) -> tuple[PrometheusServer, PrometheusServer]:
    """The Prometheus of 15 s and the one of 30 s."""
    return stage.prometheus, stage.slow


def reason(watching: PrometheusServer, pod: str) -> list[str]:
    """How a pod's rank ended, as a Prometheus has it."""
    exits = watching.query(f'last_over_time(torchobs_rank_exit{{pod="{pod}"}}[1h]) == 1')
    return [series.labels["reason"] for series in exits]


def assert_both_know(stage: Stage, pod: str, run: str, expected: str) -> None:
    """Both have the end of the pod's rank, no state of it afterwards is alive, and no rule takes it for vanished."""

    def known() -> bool:
        left = f'last_over_time({LEFT}{{run_id="{run}"}}[1h]) > 0'  # a Job may have ended long before it is asked
        return all(reason(watching, pod) and watching.query(left) for watching in both(stage))

    wait_until(known, timeout_s=180.0, interval_s=2.0)
    for watching in both(stage):
        assert reason(watching, pod) == [expected]
        assert watching.value(f'last_over_time(torchobs_rank_up{{pod="{pod}"}}[1h])') == 0
        assert [alert.name for alert in watching.alerts() if alert.labels.get("run_id") == run] == []


def finished_s(ended: Mapping[str, Any]) -> float:
    """When a container ended, in Unix time."""
    return datetime.fromisoformat(str(ended["finishedAt"]).replace("Z", "+00:00")).timestamp()


@pytest.mark.parametrize(("name", "condition", "exit_code"), [("finishes", "Complete", 0), ("fails", "Failed", 1)])
def test_a_pod_ends_with_its_training_and_both_prometheus_have_its_last_step(
    stage: Stage, name: str, condition: str, exit_code: int
) -> None:
    """Within one scrape of the slower one; the sidecar ends with 0 however short the grace is, and changes no Job's outcome."""
    pod = pod_of(stage, name)
    ended = stage.ended(name, condition)
    assert ended.name == pod, "no second pod"
    assert (ended.ended("main")["exitCode"], ended.ended("torchobs")["exitCode"]) == (exit_code, 0)
    waited_s = finished_s(ended.ended("torchobs")) - finished_s(ended.ended("main"))
    assert waited_s <= INTERVAL_S + TIMEOUT_S + OWN_S + 1.0  # times are whole seconds
    if name == "finishes":
        for watching in both(stage):
            assert watching.value(f'last_over_time(torchobs_steps_total{{pod="{pod}"}}[1h])') == float(STEPS)
            assert reason(watching, pod) == ["finished"]


def test_a_deleted_training_that_sigterm_does_not_end_has_its_end(stage: Stage) -> None:
    """The first process of a container trains on until it is killed; meanwhile its exporter says what will become of it."""
    pod, run = pod_of(stage, "deleted"), stage.uid("deleted")
    (address,) = (f"{living.ip}:{PORT}" for living in stage.namespace.pods("deleted"))
    stage.namespace.kubectl("delete", "job", "deleted", "--cascade=background", "--wait=false")
    wait_until(lambda: 'reason="terminated"' in get(address, User_Agent="curl")[1], timeout_s=60.0, interval_s=0.5)
    assert_both_know(stage, pod, run, "terminated")
