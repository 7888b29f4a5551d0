"""One label on a pod, on a real cluster: what the chart's admission policy makes of it, and that it never stops a training.

Asks KUBECONFIG for a cluster that serves MutatingAdmissionPolicy, and for the images of `make kube-test`.
"""

from collections.abc import Iterator
from functools import partial
from threading import Event, Thread
from typing import Any

import pytest

from tests import support
from tests.kubernetes.cluster import PORT, Namespace, Pod, get, value
from tests.kubernetes.injection import (
    RESTRICTED,
    Policy,
    admitted,
    annotated,
    injection,
    job,
    pod,
    pod_template,
    rendered,
    served_version,
    wait_for_injection,
)
from tests.kubernetes.jobs import EXPORTER, READY
from tests.support import wait_until

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.skipif(not READY, reason=f"{support.NEEDS_KUBERNETES}: KUBECONFIG, and `make kube-test`"),
]

SCRIPTS = support.ROOT / "tests" / "scripts"
# The trainer's image has torch apart from torchobs and what torchobs requires: by this path alone it lacks them.
NO_TORCHOBS = {"name": "PYTHONPATH", "value": "/opt/torch"}
UID = "0a7f8c1e-5a0e-4d0c-8c57-0c1a5c1f2b3d"
STEPS = 200
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"
JOBSET = {
    "jobset.sigs.k8s.io/jobset-name": "gpt",
    "jobset.sigs.k8s.io/jobset-uid": UID,
    "jobset.sigs.k8s.io/restart-attempt": "1",
}


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
    """An image without torchobs, and a script that does not know it."""
    return job(
        "automatic", pod_template("auto", ["python3", "/script/plain_training.py", str(STEPS)], NO_TORCHOBS, level="advanced")
    )


def own() -> dict[str, Any]:
    """An image with torchobs, given one more. What it says of its PYTHONPATH the annotation must: a variable replaces it."""
    program = "import torch, torchobs, sys; print(torchobs.__file__); print(sys.modules['sitecustomize'].__file__)"
    return job("own", pod_template("auto", ["python3", "-c", program], pythonpath="/opt/site:/opt/torch"))


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
    made = job(f"gpt-node-{index}", template, completionMode="Indexed", completions=1, parallelism=1)
    made["metadata"]["labels"] = labels
    return made


class Pages:
    """The last page of each pod's exporter, scraped each second as Prometheus would."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace, self._stop, self._latest = namespace, Event(), dict[str, str]()
        self._thread = Thread(target=self._scrape, daemon=True)
        self._thread.start()

    def __getitem__(self, pod: Pod) -> str:
        return self._latest[pod.name]

    def close(self) -> None:
        """Stop scraping."""
        self._stop.set()
        self._thread.join()

    def _scrape(self) -> None:
        while not self._stop.wait(1.0):
            for one in self._namespace.pods():
                if one.ip and (text := get(f"{one.ip}:{PORT}", User_Agent="tests", X_Prometheus_Scrape_Timeout_Seconds="2")[1]):
                    self._latest[one.name] = text


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    """One with the policy, Pod Security `restricted`, and all Jobs of these tests running."""
    if missing := support.why_missing("helm"):
        pytest.skip(missing)
    if not served_version():
        pytest.skip(f"{support.NEEDS_KUBERNETES} that serves MutatingAdmissionPolicy")
    scripts = {name: (SCRIPTS / name).read_text() for name in ("pod.py", "plain_training.py")}
    with Namespace() as made, injection(made, EXPORTER):
        made.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script"}, "data": scripts})
        wait_for_injection(made, pod())
        made.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"id": "a key"}})
        made.apply(labelled(), automatic(), own(), with_keys(), child_of_a_jobset(0), child_of_a_jobset(1))
        introduce(made)
        yield made


@pytest.fixture(scope="module")
def pages(namespace: Namespace) -> Iterator[Pages]:
    """What all of them show, from the beginning to the end."""
    made = Pages(namespace)
    yield made
    made.close()


def uid_of(namespace: Namespace, name: str) -> str:
    """A Job's UID."""
    return namespace.kubectl("get", "job", name, "-o", "jsonpath={.metadata.uid}")


