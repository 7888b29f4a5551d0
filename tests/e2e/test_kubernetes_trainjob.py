"""A labelled pod as Kubeflow Trainer's controller makes it, on a real cluster: its exporter reports with the pod's own token.

The controller is not there. Its status server is in this process, and asks the cluster whose a token is, as the real one does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.kubernetes.cluster import Namespace, reached_from
from tests.kubernetes.injection import injecting, job, pod_template
from tests.kubernetes.jobs import EXPORTER, IN_A_CLUSTER, scripts
from tests.support import wait_until
from tests.trainjob_server import Trainer, serving
from tests.web_configs import certify

pytestmark = [*IN_A_CLUSTER, pytest.mark.skipif(bool(missing := support.why_missing("openssl")), reason=str(missing))]

STEPS = 200
AUDIENCE = "trainer.kubeflow.org"
FOLDER, TOKEN = "/var/run/secrets/kubeflow/trainer", "kubeflow-trainer-token"


def of_a_trainjob(url: str) -> dict[str, Any]:
    """A Job whose pod has what `pkg/runtime/framework/plugins/trainjobstatus` of Kubeflow Trainer 2.2 adds, and the label."""
    values = {"URL": url, "CA_CERT": f"{FOLDER}/ca.crt", "TOKEN": f"{FOLDER}/token"}
    env = [{"name": f"KUBEFLOW_TRAINER_SERVER_{name}", "value": text} for name, text in values.items()]
    template = pod_template("true", ["python3", "/script/pod.py", str(STEPS)], *env)
    template["spec"]["containers"][0]["volumeMounts"].append({"name": TOKEN, "mountPath": FOLDER, "readOnly": True})
    token = {"serviceAccountToken": {"audience": AUDIENCE, "expirationSeconds": 3600, "path": "token"}}
    authority = {"configMap": {"name": "gpt-tls-config", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    template["spec"]["volumes"].append({"name": TOKEN, "projected": {"sources": [token, authority]}})
    return job("gpt", template)


def address_of_this_machine(namespace: Namespace) -> str:
    """As pods see it: asked of one that waits."""
    template = pod_template("false", ["python3", "-c", "import time; time.sleep(600)"])
    waits = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "waits"}, "spec": template["spec"]}
    namespace.apply(waits)
    wait_until(lambda: namespace.pods()[0].ip, timeout_s=300, interval_s=0.3)
    return reached_from(namespace.pods()[0])


def reviewed(namespace: Namespace, token: str) -> Mapping[str, Any]:
    """What the API server says of a token."""
    review = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": {"token": token, "audiences": [AUDIENCE]},
    }
    found: Mapping[str, Any] = json.loads(namespace.kubectl("create", "-o", "json", "-f", "-", given=json.dumps(review)))[
        "status"
    ]
    return found


def test_the_exporter_reports_with_the_token_of_its_pod(tmp_path: Path) -> None:
    """Under `restricted`, with the token's file as kubelet writes it; the last report is the end."""
    with injecting(EXPORTER) as namespace:
        namespace.apply(scripts("pod.py"))
        host = address_of_this_machine(namespace)
        trainer = Trainer(certify(str(shutil.which("openssl")), tmp_path, "server", host), host)
        data = {"ca.crt": trainer.certificate.read_text()}
        namespace.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "gpt-tls-config"}, "data": data})
        with serving(trainer):
            namespace.apply(of_a_trainjob(trainer.url))
            wait_until(partial(namespace.job_condition, "gpt"), timeout_s=600, interval_s=0.5)
            assert namespace.job_condition("gpt") == "Complete"
        (pod,) = namespace.pods("gpt")
        assert trainer.last["progressPercentage"] == 100, namespace.logs(pod, "torchobs")
        assert {"name": "step", "value": str(STEPS)} in trainer.last["metrics"]
        status = reviewed(namespace, trainer.got[0][1].removeprefix("Bearer "))
        assert (status["authenticated"], status["audiences"]) == (True, [AUDIENCE])
        assert status["user"]["extra"]["authentication.kubernetes.io/pod-name"] == [pod.name]
