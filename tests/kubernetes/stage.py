"""Jobs on a cluster, and beside it the chart's Prometheus and Alertmanager that watch them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import support
from tests.exporters import value_on
from tests.helm import objects
from tests.helm import rendered as rendered_chart
from tests.kubernetes.cluster import PORT, Namespace, Pod, get
from tests.kubernetes.injection import injection
from tests.kubernetes.jobs import trainer_of
from tests.prometheus_server import PrometheusServer, alertmanager_command, newest_prometheus, serving, start_alertmanager
from tests.support import free_port, wait_until
from torchobs.rules.files import rendered
from torchobs.rules.values import Thresholds, Values

# Upper bounds for a machine that is busy with other tests.
STARTS_S, ENDS_S, ARRIVES_S = 600.0, 600.0, 600.0


@dataclass(frozen=True, slots=True)
class Stage:
    """All Jobs, running, and what watches them."""

    namespace: Namespace
    prometheus: PrometheusServer
    slow: PrometheusServer
    """The same, evaluating its rules once a minute"""
    arrived: list[dict[str, Any]]
    """The notifications that Alertmanager has sent"""
    began_s: float
    """Unix time before the first Job"""

    def uid(self, name: str) -> str:
        """A Job's UID."""
        return self.namespace.kubectl("get", "job", name, "-o", "jsonpath={.metadata.uid}")

    def training(self, name: str) -> Pod:
        """The only pod of a Job, once its page has steps."""

        def stepping() -> Pod | None:
            pods = self.namespace.pods(name)
            return pods[0] if pods and pods[0].ip and steps(pods[0]) else None

        pod = wait_until(stepping, timeout_s=STARTS_S, interval_s=0.5)
        assert pod is not None
        return pod

    def ended(self, name: str, condition: str) -> Pod:
        """The only pod of a Job, once the Job is what it was expected to be."""
        wait_until(partial(self.namespace.job_condition, name), timeout_s=ENDS_S, interval_s=0.5)
        assert self.namespace.job_condition(name) == condition
        (pod,) = self.namespace.pods(name)
        return pod

    def scraped(self, metric: str, pod: Pod, **labels: str) -> float:
        """The last value that Prometheus has of a pod's metric, though the pod has ended since."""
        chosen = "".join(f',{name}="{text}"' for name, text in labels.items())
        return self.prometheus.value(f'last_over_time({metric}{{pod="{pod.name}"{chosen}}}[1h])')

    def told(self, name: str, alert: str) -> dict[str, Any]:
        """The alert of a Job's run that arrived, with its receiver."""
        run = self.uid(name)

        def notification() -> dict[str, Any] | None:
            return next((sent for sent in self.notified(run) if sent["labels"]["alertname"] == alert), None)

        arrived = wait_until(notification, timeout_s=ARRIVES_S, interval_s=0.2)
        assert arrived is not None
        return arrived

    def notified(self, run: str) -> Iterator[dict[str, Any]]:
        """All alerts of a run that have arrived so far, each with its receiver."""
        for sent in self.arrived:
            yield from (
                {**alert, "receiver": sent["receiver"]} for alert in sent["alerts"] if alert["labels"].get("run_id") == run
            )

    def assert_silence_of(self, run: str) -> None:
        """No alert of a run is active, by rules that have seen its end, and none has arrived."""
        self.prometheus.wait_for_evaluation()
        assert [alert.name for alert in self.prometheus.alerts() if alert.labels.get("run_id") == run] == []
        assert list(self.notified(run)) == []


def steps(pod: Pod) -> float:
    """What the pod's page has of steps."""
    return value_on(get(f"{pod.ip}:{PORT}", User_Agent="tests")[1], "torchobs_steps_total") or 0


def torchrun(manifest: dict[str, Any], *options: str) -> dict[str, Any]:
    """The Job with its script started by torchrun, as the container's first process; for its logs it has the volume at /tmp."""
    trainer = trainer_of(manifest)
    trainer["command"] = ["python3", "-m", "torch.distributed.run", "--standalone", *options, *trainer["command"][1:]]
    return manifest


@contextmanager
def monitored(
    folder: Path,
    *objects: Mapping[str, Any],
    scrapes: tuple[str, str] = ("1s", "5s"),
    evaluation: str = "1s",
    exporter: str = "",
) -> Iterator[Stage]:
    """All objects at once; two Prometheus, one with an Alertmanager that notifies this process.

    They run outside the cluster, with the chart's rules, and find the pods by its scrape configuration and the cluster's API.
    One value is another: lives are short here. To a pod they are two scrapers behind one address. ``scrapes``: their scrape
    intervals; ``evaluation``: that of the first one's rules, where the second has a minute; ``exporter``: an image of the
    exporter by which the admission policy is at work in the namespace.
    """
    program = newest_prometheus(2)
    if reason := support.why_missing("helm") or support.why_missing("prometheus-alertmanager"):
        pytest.skip(reason)
    assert program, support.why_missing("prometheus")
    arrived: list[dict[str, Any]] = []
    rules = []
    for name, text in rendered(Values(Thresholds(lived_s=1))).items():
        if name.startswith("rules/"):
            rules.append(folder / Path(name).name)
            rules[-1].write_text(text)

    def receive(request: BaseHTTPRequestHandler) -> bytes:
        arrived.append(json.loads(request.rfile.read(int(request.headers["Content-Length"]))))
        return b""

    with ExitStack() as stack:
        namespace, began_s = stack.enter_context(Namespace()), time.time()
        if exporter:
            stack.enter_context(injection(namespace, exporter))
        namespace.apply(*objects)
        receiver = stack.enter_context(serving(receive))
        command = alertmanager_command(str(shutil.which("prometheus-alertmanager")))
        alertmanager = start_alertmanager(partial(_started, stack, folder), command, folder, free_port(), receiver)
        alerting = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}

        def prometheus(scrape: str, evaluation: str, **settings: object) -> PrometheusServer:
            often = {"scrape_interval": scrape, "scrape_timeout": scrape if scrape in {"1s", "5s"} else "10s"}
            settings["scrape_configs"] = [scrape_config(namespace.name) | often]
            settings["global"] = often | {"evaluation_interval": evaluation}
            return stack.enter_context(PrometheusServer(program, rules=rules, interval="1s", settings=settings))

        slow = prometheus(scrapes[1], "1m")
        yield Stage(namespace, prometheus(scrapes[0], evaluation, alerting=alerting), slow, arrived, began_s)


def _started(stack: ExitStack, folder: Path, *argv: str, **options: Any) -> subprocess.Popen[str]:
    log = stack.enter_context((folder / "log").open("w"))
    process = stack.enter_context(
        subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, **options)
    )
    stack.callback(process.kill)
    return process


def scrape_config(namespace: str) -> dict[str, Any]:
    """The job of the chart's scrape configuration, for this cluster's pods of one namespace."""
    (config_map,) = objects(rendered_chart("--set", "scrapeConfig.enabled=true", "-s", "templates/scrapeconfig.yaml"))
    (job,) = yaml.safe_load(config_map["data"]["torchobs.yaml"])["scrape_configs"]
    selectors = [selector for config in job.get("kubernetes_sd_configs", ()) for selector in config.get("selectors", ())]
    pods = {"role": "pod", "selectors": selectors, "namespaces": {"names": [namespace]}}
    return {**job, "kubernetes_sd_configs": [pods | {"kubeconfig_file": os.environ["KUBECONFIG"]}]}
