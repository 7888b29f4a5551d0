"""Life in a pod, on a real cluster: the shipped Job, broken exporters, a trainer and a sidecar that the kernel ends.

The chart's Prometheus and Alertmanager watch it. Asks KUBECONFIG for the cluster, and for images that it has; `make kube-test`
builds and hands them over.
"""

import copy
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.exporters import value_on
from tests.kubernetes.cluster import OOM_KILLED, PORT, Pod, environment, get, printed_steps
from tests.kubernetes.jobs import ARBITRARY_UID, IN_A_CLUSTER, SHIPPED, exporter_of, job, scripts, trainer_of
from tests.kubernetes.stage import ENDS_S, STARTS_S, Stage, monitored, steps
from tests.support import wait_until

pytestmark = IN_A_CLUSTER

# The kernel takes the largest process by its score: of the sidecar's its first, and not one of these.
EXHAUST = """
import os, time
open("/proc/1/oom_score_adj", "w").write("1000")
for _ in range(40):
    if not os.fork():
        held = b"x" * (6 << 20)
        time.sleep(30)
time.sleep(30)
"""


def broken() -> dict[str, Any]:
    """Three sidecars, each broken in a way of its own: its web configuration, its directory and values, its port."""
    manifest = job("broken", "150")
    containers = manifest["spec"]["template"]["spec"]["initContainers"]
    first = containers.pop()
    first["resources"] = {kind: {"cpu": "150m", "memory": "128Mi"} for kind in ("requests", "limits")}
    for number, (name, variables) in enumerate(BROKEN.items()):
        sidecar = copy.deepcopy(first)
        address = {"TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS": f":{PORT + number}"} | variables
        containers.append(sidecar | {"name": name, "ports": [], "env": environment(**address), "tty": name == "values"})
    return manifest


BROKEN = {
    "web-config": {"TORCHOBS_EXPORTER_WEB_CONFIG_FILE": "/proc/1/mem"},
    "values": {
        "TORCHOBS_EXPORTER_FLIGHT_DIR": "/nowhere",
        "TORCHOBS_EXPORTER_GRACE": "soon",
        "TORCHOBS_EXPORTER_OTLP_ENDPOINT": "nonsense",
        "TORCHOBS_EXPORTER_API_SOCKET": "/read/only.sock",
        "TORCHOBS_EXPORTER_API_TOKEN_FILE": "/nowhere/token",
    },
    "port": {"TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS": f":{PORT}"},
}


def hoards() -> dict[str, Any]:
    """Its first pod takes memory until the kernel ends it; then it is tried again."""
    manifest = job("hoards", "400", "60", completionMode="Indexed", completions=1, backoffLimitPerIndex=1)
    del manifest["spec"]["backoffLimit"]
    field = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"}
    trainer_of(manifest)["env"].append({"name": "FAILURES", "valueFrom": {"fieldRef": field}})
    trainer_of(manifest)["resources"]["limits"]["memory"] = "640Mi"
    return manifest


def long() -> dict[str, Any]:
    """Trains until it is deleted; every container as the user of its own image or manifest, together by fsGroup alone."""
    manifest = job("long", "100000")
    pod = manifest["spec"]["template"]["spec"]
    del pod["securityContext"]["runAsUser"]
    trainer_of(manifest)["securityContext"] = trainer_of(manifest)["securityContext"] | {"runAsUser": 1000}
    pod["volumes"].append({"name": "socket", "emptyDir": {}})
    exporter_of(manifest)["volumeMounts"].append({"name": "socket", "mountPath": "/run/exporter"})
    exporter_of(manifest)["env"] = environment(TORCHOBS_EXPORTER_API_SOCKET="/run/exporter/api.sock")
    return manifest


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "broken": broken,
    "hoards": hoards,
    "long": long,
    "steady": lambda: job("steady", "100000"),
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """All Jobs at once."""
    folder = tmp_path_factory.mktemp("alertmanager")
    with monitored(folder, scripts("pod.py"), *(make() for make in JOBS.values())) as running:
        yield running


def test_the_shipped_manifests_are_strictly_valid(stage: Stage) -> None:
    """As they are, with no field that Kubernetes does not know, and within Pod Security `restricted`."""
    path = str(SHIPPED / "job-with-sidecar.yaml")
    assert "created" in stage.namespace.kubectl("create", "--dry-run=server", "--validate=strict", "-f", path)


