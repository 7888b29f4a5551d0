"""Cases of an alert in tests/rules, made ready for `promtool test rules`.

A case is promtool's, with two differences: it is run at two evaluation intervals, 15 s and Prometheus' default of a minute,
where times to look at are rounded up to the next evaluation; and the links among the annotations are left out, as they follow
from the labels and the time (`active`: when the alert's expression was last true, if that is not when it is looked at).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus

import yaml

from torchobs.rules import values

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INTERVALS = ("15s", "1m")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, where it is: a rule file takes PyYAML's own half a second"""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+)([smhd])")


def seconds(duration: str) -> int:
    """`1h10m` as 4200."""
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION.findall(duration))


def load(text: str) -> Any:
    """A YAML document."""
    return yaml.load(text, _LOADER)  # noqa: S506  # it is a safe one


def document(cases: Path, interval: str, *, only: str = "") -> dict[str, Any]:
    """The file for promtool, whose rules are `rules.yml` beside it. `only`: cases with this in their name."""
    given = load(cases.read_text())
    tests = [_test(case, seconds(interval)) for case in given["tests"] if only in case["name"]]
    return {"rule_files": ["rules.yml"], "evaluation_interval": interval, "tests": tests}


def groups_of(files: list[str], alert: str) -> dict[str, Any]:
    """A rule file with the group of that alert and those that record what it asks for, in the order of their evaluation.

    Groups are evaluated by themselves, and others cost time only.
    """
    groups = [group for text in files for group in load(text)["groups"]]
    (wanted,) = (group for group in groups if alert in {rule.get("alert") for rule in group["rules"]})
    found = list(_needed(groups, wanted, [wanted["name"]]))
    return {"groups": [*found, wanted]}


def _needed(groups: list[dict[str, Any]], of: dict[str, Any], seen: list[str]) -> Iterator[dict[str, Any]]:
    text = " ".join(str(value) for rule in of["rules"] for value in (rule["expr"], *rule.get("annotations", {}).values()))
    asked = set(re.findall(r"[a-z_]+:[a-z_0-9]+:[a-z_0-9]+", text))
    for group in groups:
        if group["name"] not in seen and asked & {rule.get("record") for rule in group["rules"]}:
            seen.append(group["name"])
            yield from _needed(groups, group, seen)
            yield group


def _test(case: dict[str, Any], interval_s: int) -> dict[str, Any]:
    checks = []
    for check in case["alert_rule_test"]:
        at_s = -(-seconds(check["eval_time"]) // interval_s) * interval_s
        expected = [_alert(alert, check["alertname"], at_s) for alert in check["exp_alerts"]]
        checks.append({**check, "eval_time": f"{at_s}s", "exp_alerts": expected})
    return {**case, "alert_rule_test": checks}


def _alert(given: dict[str, Any], name: str, at_s: int) -> dict[str, Any]:
    labels = given["exp_labels"]
    links = {"runbook_url": f"{values.RUNBOOKS}/{name}.md"}
    if "run_id" in labels:
        active_s = seconds(given["active"]) if "active" in given else at_s
        since_ms = (active_s // 600 * 600 - 3600) * 1000
        chosen = "".join(
            f"&var-{label}={quote_plus(labels[label])}"
            for label in ("cluster", "namespace", "job_name", "run_id")
            if label in labels
        )
        links["dashboard_url"] = f"/d/torchobs-run?from={since_ms}&to=now{chosen}"
    return {"exp_labels": labels, "exp_annotations": {**given["exp_annotations"], **links}}
