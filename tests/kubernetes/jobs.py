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
"""Marks of a module whose tests need a cluster and the images"""

SHIPPED = support.ROOT / "deploy" / "kubernetes"
ARBITRARY_UID = 1_000_650_000
_SCRIPT = {"name": "script", "mountPath": "/script", "readOnly": True}


def job(name: str, *arguments: str, script: str = "pod.py", **spec: object) -> dict[str, Any]:
    """The shipped Job with what it says to CHANGE changed, and what a machine with two cores cannot give."""
    made: dict[str, Any] = yaml.safe_load((SHIPPED / "job-with-sidecar.yaml").read_text())
    made["metadata"]["name"] = name
    made["spec"] |= spec
    pod = made["spec"]["template"]["spec"]
    pod["securityContext"] |= {"runAsUser": ARBITRARY_UID, "fsGroup": ARBITRARY_UID}
    pod["volumes"].append({"name": "script", "configMap": {"name": "script"}})
    exporter_of(made)["image"] = EXPORTER
    exporter_of(made)["resources"]["requests"]["cpu"] = "50m"
    trainer = trainer_of(made)
    trainer |= {"image": TRAINER, "command": ["python3", f"/script/{script}", *arguments]}
    trainer["resources"] = {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "768Mi"}}
    trainer["volumeMounts"].append(_SCRIPT)
    return made


def exporter_of(made: dict[str, Any]) -> dict[str, Any]:
    """The sidecar's container."""
    found: dict[str, Any] = made["spec"]["template"]["spec"]["initContainers"][0]
    return found


def trainer_of(made: dict[str, Any]) -> dict[str, Any]:
    """The trainer's container."""
    found: dict[str, Any] = made["spec"]["template"]["spec"]["containers"][0]
    return found


def scripts(*names: str) -> dict[str, Any]:
    """The ConfigMap of scripts that the Jobs mount."""
    data = {name: (support.ROOT / "tests" / "scripts" / name).read_text() for name in names}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "script"}, "data": data}
