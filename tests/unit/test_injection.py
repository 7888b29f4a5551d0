"""Injection: the policies that change a pod, and the manifests that set them up."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests import helm, support
from tests.helm import objects
from tests.kubernetes.injection import pod_spec, pods, rendered
from tests.support import for_each

pytest.importorskip("cel_expr_python", reason="needs the extra dev: pip install cel-expr-python")

from tests.kubernetes.cel import admitted  # imports that package

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(support.why_missing("helm") is not None, reason=str(support.why_missing("helm")))

START = "/var/run/torchobs/site/start"
USER = "/var/run/torchobs/site/user"


def policy(**settings: str) -> dict[str, Any]:
    """The policy that the chart makes of these values."""
    return rendered(injection__apiVersion="v1", **settings)[0]


@pytest.fixture(scope="module")
def default() -> dict[str, Any]:
    """That of the default values."""
    return policy()


def pod(
    *containers: dict[str, Any], inject: str = "true", annotations: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    """A pod with these containers; annotations without their prefix."""
    metadata: dict[str, Any] = {"name": "any", "labels": {"torchobs.io/inject": inject}}
    if annotations:
        metadata["annotations"] = {f"torchobs.io/{name}": text for name, text in annotations.items()}
    return {"metadata": metadata, "spec": {"containers": [*containers] or [{"name": "a"}]} | spec}


def sidecar(injected: dict[str, Any]) -> dict[str, Any]:
    """The exporter's container."""
    container: dict[str, Any] = injected["spec"]["initContainers"][0]
    assert container["name"] == "torchobs"
    return container


def environment(container: dict[str, Any]) -> dict[str, Any]:
    """A container's variables, each there once: their text, or where it comes from."""
    env = container["env"]
    variables = {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in env}
    assert len(variables) == len(env)
    return variables


@pytest.mark.parametrize("security", [{}, {"runAsUser": 0}, {"runAsUser": 7}, {"fsGroup": 9}])
def test_it_makes_of_a_jobs_pod_what_the_helper_does(default: dict[str, Any], tmp_path: Path, security: dict[str, int]) -> None:
    """Sidecar, volumes, mounts, variables, group and grace: the policy and `torchobs.podSpec` are two ways to one pod."""
    settings: dict[str, Any] = {"securityContext": security} if security else {}
    described = pod_spec(tmp_path, {"containers": [{"name": "trainer"}], **settings})
    plain = pod({"name": "trainer"}, terminationGracePeriodSeconds=30, **settings)
    plain["metadata"]["labels"] |= {"batch.kubernetes.io/job-name": "gpt", "batch.kubernetes.io/controller-uid": "c1"}
    injected = admitted(default, plain)
    assert injected["spec"] == described
    assert injected["metadata"]["labels"]["torchobs"] == "sidecar"


def test_the_raw_policy_does_nothing_until_an_image_is_named() -> None:
    """An exporter that cannot be pulled would keep every labelled pod from starting; also `sed s/REGISTRY/.../g` is enough."""
    raw = (support.ROOT / "deploy" / "kubernetes" / "injection-policy.yaml").read_text()
    assert admitted(objects(raw)[0], pod()) == pod()
    named = objects(raw.replace("REGISTRY", "registry.example.org"))[0]
    assert sidecar(admitted(named, pod()))["image"] == "registry.example.org/torchobs-exporter:latest"


def test_the_registrys_secrets_come_to_the_pods_own() -> None:
    """Each once, whether the values have names or objects; without any the pod's list is not touched."""
    with_secrets = policy(injection__imagePullSecrets="{ours,mine}")
    assert admitted(with_secrets, pod())["spec"]["imagePullSecrets"] == [{"name": "ours"}, {"name": "mine"}]
    mine = [{"name": "mine"}]
    assert admitted(with_secrets, pod(imagePullSecrets=mine))["spec"]["imagePullSecrets"] == [*mine, {"name": "ours"}]
    both = [{"name": "ours"}, {"name": "mine"}]
    assert admitted(with_secrets, pod(imagePullSecrets=both))["spec"]["imagePullSecrets"] == both


