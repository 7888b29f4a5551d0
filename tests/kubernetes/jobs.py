"""The shipped Job, as a test changes it for a cluster with two cores."""

from __future__ import annotations

import os
from typing import Any

import pytest
import yaml

from tests import support

# Asked for here, before the fixture that hides what begins with TORCHOBS_ from every test.
EXPORTER, TRAINER = (os.environ.get(f"TORCHOBS_TEST_{image}_IMAGE", "") for image in ("EXPORTER", "TRAINER"))
READY = bool(os.environ.get("KUBECONFIG") and EXPORTER and TRAINER)
IN_A_CLUSTER = [
    pytest.mark.kubernetes,
    pytest.mark.skipif(not READY, reason=f"{support.NEEDS_KUBERNETES}: KUBECONFIG, and `make kube-test`"),
]
"""Marks of a module with tests that need a cluster and the images"""

SHIPPED = support.ROOT / "deploy" / "kubernetes"
ARBITRARY_UID = 1_000_650_000
_SCRIPT = {"name": "script", "mountPath": "/script", "readOnly": True}


def job(name: str, *arguments: str, script: str = "pod.py", **spec: object) -> dict[str, Any]:
    """The shipped Job with what it says to CHANGE changed, and what a machine with two cores cannot give."""
    manifest: dict[str, Any] = yaml.safe_load((SHIPPED / "job-with-sidecar.yaml").read_text())
    manifest["metadata"]["name"] = name
    manifest["spec"] |= spec
    pod = manifest["spec"]["template"]["spec"]
    pod["securityContext"] |= {"runAsUser": ARBITRARY_UID, "fsGroup": ARBITRARY_UID}
    pod["volumes"].append({"name": "script", "configMap": {"name": "script"}})
    exporter_of(manifest)["image"] = EXPORTER
    exporter_of(manifest)["resources"]["requests"]["cpu"] = "50m"
    trainer = trainer_of(manifest)
    trainer |= {"image": TRAINER, "command": ["python3", f"/script/{script}", *arguments]}
    trainer["resources"] = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "768Mi"}}
    trainer["volumeMounts"].append(_SCRIPT)
    return manifest


def exporter_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The sidecar's container."""
    container: dict[str, Any] = manifest["spec"]["template"]["spec"]["initContainers"][0]
    return container


def trainer_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The trainer's container."""
    container: dict[str, Any] = manifest["spec"]["template"]["spec"]["containers"][0]
    return container


def scripts(*names: str) -> dict[str, Any]:
    """The ConfigMap of scripts that the Jobs mount."""
    data = {name: (support.ROOT / "tests" / "scripts" / name).read_text() for name in names}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script"}, "data": data}
