"""A Prometheus in the cluster, which asks its API as a pod does, with the chart's scrape configuration as Kubernetes mounts it.

The other tests' Prometheus run beside the cluster. Needs what `make kube-test` gives: the trainer's image has the program.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from functools import partial
from ipaddress import ip_address
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from tests import support
from tests.helm import objects, rendered
from tests.kubernetes.cluster import Namespace, Pod, get
from tests.kubernetes.jobs import IN_A_CLUSTER, TRAINER, job, scripts
from tests.prometheus_server import newest_prometheus
from tests.support import free_port, wait_until

MAJOR = 3
"""Of the Prometheus that has `scrape_config_files`, for which the chart's ConfigMap is."""
pytestmark = [
    *IN_A_CLUSTER,
    pytest.mark.skipif(newest_prometheus(MAJOR) is None, reason=f"{support.NEEDS_PROGRAM}: prometheus3, on PATH"),
]

STEPS = 500
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
CONFIG = {"global": {"scrape_interval": "1m"}, "scrape_config_files": ["/etc/scrape/*.yaml"]}
READS_PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}


def scrape_configuration(namespace: str) -> dict[str, Any]:
    """The chart's ConfigMap, for one namespace, as it is; scraped often, for the training is short."""
    given = (
        f"scrapeConfig.enabled=true,scrapeConfig.namespaces={{{namespace}}},podMonitor.interval=1s,podMonitor.scrapeTimeout=1s"
    )
    (made,) = objects(rendered("--set", given, "-s", "templates/scrapeconfig.yaml"))
    made["metadata"]["namespace"] = namespace
    return made


def permissions(namespace: str) -> Iterator[dict[str, Any]]:
    """A service account that may look for pods, which is all that the scrape configuration asks for."""
    named, group = {"metadata": {"name": "prometheus"}}, "rbac.authorization.k8s.io"
    yield named | {"apiVersion": "v1", "kind": "ServiceAccount"}
    yield named | {"apiVersion": f"{group}/v1", "kind": "Role", "rules": [READS_PODS]}
    subject = {"kind": "ServiceAccount", "name": "prometheus", "namespace": namespace}
    role = {"apiGroup": group, "kind": "Role", "name": "prometheus"}
    yield named | {"apiVersion": f"{group}/v1", "kind": "RoleBinding", "subjects": [subject], "roleRef": role}


def config_map(name: str, **data: str) -> dict[str, Any]:
    """A ConfigMap."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def prometheus(port: int) -> dict[str, Any]:
    """The pod."""
    folders = {"config": "/etc/prometheus", "scrape": "/etc/scrape", "data": "/data"}
    container = {
        "name": "prometheus",
        "image": TRAINER,
        "imagePullPolicy": "IfNotPresent",
        "command": [
            "/opt/prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/data",
            f"--web.listen-address=:{port}",
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in folders.items()],
    }  # fmt: skip
    volumes = [
        {"name": "config", "configMap": {"name": "prometheus"}},
        {"name": "scrape", "configMap": {"name": "torchobs-scrape-config"}},
        {"name": "data", "emptyDir": {}},
    ]
    spec = {"serviceAccountName": "prometheus", "restartPolicy": "Never", "containers": [container], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "prometheus"}, "spec": spec}


def on_the_node(pod: dict[str, Any], host: str, port: int) -> dict[str, Any]:
    """Where pods do not reach the API: let the pod share the node's network, and find the API as a pod finds it elsewhere.

    By the variables and the files that Kubernetes gives, whose authority is then the server's own certificate.
    """
    (container,) = pod["spec"]["containers"]
    variables = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": str(port)}
    container["env"] = [{"name": name, "value": text} for name, text in variables.items()]
    container["volumeMounts"].append({"name": "account", "mountPath": ACCOUNT, "readOnly": True})
    token = {"serviceAccountToken": {"path": "token"}}
    volume = {"name": "account", "projected": {"sources": [token, {"configMap": {"name": "authority"}}]}}
    pod["spec"] |= {"hostNetwork": True, "volumes": [*pod["spec"]["volumes"], volume]}
    return pod


def started(namespace: Namespace) -> str:
    """Start it; its `host:port`."""
    address = urlsplit(namespace.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}"))
    host, api_port, port = str(address.hostname), address.port or 443, free_port()
    pod = prometheus(port)
    if host == "localhost" or (host[0].isdigit() and ip_address(host).is_loopback):
        authority = {"ca.crt": ssl.get_server_certificate((host, api_port)), "namespace": namespace.name}
        namespace.apply(config_map("authority", **authority))
        pod = on_the_node(pod, host, api_port)
    namespace.apply(
        scrape_configuration(namespace.name),
        config_map("prometheus", **{"prometheus.yml": json.dumps(CONFIG)}),
        *permissions(namespace.name),
        pod,
    )

    def ready() -> str:
        (found,) = namespace.pods()
        assert found.phase in {"Pending", "Running"}, namespace.logs(found, "prometheus")
        return found.ip if found.ip and get(f"{found.ip}:{port}", "/-/ready")[0] == 200 else ""

    return f"{wait_until(ready, timeout_s=300, interval_s=0.5)}:{port}"


def answer(address: str, query: str) -> list[Mapping[str, Any]]:
    """The series of an instant query."""
    status, body = get(address, f"/api/v1/query?query={quote(query)}")
    assert status == 200, body
    found: list[Mapping[str, Any]] = json.loads(body)["data"]["result"]
    return found


def test_a_prometheus_in_the_cluster_finds_a_training_and_has_its_exact_end() -> None:
    """With no more than the right to look for pods; series have the pod's and the namespace's labels."""
    with Namespace("privileged") as namespace:
        address = started(namespace)
        namespace.apply(scripts("pod.py"), job("watched", str(STEPS)))
        wait_until(partial(namespace.job_condition, "watched"), timeout_s=600, interval_s=0.5)
        assert namespace.job_condition("watched") == "Complete"
        (pod,) = namespace.pods("watched")
        assert_has_its_end(address, pod, namespace.name)


def assert_has_its_end(address: str, pod: Pod, namespace: str) -> None:
    """Prometheus' last sample of the pod's steps is the last step."""
    (found,) = answer(address, f'last_over_time(torchobs_steps_total{{pod="{pod.name}",namespace="{namespace}"}}[1h])')
    assert float(found["value"][1]) == STEPS
    (exits,) = answer(address, f'last_over_time(torchobs_rank_exit{{pod="{pod.name}"}}[1h]) == 1')
    assert exits["metric"]["reason"] == "finished"
