"""What other programs read here: systemd, compose, image builders, Grafana, GitHub; and the web site."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

from tests.dashboards import FOLDER, shipped
from tests.support import NEEDS_PROGRAM, ROOT
from torchobs.cli import __main__ as cli
from torchobs.cli import deploy as command
from torchobs.config import settings
from torchobs.exporter import config as exporter_config
from torchobs.exporter.otlp import source

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="needs a Python that reads TOML")

pytestmark = pytest.mark.usefixtures("checkout")
DEPLOY = ROOT / "deploy"
EXPOSURE = 20
"""Of 100, as `systemd-analyze security` counts: "OK" ends at 40; a unit without any directive has 96."""


def vendored(name: str) -> jsonschema_rs.Validator:
    """A validator by check-jsonschema's schema of that name, without its import, which takes seconds."""
    package = find_spec("check_jsonschema")
    assert package
    assert package.origin
    schema = json.loads((Path(package.origin).parent / f"builtin_schemas/vendor/{name}.json").read_text())
    return jsonschema_rs.validator_for(schema, validate_formats=True)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The system's unit for this user."""
    if not shutil.which("systemd-analyze"):
        pytest.skip(f"{NEEDS_PROGRAM}: systemd-analyze, on PATH")
    return installed("torchobs-exporter@.service", tmp_path / "torchobs-exporter@root.service")


def installed(shipped: str, path: Path) -> Path:
    """Write the unit with this environment's program in place of its own: one that is not there is an error of the unit."""
    text = (DEPLOY / "systemd" / shipped).read_text()
    (program,) = re.findall(r"^ExecStart=(\S+/bin/torchobs) ", text, re.MULTILINE)
    path.write_text(text.replace(program, f"{Path(sys.executable).parent}/torchobs"))
    return path


def analyze(*arguments: str | Path, **environ: str) -> tuple[int, str]:
    """Run systemd-analyze: its status, and what it has said."""
    argv = ["systemd-analyze", *arguments]
    done = subprocess.run(argv, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_systemd_understands_the_units(unit: Path, tmp_path: Path) -> None:
    """No directive is misspelt, in the system's unit and in the user's."""
    assert analyze("verify", unit) == (0, "")
    user = installed("user/torchobs-exporter.service", tmp_path / "torchobs-exporter.service")
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    assert analyze("--user", "verify", user, XDG_RUNTIME_DIR=str(runtime)) == (0, "")
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHouse="))
    assert "'ProtectHouse'" in analyze("verify", unit)[1]


def test_the_unit_is_hardened(unit: Path) -> None:
    """What is left is to open files and to listen; systemd calls the same unit exposed without its sandbox."""
    threshold = f"--threshold={EXPOSURE}"
    assert analyze("security", "--offline=true", threshold, unit)[0] == 0
    unit.write_text(re.sub(r"^(Protect|Private|SystemCall|Capab).*\n", "", unit.read_text(), flags=re.MULTILINE))
    assert analyze("security", "--offline=true", threshold, unit)[0] != 0


def test_both_sides_look_into_the_same_directory() -> None:
    """A user's trainings have by the profile the directory that the user's exporter makes by the unit."""
    unit = (DEPLOY / "systemd/torchobs-exporter@.service").read_text()
    assert "Environment=TORCHOBS_DIR=/run/torchobs/%i\n" in unit
    assert "RuntimeDirectory=torchobs/%i\n" in unit
    profile = DEPLOY / "systemd/torchobs.sh"
    said: list[str | Path] = ["sh", "-c", '[ -d /run ] && . "$0" && echo "${TORCHOBS_DIR:-none}"', profile]
    assert subprocess.run(said, env={"USER": "nobody-here"}, capture_output=True, text=True, check=True).stdout == "none\n"
    assert 'TORCHOBS_DIR="/run/torchobs/$USER"' in profile.read_text()


def test_the_compose_file() -> None:
    """Valid by the specification; no variable is misspelt; nothing is reached from other machines, and nothing has rights."""
    composed: dict[str, Any] = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    vendored("compose-spec").validate(composed)
    services = composed["services"]
    variables = {name for option in settings.OPTIONS for name in option.variables}
    options = {name for option in exporter_config.EVERY_OPTION for name in option.variables}
    assert set(services["trainer"]["environment"]) <= variables
    assert set(services["exporter"]["environment"]) <= options
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service.get("read_only", False) or name == "trainer"
        assert "latest" not in service["image"]
    services["trainer"]["enviroment"] = {}
    with pytest.raises(jsonschema_rs.ValidationError):
        vendored("compose-spec").validate(composed)


def test_the_lock_has_what_the_exporter_needs() -> None:
    """One version with hashes of everything that pyproject.toml asks for, in the range that it allows."""
    lines = re.sub(r"^#.*\n", "", (DEPLOY / "image/requirements.lock").read_text()).strip()
    locked = [(Requirement(entry.partition(" \\\n")[0]), entry) for entry in re.split(r"\n(?=\S)", lines)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["exporter"])]
    for python in ("3.10", "3.11", "3.13", "3.14"):
        for machine in ("x86_64", "aarch64"):
            where = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
            versions: dict[str, str] = {}
            for requirement, entry in locked:
                if requirement.marker is None or requirement.marker.evaluate(where):
                    (only,) = requirement.specifier
                    assert (only.operator, "--hash=sha256:" in entry) == ("==", True), requirement
                    assert canonicalize_name(requirement.name) not in versions, "two versions of one package"
                    versions[canonicalize_name(requirement.name)] = only.version
            for wanted in asked:
                if wanted.marker is None or wanted.marker.evaluate(where):
                    assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), (str(wanted), where)


