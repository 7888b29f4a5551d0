"""Write what the chart has from elsewhere: `python helm/generate_chart.py`, or `--check` it.

Its version from torchobs/_version.py; schema and table of values from values.yaml; rules from torchobs/rules/; dashboards from
`deploy/`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from torchobs._version import __version__
from torchobs.rules import files
from torchobs.rules.values import Values

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "torchobs"
RULES = ("rules/torchobs-alerts.yml", "rules/torchobs-recordings.yml", "rules/torchobs-percentiles.yml")
RULES_NATIVE = "rules-native/torchobs-percentiles.yml"
TYPES = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
ALERTS = "$alerts"
"""Stands in `@schema` for the names of all alerts, as a list or as keys."""
BEGIN, END = "<!-- values: written by helm/generate_chart.py -->\n", "<!-- end of values -->"
SUBCHART = {"global": {"type": "object"}, "enabled": {"type": "boolean"}}
"""What Helm gives to a chart that is another one's dependency: the globals, and the condition that switches it on."""


class ValuesError(ValueError):
    """values.yaml lacks something that the generator needs; the message says which line."""


@dataclass(frozen=True, slots=True)
class Value:
    """A key of values.yaml: its dotted path, its default, its description, what `@schema` says, and the keys in it."""

    path: str
    default: Any
    about: str
    schema: Mapping[str, Any]
    inner: tuple[Value, ...]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]


def main(argv: list[str] | None = None) -> int:
    """Write the files that differ, or with `--check` say which are stale and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is stale")
    options = parser.parse_args(argv)
    stale = {path: text for path, text in generated().items() if not path.is_file() or path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        if options.check:
            print(f"{path} is stale: run `make docs`")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return int(bool(stale) and options.check)


def generated() -> dict[Path, str]:
    """Return the text of every generated file of the chart. Raises :class:`ValuesError`."""
    values = read((CHART / "values.yaml").read_text(encoding="utf-8"))
    return {
        CHART / "Chart.yaml": _with_version((CHART / "Chart.yaml").read_text(encoding="utf-8")),
        CHART / "values.schema.json": schema(values, _alerts()),
        CHART / "README.md": _with_table((CHART / "README.md").read_text(encoding="utf-8"), values),
        **_copies(),
    }


_GRAFANA = "https://grafana.invalid"
"""Taken out again: rules that are rendered without an address have no links."""


def _copies() -> dict[Path, str]:
    """Return rules whose links begin with Grafana's address, which the template adds, and dashboards without white space.

    A Helm release must fit into a Secret of 1 MiB.
    """
    grafana = ROOT / "deploy" / "grafana" / "dashboards"
    texts = files.rendered(Values(grafana_url=_GRAFANA))
    rules = {CHART / "files" / name: texts[name].replace(_GRAFANA, "") for name in (*RULES, RULES_NATIVE)}
    dashboards = {
        CHART / "files" / "dashboards" / path.name: json.dumps(
            json.loads(path.read_text(encoding="utf-8")), ensure_ascii=False, separators=(",", ":")
        )
        + "\n"
        for path in sorted(grafana.glob("*.json"))
    }
    return {**rules, **dashboards}


def _alerts() -> list[str]:
    document = yaml.load((ROOT / "deploy" / "prometheus" / RULES[0]).read_bytes(), Loader=yaml.CSafeLoader)
    return sorted(rule["alert"] for group in document["groups"] for rule in group["rules"] if "alert" in rule)


def _with_version(text: str) -> str:
    text = re.sub(r"^version: .*$", f"version: {__version__}", text, flags=re.MULTILINE)
    return re.sub(r"^appVersion: .*$", f'appVersion: "{__version__}"', text, flags=re.MULTILINE)


def read(text: str) -> tuple[Value, ...]:
    """Return the keys of a values file with their comments. Raises :class:`ValuesError` for a value without description."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        raise ValuesError("values.yaml is no mapping")
    return tuple(_read(node, yaml.safe_load(text), text.splitlines(), ""))


def _read(node: yaml.MappingNode, defaults: Mapping[str, Any], lines: list[str], prefix: str) -> Iterator[Value]:
    for key, found in node.value:
        path, default = f"{prefix}{key.value}", defaults[key.value]
        about, extra = _comment(lines, key.start_mark.line)
        is_open = "additionalProperties" in extra and not about
        inner = isinstance(found, yaml.MappingNode) and found.value and ("additionalProperties" not in extra or is_open)
        if not inner and not about:
            raise ValuesError(f"values.yaml:{key.start_mark.line + 1}: {path} has no description (`# -- …`)")
        within = tuple(_read(found, default, lines, f"{path}.")) if inner else ()
        yield Value(path, default, about, extra, within)


def _comment(lines: list[str], row: int) -> tuple[str, dict[str, Any]]:
    """Return description and `@schema` of the comment block above a line."""
    block: list[str] = []
    while row > 0 and lines[row - 1].lstrip().startswith("#"):
        row -= 1
        block.insert(0, lines[row].strip().lstrip("#").strip())
    extra = [line.removeprefix("@schema") for line in block if line.startswith("@schema")]
    words = " ".join(line for line in block if not line.startswith("@schema"))
    about = words.partition("-- ")[2]
    return about, yaml.safe_load(extra[0]) if extra else {}


def schema(values: tuple[Value, ...], alerts: list[str]) -> str:
    """Return values.schema.json; ``alerts``: the names that stand where `@schema` says so."""
    document = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart torchobs",
        **_object(values, SUBCHART),
    }
    return json.dumps(_filled(document, alerts), indent=2, ensure_ascii=False) + "\n"


def _object(values: tuple[Value, ...], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    properties = {value.name: _property(value) for value in values}
    required = [value.name for value in values if value.inner or "required" in value.schema]  # `null` would remove them
    needed = {"required": required} if required else {}
    return {"type": "object", "additionalProperties": False, **needed, "properties": {**properties, **(more or {})}}


def _property(value: Value) -> dict[str, Any]:
    about = {"description": value.about} if value.about else {}
    if value.inner:
        return {**_object(value.inner), **about, **value.schema}
    return {"type": TYPES[type(value.default)], **about, **value.schema}


def _filled(schema: Any, alerts: list[str]) -> Any:
    if isinstance(schema, dict):
        return {name: _filled(inner, alerts) for key, inner in schema.items() for name in (alerts if key == ALERTS else [key])}
    if isinstance(schema, list):
        return [_filled(inner, alerts) for inner in schema]
    return alerts if schema == ALERTS else schema


def _with_table(text: str, values: tuple[Value, ...]) -> str:
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    if not tail:
        raise ValuesError("README.md has no place for the table of values")
    rows = "".join(_row(value) for value in leaves(values))
    return f"{head}{BEGIN}\n| value | default | |\n|---|---|---|\n{rows}\n{END}{tail}"


def leaves(values: tuple[Value, ...]) -> Iterator[Value]:
    """Yield the values that have no described keys in them, in order."""
    for value in values:
        if value.inner:
            yield from leaves(value.inner)
        else:
            yield value


def _row(value: Value) -> str:
    default = json.dumps(value.default, ensure_ascii=False)
    return f"| `{value.path}` | `{default}` | {value.about.replace('|', '&#124;')} |\n"


if __name__ == "__main__":
    sys.exit(main())
