"""The chart on a real cluster: installed, tested, upgraded, rolled back and uninstalled by the real Helm.

The operators' CRDs are in the API server (`tests/kubernetes/crds.py` says where their schemas come from), the operators are
not: that it takes the objects, with no unknown field, is what is shown here.
"""

from __future__ import annotations

import base64
import json
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from tests import support
from tests.helm import CHART, helm
from tests.kubernetes import injection
from tests.kubernetes.cluster import Namespace
from tests.kubernetes.crds import CRDS
from tests.kubernetes.jobs import EXPORTER, IN_A_CLUSTER
from tests.support import wait_until
from torchobs._version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [*IN_A_CLUSTER, pytest.mark.skipif(bool(missing := support.why_missing("helm")), reason=str(missing))]

PREVIOUS = "0.0.1"
SECRET_LIMIT_BYTES = 1 << 20
"""Of a Secret's data, which is where Helm keeps a release."""
OF_THE_CLUSTER = frozenset({"mutatingadmissionpolicies", "mutatingadmissionpolicybindings"})
BY_ITSELF = ("event", "serviceaccount/default", "configmap/kube-root-ca.crt")
"""What the cluster puts into a namespace."""
REPOSITORY, _, TAG = EXPORTER.rpartition(":")
IMAGE = ("--set", f"image.repository={REPOSITORY},image.tag={TAG},image.pullPolicy=IfNotPresent")


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    """A namespace that enforces `restricted`, and the operators' CRDs, of which those that were there are left alone."""
    with Namespace() as empty:
        there = empty.kubectl("get", "customresourcedefinitions", "-o", "name")
        ours = [crd for crd in CRDS if crd.name not in there]
        for crd in ours:
            empty.kubectl("create", "-f", "-", given=json.dumps(crd.definition()))
        for crd in CRDS:
            empty.kubectl("wait", "--for=condition=Established", "--timeout=30s", f"customresourcedefinition/{crd.name}")
        yield empty
        for crd in ours:
            empty.kubectl("delete", "customresourcedefinition", crd.name, "--wait=false")


def succeeds(namespace: Namespace, *arguments: str | Path) -> str:
    """Run Helm in the namespace; the test fails with its message if it fails."""
    shows_a_policy = arguments[0] in {"install", "upgrade", "rollback"} and "--dry-run=server" not in arguments
    with injection.one_at_a_time() if shows_a_policy else nullcontext():
        done = helm(*arguments, "--namespace", namespace.name)
        time.sleep(injection.COMPILED_S if shows_a_policy else 0)
    assert done.returncode == 0, done.stderr
    return done.stdout


def everything(namespace: Namespace) -> set[str]:
    """Return the names of all objects of the namespace, and of those outside that a chart of ours makes."""
    kinds = namespace.kubectl("api-resources", "--namespaced", "--verbs=list,delete", "-o", "name").split()
    objects = namespace.kubectl("get", ",".join(kinds), "-o", "name", "--ignore-not-found").split()
    listed = namespace.kubectl("api-resources", "--namespaced=false", "--verbs=list,delete", "-o", "name").split()
    whole = ",".join(kind for kind in listed if kind.partition(".")[0] in OF_THE_CLUSTER)
    # what other tests have there is called by their namespaces
    names = namespace.kubectl("get", whole, "-o", "name").split()
    objects += [name for name in names if "torchobs" in name and "torchobs-test-" not in name]
    return {name for name in objects if not name.startswith(BY_ITSELF)}


def version_of(namespace: Namespace, name: str) -> str:
    """Return the version of the chart that an object is of."""
    labels = json.loads(namespace.kubectl("get", name, "-o", "json"))["metadata"]["labels"]
    return str(labels["app.kubernetes.io/version"])


def test_from_the_previous_chart_and_back_without_a_trace(namespace: Namespace, tmp_path: Path) -> None:
    """Installed, tested under `restricted`, upgraded with other values, rolled back, uninstalled: nothing is left.

    The previous chart is this one under another version: there is no older release yet.
    """
    before = everything(namespace)
    try:
        installed_and_changed(namespace, tmp_path, before)
    finally:
        succeeds(namespace, "uninstall", "torchobs", "--wait", "--ignore-not-found")
    assert everything(namespace) == before


