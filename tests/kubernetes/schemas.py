"""Strict JSON schemas for kubeconform, without a network: of Kubernetes' own kinds and of the operators'.

Kubernetes' are those of the package `kubernetes-validate`, which has every minor version's; kubeconform does not read its files
as they are, for they refer to each other by addresses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.kubernetes import crds

POLICIES = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")
KINDS = ("ConfigMap", "NetworkPolicy", "Pod", "Secret", "ServiceAccount", *POLICIES)


def write(folder: Path, version: str, kinds: Iterable[str] = KINDS) -> None:
    """Write a file for each kind of Kubernetes 1.N.0 and each of the operators, named as kubeconform's template asks for it."""
    for name, schema in (*_core(version, frozenset(kinds)), *crds.strict_schemas()):
        (folder / name).write_text(json.dumps(schema), encoding="utf-8")


def _core(version: str, kinds: frozenset[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    spec = find_spec("kubernetes_validate")
    assert spec is not None, "needs the extra dev: pip install kubernetes-validate"
    found = Path(str(spec.origin)).parent / "kubernetes-json-schema" / f"v{version}-local-strict" / "_definitions.json"
    definitions = json.loads(found.read_text(encoding="utf-8"))["$defs"]
    for name, definition in definitions.items():
        for one in definition.get("x-kubernetes-group-version-kind", ()):
            if one["kind"] in kinds:
                group = f"-{one['group'].partition('.')[0]}" if one["group"] else ""
                needed = {each: definitions[each] for each in _reached(name, definitions)}
                yield f"{one['kind'].lower()}{group}-{one['version']}.json", {"$ref": f"#/$defs/{name}", "$defs": needed}


def _reached(name: str, definitions: Mapping[str, Any]) -> set[str]:
    """Return the names of a definition and of all that it refers to."""
    seen, waiting = set(), [name]
    while waiting:
        seen.add(current := waiting.pop())
        waiting.extend(set(_references(definitions[current])) - seen)
    return seen


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"].rpartition("/")[2]
        for inner in node.values():
            yield from _references(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from _references(inner)