NUMBERED = "$(TORCHOBS_K8S_JOB_UID)-$(POD_INDEX)"
CONTROLLER, INDEX = (f"batch.kubernetes.io/{name}" for name in ("controller-uid", "job-completion-index"))


@for_each(
    {
        "indexed Job": ({CONTROLLER: "u", INDEX: "3"}, NUMBERED),
        "StatefulSet": ({"apps.kubernetes.io/pod-index": "0"}, NUMBERED),
        "Deployment": ({"pod-template-hash": "h"}, "$(POD_UID)"),
        "JobSet": ({"jobset.sigs.k8s.io/jobset-uid": "u", INDEX: "0"}, "$(POD_UID)"),
    }
)
def test_pods_that_train_for_themselves_are_runs_of_their_own(
    labels: dict[str, str], expected: str, default: dict[str, Any]
) -> None:
    """By an annotation: the same run for the pod that replaces another, where pods have a number; else all pods are one run."""

    def trainer(plain: dict[str, Any]) -> dict[str, Any]:
        return environment(admitted(default, plain)["spec"]["containers"][0])

    numbered = pod(annotations={"run": "pod"})
    numbered["metadata"] |= {"ownerReferences": [{"controller": True, "uid": "u", "name": "n", "kind": "any"}]}
    numbered["metadata"]["labels"] |= labels
    env = trainer(numbered)
    assert env["TORCHOBS_RUN_ID"] == expected
    names = list(env)
    used = {name for name in names if f"$({name})" in expected}
    assert used
    assert all(names.index(name) < names.index("TORCHOBS_RUN_ID") for name in used), "kubelet knows what came before"
    del numbered["metadata"]["annotations"]
    assert "TORCHOBS_RUN_ID" not in trainer(numbered)
    named = pod({"name": "a", "env": [{"name": "TORCHOBS_RUN_ID", "value": "mine"}]}, annotations={"run": "pod"})
    assert trainer(named)["TORCHOBS_RUN_ID"] == "mine"
    assert trainer(pod(annotations={"run": "pod"}))["TORCHOBS_RUN_ID"] == "$(POD_UID)"


@pytest.mark.parametrize(
    ("settings", "annotation", "security", "trainer", "sidecars", "group"),
    [
        ({}, "", {}, {}, {}, 65532),
        ({}, "", {"runAsUser": 7}, {}, {}, 7),
        ({}, "", {"runAsUser": 0}, {}, {"runAsUser": 65532}, 65532),
        ({}, "", {"fsGroup": 9}, {}, {}, 9),
        ({}, "false", {}, {}, {"runAsGroup": 0}, None),
        ({}, "false", {"runAsUser": 0}, {}, {"runAsUser": 65532, "runAsGroup": 0}, None),
        ({}, "false", {"runAsUser": 7}, {}, {}, None),
        ({}, "false", {}, {"runAsUser": 7}, {"runAsUser": 7}, None),
        ({"injection__fsGroup": "null"}, "", {}, {}, {"runAsGroup": 0}, None),
    ],
)
def test_the_sidecar_starts_and_reads_whatever_the_pods_users_are(
    settings: Any, annotation: str, security: Any, trainer: Any, sidecars: Any, group: int | None
) -> None:
    """Never as root; by a group of the volumes, or without one (ssh keys, OpenShift) as the trainer's user or root's group."""
    annotations = {"fsgroup": annotation} if annotation else None
    plain = pod({"name": "a", "securityContext": trainer}, annotations=annotations, securityContext=security)
    injected = admitted(policy(**settings), plain)
    context = sidecar(injected)["securityContext"]
    assert context["runAsNonRoot"] is True
    assert {key: context[key] for key in ("runAsUser", "runAsGroup") if key in context} == sidecars
    assert injected["spec"]["securityContext"].get("fsGroup") == group


