"""`deploy/compose`: valid by the compose specification, every file that it names is there, and its parts know each other."""

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from torchobs.config import settings
from torchobs.config.settings import EXPORTER_ADDRESS
from torchobs.exporter import config as exporter_config

PORT = EXPORTER_ADDRESS.port


@pytest.fixture
def folder(checkout: Path) -> Path:
    """Where the compose file is."""
    return checkout / "deploy" / "compose"


@pytest.fixture
def composed(folder: Path) -> dict[str, Any]:
    """The compose file."""
    found: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())
    return found


@pytest.fixture
def shipped(checkout: Path) -> Callable[[str], dict[str, Any]]:
    """A YAML file of deploy/ by its path there."""
    return lambda path: yaml.safe_load((checkout / "deploy" / path).read_text())


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Of a service: what is mounted, by where."""
    return {target: source for source, target, *_ in (volume.split(":") for volume in service.get("volumes", ()))}


def test_it_is_valid_by_the_specification(composed: dict[str, Any]) -> None:
    """The schema is the compose specification's own, as check-jsonschema carries it; a service with a typing error fails."""
    schema = json.loads((resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
    validator = jsonschema_rs.validator_for(schema)
    validator.validate(composed)
    composed["services"]["trainer"]["enviroment"] = {}
    with pytest.raises(jsonschema_rs.ValidationError):
        validator.validate(composed)


def test_every_file_that_it_names_is_there(composed: dict[str, Any], folder: Path) -> None:
    """Mounted files and folders, Containerfiles, and each named volume is declared."""
    for service in composed["services"].values():
        for source in mounts(service).values():
            assert source in composed["volumes"] or (source.startswith(".") and (folder / source).exists()), source
        if build := service.get("build"):
            assert (folder / build["context"] / build["dockerfile"]).is_file()


def test_what_is_copied_into_images_is_not_ignored(checkout: Path, composed: dict[str, Any]) -> None:
    """`.dockerignore` lets through what the Containerfiles copy, so that a build with the checkout as its context works."""
    kept = {line[1:] for line in (checkout / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    built = [service["build"]["dockerfile"] for service in composed["services"].values() if "build" in service]
    assert len(built) == 2
    for name in built:
        lines = (checkout / name).read_text().splitlines()
        copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from" not in line]
        assert copies
        assert {source for sources in copies for source in sources} <= kept


def test_trainer_and_exporter_share_the_files_and_the_user(composed: dict[str, Any]) -> None:
    """The exporter reads what the trainer writes, and the other way round for commands; both are one user, and in memory."""
    trainer, exporter = composed["services"]["trainer"], composed["services"]["exporter"]
    assert trainer["user"] == exporter["user"]
    options = dict(zip(exporter["command"][::2], exporter["command"][1::2], strict=True))
    assert trainer["environment"]["TORCHOBS_DIR"] == options["--flight-dir"]
    assert trainer["environment"]["TORCHOBS_CONTROL_DIR"] == options["--control.dir"]
    modes = {
        name: [volume.split(":")[2:] for volume in service["volumes"]]
        for name, service in (("trainer", trainer), ("exporter", exporter))
    }
    assert modes == {"trainer": [[], ["ro"]], "exporter": [["ro"], []]}
    for name in ("flight", "control"):
        options = composed["volumes"][name]["driver_opts"]
        user, group = trainer["user"].split(":")
        assert options["type"] == "tmpfs"
        assert {f"uid={user}", f"gid={group}", "mode=0700"} <= set(options["o"].split(","))


def test_it_sets_what_torchobs_knows(composed: dict[str, Any]) -> None:
    """No variable is misspelt: the trainer's are settings, the exporter's are options."""
    known = {name for option in settings.OPTIONS for name in option.variables}
    options = {name for option in exporter_config.EVERY_OPTION for name in option.variables}
    assert set(composed["services"]["trainer"]["environment"]) <= known
    assert set(composed["services"]["exporter"]["environment"]) <= options


def test_the_parts_look_for_each_other_where_they_are(
    composed: dict[str, Any], shipped: Callable[[str], dict[str, Any]]
) -> None:
    """Every host that a configuration names is a service, by the port that it listens on."""
    listens = {"exporter": PORT, "prometheus": 9090, "alertmanager": 9093, "collector": 4318, "tempo": 4318, "grafana": 3000}
    assert set(composed["services"]) == {"trainer", *listens}
    prometheus, collector, tempo = (shipped(f"compose/{name}.yml") for name in ("prometheus", "collector", "tempo"))
    targets = [target for job in prometheus["scrape_configs"] for one in job["static_configs"] for target in one["targets"]]
    alerting = [each for one in prometheus["alerting"]["alertmanagers"] for each in one["static_configs"]]
    targets += [target for one in alerting for target in one["targets"]]
    assert set(targets) == {f"exporter:{PORT}", "alertmanager:9093", "localhost:9090"}
    assert collector["exporters"]["otlphttp"]["endpoint"] == f"http://tempo:{listens['tempo']}"
    for receiver in (collector["receivers"], tempo["distributor"]["receivers"]):
        assert receiver["otlp"]["protocols"]["http"]["endpoint"] == "0.0.0.0:4318"
    assert composed["services"]["exporter"]["environment"] == {
        "TORCHOBS_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"
    }


def test_grafana_is_provisioned(composed: dict[str, Any], shipped: Callable[[str], dict[str, Any]], folder: Path) -> None:
    """The shipped data sources but Loki, the shipped dashboards where the provider looks, and the run's is the first seen."""
    grafana = composed["services"]["grafana"]
    own = {one["name"]: one for one in shipped("compose/datasources.yml")["datasources"]}
    whole = {one["name"]: one for one in shipped("grafana/provisioning/datasources/torchobs.yaml")["datasources"]}
    del whole["Loki"], whole["Tempo"]["jsonData"]["tracesToLogsV2"]
    assert own == whole
    (provider,) = shipped("grafana/provisioning/dashboards/torchobs.yaml")["providers"]
    source = mounts(grafana)[provider["options"]["path"]]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (folder / source / home.name).is_file()


def test_nothing_is_reached_from_other_machines_and_nothing_has_rights(composed: dict[str, Any]) -> None:
    """Ports on loopback only, no capability, no privilege, and a root file system that only the trainer can write to."""
    for name, service in composed["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service.get("read_only", False) or name == "trainer"
        assert "latest" not in service["image"]
