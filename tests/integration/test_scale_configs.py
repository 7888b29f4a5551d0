"""The configurations for many ranks (docs/scale.md) in real programs: agents in shards, what is behind them, a gateway."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from tests.exporters import Service, start_program
from tests.otlp import listens, pairs_of_json
from tests.prometheus_server import DIRECT, LISTENING, PrometheusServer, newest_prometheus
from tests.prometheus_server import FLAG as RECEIVER
from tests.rank_files import begin_run, live_rank, live_span, train
from tests.support import free_port, wait_until
from torchobs import catalog
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.otlp.source import namespaced
from torchobs.flight.layout import Exit

SHARDS = 2
TARGETS = 32


def shipped(checkout: Path, name: str) -> dict[str, Any]:
    """Read a file of deploy/."""
    found: dict[str, Any] = yaml.safe_load((checkout / "deploy" / name).read_text())
    return found


def test_promtool_takes_the_files_as_they_are(program: Callable[[str], str], checkout: Path) -> None:
    """An option that a Prometheus does not know, or a rule file that is not there, is an error at its start.

    Debian's promtool is built without the discovery in Kubernetes: it is given the file for the Prometheus behind the agents.
    """
    home = checkout / "deploy" / "prometheus"
    checks = (("promtool3", "--agent", "agent.yml"), ("promtool3", "central.yml"), ("promtool", "central.yml"))
    for name, *arguments, file in checks:
        argv = [program(name), "check", "config", *arguments, str(home / file)]
        result = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (result.returncode, "SUCCESS" in result.stdout) == (0, True), result.stdout + result.stderr
        assert file == "agent.yml" or "3 rule files found" in result.stdout


def shard(checkout: Path, number: int, targets: list[str], receiver: str) -> dict[str, Any]:
    """Return agent.yml as that shard's, with given targets in place of a cluster's pods; the last of them has ended."""
    config = shipped(checkout, "prometheus/agent.yml")
    (job,) = config["scrape_configs"]
    del job["kubernetes_sd_configs"]
    job["static_configs"] = [
        {
            "targets": [target],
            "labels": {
                "__meta_kubernetes_pod_container_port_name": "torchobs",
                "__meta_kubernetes_pod_phase": "Succeeded" if target is targets[-1] else "Running",
                "__meta_kubernetes_namespace": "training",
                "__meta_kubernetes_pod_name": f"pod-{index}",
            },
        }
        for index, target in enumerate(targets)
    ]
    (hashing,) = (rule for rule in job["relabel_configs"] if rule.get("action") == "hashmod")
    (mine,) = (rule for rule in job["relabel_configs"] if rule.get("source_labels") == [hashing["target_label"]])
    assert (hashing["modulus"], mine["regex"]) == (4, "0")
    hashing["modulus"], mine["regex"] = SHARDS, str(number)
    config["global"].update(scrape_interval="1s", scrape_timeout="1s")
    (remote,) = config["remote_write"]
    remote["url"] = f"{receiver}/api/v1/write"
    return config


def start_agents(start: Callable[..., object], executable: str, configs: list[dict[str, Any]], home: Path) -> list[Path]:
    """Start an agent with each of these configurations; return their logs."""
    logs, agent = [], "--agent" if executable == newest_prometheus(3) else "--enable-feature=agent"
    for number, config in enumerate(configs):
        file, log = home / f"agent-{number}.yml", home / f"agent-{number}.log"
        file.write_text(yaml.safe_dump(config))
        paths = f"--config.file={file}", f"--storage.agent.path={home / f'wal-{number}'}"
        options = "--web.listen-address=127.0.0.1:0", "--scrape.discovery-reload-interval=100ms"
        with log.open("w") as output:
            start(executable, agent, *paths, *options, stdout=output)
        logs.append(log)
    return logs


def test_shards_of_agents_write_each_exporter_once_to_the_prometheus_that_has_the_rules(
    prometheus_program: str,
    start: Callable[..., subprocess.Popen[str]],
    checkout: Path,
    flight_dir: Path,
    tmp_path: Path,
) -> None:
    """Real agents share the targets among themselves; the rules see all of them, and only what they record is sent on."""
    central = shipped(checkout, "prometheus/central.yml")
    rules = sorted((checkout / "deploy" / "prometheus" / "rules").glob("torchobs-*.yml"))
    writer = live_rank(flight_dir)
    train(writer, range(1, 4))
    with (
        PrometheusServer(prometheus_program, arguments=[RECEIVER]) as long_term,
        PrometheusServer(
            prometheus_program,
            rules=rules,
            settings={
                "storage": central["storage"],
                "remote_write": [{**central["remote_write"][0], "url": f"{long_term.url}/api/v1/write"}],
            },
            arguments=[RECEIVER],
        ) as behind,
        Service(ExporterConfig(flight_dir=str(flight_dir)), listen="0.0.0.0:0") as exporter,
    ):
        port = exporter.address.rpartition(":")[2]
        targets = [f"127.0.0.{number}:{port}" for number in range(1, TARGETS + 2)]
        shards = [shard(checkout, number, targets, behind.url) for number in range(SHARDS)]
        logs = start_agents(start, prometheus_program, shards, tmp_path)

        def scraped(log: Path) -> set[str]:
            found = LISTENING.search(log.read_text())
            if found is None:
                return set()
            with DIRECT.open(f"http://{found[1]}/api/v1/targets?state=active", timeout=5) as answer:
                return {target["labels"]["instance"] for target in json.load(answer)["data"]["activeTargets"]}

        def all_there() -> bool:
            writer.heartbeat()
            return len(behind.query('torchobs_rank_up{namespace="training", cluster="my-cluster"} == 1')) == TARGETS

        wait_until(all_there, timeout_s=60)
        first, second = map(scraped, logs)
        assert first | second == set(targets[:-1])
        assert first & second == set()
        assert first, "with this many targets each shard has some"
        assert second, "with this many targets each shard has some"
        assert {series.labels["pod"] for series in behind.query("torchobs_steps_total")} == {f"pod-{n}" for n in range(TARGETS)}

        def sent_on() -> bool:
            writer.heartbeat()
            return [series.value for series in long_term.query("run:torchobs_rank_up:sum")] == [TARGETS]

        wait_until(sent_on, timeout_s=60)
        assert long_term.query("torchobs_rank_info"), "what a rank was is kept, too"
        assert long_term.query('{__name__=~"torchobs_(loss|steps_total|rank_up)|rank:.+"}') == []
    writer.close()


def test_victoria_metrics_takes_what_agents_write_and_its_ruler_the_rules(
    program: Callable[[str], str],
    start: Callable[..., subprocess.Popen[str]],
    checkout: Path,
    flight_dir: Path,
    tmp_path: Path,
) -> None:
    """Only the URL is another; what the rules record comes back. Debian's vmalert does not know `keep_firing_for`."""
    rules = checkout / "deploy" / "prometheus" / "rules"
    alerts = tmp_path / "alerts.yml"
    alerts.write_text(re.sub(r"\n *keep_firing_for: .*", "", (rules / "torchobs-alerts.yml").read_text()))
    subprocess.run([program("vmalert"), "-dryRun", f"-rule={rules}/torchobs-[rp]*.yml", f"-rule={alerts}"], check=True)
    address, ruler = (f"127.0.0.1:{free_port()}" for _ in range(2))
    start(
        program("victoria-metrics"),
        f"-storageDataPath={tmp_path / 'store'}",
        f"-httpListenAddr={address}",
        "-search.latencyOffset=1s",
    )
    wait_until(lambda: listens(f"http://{address}"), timeout_s=30)

    def value(query: str) -> list[float]:
        url = f"http://{address}/api/v1/query?{urlencode({'query': query, 'nocache': 1})}"
        with DIRECT.open(url, timeout=5) as answer:
            return [float(series["value"][1]) for series in json.load(answer)["data"]["result"]]

    writer = live_rank(flight_dir)
    train(writer, range(1, 4))
    with Service(ExporterConfig(flight_dir=str(flight_dir)), listen="0.0.0.0:0") as exporter:
        port = exporter.address.rpartition(":")[2]
        targets = [f"127.0.0.{number}:{port}" for number in range(1, 12)]
        shards = [shard(checkout, number, targets, f"http://{address}") for number in range(SHARDS)]
        start_agents(start, program("prometheus"), shards, tmp_path)
        start(
            program("vmalert"), f"-rule={rules}/torchobs-recordings.yml", "-evaluationInterval=1s", f"-httpListenAddr={ruler}",
            f"-datasource.url=http://{address}", f"-remoteWrite.url=http://{address}",
            f"-remoteRead.url=http://{address}",
        )  # fmt: skip

        def there(query: str) -> bool:
            writer.heartbeat()
            return value(query) == [len(targets) - 1]

        wait_until(lambda: there('count(torchobs_rank_up{namespace="training", cluster="my-cluster"} == 1)'), timeout_s=60)
        wait_until(lambda: there("run:torchobs_rank_up:sum"), timeout_s=60)
    writer.close()