FROM_A_MAP = {"configMapKeyRef": {"name": "paths", "key": "python"}}
MAPPED = {"PYTHONPATH_OF_POD": FROM_A_MAP, "PYTHONPATH": f"{START}:$(PYTHONPATH_OF_POD)"}


@for_each(
    {
        "none": ([], None, {"PYTHONUSERBASE": USER}),
        "a base": ([{"name": "PYTHONUSERBASE", "value": "/own"}], None, {"PYTHONUSERBASE": "/own"}),
        "a path": ([{"name": "PYTHONPATH", "value": "/src"}], None, {"PYTHONPATH": f"{START}:/src"}),
        "by an annotation": ([], {"pythonpath": "/src"}, {"PYTHONPATH": f"{START}:/src"}),
        "from a map": ([{"name": "PYTHONPATH", "valueFrom": FROM_A_MAP}], None, MAPPED),
    }
)
def test_a_path_of_the_pods_own_is_kept(
    env: list[Any], annotations: dict[str, str] | None, expected: dict[str, Any], default: dict[str, Any]
) -> None:
    """Wherever it comes from; nothing of ours replaces the image's. Kubelet resolves a variable by those before it."""
    container = {"name": "a", "env": env}
    injected = admitted(default, pod(container, inject="auto", annotations=annotations))
    variables = environment(injected["spec"]["containers"][0])
    assert {name: value for name, value in variables.items() if name.startswith("PYTHON")} == expected
    assert list(variables)[-1] == "PYTHONPATH" or "PYTHONPATH_OF_POD" not in variables
    plain = environment(admitted(default, pod(container))["spec"]["containers"][0])
    assert [name for name in plain if name.startswith("PYTHON")] == [variable["name"] for variable in env]


@pytest.mark.parametrize(
    ("name", "text", "taken"),
    [
        ("cpu", "300m", "300m"),
        ("cpu", "16", "16"),
        *(("cpu", text, None) for text in ("-1", "0", "1u", "17", "1e9", "a lot", "", "300 m", "0x10")),
        ("memory", "256Mi", "256Mi"),
        *(("memory", text, None) for text in ("-1", "300m", "1Mi", "65Gi", "128MiB", "128mi", "")),
        ("port", "12345", "12345"),
        *(("port", text, None) for text in ("80", "1023", "65536", "99999", "-1", "http", "", "10960.0", "0x2ad0")),
    ],
)
def test_an_annotation_that_makes_no_sense_is_ignored(default: dict[str, Any], name: str, text: str, taken: str | None) -> None:
    """What the API server would refuse, or no node could hold, must not keep the pod from starting."""
    before, after = (sidecar(admitted(default, pod(annotations=chosen))) for chosen in (None, {name: text}))
    if taken is None:
        assert after == before
    elif name == "port":
        assert [port["containerPort"] for port in after["ports"]] == [int(text)]
        assert environment(after)["TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS"] == f":{text}"
        assert environment(after).keys() - environment(before).keys() == {"TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS"}
    else:
        assert {kind: after["resources"][kind][name] for kind in ("requests", "limits")} == {"requests": text, "limits": text}


@pytest.mark.parametrize(
    ("chosen", "expected"), [(None, ["a", "b"]), ("a", ["a"]), ("b, istio-proxy", ["istio-proxy", "b"]), ("nobody", ["a", "b"])]
)
def test_the_containers_that_train_are_changed_and_no_other(
    default: dict[str, Any], chosen: str | None, expected: list[str]
) -> None:
    """By default all but those that are known to be somebody's proxy; names that nobody has are no choice."""
    annotations = {"containers": chosen} if chosen is not None else None
    plain = pod(*({"name": name} for name in ("a", "istio-proxy", "b")), annotations=annotations)
    containers = admitted(default, plain)["spec"]["containers"]
    assert [container["name"] for container in containers if "volumeMounts" in container] == expected
    assert all(container == {"name": container["name"]} for container in containers if container["name"] not in expected)


