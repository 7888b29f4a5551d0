"""The chart's scrape configuration, for a Prometheus outside the cluster."""

from __future__ import annotations

import os
from typing import Any

import yaml

from tests.helm import objects, rendered


def scrape_config(namespace: str) -> dict[str, Any]:
    """The job of the chart's scrape configuration."""
    (made,) = objects(rendered("--set", "scrapeConfig.enabled=true", "-s", "templates/scrapeconfig.yaml"))
    (job,) = yaml.safe_load(made["data"]["torchobs.yaml"])["scrape_configs"]
    return within(job, namespace)


def within(job: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Let a job ask this cluster for the pods of one namespace."""
    found = {
        "role": "pod",
        "selectors": _selectors(job),
        "kubeconfig_file": os.environ["KUBECONFIG"],
        "namespaces": {"names": [namespace]},
    }
    return {**job, "kubernetes_sd_configs": [found]}


def _selectors(job: dict[str, Any]) -> list[dict[str, str]]:
    """The selectors that a job has already."""
    return [selector for config in job.get("kubernetes_sd_configs", ()) for selector in config.get("selectors", ())]
