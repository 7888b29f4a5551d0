"""What is deployed: units of systemd, the compose file, the image, and what brings the dashboards into a Grafana."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.dashboards import FOLDER, shipped
from tests.support import NEEDS_PROGRAM
from torchobs.cli import deploy as command
from torchobs.config import settings
from torchobs.exporter import config as exporter_config
from torchobs.exporter.otlp import source

EXPOSURE = 20
"""Of 100, as `systemd-analyze security` counts: "OK" ends at 40; a unit without any directive has 96."""


@pytest.fixture
def unit(checkout: Path, tmp_path: Path) -> Path:
    """The system's unit for this user, with this environment's program: one that is not there is an error of the unit."""
    if not shutil.which("systemd-analyze"):
        pytest.skip(f"{NEEDS_PROGRAM}: systemd-analyze, on PATH")
    return installed(checkout / "deploy/systemd/torchobs-exporter@.service", tmp_path / "torchobs-exporter@root.service")


def installed(shipped: Path, path: Path) -> Path:
    """Write the unit with this environment's program in place of its own."""
    (command,) = (line for line in shipped.read_text().splitlines() if line.startswith("ExecStart="))
    program = command.removeprefix("ExecStart=").split()[0]
    assert program.endswith("/bin/torchobs")
    path.write_text(shipped.read_text().replace(program, f"{Path(sys.executable).parent}/torchobs"))
    return path