@pytest.mark.parametrize(
    "untouched",
    [
        pod({"name": "torchobs"}),
        pod({"name": "torchobs-copy"}),
        pod(initContainers=[{"name": "torchobs"}]),
        pod(volumes=[{"name": "torchobs-flight"}]),
        pod(os={"name": "windows"}),
    ],
)
def test_what_would_be_refused_after_the_change_is_left_alone(default: dict[str, Any], untouched: dict[str, Any]) -> None:
    """Two containers or volumes of one name, or Linux's settings on Windows: the training would not start."""
    assert admitted(default, untouched) == untouched


COMMITTED = support.ROOT / "deploy" / "kubernetes"
FILES = ("injection-policy.yaml", "injection-kyverno.yaml")


def test_what_is_committed_is_what_the_chart_makes(tmp_path: Path) -> None:
    """`helm/render.sh` writes the files; nobody edits them."""
    subprocess.run([support.ROOT / "helm" / "render.sh", tmp_path], check=True, timeout=60)
    assert {file: (tmp_path / file).read_text() for file in FILES} == {file: (COMMITTED / file).read_text() for file in FILES}


def test_the_job_by_hand_has_what_the_chart_adds(tmp_path: Path) -> None:
    """Sidecar, volumes, mounts and variables, one by one; what a pod says as a whole, the sidecar need not say."""
    template = yaml.safe_load((COMMITTED / "job-with-sidecar.yaml").read_text())["spec"]["template"]
    by_hand = template["spec"]
    described = pod_spec(tmp_path, {"containers": [{"name": "trainer"}]})
    (sidecar,), (theirs,) = described["initContainers"], by_hand["initContainers"]
    assert [sidecar[key] == theirs[key] for key in ("name", "restartPolicy", "ports")] == [True] * 3
    # By hand no container gets the account's token; a policy cannot know what the trainer asks of the API server.
    assert by_hand["automountServiceAccountToken"] is False
    assert [mount for mount in sidecar["volumeMounts"] if mount["name"] != "torchobs-no-token"] == theirs["volumeMounts"]
    security = by_hand["securityContext"]
    whole = {key: security[key] for key in ("runAsNonRoot", "seccompProfile")}
    assert sidecar["securityContext"] == theirs["securityContext"] | whole
    assert sidecar["resources"]["limits"] == theirs["resources"]["limits"]
    volumes = [volume for volume in by_hand["volumes"] if volume["name"].startswith("torchobs-")]
    assert [volume for volume in described["volumes"] if volume["name"] != "torchobs-no-token"] == volumes
    (trainer,), (other,) = described["containers"], by_hand["containers"]
    assert trainer["env"] == other["env"]
    assert trainer["volumeMounts"] == [mount for mount in other["volumeMounts"] if mount["name"].startswith("torchobs-")]
    assert described["terminationGracePeriodSeconds"] == by_hand["terminationGracePeriodSeconds"]
    assert theirs.keys() <= sidecar.keys(), "a probe could hold up the training"
    monitor = objects((COMMITTED / "podmonitor.yaml").read_text())[0]["spec"]
    chart = objects(helm.rendered("-s", "templates/podmonitor.yaml"))[0]["spec"]
    assert monitor["selector"] == chart["selector"] == {"matchLabels": template["metadata"]["labels"]}
    assert [endpoint | {"path": "/metrics"} for endpoint in monitor["podMetricsEndpoints"]] == chart["podMetricsEndpoints"][:1]


def test_both_policies_do_the_same() -> None:
    """Kyverno's has a binding built in, and leaves templates alone."""
    policy, binding = rendered(injection__apiVersion="v1")
    (kyverno,) = rendered(injection__engine="kyverno")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert kyverno["spec"].pop("autogen")["podControllers"] == {"controllers": []}
    assert kyverno["spec"] == policy["spec"]
    assert policy["spec"]["failurePolicy"] == "Ignore"
    assert rendered(injection__engine="none") == []


