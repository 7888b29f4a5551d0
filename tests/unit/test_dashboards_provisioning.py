"""What brings the dashboards into a Grafana: files and objects that a person copies as they are, and `torchobs dashboards`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards import FOLDER, shipped
from torchobs.cli import deploy as command
from torchobs.exporter.otlp import source

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