def analyze(*arguments: str | Path, **environ: str) -> tuple[int, str]:
    """Run systemd-analyze: its status, and what it has said."""
    argv = ["systemd-analyze", *arguments]
    done = subprocess.run(argv, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_systemd_understands_the_units(unit: Path, checkout: Path, tmp_path: Path) -> None:
    """No directive is misspelt, in the system's unit and in the user's."""
    assert analyze("verify", unit) == (0, "")
    user = installed(checkout / "deploy/systemd/user/torchobs-exporter.service", tmp_path / "torchobs-exporter.service")
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    assert analyze("--user", "verify", user, XDG_RUNTIME_DIR=str(runtime)) == (0, "")
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHouse="))
    assert "'ProtectHouse'" in analyze("verify", unit)[1]


def test_the_unit_is_hardened(unit: Path) -> None:
    """What is left is to open files and to listen; without its sandbox the same unit is told to be exposed."""
    threshold = f"--threshold={EXPOSURE}"
    assert analyze("security", "--offline=true", threshold, unit)[0] == 0
    kept = [
        line for line in unit.read_text().splitlines() if not line.startswith(("Protect", "Private", "SystemCall", "Capab"))
    ]
    unit.write_text("\n".join(kept))
    assert analyze("security", "--offline=true", threshold, unit)[0] != 0


def test_both_sides_look_into_the_same_directory(checkout: Path) -> None:
    """What the profile tells a user's trainings is what the unit tells that user's exporter, which makes it."""
    unit = (checkout / "deploy/systemd/torchobs-exporter@.service").read_text()
    assert "Environment=TORCHOBS_DIR=/run/torchobs/%i\n" in unit
    assert "RuntimeDirectory=torchobs/%i\n" in unit
    profile = checkout / "deploy/systemd/torchobs.sh"
    said: list[str | Path] = ["sh", "-c", '[ -d /run ] && . "$0" && echo "${TORCHOBS_DIR:-none}"', profile]
    assert subprocess.run(said, env={"USER": "nobody-here"}, capture_output=True, text=True, check=True).stdout == "none\n"
    assert 'TORCHOBS_DIR="/run/torchobs/$USER"' in profile.read_text()


@pytest.fixture
def compose_folder(checkout: Path) -> Path:
    """Where the compose file is."""
    return checkout / "deploy" / "compose"


@pytest.fixture
def composed(compose_folder: Path) -> dict[str, Any]:
    """The compose file."""
    found: dict[str, Any] = yaml.safe_load((compose_folder / "compose.yaml").read_text())
    return found


def test_it_is_valid_by_the_specification(composed: dict[str, Any]) -> None:
    """The schema is the compose specification's own, as check-jsonschema carries it; a service with a typing error fails."""
    schema = json.loads((resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
    validator = jsonschema_rs.validator_for(schema)
    validator.validate(composed)
    composed["services"]["trainer"]["enviroment"] = {}
    with pytest.raises(jsonschema_rs.ValidationError):
        validator.validate(composed)


def test_it_sets_what_torchobs_knows(composed: dict[str, Any]) -> None:
    """No variable is misspelt: the trainer's are settings, the exporter's are options."""
    known = {name for option in settings.OPTIONS for name in option.variables}
    options = {name for option in exporter_config.EVERY_OPTION for name in option.variables}
    assert set(composed["services"]["trainer"]["environment"]) <= known
    assert set(composed["services"]["exporter"]["environment"]) <= options


def test_nothing_is_reached_from_other_machines_and_nothing_has_rights(composed: dict[str, Any]) -> None:
    """Ports on loopback only, no capability, no privilege, and a root file system that only the trainer can write to."""
    for name, service in composed["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service.get("read_only", False) or name == "trainer"
        assert "latest" not in service["image"]


if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="needs a Python that reads TOML")

MACHINES = ("x86_64", "aarch64")
PYTHONS = ("3.10", "3.11", "3.13", "3.14")


@pytest.fixture
def image_folder(checkout: Path) -> Path:
    """Where the Containerfile is."""
    return checkout / "deploy" / "image"


@pytest.fixture
def locked(image_folder: Path) -> list[tuple[Requirement, int]]:
    """Each line of the lock, and how many hashes it has."""
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", (image_folder / "requirements.lock").read_text()).strip())
    return [(Requirement(entry.partition(" \\\n")[0]), entry.count("--hash=sha256:")) for entry in entries]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_what_the_exporter_needs(
    checkout: Path, locked: list[tuple[Requirement, int]], python: str, machine: str
) -> None:
    """One version with hashes of everything that pyproject.toml asks for, in the range that it allows."""
    where = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
    versions: dict[str, str] = {}
    for requirement, hashes in locked:
        if requirement.marker is None or requirement.marker.evaluate(where):
            (only,) = requirement.specifier
            assert (only.operator, hashes > 0) == ("==", True), requirement
            assert canonicalize_name(requirement.name) not in versions, "two versions of one package"
            versions[canonicalize_name(requirement.name)] = only.version
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["exporter"]):
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate(where):
            assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), text


def test_the_image_belongs_to_a_number_and_needs_no_shell(image_folder: Path) -> None:
    """Kubelet refuses `runAsNonRoot` for a name. Nothing runs in the last stage, so that it can be for another machine."""
    text = (image_folder / "Containerfile").read_text()
    last = text.rpartition("\nFROM ")[2]
    (user,) = re.findall(r"^USER (.*)$", text, re.MULTILINE)
    assert all(part.isdecimal() and int(part) > 0 for part in user.split(":"))
    assert last.startswith("scratch\n")
    assert not re.search(r"^RUN", last, re.MULTILINE)
    assert 'ENTRYPOINT ["torchobs", "exporter"]' in last
    assert set(re.findall(r"org\.opencontainers\.image\.(\S+)=", last)) >= {
        "title",
        "version",
        "revision",
        "source",
        "licenses",
    }


def test_signing_signs_and_attests_by_digest(image_folder: Path, tmp_path: Path) -> None:
    """What cosign is called with, as a program of that name on PATH is told."""
    (tmp_path / "cosign").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/called"\n')
    (tmp_path / "cosign").chmod(0o755)
    sbom = tmp_path / "sbom.json"
    sbom.write_text("{}")
    image = f"registry.example/torchobs-exporter@sha256:{'0' * 64}"
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "COSIGN_KEY": "awskms:///alias/key"}
    subprocess.run([image_folder / "sign", image, sbom], env=environ, check=True)
    assert (tmp_path / "called").read_text().splitlines() == [
        f"sign --yes --key awskms:///alias/key {image}",
        f"attest --yes --key awskms:///alias/key --type cyclonedx --predicate {sbom} {image}",
    ]


GRAFANA = FOLDER.parent
PATH = "/etc/grafana/dashboards/torchobs"


@pytest.fixture(autouse=True)
def _in_a_checkout(checkout: Path) -> None:
    """The files are not installed."""