def gateway(checkout: Path, program: str, out: Path) -> tuple[dict[str, Any], bool]:
    """Return gateway.yml with ports of its own, a file as its backend, and waits of a second; and whether it samples.

    What a build of the Collector lacks of the processors is left out.
    """
    listed = subprocess.run([program, "components"], capture_output=True, text=True, check=True)
    there = {one["name"] for one in yaml.safe_load(listed.stdout)["processors"]}
    config = shipped(checkout, "collector/gateway.yml")
    for protocol in config["receivers"]["otlp"]["protocols"].values():
        protocol["endpoint"] = f"127.0.0.1:{free_port()}"
    config["exporters"] = {"file": {"path": str(out), "flush_interval": "50ms"}}
    processors = config["processors"] = {
        name: given for name, given in config["processors"].items() if name.partition("/")[0] in there
    }
    processors["batch"]["timeout"] = "200ms"
    samples = "tail_sampling" in there
    pipelines = config["service"]["pipelines"]
    for pipeline in pipelines.values():
        pipeline["processors"] = [name for name in pipeline["processors"] if name in processors]
        pipeline["exporters"] = ["file"]
    if samples:
        processors["tail_sampling"]["decision_wait"] = "1s"
        processors["tail_sampling"]["policies"] = processors["tail_sampling"]["policies"][:1]  # without the one of chance
    config["service"]["telemetry"] = {"metrics": {"level": "none"}}
    return config, samples