def test_the_image_belongs_to_a_number_and_needs_no_shell() -> None:
    """Kubelet refuses `runAsNonRoot` for a name. Nothing runs in the last stage, so that it can be for another machine."""
    text = (DEPLOY / "image/Containerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    (user,) = re.findall(r"^USER (.*)$", text, re.MULTILINE)
    assert all(part.isdecimal() and int(part) > 0 for part in user.split(":"))
    assert last.startswith("scratch\n")
    assert not re.search(r"^RUN", last, re.MULTILINE)
    assert 'ENTRYPOINT ["torchobs", "exporter"]' in last
    labels = set(re.findall(r"org\.opencontainers\.image\.(\S+)=", last))
    assert labels >= {"title", "version", "revision", "source", "licenses"}


def test_signing_signs_and_attests_by_digest(tmp_path: Path) -> None:
    """The arguments that cosign is called with, by a program of that name on PATH."""
    (tmp_path / "cosign").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/called"\n')
    (tmp_path / "cosign").chmod(0o755)
    sbom, image = tmp_path / "sbom.json", f"registry.example/torchobs-exporter@sha256:{'0' * 64}"
    sbom.write_text("{}")
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "COSIGN_KEY": "awskms:///alias/key"}
    subprocess.run([DEPLOY / "image/sign", image, sbom], env=environ, check=True)
    assert (tmp_path / "called").read_text().splitlines() == [
        f"sign --yes --key awskms:///alias/key {image}",
        f"attest --yes --key awskms:///alias/key --type cyclonedx --predicate {sbom} {image}",
    ]


GRAFANA = FOLDER.parent
PATH = "/etc/grafana/dashboards/torchobs"


def documents(name: str) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return list(yaml.safe_load_all((GRAFANA / name).read_text()))


