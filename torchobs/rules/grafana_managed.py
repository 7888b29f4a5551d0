"""The alerts as rules that Grafana itself evaluates, in the form of its file provisioning.

Each has the three steps of Grafana's own import of Prometheus rules: the expression, whether it has any value, and a threshold
on that. Grafana's templates cannot ask queries: they name no culprits, and lead to the dashboard that shows them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torchobs.rules.alert_texts import MATCHERS, RUN, dashboard
from torchobs.rules.rule_file import HEADER, Alert, Group, clean, dump
from torchobs.rules.values import Values

ABOUT = """\
#
# Alert rules for Grafana to evaluate, instead of Prometheus: copy to /etc/grafana/provisioning/alerting/. They ask for what
# Prometheus records: it has to load the files of rules/ all the same, and without `alerting:` it notifies nobody itself. An old
# Grafana does not know `keepFiringFor`: there an alert ends with its expression. The data source is the one whose uid is
# `prometheus`; change `datasourceUid` if yours has another.
"""
DATASOURCE, EXPRESSION = "prometheus", "__expr__"
FOLDER = "torchobs"
INTERVAL = "1m"
LOOKED_AT_S = 600
"""Range of an instant query; Grafana asks for one, and looks at its end."""
VALUE = "$values.query.Value"
"""The query's value as a number; `$value` is a text in Grafana."""


def render(groups: Iterable[Group], values: Values) -> str:
    """Return the file, of the alerts that are not disabled."""
    made = [made for group in groups if (made := _group(group, values))["rules"]]
    return f"{HEADER}{ABOUT}{dump({'apiVersion': 1, 'groups': made})}"


def _group(group: Group, values: Values) -> dict[str, Any]:
    alerts = (rule for rule in group.rules if isinstance(rule, Alert) and rule.alert not in values.disabled)
    rules = [_rule(alert, values) for alert in alerts]
    return {"orgId": 1, "name": group.name, "folder": FOLDER, "interval": INTERVAL, "rules": rules}


def _rule(alert: Alert, values: Values) -> dict[str, Any]:
    links = {"runbook_url": f"{values.runbooks}/{alert.alert}.md"}
    if alert.of_run and values.grafana_url:
        links = {"dashboard_url": dashboard(values.grafana_url, alert.dashboard, "now-1h"), **links}
    return {
        "uid": alert.alert,
        "title": alert.alert,
        "condition": "threshold",
        "data": _data(clean(alert.expr)),
        "noDataState": "OK",  # an expression that is not true has no value
        "execErrState": "Error",
        "missing_series_evals_to_resolve": 1,
        "for": alert.wait,
        "keepFiringFor": alert.keep_firing_for,
        "labels": {"severity": values.severities.get(alert.alert, alert.severity)},
        "annotations": {
            "summary": _text(f"{RUN} {alert.summary}" if alert.of_run else alert.summary),
            "description": _text(alert.description),
            **links,
        },
        "isPaused": False,
    }


def _data(expr: str) -> list[dict[str, Any]]:
    there = "is_number($query) || is_nan($query) || is_inf($query)"
    above = {"evaluator": {"type": "gt", "params": [0]}}
    source = {"type": "prometheus", "uid": DATASOURCE}
    return [
        _step("query", DATASOURCE, {"datasource": source, "expr": expr, "instant": True, "range": False}, LOOKED_AT_S),
        _step("there", EXPRESSION, {"type": "math", "expression": there}),
        _step("threshold", EXPRESSION, {"type": "threshold", "expression": "there", "conditions": [above]}),
    ]


def _step(name: str, source: str, model: dict[str, Any], from_s: int = 0) -> dict[str, Any]:
    if source == EXPRESSION:
        model = {"datasource": {"type": EXPRESSION, "uid": EXPRESSION}, **model}
    return {
        "refId": name,
        "relativeTimeRange": {"from": from_s, "to": 0},
        "datasourceUid": source,
        "model": {"refId": name, **model},
    }


def _text(template: str) -> str:
    """Return a text without what a query would say, which stands at its end."""
    return re.sub(r"\$value\b", lambda _: VALUE, template.partition(MATCHERS)[0])