def test_the_gateway_passes_on_what_exporters_push(
    program: Callable[[str], str],
    start: Callable[..., subprocess.Popen[str]],
    checkout: Path,
    flight_dir: Path,
    tmp_path: Path,
) -> None:
    """Each span once, where the Collector can sample no routine step, unless it was slow on another rank; and all metrics."""
    found, out = shutil.which("otelcol-contrib") or program("otelcol"), tmp_path / "collected.json"
    config, samples = gateway(checkout, found, out)
    file = tmp_path / "gateway.yml"
    file.write_text(yaml.safe_dump(config))
    start(found, "--config", file)
    url = f"http://{config['receivers']['otlp']['protocols']['http']['endpoint']}"
    wait_until(lambda: listens(url), timeout_s=30)
    writers = [live_rank(flight_dir, rank=rank) for rank in range(2)]
    for writer in writers:
        begin_run(writer)
        train(writer, range(1, 4))
        live_span(writer, 2, "sampled")
    live_span(writers[0], 3, "sampled")
    live_span(writers[1], 3, "slow")
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    start_program(start, tmp_path / "log", free_port(), "--flight-dir", str(flight_dir), **environ)

    def collected(signal: str) -> list[dict[str, Any]]:
        lines = out.read_text().splitlines(keepends=True) if out.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return [resource for line in whole for resource in line.get(f"resource{signal}", [])]

    def spans() -> Counter[tuple[int, int, str]]:
        return Counter(
            (pairs_of_json(of["resource"]["attributes"])["torchobs.rank"], *step_and_reason(span))
            for of in collected("Spans")
            for scope in of["scopeSpans"]
            for span in scope["spans"]
        )

    routine = set() if samples else {(0, 2, "sampled"), (1, 2, "sampled")}
    expected = {*routine, (0, 3, "sampled"), (1, 3, "slow")}
    wait_until(lambda: spans().keys() >= expected, timeout_s=30)
    for writer in writers:
        writer.exit(Exit.FINISHED, 0)
        writer.close()
    expected |= {(0, 0, "finished"), (1, 0, "finished")}
    wait_until(lambda: spans().keys() >= expected, timeout_s=30)
    assert spans() == Counter(expected), "each of them once"
    ranks = {pairs_of_json(of["resource"]["attributes"]).get("torchobs.rank") for of in collected("Metrics")}
    assert {0, 1} <= ranks


def step_and_reason(span: dict[str, Any]) -> tuple[int, str]:
    """Return a step's number and why it was recorded, or 0 and how a run ended."""
    given = pairs_of_json(span["attributes"])
    return given.get("torchobs.step.number", 0), next(value for name, value in given.items() if name.endswith(".reason"))


def test_the_gateway_s_policy_asks_for_spans_that_there_are(checkout: Path) -> None:
    """What is routine, by names of the catalog as they are sent."""
    config = shipped(checkout, "collector/gateway.yml")
    rare, share = config["processors"]["tail_sampling"]["policies"]
    assert (share["type"], share["probabilistic"]) == ("probabilistic", {"sampling_percentage": 2})
    (condition,) = rare["ottl_condition"]["span"]
    (reason,) = (attribute for attribute in catalog.SPAN_STEP.attributes if attribute.name == "reason")
    assert "sampled" in reason.values
    step, phase = catalog.SPAN_STEP.name, catalog.SPAN_STEP_PHASE.name
    (key,) = namespaced(step, {reason.name: "sampled"})
    assert condition == f'not (name == "{phase}" or (name == "{step}" and attributes["{key}"] == "sampled"))'
    for pipeline in config["service"]["pipelines"].values():
        assert pipeline["processors"][0] == "memory_limiter"
        assert pipeline["processors"][-1] == "batch"
