"""Trainings on a real cluster as the chart's Prometheus, dashboards and Alertmanager see them.

One that blows up, and one whose node is drained. Needs what `make kube-test` gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.dashboards import answered
from tests.kubernetes.jobs import IN_A_CLUSTER, job, scripts
from tests.kubernetes.stage import STARTS_S, Stage, monitored, torchrun
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.kubernetes.cluster import Pod

pytestmark = IN_A_CLUSTER

DRAINED = "torchobs-test-drained"


def drained() -> dict[str, Any]:
    """Its pod has a label that no other pod of the cluster has."""
    manifest = torchrun(job("drained", "100000"))
    manifest["spec"]["template"]["metadata"]["labels"][DRAINED] = "yes"
    return manifest


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "explodes": lambda: job("explodes", script="sick_pod.py"),
    "drained": drained,
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """All Jobs at once."""
    folder, names = tmp_path_factory.mktemp("alertmanager"), ("pod.py", "sick_pod.py")
    with monitored(folder, scripts(*names), *(make() for make in JOBS.values())) as running:
        yield running


def test_of_a_run_that_blows_up_a_page_names_run_node_and_pod(stage: Stage) -> None:
    """From the loss in a pod to the pager's webhook."""
    alert = stage.told("explodes", "TorchobsLossNotFinite")
    (pod,) = stage.namespace.pods("explodes")
    assert (alert["receiver"], alert["status"]) == ("pager", "firing")
    whose = {"job_name": "explodes", "run_id": stage.uid("explodes"), "namespace": stage.namespace.name}
    assert whose.items() <= alert["labels"].items()
    assert f"rank 0 on {pod.content['spec']['nodeName']} in pod {pod.name}: " in alert["annotations"]["description"]
    shown = answered(stage.prometheus, stage.began_s, stage.uid("explodes"), "torchobs-run", "Alerts of this run")
    assert "TorchobsLossNotFinite" in {series.labels["alertname"] for series in shown}


def test_a_drained_node_s_training_is_terminated_and_wakes_nobody(stage: Stage) -> None:
    """By `kubectl drain`: SIGTERM, and its grace. The last state is scraped; the Job makes another pod, of the same run."""
    pod, run = stage.training("drained"), stage.uid("drained")
    node = pod.content["spec"]["nodeName"]
    drain = ("drain", node, f"--pod-selector={DRAINED}=yes", "--delete-emptydir-data", "--timeout=120s")
    try:
        stage.namespace.kubectl(*drain)
    finally:
        stage.namespace.kubectl("uncordon", node)
    exits = stage.prometheus.query(f'last_over_time(torchobs_rank_exit{{pod="{pod.name}"}}[1h]) == 1')
    assert [series.labels["reason"] for series in exits] == ["terminated"]
    stage.assert_silence_of(run)

    def again() -> Pod | None:
        return next((other for other in stage.namespace.pods("drained") if other.name != pod.name), None)

    wait_until(again, timeout_s=STARTS_S, interval_s=0.5)
    wait_until(lambda: lives(stage, run) == 2, timeout_s=STARTS_S, interval_s=0.5)


def lives(stage: Stage, run: str) -> int:
    """How many pods a run has had."""
    return len(
        {series.labels["pod"] for series in stage.prometheus.query(f'last_over_time(torchobs_rank_info{{run_id="{run}"}}[1h])')}
    )
