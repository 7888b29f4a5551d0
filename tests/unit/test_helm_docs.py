"""The commands and values of the documentation, given to the real Helm and kubectl as a reader would, without a cluster."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.helm import CHART, NEWEST, helm, objects, rendered
from tests.support import ROOT

PAGES = (
    "README.md",
    "docs/kubernetes.md",
    "helm/torchobs/README.md",
    "deploy/prometheus/README.md",
    "deploy/grafana/README.md",
)
WORDS = {"REGISTRY": "registry.example.org", "TAG": "1.0", "NAME": "stack"}
"""What a reader replaces."""
OF_A_CLUSTER = {"--install", "--create-namespace", "--reset-then-reuse-values"}
"""Options that `helm template` does not have."""
JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "gpt"},
    "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "training"}]}}},
}


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command that a page shows."""
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


def of_the_chart() -> list[list[str]]:
    """The commands that install or change the chart."""
    found = [words for page in PAGES for words in commands(ROOT / page)]
    return [words for words in found if words[:2] in (["helm", "install"], ["helm", "upgrade"]) and "helm/torchobs" in words]


@pytest.fixture(autouse=True)
def _helm_is_there(program: Callable[[str], str]) -> None:
    program("helm")


@pytest.mark.parametrize("words", of_the_chart(), ids=" ".join)
def test_every_command_with_the_chart_renders(words: list[str], tmp_path: Path) -> None:
    """An option that the chart has no value for is refused by its schema."""
    (tmp_path / "alerts.yml").write_text((ROOT / "deploy/prometheus/rules/torchobs-alerts.yml").read_text())
    arguments = [str(CHART) if word == "helm/torchobs" else word for word in words[2:] if word not in OF_A_CLUSTER]
    replaced = [re.sub(r"\b(REGISTRY|TAG|NAME)\b", lambda found: WORDS[found[0]], word) for word in arguments]
    replaced = [word.replace("=alerts.yml", f"={tmp_path / 'alerts.yml'}") for word in replaced]
    image = () if any("image.repository" in word for word in replaced) else ("--set", "image.repository=any")
    done = helm("template", *replaced, *image, "--kube-version", NEWEST)
    assert done.returncode == 0, done.stderr
    assert objects(done.stdout)


def test_there_are_such_commands() -> None:
    """Else the test above shows nothing: one to install, one without the operator, one with other labels, one with a file."""
    shown = [" ".join(words) for words in of_the_chart()]
    for part in ("--install", "scrapeConfig.enabled=true", "additionalLabels.release=NAME", "--set-file"):
        assert any(part in one for one in shown), part


def test_the_values_for_several_releases_render(tmp_path: Path) -> None:
    """As they stand in the chart's README; they leave out what one release alone may have."""
    text = (CHART / "README.md").read_text()
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "values.yaml").write_text(block)
    made = objects(rendered("-f", tmp_path / "values.yaml", "--set", "injection.apiVersion=v1", version=NEWEST))
    assert {one["metadata"]["name"].startswith("torchobs-vision") for one in made} == {True}
    assert not {"PrometheusRule", "ConfigMap"} & {one["kind"] for one in made}


def test_the_command_that_labels_a_job_labels_its_pods(tmp_path: Path, program: Callable[[str], str]) -> None:
    """The label has to be on the template: on the Job itself it does nothing."""
    program("kubectl")
    (words,) = [words for words in commands(ROOT / "docs/kubernetes.md") if words[:3] == ["kubectl", "patch", "--local"]]
    (tmp_path / "job.yaml").write_text(json.dumps(JOB))
    patch = words[: words.index("|")]
    done = subprocess.run(patch, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    labelled = yaml.safe_load(done.stdout)
    assert labelled["spec"]["template"]["metadata"]["labels"] == {"torchobs.io/inject": "auto"}
    assert "labels" not in labelled["metadata"]
