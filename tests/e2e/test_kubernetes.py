"""Life in a pod, on a real cluster: the shipped Job, exporters that are broken, a trainer that is killed, signals.

Asks KUBECONFIG for the cluster, and for images that it has; `make kube-test` builds and hands them over.
"""

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests import support
from tests.exporters import value_on
from tests.kubernetes.cluster import (
    OOM_KILLED,
    PORT,
    Namespace,
    Pod,
    environment,
    get,
    printed_steps,
)
from tests.kubernetes.jobs import ARBITRARY_UID, IN_A_CLUSTER, SHIPPED, exporter_of, job, scripts, trainer_of
from tests.prometheus_server import PrometheusServer, newest_prometheus
from tests.support import wait_until

pytestmark = IN_A_CLUSTER


def trains() -> dict[str, Any]:
    """As shipped; long enough for Prometheus to find it."""
    return job("trains", "450")


def broken() -> dict[str, Any]:
    """Three sidecars, each broken in a way of its own: its web configuration, its directory and values, its port."""
    made = job("broken", "150")
    containers = made["spec"]["template"]["spec"]["initContainers"]
    first = containers.pop()
    first["resources"] = {kind: {"cpu": "150m", "memory": "128Mi"} for kind in ("requests", "limits")}
    for number, (name, variables) in enumerate(BROKEN.items()):
        one = copy.deepcopy(first)
        address = {"TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS": f":{PORT + number}"} | variables
        containers.append(one | {"name": name, "ports": [], "env": environment(**address), "tty": name == "values"})
    return made


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


def killed() -> dict[str, Any]:
    """Its first pod takes memory until the kernel ends it; then it is tried again."""
    made = job("killed", "400", "60", completionMode="Indexed", completions=1, backoffLimitPerIndex=1)
    del made["spec"]["backoffLimit"]
    field = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"}
    trainer_of(made)["env"].append({"name": "FAILURES", "valueFrom": {"fieldRef": field}})
    trainer_of(made)["resources"]["limits"]["memory"] = "640Mi"
    return made


def long() -> dict[str, Any]:
    """Trains until it is deleted; every container as the user of its own image or manifest, together by fsGroup alone."""
    made = job("long", "100000")
    pod = made["spec"]["template"]["spec"]
    del pod["securityContext"]["runAsUser"]
    trainer_of(made)["securityContext"] = trainer_of(made)["securityContext"] | {"runAsUser": 1000}
    pod["volumes"].append({"name": "socket", "emptyDir": {}})
    exporter_of(made)["volumeMounts"].append({"name": "socket", "mountPath": "/run/exporter"})
    exporter_of(made)["env"] = environment(TORCHOBS_EXPORTER_API_SOCKET="/run/exporter/api.sock")
    return made


def brief() -> dict[str, Any]:
    """Over before its exporter, which has little of a core, has loaded."""
    made = job("brief")
    trainer_of(made)["command"] = ["true"]
    exporter_of(made)["resources"] = {kind: {"cpu": "50m", "memory": "128Mi"} for kind in ("requests", "limits")}
    return made


