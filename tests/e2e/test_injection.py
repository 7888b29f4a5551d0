"""One label on a pod, on a real cluster: it is watched to its end, and the chart's admission policy never stops a training.

Asks KUBECONFIG for a cluster that serves MutatingAdmissionPolicy, and for the images of `make kube-test`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.kubernetes.cluster import Namespace, Pod
from tests.kubernetes.injection import JOBSET, injection, job, pod_template, require_policy
from tests.kubernetes.jobs import EXPORTER, IN_A_CLUSTER, scripts
from tests.kubernetes.stage import Stage, monitored
from tests.support import wait_until

pytestmark = IN_A_CLUSTER

# The trainer's image sets PYTHONPATH=/opt/site:/opt/torch, and has torchobs and what it requires in the first: without that it
# lacks them, and keeps its torch only as long as nobody replaces the variable.
NO_TORCHOBS = """
import runpy, sys
sys.path.remove("/opt/site")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STEPS = 200


def labelled() -> dict[str, Any]:
    """An image with torchobs, two pods of one Job, whose torchruns meet at the first one's address.

    A cluster for tests may lack DNS: the address comes by a ConfigMap, for which both trainers wait (`introduce`).
    """
    address = {"name": "FIRST", "valueFrom": {"configMapKeyRef": {"name": "rendezvous", "key": "address"}}}
    options = "--nnodes 2 --nproc-per-node 1 --node-rank $JOB_COMPLETION_INDEX --master-addr $FIRST --master-port 29500"
    command = ["sh", "-c", f"exec python3 -m torch.distributed.run {options} /script/pod.py {STEPS}"]
    return job("labelled", pod_template("true", command, address), completions=2, parallelism=2, completionMode="Indexed")


def introduce(namespace: Namespace) -> None:
    """Let both pods of that Job know the first one's address, which it has once its sidecar starts."""

    def first() -> str:
        pods = in_order(namespace.pods("labelled"))
        return pods[0].ip if len(pods) == 2 else ""

    address = wait_until(first, timeout_s=600, interval_s=0.3)
    namespace.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "rendezvous"}, "data": {"address": address}})


