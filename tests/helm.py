"""The chart in helm/torchobs, rendered by the real Helm."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tests.support import ROOT

CHART = ROOT / "helm" / "torchobs"
VALUE_SETS = tuple(sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml")))
"""The sets of values that must hold: chart-testing's `ci/NAME-values.yaml`."""
IMAGE = ("--set", "image.repository=registry.example.org/torchobs-exporter")
"""Without it nothing is rendered."""
SERVED = (
    "v1/Pod",
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy",
)
"""What a cluster with the Prometheus operator and the policy tells Helm; `helm template` alone asks none."""
CLUSTER = ("--api-versions", ",".join(SERVED))
OLDEST, NEWEST = "1.29.0", "1.37.0"
"""Kubernetes versions: the chart's first, and the last with schemas."""


def values_of(name: str) -> Path:
    """Return the file of a set of values."""
    return CHART / "ci" / f"{name}-values.yaml"


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Helm; the caller looks at how it ended."""
    return subprocess.run(["helm", *map(str, arguments)], capture_output=True, text=True, check=False)


def rendered(*arguments: str | Path, version: str = OLDEST) -> str:
    """Return what is installed as the release `torchobs` in `monitoring`; the test fails with Helm's message."""
    return checked("-n", "monitoring", "--kube-version", version, *IMAGE, *CLUSTER, *arguments)


def checked(*arguments: str | Path) -> str:
    """Return what `helm template torchobs CHART` prints with these arguments alone."""
    done = helm("template", "torchobs", CHART, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:
    """Parse manifests."""
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def of_kind(manifests: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return those of a kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]