@dataclass(frozen=True, slots=True)
class Stage:
    """All of them, running."""

    namespace: Namespace
    prometheus: PrometheusServer

    def completed(self, name: str) -> list[Pod]:
        """The pods of a Job that has completed."""
        wait_until(lambda: self.namespace.job_condition(name), timeout_s=600, interval_s=1.0)
        assert self.namespace.job_condition(name) == "Complete"
        return self.namespace.pods(name)

    def running(self, name: str) -> Pod:
        """The only pod of a Job, once its exporter answers."""

        def answering() -> Pod | None:
            pods = self.namespace.pods(name)
            return pods[0] if pods and pods[0].ip and get(f"{pods[0].ip}:{PORT}", "/-/ready")[0] else None

        found = wait_until(answering, timeout_s=600, interval_s=1.0)
        assert found is not None
        return found

    def scraped(self, metric: str, pod: Pod, **labels: str) -> float:
        """The last value that Prometheus has of a pod's metric, though the pod has ended since."""
        chosen = "".join(f',{name}="{text}"' for name, text in labels.items())
        return self.prometheus.value(f'last_over_time({metric}{{pod="{pod.name}"{chosen}}}[1h])')


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """All Jobs at once, and a Prometheus outside the cluster that finds their pods as a PodMonitor would."""
    program = newest_prometheus(2)
    assert program, support.why_missing("prometheus")
    with Namespace() as namespace:
        settings = {"scrape_configs": [scraping(namespace.name)]}
        with PrometheusServer(program, interval="1s", settings=settings) as prometheus:
            namespace.apply(scripts("pod.py"), trains(), broken(), killed(), long(), brief())
            yield Stage(namespace, prometheus)


