"""What GitHub reads: workflows, issue forms, Dependabot's file; the web site."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from ruamel.yaml import YAML

from tests import support
from tests.unit.test_deploy import vendored

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("checkout")
FOLDER = support.ROOT / ".github"
SCHEMAS = {
    "github-workflows": "workflows/*.yml",
    "github-issue-forms": "ISSUE_TEMPLATE/[bi]*.yml",
    "github-issue-config": "ISSUE_TEMPLATE/config.yml",
    "dependabot": "dependabot.yml",
}


def test_each_file_is_what_github_takes() -> None:
    """By GitHub's schemas, read as YAML 1.2, where `on` is a word."""
    for schema, pattern in SCHEMAS.items():
        files = sorted(FOLDER.glob(pattern))
        assert files
        for file in files:
            content = YAML(typ="safe", pure=True).load(file.read_text())
            assert [str(error) for error in vendored(schema).iter_errors(content)] == [], file


def test_workflows_do_what_make_can() -> None:
    """Every command of a workflow is `make` with targets that there are, and all who work from a checkout can run it."""
    targets = set(re.findall(r"^([a-z-]+):", (support.ROOT / "Makefile").read_text(), re.MULTILINE))
    workflows: list[Any] = [yaml.safe_load(path.read_text()) for path in (FOLDER / "workflows").glob("*.yml")]
    steps = [step for workflow in workflows for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [re.sub(r"\S+=(\$\{\{.*?\}\}|\S+)", "", step["run"]).split() for step in steps if "run" in step]
    assert {target for command in commands for target in command[1:]} <= targets
    assert {command[0] for command in commands} == {"make"}
    hooks = yaml.safe_load((support.ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == ["make lint"]


def test_the_site_has_no_broken_link(tmp_path: Path) -> None:
    """Strict: a link to a page or a heading that is not there fails; the README is the first page."""
    command: list[str | Path] = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=support.ROOT, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    first = (tmp_path / "index.html").read_text()
    assert 'href="kubernetes/' in first
    assert re.search(r'href="https://github.com/torchobs/torchobs/blob/v[\d.]+/helm/torchobs/README.md"', first)
