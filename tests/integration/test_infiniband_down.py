"""The alert about InfiniBand ports with a real node_exporter, which reads a machine's ports from files of the kernel's form."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tests.alertmanager_server import serving
from tests.prometheus_server import PrometheusServer
from tests.support import free_port, wait_until
from torchobs.rules.alerts_machine import links
from torchobs.rules.rule_file import render
from torchobs.rules.values import DEFAULT

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

FILES = {
    "fw_ver": "20.1.0",
    "board_id": "MT_0000000223",
    "hca_type": "MT4123",
    "ports/1/state": "4: ACTIVE",
    "ports/1/phys_state": "5: LinkUp",
    "ports/1/rate": "200 Gb/sec (4X HDR)",
    "ports/1/counters/link_downed": "0",
}
"""What the kernel says of a port (Documentation/ABI/stable/sysfs-class-infiniband)."""
FIRING = 'ALERTS{alertname="TorchobsInfinibandDown", alertstate="firing"}'


def test_a_port_that_goes_down_is_told_of_the_run_on_that_node(
    program: Callable[[str], str], start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Rank and port are joined by the node's name; of a run on another node nothing is told."""
    device, port = tmp_path / "sys" / "class" / "infiniband" / "mlx5_0", free_port()
    for name, text in FILES.items():
        (device / name).parent.mkdir(parents=True, exist_ok=True)
        (device / name).write_text(f"{text}\n")
    collectors = ("--collector.disable-defaults", "--collector.infiniband", "--collector.uname")
    node = program("prometheus-node-exporter")
    start(node, f"--path.sysfs={tmp_path / 'sys'}", *collectors, f"--web.listen-address=127.0.0.1:{port}")
    page = f'torchobs_rank_info{{run_id="here", rank="0", host="{os.uname().nodename}"}} 1\n'
    page += 'torchobs_rank_info{run_id="elsewhere", rank="0", host="another"} 1\n'
    rules = tmp_path / "rules.yml"  # two seconds in place of two minutes
    rules.write_text(render([links()], DEFAULT, "").replace("[2m]", "[2s]").replace("interval: 1m", "interval: 1s"))
    with serving(lambda _: page.encode()) as target:
        jobs = {"torchobs": target, "node": f"127.0.0.1:{port}"}
        scraped = [{"job_name": name, "static_configs": [{"targets": [address]}]} for name, address in jobs.items()]
        with PrometheusServer(
            program("prometheus"), rules=[rules], interval="1s", settings={"scrape_configs": scraped}
        ) as prometheus:
            wait_until(lambda: prometheus.query("node_infiniband_state_id == 4"), timeout_s=60)
            assert prometheus.query(FIRING) == []
            (device / "ports" / "1" / "state").write_text("1: DOWN\n")
            wait_until(lambda: prometheus.query(FIRING), timeout_s=60)
            assert [one.labels["run_id"] for one in prometheus.query(FIRING)] == ["here"]
            told = [
                alert["annotations"]["description"]
                for group in prometheus.get("/api/v1/rules")["groups"]
                for rule in group["rules"]
                for alert in rule.get("alerts", ())
            ]
    assert len(told) == 1
    assert told[0].endswith(f" Down are: port 1 of mlx5_0 on {os.uname().nodename}.")
