"""A throw-away Prometheus: scrapes one exporter every second and evaluates the rules that torchobs ships."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import final
from urllib.parse import quote

from examples._demo.processes import Program

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "rules"
HOW_TO_INSTALL = """\
  Debian, Ubuntu   apt-get install prometheus
  macOS            brew install prometheus
  elsewhere        https://prometheus.io/download"""
CONFIGURATION = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: {rules}
scrape_configs:
  - job_name: torchobs
    static_configs:
      - targets: {targets}
"""


@dataclass(frozen=True, slots=True)
class Alert:
    """An active alert: `state` is `pending` or `firing`."""

    name: str
    state: str
    summary: str


@final
class Prometheus(Program):
    """Runs a Prometheus for the length of a `with` block.

    Args:
        program: Its path.
        home: A private directory for its configuration, data and log.
        target: The exporter's `host:port`.
    """

    def __init__(self, program: str, home: Path, target: str) -> None:
        own = home / "prometheus"
        self.url = f"http://127.0.0.1:{_free_port()}"
        argv = [
            program,
            f"--config.file={own / 'prometheus.yml'}",
            f"--storage.tsdb.path={own / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        ]
        super().__init__(argv, own / "log", os.environ, own)
        own.mkdir(mode=0o700)
        rules = json.dumps([str(path) for path in sorted(RULES.glob("*.yml"))])  # JSON is YAML
        configuration = CONFIGURATION.format(rules=rules, targets=json.dumps([target]))
        (own / "prometheus.yml").write_text(configuration, "utf-8")

    def graph(self, *expressions: str) -> str:
        """Return the address of its page with a graph for each expression."""
        panels = (
            f"g{number}.expr={quote(expression)}&g{number}.tab=0&g{number}.range_input=3m"
            for number, expression in enumerate(expressions)
        )
        return f"{self.url}/graph?{'&'.join(panels)}"

    def alerts(self) -> list[Alert]:
        """Return the pending and the firing alerts.

        Raises:
            OSError: It does not answer.
        """
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}/api/v1/alerts", timeout=2) as answer:
            found = json.load(answer)["data"]["alerts"]
        return [Alert(one["labels"]["alertname"], one["state"], one["annotations"].get("summary", "")) for one in found]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
