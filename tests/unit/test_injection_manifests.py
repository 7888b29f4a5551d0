"""Every way to add torchobs to a pod adds the same: policies, the chart's helper, the kustomize component, the Job by hand."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import support
from tests.kubernetes.injection import CHART, rendered

pytestmark = pytest.mark.skipif(support.why_missing("helm") is not None, reason=str(support.why_missing("helm")))

COMMITTED = support.ROOT / "deploy" / "kubernetes"
FILES = ("injection-policy.yaml", "injection-kyverno.yaml", "component/job.yaml")
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
IMAGE = {"repository": "registry.example.org/torchobs-exporter"}


@pytest.fixture(scope="module")
def component() -> dict[str, Any]:
    """The pod of the kustomize component's patch."""
    (made,) = rendered(injection__engine="component")
    found: dict[str, Any] = made["spec"]["template"]["spec"]
    return found


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
    torchobs = {"helpersOnly": True, "image": IMAGE} | values
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"torchobs": torchobs, "given": given}))
    command = ["helm", "template", "any", str(chart), "--kube-version", "1.36", "-f", str(tmp_path / "values.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr, [made for made in yaml.safe_load_all(done.stdout) if made]


def pod_spec(tmp_path: Path, spec: dict[str, Any], kind: str = "Job", **values: Any) -> dict[str, Any]:
    """The pod's spec, and that nothing else is made."""
    errors, (pod,) = pods(tmp_path, {"kind": kind, "spec": spec}, **values)
    assert (errors, pod["metadata"]["labels"]) == ("", {"torchobs": "sidecar"})
    found: dict[str, Any] = pod["spec"]
    return found


def test_what_is_committed_is_what_the_chart_makes(tmp_path: Path) -> None:
    """`helm/render.sh` writes the files; nobody edits them."""
    subprocess.run([support.ROOT / "helm" / "render.sh", tmp_path], check=True, timeout=60)
    assert {file: (tmp_path / file).read_text() for file in FILES} == {file: (COMMITTED / file).read_text() for file in FILES}


def test_the_job_by_hand_has_what_the_chart_adds(component: dict[str, Any]) -> None:
    """Sidecar, volumes, mounts and variables, one by one; what a pod says as a whole, the sidecar need not say."""
    by_hand = yaml.safe_load((COMMITTED / "job-with-sidecar.yaml").read_text())["spec"]["template"]["spec"]
    (sidecar,), (theirs,) = component["initContainers"], by_hand["initContainers"]
    assert {key: sidecar[key] for key in ("name", "restartPolicy", "ports")} == {
        key: theirs[key] for key in ("name", "restartPolicy", "ports")
    }
    # By hand no container gets the account's token; a policy cannot know what the trainer asks of the API server.
    assert by_hand["automountServiceAccountToken"] is False
    assert [one for one in sidecar["volumeMounts"] if one["name"] != "torchobs-no-token"] == theirs["volumeMounts"]
    security = by_hand["securityContext"]
    whole = {key: security[key] for key in ("runAsNonRoot", "seccompProfile")}
    assert sidecar["securityContext"] == theirs["securityContext"] | whole | {"runAsUser": 65532}
    assert sidecar["resources"]["limits"] == theirs["resources"]["limits"]
    volumes = [one for one in by_hand["volumes"] if one["name"].startswith("torchobs-")]
    assert [one for one in component["volumes"] if one["name"] != "torchobs-no-token"] == volumes
    (trainer,), (other,) = component["containers"], by_hand["containers"]
    assert trainer["env"] == other["env"]
    assert trainer["volumeMounts"] == [one for one in other["volumeMounts"] if one["name"].startswith("torchobs-")]
    assert component["terminationGracePeriodSeconds"] == by_hand["terminationGracePeriodSeconds"]


def test_both_policies_do_the_same() -> None:
    """Kyverno's has a binding built in, and leaves templates alone."""
    policy, binding = rendered(injection__apiVersion="v1")
    (kyverno,) = rendered(injection__engine="kyverno")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert kyverno["spec"].pop("autogen")["podControllers"] == {"controllers": []}
    assert kyverno["spec"] == policy["spec"]
    assert policy["spec"]["failurePolicy"] == "Ignore"


def test_no_engine_renders_nothing_and_a_cluster_without_policies_is_told() -> None:
    """Helm's own message would be about a kind that it does not know."""
    assert rendered(injection__engine="none") == []
    with pytest.raises(AssertionError, match=r"set injection\.engine to kyverno or none"):
        rendered(injection__engine="policy")
    assert rendered() == []  # `auto`: not a reason to refuse the rest of the chart


def test_the_exporters_variables_come_before_its_port() -> None:
    """Another port is one more of them."""
    push = '{"name":"OTEL_EXPORTER_OTLP_ENDPOINT","value":"http://collector:4318"}'
    (made,) = rendered("any", "--set-json", f"injection.env=[{push}]", injection__engine="component", injection__port="12345")
    names = [one["name"] for one in made["spec"]["template"]["spec"]["initContainers"][0]["env"]]
    assert names == ["POD_UID", "OTEL_EXPORTER_OTLP_ENDPOINT", "TORCHOBS_EXPORTER_WEB_LISTEN_ADDRESS"]
    assert made["spec"]["template"]["spec"]["initContainers"][0]["ports"][0]["containerPort"] == 12345


def test_excluded_namespaces_and_further_conditions_are_in_the_policy() -> None:
    """Besides a namespace's own label."""
    policy, _ = rendered("any", "--set-json", 'injection.excludedNamespaces=["a"]', injection__apiVersion="v1")
    expressions = policy["spec"]["matchConstraints"]["namespaceSelector"]["matchExpressions"]
    assert {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["a"]} in expressions
    assert {"key": "torchobs.io/inject", "operator": "NotIn", "values": ["false"]} in expressions


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
    made = pod_spec(tmp_path, spec, kind)
    assert [one["name"] for one in made["initContainers"]] == ["torchobs", "first"]
    assert made["securityContext"] == {
        "runAsUser": 1000,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    for container in made["containers"]:
        env = {one["name"]: one for one in container["env"]}
        assert env["TORCHOBS_K8S_JOB_UID"]["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{label}']"
    assert made["containers"][0]["env"][0] == {"name": "POD_NAME", "value": "mine"}
    assert pod_spec(tmp_path, made, kind) == made


def test_the_helper_claims_no_port_of_the_node_and_refuses_an_unknown_kind(tmp_path: Path) -> None:
    """Its message says which there are."""
    made = pod_spec(tmp_path, {"hostNetwork": True, "containers": [{"name": "a"}]})
    assert "ports" not in made["initContainers"][0]
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


@pytest.mark.parametrize(
    ("pod_security", "trainer_security", "fs_group", "sidecar", "pod"),
    [
        ({"runAsUser": 0}, {}, 65532, {"runAsUser": 65532}, {"fsGroup": 65532}),
        ({"runAsUser": 0}, {}, None, {"runAsUser": 65532, "runAsGroup": 0}, {}),
        ({"runAsUser": 0}, {}, 0, {"runAsUser": 65532, "runAsGroup": 0}, {}),
        ({"runAsUser": 7}, {}, None, {}, {}),
        ({}, {"runAsUser": 7}, None, {"runAsUser": 7}, {}),
        ({}, {}, None, {"runAsGroup": 0}, {}),
        ({"fsGroup": 9}, {}, None, {}, {"fsGroup": 9}),
    ],
)
def test_the_helper_lets_the_sidecar_start_and_read(
    tmp_path: Path,
    pod_security: dict[str, Any],
    trainer_security: dict[str, Any],
    fs_group: int | None,
    sidecar: dict[str, Any],
    pod: dict[str, Any],
) -> None:
    """Never as root; by the pod's group, or where none may be set as the trainer's user, or with root's group."""
    spec = {"securityContext": pod_security, "containers": [{"name": "a", "securityContext": trainer_security}]}
    made = pod_spec(tmp_path, spec, injection={"fsGroup": fs_group})
    own = made["initContainers"][0]["securityContext"]
    assert {key: own[key] for key in ("runAsUser", "runAsGroup") if key in own} == sidecar
    assert {key: value for key, value in made.get("securityContext", {}).items() if key == "fsGroup"} == pod


def test_the_component_starts_in_a_pod_of_root() -> None:
    """It cannot see the pod's user, so it names its own; not where the cluster gives users and groups (OpenShift)."""
    (made,) = rendered(injection__engine="component")
    assert made["spec"]["template"]["spec"]["initContainers"][0]["securityContext"]["runAsUser"] == 65532
    (made,) = rendered(injection__engine="component", injection__fsGroup="null", injection__imagePullSecrets="{ours}")
    spec = made["spec"]["template"]["spec"]
    assert "runAsUser" not in spec["initContainers"][0]["securityContext"]
    assert "fsGroup" not in spec.get("securityContext", {})
    assert spec["imagePullSecrets"] == [{"name": "ours"}]


@pytest.mark.skipif(support.why_missing("kubectl") is not None, reason=str(support.why_missing("kubectl")))
def test_the_component_patches_a_labelled_job_and_no_other(tmp_path: Path) -> None:
    """By kustomize itself: the sidecar is first, and the Job's own variables are kept."""
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "yes", "labels": {"torchobs.io/inject": "true"}},
        "spec": {
            "template": {
                "spec": {
                    "initContainers": [{"name": "first", "image": "any"}],
                    "containers": [{"name": "trainer", "image": "any", "env": [{"name": "MINE", "value": "1"}]}],
                }
            }
        },
    }
    other = job | {"metadata": {"name": "no"}}
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump_all([job, other]))
    shutil.copytree(COMMITTED / "component", tmp_path / "component")
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({"resources": ["jobs.yaml"], "components": ["component"]}))
    done = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True, timeout=60)
    made = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in yaml.safe_load_all(done.stdout)}
    assert [one["name"] for one in made["yes"]["initContainers"]] == ["torchobs", "first"]
    assert "MINE" in {one["name"] for one in made["yes"]["containers"][0]["env"]}
    assert made["no"] == other["spec"]["template"]["spec"]  # type: ignore[index]  # a dict of dicts
