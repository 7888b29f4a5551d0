"""The services of `deploy/compose`, as far as their programs are here: the shipped files, but for hosts, ports and folders."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import yaml

from tests.alertmanager_server import alertmanager_command
from tests.exporters import start_program
from tests.otlp import Collector
from tests.prometheus_server import PrometheusServer, newest_prometheus
from tests.rank_files import begin_run, live_rank, train
from tests.support import clean_environment, wait_until
from torchobs.flight.format.layout import Exit

Start = Callable[..., subprocess.Popen[str]]


def test_the_composed_services_work_together(
    checkout: Path, flight_dir: Path, tmp_path: Path, start: Start, program: Callable[[str], str], free_port: Callable[[], int]
) -> None:
    """A rank is scraped, its span reaches the Collector, and its end by a fault an alert of the Alertmanager."""
    folder = checkout / "deploy" / "compose"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    exporter, alertmanager = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    collector = Collector(program("otelcol"), start, tmp_path, signals=["traces"])
    given = {"/run/torchobs/flight": str(flight_dir), "/run/torchobs/control": str(tmp_path / "control")}
    (tmp_path / "control").mkdir(mode=0o700)
    command = [given.get(word, word) for word in services["exporter"]["command"]]
    environ = {
        name: value.replace("http://collector:4318", collector.http)
        for name, value in services["exporter"]["environment"].items()
    }
    start_program(start, tmp_path / "exporter.log", int(exporter.rpartition(":")[2]), *command, **environ)

    receivers = str(checkout / "deploy" / "alertmanager" / "alertmanager.yml")
    moved = {"/etc/alertmanager/alertmanager.yml": receivers, "/alertmanager": str(tmp_path / "alertmanager")}
    options = [
        f"{flag}={moved.get(value, value)}"
        for flag, _, value in (option.partition("=") for option in services["alertmanager"]["command"])
    ]
    start(*alertmanager_command(program("prometheus-alertmanager")), *options, f"--web.listen-address={alertmanager}",
          env=clean_environment())  # fmt: skip

    text = (folder / "prometheus.yml").read_text()
    for name, here in {
        "exporter:10960": exporter, "alertmanager:9093": alertmanager, "/etc/prometheus": str(folder.parent / "prometheus"),
        "15s": "1s",
    }.items():  # fmt: skip
        assert name in text
        text = text.replace(name, here)
    config = yaml.safe_load(text)
    del config["scrape_configs"][1]  # itself, by a port that is another one here
    rank = live_rank(flight_dir, rank=0)
    begin_run(rank)
    train(rank, range(1, 4))
    flags = [flag for flag in services["prometheus"]["command"] if flag.startswith("--enable-feature")]
    with PrometheusServer(newest_prometheus(2) or program("prometheus"), settings=config, arguments=flags) as prometheus:
        wait_until(lambda: prometheus.query('torchobs_steps_total{job="torchobs"} == 3'))
        rank.exit(Exit.EXCEPTION, 1)
        rank.close()
        wait_until(lambda: collector.resources("spans"))

        def told() -> bool:
            try:
                alerts = httpx.get(f"http://{alertmanager}/api/v2/alerts", trust_env=False).json()
            except (httpx.HTTPError, json.JSONDecodeError):
                return False
            return "TorchobsRankFailed" in {alert["labels"]["alertname"] for alert in alerts}

        wait_until(told, timeout_s=60, interval_s=0.2)