def completed(namespace: Namespace, name: str) -> list[Pod]:
    """The pods of a Job that has completed."""
    wait_until(partial(namespace.job_condition, name), timeout_s=600, interval_s=1.0)
    assert namespace.job_condition(name) == "Complete"
    return namespace.pods(name)


def printed(namespace: Namespace, pod: Pod) -> list[str]:
    """What a script has printed, without torch's own warnings."""
    return [
        line for line in namespace.logs(pod, "main").splitlines() if line.isdecimal() or line.startswith(("/opt/s", "/var"))
    ]


def test_a_label_is_all_that_a_job_needs(namespace: Namespace, pages: Pages) -> None:
    """Under `restricted` both pods meet and are watched to their last step, as the same run and job, and it completes."""
    found = completed(namespace, "labelled")
    assert len(found) == 2
    whose = {"job_name": "labelled", "run_id": uid_of(namespace, "labelled")}
    assert [value(pages[one], "torchobs_steps_total", **whose) for one in found] == [STEPS, STEPS]
    ranks = {value(pages[one], "torchobs_rank_info", rank=str(rank)) for rank, one in enumerate(in_order(found))}
    assert ranks == {1}
    for one in found:
        assert value(pages[one], "torchobs_world_size", **whose) == 2
        assert printed(namespace, one)[-1] == str(STEPS)
        assert (one.container("torchobs")["restartCount"], one.ended("torchobs")["exitCode"]) == (0, 0)


