"""The configurations for many ranks (docs/scale.md) in real programs: agents, what is behind them, a gateway."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from typing import TYPE_CHECKING, Any

import yaml

from tests.exporters import start_program
from tests.otlp import listens, pairs_of_json
from tests.rank_files import begin_run, live_rank, live_span, train
from tests.support import free_port, wait_until
from torchobs import catalog
from torchobs.exporter.otlp.source import namespaced
from torchobs.flight.layout import Exit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def shipped(checkout: Path, name: str) -> dict[str, Any]:
    """Read a file of deploy/."""
    config: dict[str, Any] = yaml.safe_load((checkout / "deploy" / name).read_text())
    return config


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


def gateway(checkout: Path, program: str, out: Path) -> tuple[dict[str, Any], bool]:
    """Return gateway.yml with ports of its own, a file as its backend, and waits of a second; and whether it samples.

    What a build of the Collector lacks of the processors is left out.
    """
    listed = subprocess.run([program, "components"], capture_output=True, text=True, check=True)
    there = {component["name"] for component in yaml.safe_load(listed.stdout)["processors"]}
    config = shipped(checkout, "collector/gateway.yml")
    for protocol in config["receivers"]["otlp"]["protocols"].values():
        protocol["endpoint"] = f"127.0.0.1:{free_port()}"
    config["exporters"] = {"file": {"path": str(out), "flush_interval": "50ms"}}
    processors = config["processors"] = {
        name: options for name, options in config["processors"].items() if name.partition("/")[0] in there
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
    collector, out = shutil.which("otelcol-contrib") or program("otelcol"), tmp_path / "collected.json"
    config, samples = gateway(checkout, collector, out)
    file = tmp_path / "gateway.yml"
    file.write_text(yaml.safe_dump(config))
    start(collector, "--config", file)
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
    pairs = pairs_of_json(span["attributes"])
    return pairs.get("torchobs.step.number", 0), next(value for name, value in pairs.items() if name.endswith(".reason"))


def test_the_gateway_s_policy_asks_for_spans_that_there_are(checkout: Path) -> None:
    """What is routine, by names of the catalog as they are sent."""
    config = shipped(checkout, "collector/gateway.yml")
    rare, _share = config["processors"]["tail_sampling"]["policies"]
    (condition,) = rare["ottl_condition"]["span"]
    (reason,) = (attribute for attribute in catalog.SPAN_STEP.attributes if attribute.name == "reason")
    assert "sampled" in reason.values
    step, phase = catalog.SPAN_STEP.name, catalog.SPAN_STEP_PHASE.name
    (key,) = namespaced(step, {reason.name: "sampled"})
    assert condition == f'not (name == "{phase}" or (name == "{step}" and attributes["{key}"] == "sampled"))'