def documents(name: str) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return list(yaml.safe_load_all((GRAFANA / name).read_text()))


def config_maps() -> dict[str, str]:
    """The ConfigMaps that kustomize makes, with the dashboard of each."""
    (kustomization,) = documents("kustomization.yaml")
    found = {}
    for one in kustomization["configMapGenerator"]:
        (file,) = one["files"]
        assert (GRAFANA / file).is_file()
        found[one["name"]] = Path(file).name
    return found


def test_config_maps_have_all_dashboards_and_what_the_sidecar_looks_for() -> None:
    """The label and the folder that Grafana's chart has by default; each is small enough for `kubectl apply`."""
    (kustomization,) = documents("kustomization.yaml")
    options = kustomization["generatorOptions"]
    assert options["labels"] == {"grafana_dashboard": "1"}
    assert options["annotations"] == {"grafana_folder": "torchobs"}
    assert options["disableNameSuffixHash"] is True  # a new name would be a second dashboard of the same uid
    assert set(config_maps().values()) == {f"{uid}.json" for uid in shipped()}
    assert max(path.stat().st_size for path in FOLDER.iterdir()) < 200_000


def test_objects_of_the_operator_read_these_config_maps() -> None:
    """One for each dashboard."""
    objects = documents("grafana-operator.yaml")
    assert {one["kind"] for one in objects} == {"GrafanaDashboard"}
    references = {one["spec"]["configMapRef"]["name"]: one["spec"]["configMapRef"]["key"] for one in objects}
    assert references == config_maps()
    assert {one["spec"]["folder"] for one in objects} == {"torchobs"}
    assert len({one["metadata"]["name"] for one in objects}) == len(objects)


def test_the_file_provider_reads_where_the_pages_say_to_write() -> None:
    """And nobody changes there what the next version overwrites."""
    (provisioning,) = documents("provisioning/dashboards/torchobs.yaml")
    (provider,) = provisioning["providers"]
    assert (provider["type"], provider["options"]["path"], provider["allowUiUpdates"]) == ("file", PATH, False)
    assert PATH in (GRAFANA / "README.md").read_text()
    assert PATH in command.dashboards_parser().format_help()


def test_data_sources_lead_to_one_another() -> None:
    """From an exemplar to its trace, from a span to the run's speed and logs, from a log record to its trace."""
    (provisioning,) = documents("provisioning/datasources/torchobs.yaml")
    found = {one["uid"]: one for one in provisioning["datasources"]}
    assert {uid: one["type"] for uid, one in found.items()} == {"prometheus": "prometheus", "tempo": "tempo", "loki": "loki"}
    (exemplar,) = found["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert (exemplar["name"], exemplar["datasourceUid"]) == ("trace_id", "tempo")
    metrics = found["tempo"]["jsonData"]["tracesToMetrics"]
    assert metrics["datasourceUid"] == "prometheus"
    (tag,) = metrics["tags"]
    assert tag == {"key": "torchobs.run_id", "value": "run_id"}
    assert "run_id" in Path(source.__file__).read_text()
    assert found["tempo"]["jsonData"]["tracesToLogsV2"]["datasourceUid"] == "loki"
    (field,) = found["loki"]["jsonData"]["derivedFields"]
    assert (field["matcherRegex"], field["datasourceUid"]) == ("trace_id", "tempo")


def test_the_command_writes_what_is_shipped(tmp_path: Path) -> None:
    """Byte for byte, in a directory that it makes; what else lies there stays, and the SDK is not needed."""
    into = tmp_path / "grafana" / "torchobs"
    into.mkdir(parents=True)
    (into / "mine.json").write_text("{}")
    code = "import sys; sys.modules['grafana_foundation_sdk'] = None; from torchobs.cli.__main__ import main; sys.exit(main())"
    argv = [sys.executable, "-c", code, "dashboards", "export", str(into)]
    for _ in range(2):
        ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{len(shipped())} dashboards in {into}\n", "")
    written = {path.name: path.read_bytes() for path in into.iterdir()}
    assert written == {"mine.json": b"{}", **{path.name: path.read_bytes() for path in FOLDER.iterdir()}}
