"""The rules as PrometheusRule objects, for the Prometheus operator where the chart is not used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchobs.rules.rule_file import HEADER, Group, dump
from torchobs.rules.values import Values

ABOUT = """\
#
# PrometheusRule objects for the Prometheus operator: `kubectl apply -n NAMESPACE -f FILE`. Add the labels that your Prometheus'
# `ruleSelector` asks for; kube-prometheus-stack's wants its release's name, and no log says so. The chart has them as values.
"""


def render(files: Mapping[str, Iterable[Group]], values: Values) -> str:
    """Return an object for each rule file, by the object's name."""
    objects = (_object(name, [group.rendered(values) for group in groups]) for name, groups in files.items())
    return f"{HEADER}{ABOUT}" + "---\n".join(map(dump, objects))


def _object(name: str, groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "torchobs"}},
        "spec": {"groups": groups},
    }