def test_broken_exporters_keep_no_training_from_its_end(stage: Stage) -> None:
    """Each serves what it can and says what is wrong; none exits before the training has; the Job completes."""

    def serving() -> Pod | None:
        for pod in stage.namespace.pods("broken"):
            if pod.ip and all(get(f"{pod.ip}:{PORT + number}", "/-/ready")[0] for number in (0, 1)):
                return pod
        return None

    pod = wait_until(serving, timeout_s=STARTS_S, interval_s=0.5)
    assert pod is not None
    assert get(f"{pod.ip}:{PORT}")[0] == 503
    status, page = get(f"{pod.ip}:{PORT + 1}")
    assert (status, value_on(page, "torchobs_exporter_config_ok")) == (200, 0)
    pod = stage.ended("broken", "Complete")
    assert pod.content["spec"]["securityContext"]["runAsUser"] == ARBITRARY_UID
    for name in BROKEN:
        assert (pod.container(name)["restartCount"], pod.ended(name)["exitCode"]) == (0, 0)
    said = {name: stage.namespace.logs(pod, name) for name in BROKEN}
    assert "nothing is served" in said["web-config"]
    assert "cannot listen on :10960" in said["port"]
    assert all(word in said["values"] for word in ("/nowhere is not there yet", "'soon'", "'nonsense'", "no Unix socket"))
    assert printed_steps(stage.namespace.logs(pod, "trainer")) == 150


def test_commands_and_the_page_reach_the_pod_only_from_inside(stage: Stage) -> None:
    """The scrape address has metrics and health; a port-forward has the page and the API; a command goes by the socket."""
    pod = stage.training("long")
    assert get(f"{pod.ip}:{PORT}", "/")[0] == 403
    assert get(f"{pod.ip}:{PORT}", "/api/v1/ranks")[0] in {401, 403}
    with stage.namespace.forwarded(pod) as address:
        status, ranks = get(address, "/api/v1/ranks")
        assert (status, json.loads(ranks)["ranks"][0]["state"]) == (200, "alive")
        assert get(address, "/")[0] == 200
    command = ["torchobs", "stacks", "0", "--socket", "/run/exporter/api.sock"]
    said = stage.namespace.kubectl("exec", pod.name, "-c", "torchobs", "--", *command)
    assert re.search(r'"/script/pod.py", line \d+ in <module>', said)
    checked = stage.namespace.kubectl("exec", pod.name, "-c", "torchobs", "--", "torchobs", "doctor")
    assert checked.endswith("\nAll is well.\n"), checked
    assert pod.content["spec"]["securityContext"].get("runAsUser") is None


def test_a_rank_that_the_kernel_ends_is_shown_with_its_last_step_and_the_next_counts_anew(stage: Stage) -> None:
    """Out of memory by the container's limit; the Job's next pod is the same run, and another life of the rank."""
    wait_until(partial(stage.namespace.job_condition, "hoards"), timeout_s=ENDS_S, interval_s=0.5)
    first, second = stage.namespace.pods("hoards")
    assert first.ended("trainer")["exitCode"] == OOM_KILLED
    last = printed_steps(stage.namespace.logs(first, "trainer"))
    assert stage.scraped("torchobs_steps_total", first) in {last, last + 1}  # it may die before it prints a step it has taken
    assert stage.scraped("torchobs_rank_exit", first, reason="out_of_memory") == 1
    assert (first.container("torchobs")["restartCount"], first.ended("torchobs")["exitCode"]) == (0, 0)
    assert stage.scraped("torchobs_steps_total", second) == printed_steps(stage.namespace.logs(second, "trainer")) == 400
    assert stage.scraped("torchobs_rank_exit", second, reason="finished") == 1
    infos = stage.prometheus.query('last_over_time(torchobs_rank_info{job_name="hoards"}[1h])')
    assert {info.labels["pod"] for info in infos} == {first.name, second.name}
    assert len({(info.labels["run_id"], info.labels["rank"]) for info in infos}) == 1


def test_a_killed_sidecar_comes_back_and_has_lost_nothing(stage: Stage) -> None:
    """Out of memory by its own limit: the training does not notice, and the new one has all that the first had."""
    before = stage.training("steady")
    steps_before = steps(before)
    exhaust = ["kubectl", "-n", stage.namespace.name, "exec", before.name, "-c", "torchobs", "--", "python3", "-c", EXHAUST]
    subprocess.run(exhaust, capture_output=True, check=False)  # what becomes of it is the kernel's choice

    def restarted() -> Pod | None:
        (pod,) = stage.namespace.pods("steady")
        return pod if pod.container("torchobs")["restartCount"] else None

    pod = wait_until(restarted, timeout_s=STARTS_S, interval_s=0.3)
    assert pod is not None
    last = pod.container("torchobs")["lastState"].get("terminated", {})  # empty at times: kubernetes/kubernetes#101044
    assert last.get("exitCode", OOM_KILLED) == OOM_KILLED

    def has_all() -> bool:  # a page is of the moment before; lost steps would be missing at any moment
        return steps_before < printed_steps(stage.namespace.logs(pod, "trainer")) <= steps(pod)

    assert wait_until(has_all, timeout_s=STARTS_S, interval_s=0.2)
    assert pod.container("trainer")["restartCount"] == 0
    page = get(f"{pod.ip}:{PORT}", User_Agent="tests")[1]
    assert value_on(page, "torchobs_rank_state", state="alive") == 1
    assert value_on(page, "torchobs_steps_total", run_id=stage.uid("steady")) is not None
