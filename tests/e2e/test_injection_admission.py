"""What the chart's admission policy makes of a pod, by a real API server, and how much later a training begins for the sidecar.

Asks KUBECONFIG for a cluster that serves MutatingAdmissionPolicy, and for the images of `make kube-test`.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import pytest

from tests.kubernetes.cluster import Namespace
from tests.kubernetes.injection import RESTRICTED, admitted, annotated, injecting, pod, pod_template, rendered
from tests.kubernetes.jobs import EXPORTER, IN_A_CLUSTER
from tests.support import wait_until

pytestmark = IN_A_CLUSTER

ROUNDS = 5
KINDS = ("false", "true", "auto")
MOST_S = 2.0
BEGUN = "import time; print(time.time())"
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    """One with the policy and Pod Security `restricted`."""
    with injecting(EXPORTER) as made:
        yield made


CHILD = {"batch.kubernetes.io/job-name": "gpt-node-0", "batch.kubernetes.io/controller-uid": "c1"}


def odd_pods() -> dict[str, dict[str, Any]]:
    """Pods that a policy may well make one of that the API server refuses."""
    pods = {
        "nonsense": annotated(level="?", port="80", cpu="-1", memory="300m", fsgroup="no", containers="x,,y", pythonpath=""),
        "no group": annotated(fsgroup="false"),
        "containers": annotated(containers=" main ,nobody"),
        "environment": annotated("auto"),
        "path": annotated("auto"),
        "bare": annotated("auto"),
        "own run": annotated(run="pod"),
        "job": pod(labels=CHILD, kind="Job", apiVersion="batch/v1", name="owner", uid="c1"),
    }
    trainer = pods["environment"]["spec"]["containers"][0]
    trainer["envFrom"] = [{"configMapRef": {"name": "any", "optional": True}}]
    trainer = pods["path"]["spec"]["containers"][0]
    trainer["env"] = [
        {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "any", "key": "path", "optional": True}}}
    ]
    pods["containers"]["spec"]["containers"].append(trainer | {"name": "istio-proxy"})
    del pods["bare"]["spec"]["securityContext"]
    pods["bare"]["spec"]["containers"][0]["securityContext"] = RESTRICTED | {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return pods


@pytest.mark.parametrize("kind", odd_pods())
def test_the_api_server_takes_what_the_policy_makes(namespace: Namespace, kind: str) -> None:
    """And it evaluates the expressions as the unit tests do, with which everything else about them is tested."""
    pytest.importorskip("cel_expr_python", reason="needs the extra dev: pip install cel-expr-python")
    from tests.kubernetes import cel  # imports that package

    image, _, tag = EXPORTER.rpartition(":")
    policy, _ = rendered(injection__apiVersion="v1", image__repository=image, image__tag=tag)
    odd = odd_pods()[kind]
    odd["spec"] |= {"automountServiceAccountToken": False, "terminationGracePeriodSeconds": 30}
    assert_contains(admitted(namespace, odd), cel.admitted(policy, odd))


def assert_contains(whole: Any, part: Any) -> None:
    """What is in the one is in the other, which has defaults besides."""
    if isinstance(part, dict):
        for key, inner in part.items():
            assert key in whole or inner in ("", {}, []), key
            if key in whole:
                assert_contains(whole[key], inner)
    elif isinstance(part, list):
        assert len(whole) == len(part)
        for item, other in zip(whole, part, strict=True):
            assert_contains(item, other)
    else:
        assert whole == part


def test_only_the_training_gets_the_accounts_token(namespace: Namespace) -> None:
    """The API server mounts it into every container that has nothing at that path, also into those that a policy adds."""
    spec = admitted(namespace, pod("auto"))["spec"]
    assert [container["name"] for container in spec["initContainers"]] == ["torchobs", "torchobs-copy"]
    ours = [mount["name"] for init in spec["initContainers"] for mount in init["volumeMounts"] if TOKEN in mount["mountPath"]]
    (its,) = [mount["name"] for mount in spec["containers"][0]["volumeMounts"] if TOKEN in mount["mountPath"]]
    assert ours == ["torchobs-no-token"] * 2
    assert its.startswith("kube-api-access-")
    (site,) = [mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == "torchobs-site"]
    assert site["readOnly"] is True  # every later process of the pod runs it


def begins(inject: str, number: int) -> dict[str, Any]:
    """A pod whose training is to say when it begins."""
    template = pod_template(inject, ["python3", "-c", BEGUN])
    del template["spec"]["volumes"], template["spec"]["containers"][0]["volumeMounts"]
    metadata = template["metadata"] | {"name": f"{inject}-{number}"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def waits_s(namespace: Namespace, number: int) -> dict[str, float]:
    """Seconds from the request to the first line of the program, of one pod of each kind, which start together."""
    pods = [begins(inject, number) for inject in KINDS]
    asked_s = time.time()
    namespace.apply(*pods)

    def ended() -> bool:
        return all(pod.phase == "Succeeded" for pod in namespace.pods())

    wait_until(ended, timeout_s=300, interval_s=0.2)
    begun_s = {pod.name: float(namespace.logs(pod, "main")) for pod in namespace.pods()}
    return {inject: begun_s[f"{inject}-{number}"] - asked_s for inject in KINDS}


@pytest.mark.serial
def test_the_sidecar_delays_a_training_by_two_seconds_at_most(
    namespace: Namespace, record_property: Callable[[str, object], None]
) -> None:
    """Median of pairs that start together, images at hand; on a slow machine by as much again as the pod takes without it."""
    rounds = [waits_s(namespace, number) for number in range(ROUNDS)]
    alone_s = median(waits["false"] for waits in rounds)
    delays_s = {inject: median(waits[inject] - waits["false"] for waits in rounds) for inject in KINDS[1:]}
    for name, seconds in {"alone": alone_s, **delays_s}.items():
        record_property(f"start of a pod, {name}, s", round(seconds, 2))
        print(f"start of a pod, {name}: {seconds:.2f} s")  # noqa: T201  # with -s or -rP
    assert delays_s["true"] <= max(MOST_S, alone_s)
