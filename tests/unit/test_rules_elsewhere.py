"""The rules in other forms than Prometheus' files: objects for its operator, and rules that Grafana evaluates."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.helm import NEWEST
from tests.kubernetes import schemas
from torchobs.rules.files import ALERTS, GRAFANA, OPERATOR, rendered
from torchobs.rules.values import DEFAULT, Thresholds, Values

if TYPE_CHECKING:
    from collections.abc import Callable

FILES = rendered()
GROUPS: list[dict[str, Any]] = yaml.safe_load(FILES[GRAFANA])["groups"]
MANAGED = {rule["title"]: rule for group in GROUPS for rule in group["rules"]}
READ = {
    "uid", "title", "condition", "data", "dashboardUid", "panelId", "noDataState", "execErrState", "for", "keepFiringFor",
    "missing_series_evals_to_resolve", "annotations", "labels", "isPaused", "notification_settings", "record",
}  # fmt: skip
"""Fields that Grafana reads of a rule in a file (`pkg/services/provisioning/alerting/rules_types.go`); others it drops."""
FUNCTIONS = {
    *("args", "externalURL", "graphLink", "humanize", "humanize1024", "humanizeDuration", "humanizePercentage"),
    *("humanizeTimestamp", "match", "pathPrefix", "tableLink", "title", "toLower", "toUpper", "reReplaceAll"),
    *("printf", "eq", "ne", "and", "or", "not", "len", "index", "urlquery"),
    *("if", "else", "with", "range", "end"),
}
"""What Grafana's templates of annotations know: its own, Go's, and their words"""

each_alert = pytest.mark.parametrize("name", MANAGED)


def in_file(name: str) -> list[dict[str, Any]]:
    """The groups of a rule file."""
    groups: list[dict[str, Any]] = yaml.safe_load(FILES[name])["groups"]
    return groups


def test_objects_for_the_operator_are_the_files() -> None:
    """One for each file, whose groups are the same; small enough for `kubectl apply`, which keeps a copy in an annotation."""
    objects = {one["metadata"]["name"]: one for one in yaml.safe_load_all(FILES[OPERATOR])}
    assert {one["kind"] for one in objects.values()} == {"PrometheusRule"}
    assert {name: one["spec"]["groups"] for name, one in objects.items()} == {
        name: in_file(f"rules/{name}.yml") for name in ("torchobs-alerts", "torchobs-recordings", "torchobs-percentiles")
    }
    assert max(len(json.dumps(one)) for one in objects.values()) < 256 << 10


def test_objects_for_the_operator_are_valid(tmp_path: Path, program: Callable[[str], str]) -> None:
    """Kubeconform, strict, with the operator's own types."""
    schemas.write(tmp_path, NEWEST, kinds=())
    template = f"{tmp_path}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"
    argv = [program("kubeconform"), "-strict", "-summary", "-schema-location", template]

    def judge(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, input=text, capture_output=True, text=True, check=False)

    done = judge(FILES[OPERATOR])
    assert done.returncode == 0, done.stdout
    assert "Valid: 3" in done.stdout
    assert judge(FILES[OPERATOR].replace("keep_firing_for:", "keep_firing:")).returncode == 1


def test_grafana_has_every_alert_with_its_expression_and_severity() -> None:
    """Rules that only record are Prometheus' own."""
    alerts = {rule["alert"]: rule for group in in_file(ALERTS) for rule in group["rules"] if "alert" in rule}
    assert alerts.keys() == MANAGED.keys()
    for name, rule in alerts.items():
        query, *_ = MANAGED[name]["data"]
        assert query["model"]["expr"] == rule["expr"]
        assert (MANAGED[name]["for"], MANAGED[name]["keepFiringFor"]) == (rule["for"], rule["keep_firing_for"])
        assert MANAGED[name]["labels"] == rule["labels"]
        assert MANAGED[name]["annotations"].keys() == rule["annotations"].keys()
        assert MANAGED[name]["annotations"]["runbook_url"] == rule["annotations"]["runbook_url"]


def test_a_person_s_values_are_in_all_forms() -> None:
    """Thresholds, severities, alerts that are left out, and links."""
    chosen = Values(
        Thresholds(memory=0.77), {"TorchobsOutOfMemoryNear": "page"}, ("TorchobsSlowdown",), "https://grafana.example.org"
    )
    for name in (GRAFANA, OPERATOR):
        text = rendered(chosen)[name]
        assert "> 0.77" in text
        assert "TorchobsSlowdown\n" not in text
        assert "https://grafana.example.org/d/torchobs-run?from=" in text
    rules = [rule for group in yaml.safe_load(rendered(chosen)[GRAFANA])["groups"] for rule in group["rules"]]
    assert {rule["title"]: rule["labels"]["severity"] for rule in rules}["TorchobsOutOfMemoryNear"] == "page"
    everything = frozenset(MANAGED)
    assert yaml.safe_load(rendered(Values(DEFAULT.thresholds, disabled=tuple(everything)))[GRAFANA])["groups"] == []


@each_alert
def test_grafana_reads_every_field(name: str) -> None:
    """An unknown one would be dropped without a word; uids are unique and no longer than Grafana takes."""
    rule = MANAGED[name]
    assert rule.keys() <= READ
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", rule["uid"])
    assert rule["condition"] in {step["refId"] for step in rule["data"]}
    assert (rule["noDataState"], rule["execErrState"]) == ("OK", "Error")


@each_alert
def test_steps_are_of_grafana_s_types(name: str) -> None:
    """Read with the SDK's models and written again they are the same; each expression asks for the step before it."""
    pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk, which needs Python 3.11")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import expr, prometheus

    query, there, threshold = (step["model"] for step in MANAGED[name]["data"])
    for model, type_ in ((query, prometheus.Dataquery), (there, expr.TypeMath), (threshold, expr.TypeThreshold)):
        again = json.loads(JSONEncoder().encode(type_.from_json(model)))
        assert {key: value for key, value in again.items() if key in model or value} == model
    assert set(re.findall(r"\$(\w+)", there["expression"])) == {query["refId"]}
    assert threshold["expression"] == there["refId"]


@each_alert
def test_texts_use_what_grafana_s_templates_know(name: str) -> None:
    """No queries, of which there are none; the value as a number, for `$value` is a text there."""
    for text in MANAGED[name]["annotations"].values():
        actions = re.findall(r"\{\{(.*?)\}\}", text)
        for action in actions:
            words = re.findall(r"[$.\w]+", re.sub(r'"(\\.|[^"])*"', "", action))
            variables = {word for word in words if word.startswith("$")}
            assert all(word.startswith("$labels.") or word == "$values.query.Value" for word in variables), text
            assert {word for word in words if word[0] not in "$." and not word.isdecimal()} <= FUNCTIONS, text
        begun = sum(action.strip().split()[0] in {"if", "with", "range"} for action in actions)
        assert begun == sum(action.strip() == "end" for action in actions), text
        assert text == text.strip()