def scraping(namespace: str) -> Mapping[str, object]:
    """What the operator makes of `podmonitor.yaml`, in small."""
    monitor = yaml.safe_load((SHIPPED / "podmonitor.yaml").read_text())["spec"]
    ((label, text),) = monitor["selector"]["matchLabels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    return {
        "job_name": "torchobs",
        "kubernetes_sd_configs": [
            {"role": "pod", "kubeconfig_file": os.environ["KUBECONFIG"], "namespaces": {"names": [namespace]}}
        ],
        "relabel_configs": [
            {"source_labels": [f"__meta_kubernetes_pod_label_{label}"], "regex": text, "action": "keep"},
            {"source_labels": ["__meta_kubernetes_pod_container_port_name"], "regex": endpoint["port"], "action": "keep"},
            {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "(Failed|Succeeded)", "action": "drop"},
            {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
        ],
    }


def test_the_shipped_manifests_are_strictly_valid(stage: Stage) -> None:
    """As they are, with no field that Kubernetes does not know, and within Pod Security `restricted`."""
    path = str(SHIPPED / "job-with-sidecar.yaml")
    assert "created" in stage.namespace.kubectl("create", "--dry-run=server", "--validate=strict", "-f", path)


def test_broken_exporters_keep_no_training_from_its_end(stage: Stage) -> None:
    """Each serves what it can and says what is wrong; none exits before the training has; the Job completes."""
    pod = stage.running("broken")
    wait_until(lambda: all(get(f"{pod.ip}:{PORT + number}", "/-/ready")[0] for number in (0, 1)), timeout_s=600)
    assert get(f"{pod.ip}:{PORT}")[0] == 503
    status, page = get(f"{pod.ip}:{PORT + 1}")
    assert (status, value_on(page, "torchobs_exporter_config_ok")) == (200, 0)
    (pod,) = stage.completed("broken")
    for name in BROKEN:
        assert (pod.container(name)["restartCount"], pod.ended(name)["exitCode"]) == (0, 0)
    said = {name: stage.namespace.logs(pod, name) for name in BROKEN}
    assert "nothing is served" in said["web-config"]
    assert "cannot listen on :10960" in said["port"]
    assert all(word in said["values"] for word in ("/nowhere is not there yet", "'soon'", "'nonsense'", "no Unix socket"))
    assert printed_steps(stage.namespace.logs(pod, "trainer")) == 150


def test_prometheus_has_the_exact_end_of_a_job(stage: Stage) -> None:
    """As any user of the cluster's choice: the last step and that it finished, though the pod ended right after it."""
    (pod,) = stage.completed("trains")
    assert pod.content["spec"]["securityContext"]["runAsUser"] == ARBITRARY_UID
    assert (pod.container("torchobs")["restartCount"], pod.ended("torchobs")["exitCode"]) == (0, 0)
    assert printed_steps(stage.namespace.logs(pod, "trainer")) == 450
    assert stage.scraped("torchobs_steps_total", pod) == 450
    assert stage.scraped("torchobs_rank_exit", pod, reason="finished") == 1
    (info,) = stage.prometheus.query(f'last_over_time(torchobs_rank_info{{pod="{pod.name}"}}[1h])')
    uid = json.loads(stage.namespace.kubectl("get", "job", "trains", "-o", "json"))["metadata"]["uid"]
    assert (info.labels["job_name"], info.labels["run_id"]) == ("trains", uid)


def test_an_exporter_that_still_loads_hears_that_the_training_has_ended(stage: Stage) -> None:
    """The kernel drops a signal that a container's first process does not handle; the pod does not wait for its grace."""
    (pod,) = stage.completed("brief")
    assert pod.ended("torchobs")["exitCode"] == 0  # killed at the end of the grace, it would be 137


def test_commands_and_the_page_reach_the_pod_only_from_inside(stage: Stage) -> None:
    """The scrape address has metrics and health; a port-forward has the page and the API; a command goes by the socket."""
    pod = stage.running("long")
    wait_until(lambda: value_on(get(f"{pod.ip}:{PORT}")[1], "torchobs_steps_total") or 0, timeout_s=600)
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


def test_the_first_signal_drains_and_the_second_ends(stage: Stage) -> None:
    """A scraper that it has seen does not come again: it waits, and serves; then it goes at once, and loses nothing."""
    pod = stage.running("long")
    seen = {"User_Agent": "somebody-else", "X_Prometheus_Scrape_Timeout_Seconds": "5"}
    assert get(f"{pod.ip}:{PORT}", **seen)[0] == 200
    terminate = ["exec", pod.name, "-c", "torchobs", "--", "python3", "-c", "import os; os.kill(1, 15)"]
    stage.namespace.kubectl(*terminate)
    wait_until(lambda: "waiting for the final state" in stage.namespace.logs(pod, "torchobs"), timeout_s=120, interval_s=0.5)
    status, page = get(f"{pod.ip}:{PORT}")
    before = value_on(page, "torchobs_steps_total")
    assert (status, bool(before)) == (200, True)
    stage.namespace.kubectl(*terminate)
    restarted = wait_until(lambda: _restarted(stage), timeout_s=600, interval_s=0.5)
    assert restarted is not None
    assert restarted.container("torchobs")["lastState"]["terminated"]["exitCode"] == 0
    wait_until(lambda: (value_on(get(f"{pod.ip}:{PORT}")[1], "torchobs_steps_total") or 0) > (before or 0), timeout_s=600)
    assert restarted.container("trainer")["restartCount"] == 0


def _restarted(stage: Stage) -> Pod | None:
    (pod,) = stage.namespace.pods("long")
    return pod if pod.container("torchobs").get("restartCount") else None


def test_a_rank_that_the_kernel_ends_is_shown_with_its_last_step_and_the_next_counts_anew(stage: Stage) -> None:
    """Out of memory by the container's limit; the Job's next pod is the same run, and another life of the rank."""
    first, second = stage.completed("killed")
    assert first.ended("trainer")["exitCode"] == OOM_KILLED
    last = printed_steps(stage.namespace.logs(first, "trainer"))
    assert stage.scraped("torchobs_steps_total", first) in {last, last + 1}  # it may die before it prints a step it has taken
    assert stage.scraped("torchobs_rank_exit", first, reason="out_of_memory") == 1
    assert (first.container("torchobs")["restartCount"], first.ended("torchobs")["exitCode"]) == (0, 0)
    assert stage.scraped("torchobs_steps_total", second) == printed_steps(stage.namespace.logs(second, "trainer")) == 400
    assert stage.scraped("torchobs_rank_exit", second, reason="finished") == 1
    infos = stage.prometheus.query('last_over_time(torchobs_rank_info{job_name="killed"}[1h])')
    assert {info.labels["pod"] for info in infos} == {first.name, second.name}
    assert len({(info.labels["run_id"], info.labels["rank"]) for info in infos}) == 1
