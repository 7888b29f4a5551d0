"""`deploy/compose/compose.yaml`, run by podman-compose: users, volumes, networks and names. Grafana and Tempo are left out."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.launchers import Podman, why_not
from tests.prometheus_server import TEMPLATE, newest_prometheus
from tests.support import ROOT, wait_until

FOLDER = ROOT / "deploy" / "compose"
WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the source checkout"),
    pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT)),
]

TRAIN = """
import pathlib
import time

import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while not pathlib.Path("/opt/test/stop").exists():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
raise RuntimeError("the batch is upside down")
"""
"""A training that fails when it is told to."""

PYTHON = [path for path in sorted({Path(sys.prefix), Path(sys.base_prefix), ROOT}) if not path.is_relative_to("/usr")]
"""Where torchobs, torch and Python are, besides /usr."""


class Stack:
    """The services that can be had without a registry, up: `compose.yaml`, and a second file that mounts programs."""

    def __init__(self, podman: Podman, programs: dict[str, str], ports: dict[str, int]) -> None:
        self.ports = ports
        self.shared = podman.home / "shared"
        self.shared.mkdir()
        self.shared.chmod(0o777)  # each service is another user
        services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
        changes = self._changes(programs)
        for name, program in programs.items():
            changes[name]["volumes"].append(f"{program}:/program:ro")
        for name, port in ports.items():
            inner = services[name]["ports"][0].rpartition(":")[2]
            changes[name]["ports"] = _Replaced([f"127.0.0.1:{port}:{inner}"])
        file = podman.home / "override.yaml"
        file.write_text(yaml.dump({"services": changes}, Dumper=_Dumper))
        path = f"ENV PATH={Path(sys.prefix) / 'bin'}:/usr/bin"
        for name in changes:
            of_image = {"trainer": [path], "exporter": [path, 'ENTRYPOINT ["torchobs", "exporter"]']}
            nobodys = ['ENTRYPOINT ["/program"]', "USER 65534:65534"]
            podman.image(services[name]["image"], *of_image.get(name, nobodys))
        podman.compose([FOLDER / "compose.yaml", file], "up", "--detach", "--no-build", *changes)

    def _changes(self, programs: dict[str, str]) -> dict[str, dict[str, Any]]:
        (self.shared / "train.py").write_text(TRAIN)
        text = (FOLDER / "prometheus.yml").read_text()
        assert "15s" in text
        (self.shared / "prometheus.yml").write_text(text.replace("15s", "1s"))
        config = yaml.safe_load((FOLDER / "collector.yml").read_text())
        config["exporters"] = {"file": {"path": "/opt/test/spans.json", "flush_interval": "50ms"}}
        config["service"]["pipelines"]["traces"]["exporters"] = ["file"]  # not to Tempo, which is not here
        (self.shared / "collector.yml").write_text(yaml.safe_dump(config))

        python = [f"{path}:{path}:ro" for path in ("/usr", *PYTHON)]
        templates = (Path("share") / TEMPLATE).parent  # which Debian's asks for
        share = Path(programs["alertmanager"]).parent.parent / templates
        libraries = [f"{path}:{path}:ro" for path in ("/usr/lib", "/usr/lib64")]
        return {
            "trainer": {
                "command": ["torchobs", "run", "/opt/test/train.py"],
                "volumes": [*python, f"{self.shared}:/opt/test:ro"],
            },
            "exporter": {"volumes": python},
            "prometheus": {"volumes": [f"{self.shared}/prometheus.yml:/etc/prometheus/prometheus.yml:ro"]},
            "alertmanager": {"volumes": [*libraries, f"{share}:/usr/{templates}:ro"]},
            "collector": {"volumes": [f"{self.shared}/collector.yml:/etc/otelcol/config.yaml:ro", f"{self.shared}:/opt/test"]},
        }

    def get(self, service: str, path: str, **parameters: str) -> Any:
        """What a service says at its published port, or None."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.ports[service]}{path}", params=parameters, trust_env=False).json()
        except (httpx.HTTPError, json.JSONDecodeError):
            return None

    def query(self, expression: str) -> list[Any]:
        """Prometheus' answer."""
        answer = self.get("prometheus", "/api/v1/query", query=expression)
        series: list[Any] = answer["data"]["result"] if answer and answer["status"] == "success" else []
        return series


class _Replaced(list[str]):
    """A list that replaces that of the file before, and is not added to it."""


class _Dumper(yaml.SafeDumper):
    """Knows such a list, and writes no references."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


_Dumper.add_representer(_Replaced, lambda dumper, value: dumper.represent_sequence("!override", value))


@pytest.fixture
def stack(program: Callable[[str], str], free_port: Callable[[], int]) -> Iterator[Stack]:
    """Trainer, exporter, Prometheus, Alertmanager and Collector."""
    programs = {
        "prometheus": newest_prometheus(2) or program("prometheus"),
        "alertmanager": program("prometheus-alertmanager"),
        "collector": program("otelcol"),
    }
    with Podman() as podman:
        ports = {name: free_port() for name in ("prometheus", "alertmanager")}
        yield Stack(podman, {name: str(Path(path).resolve()) for name, path in programs.items()}, ports)


def test_the_composed_services_run(stack: Stack) -> None:
    """The trainer's steps are in Prometheus, with the rules; its failure is in Alertmanager, its spans at the Collector."""
    wait_until(lambda: stack.query("torchobs_steps_total > 10"), timeout_s=120, interval_s=0.2)
    groups = stack.get("prometheus", "/api/v1/rules")["data"]["groups"]
    assert {rule["name"] for group in groups for rule in group["rules"]} >= {"TorchobsRankFailed", "TorchobsRunDown"}
    assert not [rule for group in groups for rule in group["rules"] if rule["health"] == "err"]
    wait_until(lambda: {up["metric"]["job"] for up in stack.query("up == 1")} == {"torchobs", "prometheus"}, interval_s=0.2)
    (stack.shared / "stop").touch()

    def told() -> bool:
        alerts = stack.get("alertmanager", "/api/v2/alerts") or ()
        return any(alert["labels"]["alertname"] == "TorchobsRankFailed" for alert in alerts)

    wait_until(told, timeout_s=60, interval_s=0.2)
    spans = stack.shared / "spans.json"
    wait_until(lambda: spans.exists() and '"torchobs.run' in spans.read_text(), timeout_s=60, interval_s=0.2)
