"""The shipped dashboards as tests look at them, without grafana-foundation-sdk."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tests.support import ROOT

FOLDER = ROOT / "deploy" / "grafana" / "dashboards"


def shipped() -> dict[str, dict[str, Any]]:
    """The committed dashboards by uid."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Its panels in reading order, also those below a collapsed heading; headings are none."""
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels") or ()


def targets(dashboard: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Its queries, each with its panel."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield panel, target


def variables(dashboard: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Its variables by name."""
    return {variable["name"]: variable for variable in dashboard["templating"]["list"]}
