"""How pods with the sidecar end on a real cluster, with scrapes each 15 s and each 30 s, and rules once a minute.

Two Prometheus watch them from one address. Needs what `make kube-test` gives, and a cluster that serves
MutatingAdmissionPolicy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from tests.kubernetes.cluster import PORT, Namespace, get
from tests.kubernetes.injection import job, pod_template, require_policy
from tests.kubernetes.jobs import EXPORTER, IN_A_CLUSTER, scripts
from tests.kubernetes.stage import STARTS_S, Stage, monitored
from tests.prometheus_server import PrometheusServer
from tests.support import wait_until
from torchobs.rules.recordings import LEFT

pytestmark = IN_A_CLUSTER

INTERVAL_S, TIMEOUT_S, OWN_S = 30.0, 10.0, 5.0
"""Of the slower Prometheus, and what the documentation adds to them for the end of a pod"""
STEPS, LONG = "4000", "100000"
"""The first takes more than two scrapes of the slower Prometheus"""
SLOT, URGENT = "torchobs.io~1slot", "torchobs-test-urgent"
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


def preempted() -> dict[str, Any]:
    """It has the node's only slot until a pod of a higher priority asks for it."""
    made = training("preempted", "/script/pod.py", LONG)
    slot = {"torchobs.io/slot": "1"}
    made["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "50m", **slot}, "limits": slot}
    return made


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "finishes": lambda: training("finishes", "/script/pod.py", STEPS),
    "fails": lambda: training(
        "fails", "-c", FAILS, "/script/pod.py", STEPS, grace_s=10, backoffLimit=3, podFailurePolicy=PATIENT_POLICY
    ),
    "deleted": lambda: training("deleted", "/script/pod.py", LONG),
    "late": lambda: training("late", "/script/pod.py", LONG, activeDeadlineSeconds=240),
    "preempted": preempted,
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """All Jobs at once."""
    require_policy()
    folder, made = tmp_path_factory.mktemp("alertmanager"), [scripts("pod.py"), *(make() for make in JOBS.values())]
    with slot(), monitored(folder, *made, scrapes=("15s", "30s"), evaluation="1m", exporter=EXPORTER) as stage:
        yield stage


@contextmanager
def slot() -> Iterator[None]:
    """A resource of which the node has one, and a priority by which a pod takes it from another."""
    with Namespace() as somewhere:
        (node, *_) = somewhere.kubectl("get", "nodes", "-o", "name").split()
        patch = partial(somewhere.kubectl, "patch", node, "--subresource=status", "--type=json", "-p")
        somewhere.apply(
            {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": URGENT}, "value": 1000}
        )
        patch(json.dumps([{"op": "add", "path": f"/status/capacity/{SLOT}", "value": "1"}]))
        try:
            yield
        finally:
            patch(json.dumps([{"op": "remove", "path": f"/status/capacity/{SLOT}"}]))
            somewhere.kubectl("delete", "priorityclass", URGENT)


def pod_of(stage: Stage, name: str) -> str:
    """The name of a Job's first pod, once both Prometheus have scraped its steps twice. The pod may be gone by then."""
    query = f'count_over_time(torchobs_steps_total{{run_id="{stage.uid(name)}"}}[1h])'

    def scraped() -> bool:
        return all(any(one.value >= 2 for one in watching.query(query)) for watching in both(stage))

    wait_until(scraped, timeout_s=STARTS_S, interval_s=1.0)
    return stage.prometheus.query(query)[0].labels["pod"]


def both(stage: Stage) -> tuple[PrometheusServer, PrometheusServer]:
    """The Prometheus of 15 s and the one of 30 s."""
    return stage.prometheus, stage.slow


def reason(watching: PrometheusServer, pod: str) -> list[str]:
    """How a pod's rank ended, as a Prometheus has it."""
    exits = watching.query(f'last_over_time(torchobs_rank_exit{{pod="{pod}"}}[1h]) == 1')
    return [one.labels["reason"] for one in exits]


def assert_both_know(stage: Stage, pod: str, run: str, expected: str) -> None:
    """Both have the end of the pod's rank, no state of it afterwards is alive, and no rule takes it for vanished."""

    def known() -> bool:
        left = f'last_over_time({LEFT}{{run_id="{run}"}}[1h]) > 0'  # a Job may have ended long before it is asked
        return all(reason(watching, pod) and watching.query(left) for watching in both(stage))

    wait_until(known, timeout_s=180.0, interval_s=2.0)
    for watching in both(stage):
        assert reason(watching, pod) == [expected]
        assert watching.value(f'last_over_time(torchobs_rank_up{{pod="{pod}"}}[1h])') == 0
        assert [one.name for one in watching.alerts() if one.labels.get("run_id") == run] == []


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


def test_a_grace_too_short_for_a_scrape_is_said_by_the_exporter(stage: Stage) -> None:
    """On its page, where a port-forward shows it, and in its log; the training's last steps may be lost."""
    ended = stage.ended("fails", "Failed")
    assert "the pod's grace of 10 s is too short for its scrapes" in stage.namespace.logs(ended, "torchobs")


def test_a_deleted_training_that_sigterm_does_not_end_has_its_end(stage: Stage) -> None:
    """The first process of a container trains on until it is killed; meanwhile its exporter says what will become of it."""
    pod, run = pod_of(stage, "deleted"), stage.uid("deleted")
    (address,) = (f"{one.ip}:{PORT}" for one in stage.namespace.pods("deleted"))
    stage.namespace.kubectl("delete", "job", "deleted", "--cascade=background", "--wait=false")
    wait_until(lambda: 'reason="terminated"' in get(address, User_Agent="curl")[1], timeout_s=60.0, interval_s=0.5)
    assert_both_know(stage, pod, run, "terminated")


def test_a_preempted_training_is_terminated_and_wakes_nobody(stage: Stage) -> None:
    """By a pod of a higher priority that needs its place."""
    pod, run = pod_of(stage, "preempted"), stage.uid("preempted")
    taker = training("taker", "-c", "pass")["spec"]["template"]
    taker["metadata"]["labels"] = {}
    taker["spec"] |= {"priorityClassName": URGENT, "containers": preempted()["spec"]["template"]["spec"]["containers"]}
    taker["spec"]["containers"][0]["command"] = ["true"]
    stage.namespace.apply({"apiVersion": "v1", "kind": "Pod", **taker, "metadata": {"name": "taker"}})
    assert_both_know(stage, pod, run, "terminated")


def test_a_training_past_its_deadline_is_terminated_and_wakes_nobody(stage: Stage) -> None:
    """`activeDeadlineSeconds` of its Job."""
    pod, run = pod_of(stage, "late"), stage.uid("late")
    wait_until(lambda: stage.namespace.job_condition("late") == "Failed", timeout_s=STARTS_S, interval_s=1.0)
    assert_both_know(stage, pod, run, "terminated")