def installed_and_changed(namespace: Namespace, tmp_path: Path, before: set[str]) -> None:
    """Install, test, upgrade and roll back."""
    packaged = helm("package", CHART, "--version", PREVIOUS, "--app-version", PREVIOUS, "-d", tmp_path)
    assert packaged.returncode == 0, packaged.stderr
    previous, monitor = tmp_path / f"torchobs-{PREVIOUS}.tgz", "podmonitor/torchobs"
    here = f'injection.namespaceSelector={{"matchLabels":{{"kubernetes.io/metadata.name":"{namespace.name}"}}}}'
    install = (*IMAGE, "--set-json", here)  # other tests' pods are injected by policies of their own
    notes = succeeds(namespace, "install", "torchobs", previous, *install)
    expected = ('torchobs.io/inject: "true"', "port-forward POD 10960", "helm test torchobs", "set prometheusRule.grafanaUrl")
    assert [words for words in expected if words not in notes] == []
    assert version_of(namespace, monitor) == PREVIOUS
    installed = everything(namespace)
    assert sum(name.startswith("configmap/") for name in installed - before) == 12
    assert sum(name.startswith("prometheusrule.") for name in installed - before) == 3
    assert_release_fits(namespace)
    assert_a_second_release_keeps_apart(namespace, install)
    assert_the_test_tries_the_label(namespace)
    assert not any(name.startswith("pod/") for name in everything(namespace))

    closed = f"networkPolicy.enabled=true,networkPolicy.namespaces={{{namespace.name}}}"
    more = f"{closed},dashboards.grafanaOperator.enabled=true"
    succeeds(namespace, "upgrade", "torchobs", CHART, *install, "--set", more)
    assert version_of(namespace, monitor) == __version__
    added = everything(namespace) - installed
    kinds = [name.partition("/")[0].partition(".")[0] for name in added]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "networkpolicy": 1,
        "grafanadashboard": 12,
        "secret": 1,  # of the release
    }
    named = ("--reset-then-reuse-values", "--set", "prometheusRule.severityNames.page=critical")  # as the README says
    succeeds(namespace, "upgrade", "torchobs", CHART, *named)
    assert "severity: critical" in namespace.kubectl("get", "prometheusrule", "torchobs-alerts", "-o", "yaml")
    succeeds(namespace, "rollback", "torchobs", "1")
    assert version_of(namespace, monitor) == PREVIOUS
    assert {name for name in everything(namespace) - installed if not name.startswith("secret/sh.helm.release")} == set()


def assert_a_second_release_keeps_apart(namespace: Namespace, install: tuple[str, ...]) -> None:
    """Which of two sidecars a pod gets would be chance; with other namespaces the second is taken."""
    if injection.served_version():
        again = ("install", "other", CHART, "--dry-run=server", "--namespace", namespace.name)
        refused = helm(*again, *install)
        assert f"the release torchobs in namespace {namespace.name} injects into the same namespaces" in refused.stderr
        elsewhere = 'injection.namespaceSelector={"matchLabels":{"kubernetes.io/metadata.name":"elsewhere"}}'
        assert helm(*again, *IMAGE, "--set-json", elsewhere).returncode == 0


def assert_the_test_tries_the_label(namespace: Namespace) -> None:
    """It succeeds where the label adds a sidecar, also right after the installation, when no policy is in force yet.

    Where the label does nothing the log of the pod that failed says why.
    """
    served = bool(injection.served_version())
    assert "Phase:          Succeeded" in succeeds(namespace, "test", "torchobs", "--timeout", "3m")
    if served:
        namespace.kubectl("label", "namespace", namespace.name, "torchobs.io/inject=false")
        try:
            wait_until(
                lambda: "initContainers" not in injection.admitted(namespace, injection.pod())["spec"],
                timeout_s=20,
                interval_s=0.3,
            )
            assert helm("test", "torchobs", "--timeout", "3m", "--namespace", namespace.name).returncode != 0
            assert "the label torchobs.io/inject did nothing" in namespace.kubectl("logs", "torchobs-test")
        finally:
            namespace.kubectl("label", "namespace", namespace.name, "torchobs.io/inject-")
            namespace.kubectl("delete", "pod", "torchobs-test", "--ignore-not-found")


def assert_release_fits(namespace: Namespace) -> None:
    """A Secret takes 1 MiB; upgrades and longer values need room."""
    (secret,) = json.loads(namespace.kubectl("get", "secrets", "-l", "owner=helm", "-o", "json"))["items"]
    size = sum(len(base64.b64decode(value)) for value in secret["data"].values())
    assert size < SECRET_LIMIT_BYTES / 2, f"the release takes {size} bytes"