def test_grafana_is_provisioned_with_all_dashboards_and_with_sources_that_lead_to_each_other() -> None:
    """As Grafana's chart and the operator ask for them, small enough for `kubectl apply`; a source leads to the others."""
    (kustomization,) = documents("kustomization.yaml")
    options = kustomization["generatorOptions"]
    assert options["labels"] == {"grafana_dashboard": "1"}
    assert options["annotations"] == {"grafana_folder": "torchobs"}
    assert options["disableNameSuffixHash"] is True  # a new name would be a second dashboard of the same uid
    files = {entry["name"]: Path(file).name for entry in kustomization["configMapGenerator"] for file in entry["files"]}
    assert all((GRAFANA / file).is_file() for entry in kustomization["configMapGenerator"] for file in entry["files"])
    assert sorted(files.values()) == sorted(f"{uid}.json" for uid in shipped())
    assert max(path.stat().st_size for path in FOLDER.iterdir()) < 200_000
    objects = documents("grafana-operator.yaml")
    assert {entry["kind"] for entry in objects} == {"GrafanaDashboard"}
    assert {entry["spec"]["configMapRef"]["name"]: entry["spec"]["configMapRef"]["key"] for entry in objects} == files
    assert {entry["spec"]["folder"] for entry in objects} == {"torchobs"}
    assert len({entry["metadata"]["name"] for entry in objects}) == len(objects)
    (provisioning,) = documents("provisioning/dashboards/torchobs.yaml")
    (provider,) = provisioning["providers"]
    assert (provider["type"], provider["options"]["path"], provider["allowUiUpdates"]) == ("file", PATH, False)
    assert PATH in (GRAFANA / "README.md").read_text()
    assert PATH in command.dashboards_parser().format_help()
    (provisioning,) = documents("provisioning/datasources/torchobs.yaml")
    sources = {entry["uid"]: entry for entry in provisioning["datasources"]}
    assert {uid: entry["type"] for uid, entry in sources.items()} == {name: name for name in ("prometheus", "tempo", "loki")}
    (exemplar,) = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert (exemplar["name"], exemplar["datasourceUid"]) == ("trace_id", "tempo")
    metrics = sources["tempo"]["jsonData"]["tracesToMetrics"]
    assert metrics["datasourceUid"] == "prometheus"
    assert metrics["tags"] == [{"key": "torchobs.run_id", "value": "run_id"}]
    assert "run_id" in Path(source.__file__).read_text()
    assert sources["tempo"]["jsonData"]["tracesToLogsV2"]["datasourceUid"] == "loki"
    (field,) = sources["loki"]["jsonData"]["derivedFields"]
    assert (field["matcherRegex"], field["datasourceUid"]) == ("trace_id", "tempo")


def test_the_command_writes_what_is_shipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, in a directory that it makes; what else lies there stays, and the SDK is not needed."""
    monkeypatch.setitem(sys.modules, "grafana_foundation_sdk", None)
    into = tmp_path / "grafana" / "torchobs"
    for _ in range(2):
        assert cli.main(["dashboards", "export", str(into)]) == 0
        assert capsys.readouterr() == (f"{len(shipped())} dashboards in {into}\n", "")
        (into / "mine.json").write_text("{}")
    written = {path.name: path.read_bytes() for path in into.iterdir()}
    assert written == {"mine.json": b"{}", **{path.name: path.read_bytes() for path in FOLDER.iterdir()}}


GITHUB = ROOT / ".github"
SCHEMAS = {
    "github-workflows": "workflows/*.yml",
    "github-issue-forms": "ISSUE_TEMPLATE/[bi]*.yml",
    "github-issue-config": "ISSUE_TEMPLATE/config.yml",
    "dependabot": "dependabot.yml",
}


def test_each_file_is_what_github_takes() -> None:
    """By GitHub's schemas, as YAML 1.2, where `on` is a word; every command is `make` with targets that all can run."""
    for schema, pattern in SCHEMAS.items():
        files = sorted(GITHUB.glob(pattern))
        assert files
        for file in files:
            content = YAML(typ="safe", pure=True).load(file.read_text())
            assert [str(error) for error in vendored(schema).iter_errors(content)] == [], file
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflows: list[Any] = [yaml.safe_load(path.read_text()) for path in (GITHUB / "workflows").glob("*.yml")]
    steps = [step for workflow in workflows for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [re.sub(r"\S+=(\$\{\{.*?\}\}|\S+)", "", step["run"]).split() for step in steps if "run" in step]
    assert {target for command in commands for target in command[1:]} <= targets
    assert {command[0] for command in commands} == {"make"}
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == ["make lint"]
