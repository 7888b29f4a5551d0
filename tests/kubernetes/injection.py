"""The chart's injection on a cluster, for chosen namespaces only, and pods for it."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import support
from tests.helm import CHART, helm, objects
from tests.kubernetes.cluster import Namespace
from tests.kubernetes.jobs import TRAINER
from tests.support import wait_until

# Which the cluster is, does not matter to what is rendered, and Helm without a cluster takes itself for an old one.
VERSION = "1.36"

# What else the chart makes.
OTHERS = ("podMonitor.enabled", "prometheusRule.enabled", "dashboards.enabled", "test.enabled")

IMAGE = "registry.example.org/torchobs-exporter"
PARENT = """
apiVersion: v2
name: training
version: 1.0.0
dependencies: [{name: torchobs, version: "*", repository: file://../torchobs}]
"""
TEMPLATE = """
apiVersion: v1
kind: Pod
metadata:
  name: any
  labels: {{- include "torchobs.podLabels" .Subcharts.torchobs | nindent 4 }}
spec:
  {{- include "torchobs.podSpec" (merge (dict "root" .Subcharts.torchobs) .Values.given) | nindent 2 }}
"""

Policy = list[dict[str, Any]]

COMPILED_S = 3.0
"""How long an API server takes from being shown a policy to having compiled it for use, which it begins each second"""
_HEARD_OF_S, _TOUCHED = 20.0, 4
"""The same when it is busy, and how often a policy is touched"""


def rendered(release: str = "torchobs", *arguments: str, **settings: str) -> Policy:
    """The chart's objects for the injection; settings by their path, with `__` for each dot."""
    settings = {"image__repository": IMAGE} | settings
    options = [argument for name, text in settings.items() for argument in ("--set", f"{name.replace('__', '.')}={text}")]
    off = ",".join(f"{other}=false" for other in OTHERS)
    done = helm("template", release, CHART, "--kube-version", VERSION, *options, *arguments, "--set", off)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def pods(tmp_path: Path, given: dict[str, Any], **values: Any) -> tuple[str, list[dict[str, Any]]]:
    """The messages and all objects of somebody's own chart that has torchobs' as a dependency, for `torchobs.podSpec` alone.

    ``given``: what its template hands on; ``values``: of torchobs.
    """
    chart = tmp_path / "chart"
    if not chart.exists():
        shutil.copytree(CHART, chart / "charts" / "torchobs")
        (chart / "templates").mkdir()
        (chart / "Chart.yaml").write_text(PARENT)
        (chart / "templates" / "pod.yaml").write_text(TEMPLATE)
    torchobs = {"helpersOnly": True, "image": {"repository": IMAGE}} | values
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"torchobs": torchobs, "given": given}))
    done = helm("template", "any", chart, "--kube-version", VERSION, "-f", tmp_path / "values.yaml")
    return done.stderr, objects(done.stdout)


def pod_spec(tmp_path: Path, spec: dict[str, Any], kind: str = "Job", **values: Any) -> dict[str, Any]:
    """The pod's spec, and that nothing else is made."""
    errors, (pod,) = pods(tmp_path, {"kind": kind, "spec": spec}, **values)
    assert (errors, pod["metadata"]["labels"]) == ("", {"torchobs": "sidecar"})
    content: dict[str, Any] = pod["spec"]
    return content


