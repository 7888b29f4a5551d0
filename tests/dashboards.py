"""The shipped dashboards as tests look at them, what their queries ask for, and what a real Prometheus answers."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import promql_parser

from tests.support import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.prometheus_server import PrometheusServer, Series

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


# What Grafana puts in place of its variables; the exact values matter to no test.
CHOICES = ("cluster", "namespace", "job_name", "run_id", "rank", "layer", "instance")
VARIABLES = {"$__rate_interval": "1m", "$__interval": "15s", "$__range": "1h", **{f"${choice}": ".*" for choice in CHOICES}}


@dataclass(frozen=True, slots=True)
class Selector:
    """A selector of a query: its name, what it matches by label, and the function that it is given to, if any."""

    name: str
    matchers: Mapping[str, str]
    function: str = ""
    excluded: Mapping[str, str] = field(default_factory=dict)
    """What it must not match"""

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a series with these labels, and this name, is chosen."""
        wanted = all(
            re.fullmatch(value, labels.get(name, "")) for name, value in self.matchers.items() if name not in self.excluded
        )
        return wanted and not any(re.fullmatch(value, labels.get(name, "")) for name, value in self.excluded.items())


def filled(query: str, **choices: str) -> str:
    """The query with Grafana's variables filled in; `rate_interval="4s"` and so on override the defaults."""
    values = {**VARIABLES, **{f"$__{name}": value for name, value in choices.items()}}
    for variable in sorted(values, key=len, reverse=True):
        query = query.replace(variable, values[variable])
    return query


def parse(query: str) -> Any:
    """The syntax tree of a query, Grafana's variables filled in.

    Raises:
        ValueError: It is no PromQL.
    """
    return promql_parser.parse(filled(query))


def nodes(tree: Any, function: str = "") -> Iterator[tuple[Any, str]]:
    """Every node of the tree, each with the function whose argument it is."""
    yield tree, function
    below = tree.func.name if isinstance(tree, promql_parser.Call) else function
    if isinstance(tree, promql_parser.AggregateExpr | promql_parser.BinaryExpr):
        below = ""
    parts = [getattr(tree, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    for part in [*parts, *getattr(tree, "args", [])]:
        if part is not None and not isinstance(part, str):
            yield from nodes(part, below)


def selectors(query: str) -> list[Selector]:
    """The query's selectors, in the order in which they stand."""
    return [
        Selector(
            node.name or "",
            {matcher.name: matcher.value for matcher in node.matchers.matchers},
            function,
            {matcher.name: matcher.value for matcher in node.matchers.matchers if "Not" in str(matcher.op)},
        )
        for node, function in nodes(parse(query))
        if isinstance(node, promql_parser.VectorSelector)
    ]


def groupings(query: str) -> Iterator[set[str]]:
    """The labels of each aggregation that keeps none of its operand's, which `topk` and `bottomk` do."""
    for node, _ in nodes(parse(query)):
        if isinstance(node, promql_parser.AggregateExpr) and not str(node).startswith(("topk", "bottomk")):
            yield set(getattr(node.modifier, "labels", None) or [])


def grouped_by(query: str) -> set[str]:
    """Every label that the query's aggregations and joins name."""
    labels: set[str] = set()
    for node, _ in nodes(parse(query)):
        modifier = getattr(node, "modifier", None)
        parts = [modifier, getattr(modifier, "matching", None)] if modifier is not None else []
        labels |= {label for part in parts for label in getattr(part, "labels", None) or []}
        labels |= set(getattr(modifier, "group_labels", None) or [])
    return labels


def answered(prometheus: PrometheusServer, began_s: float, run: str, uid: str, title: str) -> list[Series]:
    """The series of a panel's first query, of one run, in a Prometheus that began then."""
    expr = next(target["expr"] for panel, target in targets(shipped()[uid]) if panel["title"] == title)
    query = filled(expr, rate_interval="10s", range="2m", interval="1s").replace('run_id=~".*"', f'run_id=~"{run}"')
    now_s = time.time()  # counted from the beginning the last point would be before the newest scrape
    return prometheus.query_range(query, now_s - math.ceil(now_s - began_s), now_s, "1s")