@pytest.mark.parametrize(
    ("chosen_s", "grace_s", "drain"), [(None, 45, "40s"), (30, 45, "40s"), (10, 10, "5s"), (600, 600, "595s"), (3, 3, "0s")]
)
def test_the_sidecar_ends_before_the_pods_grace(
    default: dict[str, Any], tmp_path: Path, chosen_s: int | None, grace_s: int, drain: str
) -> None:
    """Promise: kubelet never has to kill it, which would be a failed container; a policy sees 30 where nobody has chosen."""
    spec: dict[str, Any] = {} if chosen_s is None else {"terminationGracePeriodSeconds": chosen_s}
    changed = admitted(default, pod(**spec))
    assert changed["spec"]["terminationGracePeriodSeconds"] == grace_s
    assert environment(sidecar(changed))["TORCHOBS_EXPORTER_DRAIN_TIMEOUT"] == drain
    if chosen_s != 30:
        described = pod_spec(tmp_path, {"containers": [{"name": "trainer"}], **spec})
        assert described["terminationGracePeriodSeconds"] == grace_s
        assert environment(described["initContainers"][0])["TORCHOBS_EXPORTER_DRAIN_TIMEOUT"] == drain


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("Job", "batch.kubernetes.io/controller-uid"),
        ("JobSet", "jobset.sigs.k8s.io/jobset-uid"),
        ("TrainJob", "jobset.sigs.k8s.io/jobset-uid"),
        ("LeaderWorkerSet", "leaderworkerset.sigs.k8s.io/group-key"),
    ],
)
def test_the_helper_names_the_run_by_the_kinds_own_label(tmp_path: Path, kind: str, label: str) -> None:
    """And keeps what the pod has: its first init container comes after the sidecar, its group, its variable."""
    spec = {
        "securityContext": {"runAsUser": 1000},
        "initContainers": [{"name": "first"}],
        "containers": [{"name": "a", "env": [{"name": "POD_NAME", "value": "mine"}]}, {"name": "b"}],
    }
    described = pod_spec(tmp_path, spec, kind)
    assert [item["name"] for item in described["initContainers"]] == ["torchobs", "first"]
    assert described["securityContext"] == {"runAsUser": 1000, "fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    for container in described["containers"]:
        env = {item["name"]: item for item in container["env"]}
        assert env["TORCHOBS_K8S_JOB_UID"]["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{label}']"
    assert described["containers"][0]["env"][0] == {"name": "POD_NAME", "value": "mine"}
    assert pod_spec(tmp_path, described, kind) == described


def test_the_helper_claims_no_port_of_the_node_and_refuses_an_unknown_kind(tmp_path: Path) -> None:
    """Its message says which there are."""
    described = pod_spec(tmp_path, {"hostNetwork": True, "containers": [{"name": "a"}]})
    assert "ports" not in described["initContainers"][0]
    spec = {"containers": [{"name": "a"}]}
    errors, _ = pods(tmp_path, {"kind": "CronJob", "spec": spec})
    assert 'kind is "CronJob", and must be one of Job, JobSet, LeaderWorkerSet, TrainJob' in errors
    errors, _ = pods(tmp_path, {"containers": ["b"], "spec": spec})
    assert 'there is no container "b", but a' in errors
    errors, _ = pods(tmp_path, {"spec": spec}, image={})
    assert "image.repository is not set" in errors


def test_the_helper_changes_the_containers_that_train_and_no_other(tmp_path: Path) -> None:
    """With the names given; and the registry's secrets come to the pod's own."""
    spec = {"containers": [{"name": "a"}, {"name": "b"}], "imagePullSecrets": [{"name": "mine"}]}
    _, (pod,) = pods(tmp_path, {"containers": ["b"], "spec": spec}, injection={"imagePullSecrets": ["mine", {"name": "ours"}]})
    assert pod["spec"]["containers"][0] == {"name": "a"}
    assert len(pod["spec"]["containers"][1]["volumeMounts"]) == 2
    assert pod["spec"]["imagePullSecrets"] == [{"name": "mine"}, {"name": "ours"}]
