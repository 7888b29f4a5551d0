"""The shipped manifests keep what a sidecar needs of a pod."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from torchobs.config.options import duration_s
from torchobs.config.settings import EXPORTER_ADDRESS
from torchobs.flight.directory import KUBERNETES_CONTROL, KUBERNETES_MOUNT

PORT = EXPORTER_ADDRESS.port

MARGIN_S = 5


@pytest.fixture
def manifests(checkout: Path) -> dict[str, dict[str, Any]]:
    """By kind."""
    files = (checkout / "deploy" / "kubernetes").glob("*.yaml")
    return {made["kind"]: made for path in files for made in yaml.safe_load_all(path.read_text())}


@pytest.fixture
def pod(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The pod of the Job."""
    found: dict[str, Any] = manifests["Job"]["spec"]["template"]["spec"]
    return found


def test_the_exporter_is_a_native_sidecar_that_nothing_can_fail(pod: dict[str, Any]) -> None:
    """First of the init containers, restarted whatever happens, and without a probe that could hold up the training."""
    exporter = pod["initContainers"][0]
    assert (exporter["name"], exporter["restartPolicy"]) == ("torchobs", "Always")
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} & exporter.keys()
    assert exporter["resources"]["requests"] == exporter["resources"]["limits"]


def test_there_is_time_for_the_last_scrape(pod: dict[str, Any], manifests: dict[str, dict[str, Any]]) -> None:
    """The grace period is at least interval, timeout and five seconds of the PodMonitor, which selects this pod's port."""
    monitor = manifests["PodMonitor"]["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (port,) = pod["initContainers"][0]["ports"]
    assert (port["name"], port["containerPort"]) == (endpoint["port"], PORT)
    assert len(port["name"]) <= 15
    needed_s = duration_s(endpoint["interval"]) + duration_s(endpoint["scrapeTimeout"]) + MARGIN_S
    assert pod["terminationGracePeriodSeconds"] >= needed_s
    labels = manifests["Job"]["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()


def test_each_side_writes_only_what_is_its_own(pod: dict[str, Any]) -> None:
    """Flight files are the trainer's, commands the exporter's; both volumes are limited memory, found without a setting."""

    def mounts(container: dict[str, Any]) -> dict[str, bool]:
        return {
            mount["mountPath"]: mount.get("readOnly", False)
            for mount in container["volumeMounts"]
            if mount["name"].startswith("torchobs-")
        }

    assert mounts(pod["initContainers"][0]) == {KUBERNETES_MOUNT: True, KUBERNETES_CONTROL: False}
    assert mounts(pod["containers"][0]) == {KUBERNETES_MOUNT: False, KUBERNETES_CONTROL: True}
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    assert all(volumes[name]["medium"] == "Memory" for name in ("torchobs-flight", "torchobs-control"))
    assert all("sizeLimit" in volumes[name] for name in ("torchobs-flight", "torchobs-control"))


def test_the_pod_is_restricted(pod: dict[str, Any]) -> None:
    """Pod Security `restricted`, a read-only root, a group for the volumes, and nobody's processes shared."""
    security = pod["securityContext"]
    assert (security["runAsNonRoot"], security["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert security["fsGroup"] > 0
    assert not {"shareProcessNamespace", "hostPID", "hostNetwork", "hostIPC"} & pod.keys()
    for container in (*pod["initContainers"], *pod["containers"]):
        own = container["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
        assert own["capabilities"] == {"drop": ["ALL"]}