def in_order(pods: list[Pod]) -> list[Pod]:
    """An indexed Job's pods by their index."""
    return sorted(pods, key=lambda one: str(one.content["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]))


def test_an_image_without_torchobs_is_watched_and_trains_to_its_end(namespace: Namespace, pages: Pages) -> None:
    """A script that does not know torchobs, in an image that has none; the log is what it is without."""
    (found,) = completed(namespace, "automatic")
    assert value(pages[found], "torchobs_steps_total", job_name="automatic", run_id=uid_of(namespace, "automatic")) == STEPS
    assert printed(namespace, found) == [str(step) for step in range(1, STEPS + 1)]
    assert "torchobs" not in namespace.logs(found, "main")
    assert namespace.logs(found, "torchobs-copy") == ""


def test_the_jobs_of_a_jobset_are_one_run(namespace: Namespace, pages: Pages) -> None:
    """Each child is a Job of its own, with a UID of its own, and the ranks are one run's."""
    for index in range(2):
        (found,) = completed(namespace, f"gpt-node-{index}")
        whose = {"job_name": "gpt", "run_id": UID, "rank": str(index)}
        assert value(pages[found], "torchobs_rank_info", **whose) == 1
        assert value(pages[found], "torchobs_steps_total", **whose) == STEPS
        assert value(pages[found], "torchobs_world_size", job_name="gpt", run_id=UID) == 2


def test_a_key_stays_readable_for_its_owner_alone(namespace: Namespace, pages: Pages) -> None:
    """Without a group both containers are one user, and the exporter reads the flight files all the same."""
    (found,) = completed(namespace, "keys")
    assert "0o400" in namespace.logs(found, "main").splitlines()
    assert "fsGroup" not in found.content["spec"]["securityContext"]
    assert value(pages[found], "torchobs_steps_total", job_name="keys") == STEPS


def test_an_image_with_torchobs_keeps_its_own(namespace: Namespace) -> None:
    """Though the volume's directory comes first on its path."""
    (found,) = completed(namespace, "own")
    assert printed(namespace, found) == ["/opt/site/torchobs/__init__.py", "/var/run/torchobs/site/start/sitecustomize.py"]


CHILD = {"batch.kubernetes.io/job-name": "gpt-node-0", "batch.kubernetes.io/controller-uid": "c1"}
OPERATORS = {
    "Job": (CHILD, {"kind": "Job", "apiVersion": "batch/v1"}, ("gpt-node-0", "c1")),
    "JobSet": (JOBSET | CHILD, {"kind": "Job", "apiVersion": "batch/v1"}, ("gpt", UID)),
    "TrainJob": (
        JOBSET | CHILD | {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"},
        {"kind": "Job", "apiVersion": "batch/v1"},
        ("gpt", UID),
    ),
    "PyTorchJob": (
        {"training.kubeflow.org/job-name": "gpt", "training.kubeflow.org/replica-type": "worker"},
        {"kind": "PyTorchJob", "apiVersion": "kubeflow.org/v1"},
        ("gpt", "owner-uid"),
    ),
    "MPIJob": (
        {"training.kubeflow.org/job-name": "gpt", "training.kubeflow.org/operator-name": "mpi-operator"},
        {"kind": "MPIJob", "apiVersion": "kubeflow.org/v2beta1"},
        ("gpt", "owner-uid"),
    ),
    "RayJob": (
        {"ray.io/cluster": "gpt-raycluster-x2x", "ray.io/originated-from-cr-name": "gpt", "ray.io/node-type": "worker"},
        {"kind": "RayCluster", "apiVersion": "ray.io/v1"},
        ("gpt", "owner-uid"),
    ),
    "RayCluster": (
        {"ray.io/cluster": "gpt", "ray.io/node-type": "head"},
        {"kind": "RayCluster", "apiVersion": "ray.io/v1"},
        ("gpt", "owner-uid"),
    ),
    "Volcano Job": (
        {"volcano.sh/job-name": "gpt", "volcano.sh/task-spec": "worker"},
        {"kind": "Job", "apiVersion": "batch.volcano.sh/v1alpha1"},
        ("gpt", "owner-uid"),
    ),
    "Kueue": (CHILD | {"kueue.x-k8s.io/queue-name": "q"}, {"kind": "Job", "apiVersion": "batch/v1"}, ("gpt-node-0", "c1")),
    "LeaderWorkerSet": (
        {"leaderworkerset.sigs.k8s.io/name": "gpt", "leaderworkerset.sigs.k8s.io/group-key": "9f3c"},
        {"kind": "StatefulSet", "apiVersion": "apps/v1"},
        ("gpt", "9f3c"),
    ),
    "none": ({}, {}, (None, None)),
}


@pytest.mark.parametrize(("labels", "owner", "expected"), OPERATORS.values(), ids=OPERATORS)
def test_a_run_is_its_outermost_owner(
    namespace: Namespace, labels: dict[str, str], owner: dict[str, str], expected: tuple[str | None, str | None]
) -> None:
    """From the labels and the owner that each operator's release gives to a pod (docs/kubernetes.md names the releases)."""
    given = owner | {"name": "owner", "uid": "owner-uid"} if owner else {}
    made = admitted(namespace, pod(labels=labels, **given))
    env = {one["name"]: one for one in made["spec"]["containers"][0]["env"]}

    def resolved(name: str) -> str | None:
        entry = env.get(name, {})
        field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        found: str | None = made["metadata"]["labels"][field.split("'")[1]] if field else entry.get("value")
        return found

    assert (resolved("TORCHOBS_K8S_JOB_NAME"), resolved("TORCHOBS_K8S_JOB_UID")) == expected


def test_the_policy_adds_what_the_chart_describes(namespace: Namespace) -> None:
    """To a Job's pod the same, field by field, as the kustomize component; the rest is the API server's own defaults."""
    image, _, tag = EXPORTER.rpartition(":")
    (patch,) = rendered(injection__engine="component", image__repository=image, image__tag=tag)
    described = patch["spec"]["template"]["spec"]
    described["initContainers"][0]["securityContext"].pop("runAsUser")  # the component's alone
    given = pod(labels=CHILD, kind="Job", apiVersion="batch/v1", name="owner", uid="c1")
    made = admitted(namespace, given | {"spec": given["spec"] | {"automountServiceAccountToken": False}})["spec"]
    defaults = {"terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}
    for one in described["initContainers"][0]["ports"]:
        one["protocol"] = "TCP"
    for one in made["initContainers"][0]["env"]:
        one["valueFrom"]["fieldRef"].pop("apiVersion")
    assert made["initContainers"] == [one | defaults for one in described["initContainers"]]
    assert [one for one in made["volumes"] if one["name"] != "script"] == described["volumes"]
    (main,), (trainer,) = made["containers"], described["containers"]
    for one in main["env"]:
        one["valueFrom"]["fieldRef"].pop("apiVersion")
    assert main["env"] == trainer["env"]
    assert main["volumeMounts"][1:] == trainer["volumeMounts"]
    assert made["terminationGracePeriodSeconds"] == described["terminationGracePeriodSeconds"]


def test_what_is_there_already_stays_as_it_is(namespace: Namespace) -> None:
    """A variable, a mount, a group, a grace and init containers of the user's own; and the whole pod, if a sidecar is."""
    given = pod()
    spec = given["spec"]
    spec["containers"][0]["env"] = [{"name": "TORCHOBS_K8S_JOB_UID", "value": "mine"}]
    spec["containers"][0]["volumeMounts"].append({"name": "own", "mountPath": "/var/run/torchobs/flight"})
    spec["volumes"].append({"name": "own", "emptyDir": {}})
    spec["terminationGracePeriodSeconds"] = 7
    spec["securityContext"] |= {"fsGroup": 7, "fsGroupChangePolicy": "Always"}
    spec["initContainers"] = [spec["containers"][0] | {"name": "first"}]
    made = admitted(namespace, given)["spec"]
    assert [one["name"] for one in made["initContainers"]] == ["torchobs", "first"]
    main = made["containers"][0]
    assert [one["value"] for one in main["env"] if one["name"] == "TORCHOBS_K8S_JOB_UID"] == ["mine"]
    assert [one["name"] for one in main["volumeMounts"] if one["mountPath"] == "/var/run/torchobs/flight"] == ["own"]
    assert (made["securityContext"]["fsGroup"], made["securityContext"]["fsGroupChangePolicy"]) == (7, "Always")
    assert made["terminationGracePeriodSeconds"] == 7
    spec["initContainers"] = [spec["containers"][0] | {"name": "torchobs", "restartPolicy": "Always"}]
    again = admitted(namespace, given)
    assert [one["name"] for one in again["spec"]["initContainers"]] == ["torchobs"]
    assert "torchobs" not in again["metadata"]["labels"]


def test_annotations_choose_port_and_resources_and_nonsense_is_ignored(namespace: Namespace) -> None:
    """An annotation that the API server would refuse must not keep the pod from being made."""
    given = pod()
    given["metadata"]["annotations"] = {"torchobs.io/port": "12345", "torchobs.io/cpu": "300m", "torchobs.io/memory": "32Mi"}
    sidecar = admitted(namespace, given)["spec"]["initContainers"][0]
    assert [port["containerPort"] for port in sidecar["ports"]] == [12345]
    assert sidecar["env"][1:] == [{"name": "TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS", "value": ":12345"}]
    assert sidecar["resources"] == {kind: {"cpu": "300m", "memory": "32Mi"} for kind in ("requests", "limits")}
    given["metadata"]["annotations"] = {"torchobs.io/port": "99999", "torchobs.io/cpu": "a lot", "torchobs.io/memory": ""}
    sidecar = admitted(namespace, given)["spec"]["initContainers"][0]
    assert ([port["containerPort"] for port in sidecar["ports"]], sidecar["resources"]["limits"]["cpu"]) == ([PORT], "200m")
    for cpu, memory in (("-1", "-1"), ("0", "300m"), ("1u", "1Mi")):  # the first is refused, with the others it never starts
        given["metadata"]["annotations"] = {"torchobs.io/cpu": cpu, "torchobs.io/memory": memory}
        limits = admitted(namespace, given)["spec"]["initContainers"][0]["resources"]["limits"]
        assert limits == {"cpu": "200m", "memory": "128Mi"}


def odd_pods() -> dict[str, dict[str, Any]]:
    """Pods that a policy may well make one of that the API server refuses."""
    made = {
        "nonsense": annotated(level="?", port="80", cpu="-1", memory="300m", fsgroup="no", containers="x,,y", pythonpath=""),
        "no group": annotated(fsgroup="false"),
        "containers": annotated(containers=" main ,nobody"),
        "environment": annotated("auto"),
        "path": annotated("auto"),
        "bare": annotated("auto"),
    }
    trainer = made["environment"]["spec"]["containers"][0]
    trainer["envFrom"] = [{"configMapRef": {"name": "any", "optional": True}}]
    trainer = made["path"]["spec"]["containers"][0]
    trainer["env"] = [
        {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "any", "key": "path", "optional": True}}}
    ]
    made["containers"]["spec"]["containers"].append(trainer | {"name": "istio-proxy"})
    del made["bare"]["spec"]["securityContext"]
    made["bare"]["spec"]["containers"][0]["securityContext"] = RESTRICTED | {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return made


@pytest.mark.parametrize("kind", odd_pods())
def test_the_api_server_takes_what_the_policy_makes(namespace: Namespace, kind: str) -> None:
    """And it evaluates the expressions as the unit tests do, with which everything else about them is tested."""
    pytest.importorskip("cel_expr_python", reason="needs the extra dev: pip install cel-expr-python")
    from tests.kubernetes import cel  # imports that package

    image, _, tag = EXPORTER.rpartition(":")
    policy, _ = rendered(injection__apiVersion="v1", image__repository=image, image__tag=tag)
    given = odd_pods()[kind]
    given["spec"] |= {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 30}
    assert_contains(admitted(namespace, given), cel.admitted(policy, given))


def assert_contains(whole: Any, part: Any) -> None:
    """What is in the one is in the other, which has defaults besides."""
    if isinstance(part, dict):
        for key, inner in part.items():
            assert key in whole or inner in ("", {}, []), key
            if key in whole:
                assert_contains(whole[key], inner)
    elif isinstance(part, list):
        assert len(whole) == len(part)
        for one, other in zip(whole, part, strict=True):
            assert_contains(one, other)
    else:
        assert whole == part


def test_only_the_training_gets_the_accounts_token(namespace: Namespace) -> None:
    """The API server mounts it into every container that has nothing at that path, also into those that a policy adds."""
    made = admitted(namespace, pod("auto"))["spec"]
    assert [one["name"] for one in made["initContainers"]] == ["torchobs", "torchobs-copy"]
    ours = [mount["name"] for one in made["initContainers"] for mount in one["volumeMounts"] if TOKEN in mount["mountPath"]]
    (its,) = [mount["name"] for mount in made["containers"][0]["volumeMounts"] if TOKEN in mount["mountPath"]]
    assert ours == ["torchobs-no-token"] * 2
    assert its.startswith("kube-api-access-")


@pytest.mark.usefixtures("namespace")  # what the cluster serves is asked there
def test_a_pod_without_the_exporters_image_waits_for_another() -> None:
    """Kubernetes starts no training before its sidecar; the image of a pod that waits can be changed."""
    template = pod_template("true", ["true"])
    del template["spec"]["volumes"], template["spec"]["containers"][0]["volumeMounts"]
    with Namespace() as other, injection(other, "localhost/nobody-has-this:none"):
        wait_for_injection(other, pod())
        other.apply(job("waits", template))

        def reason() -> str:
            found = other.pods("waits")
            waiting = found[0].container("torchobs").get("state", {}).get("waiting", {}) if found else {}
            return str(waiting.get("reason"))

        assert wait_until(lambda: "Image" in reason(), timeout_s=60, interval_s=0.3)
        (waits,) = other.pods("waits")
        assert not waits.container("main")["started"]
        other.kubectl("set", "image", f"pod/{waits.name}", f"torchobs={EXPORTER}")
        assert [one.name for one in completed(other, "waits")] == [waits.name]


def test_a_pod_with_volumes_of_that_name_is_left_alone(namespace: Namespace) -> None:
    """Two volumes of one name would be refused after the change, and the training would not start."""
    given = pod()
    given["spec"]["volumes"] = [*given["spec"].get("volumes", []), {"name": "torchobs-flight", "emptyDir": {}}]
    assert "initContainers" not in admitted(namespace, given)["spec"]


def test_a_pod_keeps_its_quality_of_service_class(namespace: Namespace) -> None:
    """Guaranteed, which a node's CPU manager pins to cores, stays Guaranteed, though limits and requests differ in notation."""
    given = pod("auto")
    given["spec"]["containers"][0]["resources"] = {
        "limits": {"cpu": "1", "memory": "1Gi"},
        "requests": {"cpu": "1000m", "memory": "1Gi"},
    }
    assert admitted(namespace, given)["status"]["qosClass"] == "Guaranteed"


def test_who_opts_out_is_left_alone(namespace: Namespace) -> None:
    """By the pod's label, and by the namespace's."""
    assert "initContainers" not in admitted(namespace, pod("false"))["spec"]
    with Namespace() as other, injection(other, EXPORTER):
        wait_for_injection(other, pod())
        other.kubectl("label", "namespace", other.name, "torchobs.io/inject=false")
        assert wait_until(lambda: "initContainers" not in admitted(other, pod())["spec"], timeout_s=120)


def broken(policy: Policy) -> None:
    """Valid to the API server when it is made, and an error whenever it is asked."""
    label_only(policy, "string(variables.broken)")
    policy[0]["spec"]["variables"].insert(0, {"name": "broken", "expression": "object.spec.there.is.no.such.field"})


def label_only(policy: Policy, text: str = "'yes'") -> None:
    """Let it add a label and nothing else."""
    (made,) = (one for one in policy if one["kind"] == "MutatingAdmissionPolicy")
    policy.remove(made)
    policy.insert(0, made)
    made["metadata"]["name"] = policy[1]["spec"]["policyName"] = policy[1]["metadata"]["name"] = (
        f"{made['metadata']['name']}-{len(text)}"
    )
    made["spec"]["mutations"][0]["jsonPatch"]["expression"] = (
        f"[JSONPatch{{op: 'add', path: '/metadata/labels/asked', value: {text}}}]"
    )


@pytest.mark.usefixtures("namespace")  # what the cluster serves is asked there
def test_without_a_policy_and_with_a_broken_one_the_training_starts() -> None:
    """The label then does nothing, and nobody's pod is refused."""
    template = pod_template("auto", ["true"])
    del template["spec"]["volumes"], template["spec"]["containers"][0]["volumeMounts"]
    with Namespace() as other:
        other.apply(job("absent", template))
        with injection(other, EXPORTER, broken), injection(other, EXPORTER, label_only):
            # the API server hears of the two in their order
            wait_until(lambda: "asked" in admitted(other, pod())["metadata"]["labels"], timeout_s=30, interval_s=0.3)
            other.apply(job("broken", template))
            pods = [*completed(other, "absent"), *completed(other, "broken")]
    assert [one.content["spec"].get("initContainers") for one in pods] == [None, None]
    assert [one.content["metadata"]["labels"].get("asked") for one in pods] == [None, "yes"]


@pytest.mark.usefixtures("namespace")  # as above
def test_two_pods_on_the_nodes_network_run_side_by_side() -> None:
    """Neither claims the exporter's port, so that the scheduler puts both on the node, and neither exporter ends for it.

    Their user is root, as which an exporter does not run.
    """
    address = f"('127.0.0.1', {PORT})"
    wait = f"import socket, time; [time.sleep(0.3) for _ in range(99) if socket.socket().connect_ex({address})]; time.sleep(5)"
    template = pod_template("true", ["python3", "-c", wait])
    template["spec"] |= {"hostNetwork": True, "securityContext": {"runAsUser": 0}}
    del template["spec"]["volumes"], template["spec"]["containers"][0]["volumeMounts"]
    with Namespace("privileged") as other, injection(other, EXPORTER):
        wait_for_injection(other, pod())
        other.apply(job("network", template, parallelism=2, completions=2))

        def both_run() -> bool:
            return [one.container("main").get("state", {}).keys() for one in other.pods("network")] == [
                {"running"},
                {"running"},
            ]

        assert wait_until(both_run, timeout_s=600, interval_s=0.3)
        node, uids = other.pods("network")[0].ip, [one.content["metadata"]["uid"] for one in other.pods("network")]

        def answers() -> list[int]:
            return sorted(get(f"{node}:{PORT}", f"/metrics?pod={uid}")[0] for uid in uids)

        assert wait_until(lambda: answers() == [200, 421], timeout_s=30, interval_s=0.3), "each pod's page or none"
        for found in completed(other, "network"):
            sidecar = found.content["spec"]["initContainers"][0]
            assert ("ports" in sidecar, sidecar["securityContext"]["runAsUser"]) == (False, 65532)
            assert found.container("torchobs")["restartCount"] == 0
