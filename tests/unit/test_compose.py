"""`deploy/compose`: valid by the compose specification, every file that it names is there, and its parts know each other."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from torchobs.config import settings
from torchobs.exporter import config as exporter_config


@pytest.fixture
def folder(checkout: Path) -> Path:
    """Where the compose file is."""
    return checkout / "deploy" / "compose"


@pytest.fixture
def composed(folder: Path) -> dict[str, Any]:
    """The compose file."""
    found: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())
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
