"""CustomResourceDefinitions of the operators that the chart makes objects for, for kubeconform and for a real API server.

No package index carries the operators' own CRD files. Those of Prometheus' operator come from a Python package that is
generated from them, `cloudcoil.models.prometheus_operator`. For GrafanaDashboard and Kyverno's MutatingPolicy there is no such
package: any field is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

Schema = dict[str, Any]
ANYTHING = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING = "x-kubernetes-int-or-string"
EITHER = ("ResourceQuantity", "IntOrString")
"""Endings of the models that stand for a number or a string and describe themselves as an object."""
KEPT = ("type", "enum", "pattern", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum")


@dataclass(frozen=True, slots=True)
class Crd:
    """A kind of object, and where its schema comes from."""

    group: str
    version: str
    kind: str
    plural: str
    scope: str
    schema: Callable[[], Schema]

    @property
    def name(self) -> str:
        """The name of the definition."""
        return f"{self.plural}.{self.group}"

    def definition(self) -> Schema:
        """Return the CustomResourceDefinition."""
        version = {"name": self.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": self.schema()}}
        names = {"kind": self.kind, "plural": self.plural, "singular": self.kind.lower()}
        return {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": self.name, "annotations": {"api-approved.kubernetes.io": "unapproved, a test"}},
            "spec": {"group": self.group, "scope": self.scope, "names": names, "versions": [version]},
        }

    def strict_schema(self) -> Schema:
        """Return a JSON schema that refuses fields which the definition does not know."""
        strict: Schema = _strict(self.schema())
        strict["properties"] |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}
        return strict


def structural(document: Mapping[str, Any]) -> Schema:
    """Return pydantic's JSON schema as Kubernetes takes one: without references, unions and defaults."""
    schema = _structural(document, document.get("$defs", {}))
    schema["properties"] |= {"metadata": {"type": "object"}}
    return schema


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return {INT_OR_STRING: True} if name.endswith(EITHER) else _structural(definitions[name], definitions)
    variants = [variant for variant in (*node.get("anyOf", ()), *node.get("oneOf", ())) if variant.get("type") != "null"]
    if len(variants) == 1:
        return _structural(variants[0], definitions)
    if variants:
        types = {_structural(variant, definitions).get("type") for variant in variants}
        return {INT_OR_STRING: True} if types == {"integer", "string"} else {ANYTHING: True}
    schema = {key: node[key] for key in KEPT if key in node}
    if "properties" in node:
        schema["properties"] = {name: _structural(inner, definitions) for name, inner in node["properties"].items()}
        schema |= {"required": list(node["required"])} if node.get("required") else {}
    elif schema.get("type") == "object":
        inner = node.get("additionalProperties")
        schema |= {"additionalProperties": _structural(inner, definitions)} if isinstance(inner, dict) else {ANYTHING: True}
    if "items" in node:
        schema["items"] = _structural(node["items"], definitions)
    return schema or {ANYTHING: True}


def _strict(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node.get(INT_OR_STRING):
        return {"type": ["string", "integer"]}
    schema = {key: inner for key, inner in node.items() if key != ANYTHING}
    if "properties" in schema:
        schema["properties"] = {name: _strict(inner) for name, inner in schema["properties"].items()}
        schema.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        schema |= {key: _strict(schema[key])} if key in schema else {}
    return schema


def _model(module: str, name: str) -> Callable[[], Schema]:
    @cache
    def schema() -> Schema:
        return structural(getattr(import_module(module), name).model_json_schema())

    return schema


def _anything() -> Schema:
    return {"type": "object", "properties": {"metadata": {"type": "object"}, "spec": {"type": "object", ANYTHING: True}}}


_PROMETHEUS = "cloudcoil.models.prometheus_operator.v1"
_MONITORING = "monitoring.coreos.com"
CRDS = (
    Crd(_MONITORING, "v1", "PodMonitor", "podmonitors", "Namespaced", _model(_PROMETHEUS, "PodMonitor")),
    Crd(_MONITORING, "v1", "PrometheusRule", "prometheusrules", "Namespaced", _model(_PROMETHEUS, "PrometheusRule")),
    Crd("policies.kyverno.io", "v1", "MutatingPolicy", "mutatingpolicies", "Cluster", _anything),
    Crd("grafana.integreatly.org", "v1beta1", "GrafanaDashboard", "grafanadashboards", "Namespaced", _anything),
)


def strict_schemas() -> Iterator[tuple[str, Schema]]:
    """Yield a file name, as kubeconform's template for local schemas asks for it, and the schema of each kind."""
    for crd in CRDS:
        yield f"{crd.kind.lower()}-{crd.group.partition('.')[0]}-{crd.version}.json", crd.strict_schema()
