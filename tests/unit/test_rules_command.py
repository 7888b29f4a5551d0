"""`torchobs rules`: the shipped rules, and those with a person's own thresholds and severities."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from torchobs.cli.dispatch import main
from torchobs.rules.files import ALERTS, alert_groups, rendered
from torchobs.rules.rule_file import Alert
from torchobs.rules.values import Thresholds

NAMES = {rule.alert for group in alert_groups() for rule in group.rules if isinstance(rule, Alert)}
OWN = """\
thresholds: {memory: 0.8}
severities: {TorchobsRankFailed: page}
disabled: [TorchobsCheckpointNever]
grafana_url: https://g.example/
runbooks: https://r.example/
"""


def alerts_in(text: str) -> dict[str, dict[str, Any]]:
    """The alerts of a rule file by name."""
    return {rule["alert"]: rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"] if "alert" in rule}


def written(folder: Path) -> dict[str, str]:
    """The files of a folder by their path in it."""
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_export_writes_the_files_of_the_checkout(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte: what the pages say about deploy/ holds for whoever has only the wheel."""
    folder = tmp_path / "prometheus" / "torchobs"
    assert main(["rules", "export", str(folder)]) == 0
    assert capsys.readouterr().out == f"4 files in {folder}\n"
    prometheus = checkout / "deploy" / "prometheus"
    assert written(folder) == {name: text for name, text in written(prometheus).items() if name.startswith("rules")}


def test_a_person_sets_thresholds_and_severities_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And where Grafana and the runbooks are, and what to leave out; only the alerts are changed by it."""
    (tmp_path / "my.yml").write_text(OWN)
    assert main(["rules", "render", "--values", str(tmp_path / "my.yml"), str(tmp_path / "out")]) == 0
    files, shipped = written(tmp_path / "out"), rendered()
    assert {name for name in shipped if files[name] != shipped[name]} == {ALERTS}
    found = alerts_in(files[ALERTS])
    assert "> 0.8\n" in found["TorchobsOutOfMemoryNear"]["expr"]
    assert found["TorchobsRankFailed"]["labels"] == {"severity": "page"}
    assert found["TorchobsRankFailed"]["annotations"]["runbook_url"] == "https://r.example/TorchobsRankFailed.md"
    assert found["TorchobsRankFailed"]["annotations"]["dashboard_url"].startswith("https://g.example/d/")
    assert found.keys() == NAMES - {"TorchobsCheckpointNever"}
    capsys.readouterr()
    assert main(["rules", "render", "--values", str(tmp_path / "my.yml")]) == 0
    assert capsys.readouterr().out == files[ALERTS]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("treshold: {}", "treshold means nothing here; there are disabled, grafana_url, runbooks, severities, thresholds"),
        ("thresholds: {memmory: 1}", "thresholds: memmory means nothing here; there are checkpoint_cadences, cpu, "),
        ("thresholds: {memory: yes}", "memory is True, not a share between 0 and 1"),
        ("thresholds: {memory: -1}", "memory is -1, not a share between 0 and 1"),
        ("thresholds: {memory: 90}", "memory is 90, not a share between 0 and 1"),
        ("thresholds: {goodput: 1.0}", "goodput is 1.0, not a share between 0 and 1"),
        ("thresholds: {memory: .nan}", "memory is nan, not a share between 0 and 1"),
        ("thresholds: {slower: 0.5}", "slower is 0.5, not a number above 1"),
        ("thresholds: {restarts: .inf}", "restarts is inf, not a number above 0"),
        ("thresholds: {lived_s: 10m}", "lived_s is '10m', not a number above 0"),
        ("grafana_url: grafana.example.org", "begins with http:// or https:// is expected, not 'grafana.example.org'"),
        ("grafana_url: 5", "grafana_url: a URL that begins with http:// or https:// is expected, not 5"),
        ("runbooks: {a: b}", "runbooks: a URL that begins with http:// or https:// is expected, not {'a': 'b'}"),
        ("severities: {TorchobsRankFailed: critical}", "'critical', not one of page, ticket"),
        ("severities: {TorchobsRankFaild: page}", "there is no alert TorchobsRankFaild; there are TorchobsCgroupOomKill, "),
        ("severities: [TorchobsRankFailed]", "severities: names and values are expected"),
        ("severities: {1: page}", "there is no alert 1; there are TorchobsCgroupOomKill, "),
        ("disabled: [TorchobsRankFaild]", "there is no alert TorchobsRankFaild; there are TorchobsCgroupOomKill, "),
        ("disabled: TorchobsRankFailed", "disabled: a list of alerts is expected, not 'TorchobsRankFailed'"),
        ("- 1", "names and values are expected"),
        ("thresholds: {", "line 1, column 14"),
    ],
)
def test_an_entry_that_means_nothing_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    """A threshold with a typing error must not leave the default in force; nothing is written."""
    (tmp_path / "my.yml").write_text(text)
    assert main(["rules", "render", "--values", str(tmp_path / "my.yml"), str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"torchobs rules: {tmp_path / 'my.yml'}: ")
    assert message in said.err
    assert not (tmp_path / "out").exists()


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values that are not there, and a directory that is a file."""
    assert main(["rules", "render", "--values", str(tmp_path / "none.yml")]) == 2
    assert capsys.readouterr().err == f"torchobs rules: {tmp_path / 'none.yml'}: No such file or directory\n"
    (tmp_path / "taken").touch()
    assert main(["rules", "export", str(tmp_path / "taken")]) == 1
    assert capsys.readouterr().err == f"torchobs rules: {tmp_path / 'taken' / 'rules'}: Not a directory\n"


def test_a_plain_install_explains_it_and_names_the_extra(tmp_path: Path) -> None:
    """Without PyYAML: the help has every threshold with its default, the command says what to install."""
    code = "import sys; sys.modules['yaml'] = None; import torchobs.cli.dispatch as c; sys.exit(c.main(sys.argv[1:]))"
    helped, refused = (
        subprocess.run(
            [sys.executable, "-c", code, "rules", *arguments], capture_output=True, text=True, check=False, timeout=60
        )
        for arguments in (["--help"], ["export", str(tmp_path)])
    )
    assert helped.returncode == 0
    for one in fields(Thresholds):
        assert f"  {one.name} " in helped.stdout
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "torchobs rules: yaml is not installed: pip install 'torchobs[exporter]'\n"