def automatic() -> dict[str, Any]:
    """An image without torchobs, and a script that does not know it; afterwards `torchobs doctor`."""
    doctor = "PYTHONPATH=/opt/torch exec python3 /var/run/torchobs/site/torchobs doctor"
    command = ["sh", "-c", f'python3 -c "$0" /script/plain_training.py {STEPS} && {doctor}', NO_TORCHOBS]
    template = pod_template("auto", command, level="advanced")
    template["spec"]["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    template["spec"]["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    return job("automatic", template)


def with_keys() -> dict[str, Any]:
    """A Secret such as ssh wants it, which a group of the pod's would open to that group."""
    look = "print(oct(os.stat('/keys/id').st_mode & 0o777), flush=True)"
    program = f"import os, runpy; {look}; runpy.run_path('/script/pod.py', run_name='__main__')"
    template = pod_template("true", ["python3", "-c", program, str(STEPS)], fsgroup="false")
    template["spec"]["containers"][0]["volumeMounts"].append({"name": "keys", "mountPath": "/keys"})
    template["spec"]["volumes"].append({"name": "keys", "secret": {"secretName": "keys", "defaultMode": 0o400}})
    return job("keys", template)


def child_of_a_jobset(index: int) -> dict[str, Any]:
    """A Job as JobSet's controller (0.8.1, `constructJob` and `labelAndAnnotateObject`) makes one of two, by hand."""
    place = {
        "replicatedjob-name": "node",
        "replicatedjob-replicas": "2",
        "job-index": str(index),
        "job-global-index": str(index),
        "job-key": f"key-{index}",
    }
    labels = JOBSET | {f"jobset.sigs.k8s.io/{name}": text for name, text in place.items()}
    rank = {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-global-index']"}}}
    world = {"name": "WORLD_SIZE", "value": "2"}
    template = pod_template("true", ["python3", "/script/pod.py", str(STEPS)], rank, world)
    template["metadata"]["labels"] |= labels
    child = job(f"gpt-node-{index}", template, completionMode="Indexed", completions=1, parallelism=1)
    child["metadata"]["labels"] = labels
    return child


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One with the policy, Pod Security `restricted`, and all Jobs of these tests running."""
    require_policy()
    keys = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"id": "a key"}}
    jobs = (labelled(), automatic(), with_keys(), child_of_a_jobset(0), child_of_a_jobset(1))
    objects = (scripts("pod.py", "plain_training.py"), keys, *jobs)
    with monitored(tmp_path_factory.mktemp("alertmanager"), *objects, exporter=EXPORTER) as running:
        introduce(running.namespace)
        yield running


def completed(namespace: Namespace, name: str) -> list[Pod]:
    """The pods of a Job that has completed."""
    wait_until(partial(namespace.job_condition, name), timeout_s=600, interval_s=1.0)
    assert namespace.job_condition(name) == "Complete"
    return namespace.pods(name)


def printed(namespace: Namespace, pod: Pod) -> list[str]:
    """The steps that a script has printed, without torch's own warnings."""
    return [line for line in namespace.logs(pod, "main").splitlines() if line.isdecimal()]


def test_a_label_is_all_that_a_job_needs(stage: Stage) -> None:
    """Under `restricted` both pods meet and are watched to their last step, as the same run and job, and it completes."""
    pods = completed(stage.namespace, "labelled")
    assert len(pods) == 2
    whose = {"job_name": "labelled", "run_id": stage.uid("labelled")}
    assert [stage.scraped("torchobs_steps_total", pod, **whose) for pod in pods] == [STEPS, STEPS]
    ranks = {stage.scraped("torchobs_rank_info", pod, rank=str(rank)) for rank, pod in enumerate(in_order(pods))}
    assert ranks == {1}
    for pod in pods:
        assert stage.scraped("torchobs_world_size", pod, **whose) == 2
        assert printed(stage.namespace, pod)[-1] == str(STEPS)
        assert (pod.container("torchobs")["restartCount"], pod.ended("torchobs")["exitCode"]) == (0, 0)


def in_order(pods: list[Pod]) -> list[Pod]:
    """An indexed Job's pods by their index."""
    return sorted(pods, key=lambda pod: str(pod.content["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]))


def test_an_image_without_torchobs_is_watched_and_trains_to_its_end(stage: Stage) -> None:
    """A script that does not know torchobs, in an image that has none; the log is what it is without. Doctor finds all well."""
    (pod,) = completed(stage.namespace, "automatic")
    assert stage.scraped("torchobs_steps_total", pod, job_name="automatic", run_id=stage.uid("automatic")) == STEPS
    assert printed(stage.namespace, pod) == [str(step) for step in range(1, STEPS + 1)]
    said, doctor, checks = stage.namespace.logs(pod, "main").partition("ok    torchobs: ")
    assert "torchobs" not in said
    assert doctor, said
    assert "ok    injection: " in checks
    assert checks.endswith("\nAll is well.\n"), checks
    assert stage.namespace.logs(pod, "torchobs-copy") == ""


def test_a_key_stays_readable_for_its_owner_alone(stage: Stage) -> None:
    """Without a group both containers are one user, and the exporter reads the flight files all the same."""
    (pod,) = completed(stage.namespace, "keys")
    assert "0o400" in stage.namespace.logs(pod, "main").splitlines()
    assert "fsGroup" not in pod.content["spec"]["securityContext"]
    assert stage.scraped("torchobs_steps_total", pod, job_name="keys") == STEPS


@pytest.mark.usefixtures("stage")  # what the cluster serves is asked there
def test_a_pod_without_the_exporters_image_waits_for_another() -> None:
    """Kubernetes starts no training before its sidecar; the image of a pod that waits can be changed."""
    template = pod_template("true", ["true"])
    del template["spec"]["volumes"], template["spec"]["containers"][0]["volumeMounts"]
    with Namespace() as other, injection(other, "localhost/nobody-has-this:none"):
        other.apply(job("waits", template))

        def reason() -> str:
            pods = other.pods("waits")
            waiting = pods[0].container("torchobs").get("state", {}).get("waiting", {}) if pods else {}
            return str(waiting.get("reason"))

        assert wait_until(lambda: "Image" in reason(), timeout_s=60, interval_s=0.3)
        (waits,) = other.pods("waits")
        assert not waits.container("main")["started"]
        other.kubectl("set", "image", f"pod/{waits.name}", f"torchobs={EXPORTER}")
        assert [pod.name for pod in completed(other, "waits")] == [waits.name]
