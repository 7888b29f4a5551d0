"""Cases of an alert in tests/rules, made ready for `promtool test rules`.

A case is promtool's, with two differences: it is run at several evaluation intervals, up to Prometheus' default of a minute,
where times to look at are rounded up to the next evaluation; and the link to the runbook is left out.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import yaml

from torchobs.rules import values

if TYPE_CHECKING:
    from pathlib import Path

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
    """A rule file with the rule of that alert and those that record what it asks for, in the order of their evaluation.

    The other rules of these groups change nothing for it, and cost most of the time.
    """
    groups = [group for text in files for group in _groups(text)]
    (wanted,) = (rule for group in groups for rule in group["rules"] if rule.get("alert") == alert)
    needed = [wanted]
    for rule in needed:  # grows meanwhile
        asked = _records(rule)
        needed += [one for group in groups for one in group["rules"] if one.get("record") in asked and one not in needed]
    found = [{**group, "rules": [rule for rule in group["rules"] if rule in needed]} for group in groups]
    return {"groups": _in_order([group for group in found if group["rules"]])}


@cache
def _groups(text: str) -> list[dict[str, Any]]:
    """The groups of a rule file, which nobody changes."""
    found: list[dict[str, Any]] = load(text)["groups"]
    return found


def _records(rule: dict[str, Any]) -> set[str]:
    """The recorded series that a rule asks for, in its expression or its texts."""
    text = " ".join(map(str, (rule["expr"], *rule.get("annotations", {}).values())))
    return set(re.findall(r"[a-z_]+:[a-z_0-9]+:[a-z_0-9]+", text))


def _in_order(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each group after those that record what it asks for; groups that ask for each other keep their order."""
    found: list[dict[str, Any]] = []

    def add(group: dict[str, Any], above: tuple[str, ...]) -> None:
        if group in found or group["name"] in above:
            return
        asked = {name for rule in group["rules"] for name in _records(rule)}
        for other in groups:
            if asked & {rule.get("record") for rule in other["rules"]}:
                add(other, (*above, group["name"]))
        found.append(group)

    for group in groups:
        add(group, ())
    return found


def _test(case: dict[str, Any], interval_s: int) -> dict[str, Any]:
    checks = []
    for check in case["alert_rule_test"]:
        at_s = -(-seconds(check["eval_time"]) // interval_s) * interval_s
        expected = [_alert(alert, check["alertname"]) for alert in check["exp_alerts"]]
        checks.append({**check, "eval_time": f"{at_s}s", "exp_alerts": expected})
    return {**case, "alert_rule_test": checks}


def _alert(given: dict[str, Any], name: str) -> dict[str, Any]:
    labels = given["exp_labels"]
    links = {"runbook_url": f"{values.RUNBOOKS}/{name}.md"}
    return {"exp_labels": labels, "exp_annotations": {**given["exp_annotations"], **links}}
