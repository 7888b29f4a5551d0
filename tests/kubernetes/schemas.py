"""Strict JSON schemas for kubeconform, without a network: of Kubernetes' own kinds and of the operators'.

Kubernetes' are those of the package `kubernetes-validate`, which has every minor version's; kubeconform does not read its files
as they are, for they refer to each other by addresses: here each refers to the file of all definitions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from tests.kubernetes import crds

POLICIES = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")
KINDS = ("ConfigMap", "NetworkPolicy", "Pod", *POLICIES)


def write(folder: Path, version: str, kinds: Iterable[str] = KINDS) -> None:
    """Write a file for each kind of Kubernetes 1.N.0 and each of the operators, named as kubeconform's template asks for it."""
    spec = find_spec("kubernetes_validate")
    assert spec is not None, "needs the extra dev: pip install kubernetes-validate"
    source = Path(str(spec.origin)).parent / "kubernetes-json-schema" / f"v{version}-local-strict" / "_definitions.json"
    definitions = folder / source.name
    definitions.write_bytes(source.read_bytes())
    for name, definition in json.loads(source.read_text(encoding="utf-8"))["$defs"].items():
        for kind in definition.get("x-kubernetes-group-version-kind", ()):
            if kind["kind"] in kinds:
                group = f"-{kind['group'].partition('.')[0]}" if kind["group"] else ""
                text = json.dumps({"$ref": f"{definitions.as_uri()}#/$defs/{name}"})
                (folder / f"{kind['kind'].lower()}{group}-{kind['version']}.json").write_text(text, encoding="utf-8")
    for name, schema in crds.strict_schemas():
        (folder / name).write_text(json.dumps(schema), encoding="utf-8")