def served_version() -> str:
    """The newest version of the API that the cluster serves policies by; empty if it serves none."""
    command = ["kubectl", "api-resources", "--api-group=admissionregistration.k8s.io", "--no-headers"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    words = [word for line in listed if line.startswith("mutatingadmissionpolicies ") for word in line.split()]
    return next((word.rpartition("/")[2] for word in words if "/" in word), "")


JOBSET_UID = "0a7f8c1e-5a0e-4d0c-8c57-0c1a5c1f2b3d"
JOBSET = {
    "jobset.sigs.k8s.io/jobset-name": "gpt",
    "jobset.sigs.k8s.io/jobset-uid": JOBSET_UID,
    "jobset.sigs.k8s.io/restart-attempt": "1",
}
"""What JobSet labels the pods of its Jobs with"""
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def pod_template(inject: str, command: list[str], *env: Mapping[str, object], **annotations: str) -> dict[str, Any]:
    """A pod's template as somebody has it who has never heard of torchobs, but for the label."""
    security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    trainer = {
        "name": "main",
        "image": TRAINER,
        "command": command,
        "env": [*env],
        "securityContext": RESTRICTED,
        "resources": {"requests": {"cpu": "100m"}},  # without, a busy machine leaves it next to nothing
        "volumeMounts": [{"name": "script", "mountPath": "/script"}],
    }
    return {
        "metadata": {
            "labels": {"torchobs.io/inject": inject},
            "annotations": {f"torchobs.io/{a}": t for a, t in annotations.items()},
        },
        "spec": {
            "restartPolicy": "Never",
            "securityContext": security,
            "containers": [trainer],
            "volumes": [{"name": "script", "configMap": {"name": "script"}}],
        },
    }


def job(name: str, template: dict[str, Any], **spec: object) -> dict[str, Any]:
    """A Job of such pods."""
    full_spec = {"backoffLimit": 0, "template": template} | spec
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": full_spec}


def annotated(inject: str = "true", **annotations: str) -> dict[str, Any]:
    """A pod with annotations of torchobs."""
    content = pod(inject)
    content["metadata"]["annotations"] = {f"torchobs.io/{name}": text for name, text in annotations.items()}
    return content


def pod(inject: str = "true", labels: dict[str, str] | None = None, **owner: str) -> dict[str, Any]:
    """A pod, as an operator creates it: with labels, and an owner if there is one."""
    template = pod_template(inject, ["true"])
    metadata = {"generateName": "pod-", "labels": template["metadata"]["labels"] | (labels or {})}
    if owner:
        metadata["ownerReferences"] = [{"controller": True, "blockOwnerDeletion": True} | owner]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Show the API server no two policies at once, from whatever process of these tests.

    It compiles them with one shared map of variables before 1.36 (kubernetes#135759): `undefined field`, it says of some, or
    does nothing by them. Each it compiles twice: when it is shown one, and in the second after that, which is to be waited for.
    """
    with (Path(tempfile.gettempdir()) / "torchobs-test-policies.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def has_sidecar(pod: Mapping[str, Any]) -> bool:
    """Whether the policy has changed it."""
    return "initContainers" in pod["spec"]


@contextmanager
def injection(
    namespace: Namespace,
    exporter: str,
    change: Callable[[Policy], None] = lambda _: None,
    changed: Callable[[Mapping[str, Any]], bool] | None = has_sidecar,
) -> Iterator[None]:
    """The policy with this image of the exporter, bound to this namespace alone, at work until the end of the block.

    ``changed``: whether a pod shows that; ``None`` for a policy that never is at work.
    """
    image, _, tag = exporter.rpartition(":")
    policy = rendered(
        namespace.name,
        "--set-json",
        f'injection.namespaceSelector={{"matchLabels":{{"kubernetes.io/metadata.name":"{namespace.name}"}}}}',
        injection__apiVersion=served_version(),
        image__repository=image,
        image__tag=tag,
    )
    with one_at_a_time():
        change(policy)
        namespace.apply(*policy)
        if changed is None:
            time.sleep(COMPILED_S)
        else:
            _wait_for_injection(namespace, changed)
    try:
        yield
    finally:
        for resource in policy:
            namespace.kubectl("delete", resource["kind"], resource["metadata"]["name"])


@contextmanager
def injecting(exporter: str) -> Iterator[Namespace]:
    """A namespace with Pod Security `restricted` in which the policy is at work; the test is skipped where it cannot be."""
    require_policy()
    with Namespace() as namespace, injection(namespace, exporter):
        yield namespace


def require_policy() -> None:
    """Skip the test where there is no helm, or the cluster serves no MutatingAdmissionPolicy."""
    if missing := support.why_missing("helm"):
        pytest.skip(missing)
    if not served_version():
        pytest.skip(f"{support.NEEDS_KUBERNETES} that serves MutatingAdmissionPolicy")


def admitted(namespace: Namespace, pod: Mapping[str, Any]) -> dict[str, Any]:
    """What becomes of a pod; it is not made."""
    said = namespace.kubectl("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", given=json.dumps(pod))
    content: dict[str, Any] = json.loads(said)
    return content


def _wait_for_injection(namespace: Namespace, changed: Callable[[Mapping[str, Any]], bool]) -> None:
    """Wait until the namespace's policy is at work: the API server hears of a new one in its own time.

    If somebody else's was compiled meanwhile, it does nothing until it changes and is compiled again.
    """

    def at_work() -> bool:
        return changed(admitted(namespace, pod()))

    for _ in range(_TOUCHED):
        with suppress(TimeoutError):
            wait_until(at_work, timeout_s=_HEARD_OF_S, interval_s=0.3)
            return
        touch(namespace)
    wait_until(at_work, timeout_s=120, interval_s=0.3)


def touch(namespace: Namespace) -> None:
    """Change the namespace's policies in what does not matter."""
    names = namespace.kubectl("get", "mutatingadmissionpolicies", "-o", "name").split()
    for name in names:
        if namespace.name in name:
            namespace.kubectl("annotate", "--overwrite", name, f"touched={time.time_ns()}")
