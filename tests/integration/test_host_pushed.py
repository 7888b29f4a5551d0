"""The machine's numbers over OTLP, and beside those of an application that has taken the same names."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.exporters import Service
from tests.otlp import Receiver, Request, Seen, points, to
from tests.rank_files import Clock, File
from tests.scanners import scanner_of
from tests.support import wait_until
from torchobs import catalog
from torchobs.catalog import Kind, Metric
from torchobs.exporter import daemon
from torchobs.exporter import host as host_module
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.exporter_metrics import HostFacts, Sample, ScrapeInput
from torchobs.exporter.otlp.batches import Metrics
from torchobs.exporter.otlp.options import PushConfig
from torchobs.exporter.prometheus.exposition import Exposition
from torchobs.exporter.prometheus.text_format import Style
from torchobs.flight.format.series import Scope
from torchobs.ranks.snapshot import EMPTY, Snapshot

BOOTED_NS, BORN_NS, NOW_NS = (seconds * 10**9 for seconds in (1_000_000_000, 1_100_000_000, 1_100_000_060))
APPLICATION = Scope("opentelemetry.instrumentation.system_metrics", "0.50b0")


def facts(cpu_s: float, *more: Sample) -> ScrapeInput:
    """What an exporter knows that looks at the processors."""
    said = Sample(catalog.SYSTEM_CPU_TIME, {catalog.CPU_MODE.name: "user"}, cpu_s)
    own = Sample(catalog.EXPORTER_HOST_DURATION, {}, 0.001)
    return ScrapeInput(EMPTY, host=HostFacts((said, *more), (own,), BOOTED_NS))


def pushed(metrics: Metrics, told: ScrapeInput, at_ns: int = NOW_NS) -> list[Seen]:
    """The points of one push."""
    return list(points([Request("/v1/metrics", {}, body, 0.0) for body, _ in metrics.collect((), (), at_ns, told)]))


def test_the_machine_is_a_resource_of_its_own_that_began_with_its_boot() -> None:
    """Named as the host; no rank, no exporter. A counter's zero was when the machine was booted, not when we looked first."""
    seen = pushed(Metrics(delta=False, series_limit=100, born_ns=BORN_NS), facts(12.5))
    (cpu,) = [one for one in seen if one.metric.name == "system.cpu.time"]
    assert cpu.resource["host.name"] == cpu.resource["service.instance.id"] == socket.gethostname()
    assert cpu.resource["service.name"] == "torchobs-host"
    assert (cpu.attributes, cpu.metric.unit, cpu.metric.sum.is_monotonic) == ({"cpu.mode": "user"}, "s", True)
    assert (cpu.point.start_time_unix_nano, cpu.point.as_double) == (BOOTED_NS, 12.5)
    (took,) = [one for one in seen if one.metric.name == "torchobs.exporter.host.duration"]
    assert took.resource["service.name"] == "torchobs-exporter"


def test_delta_counts_from_the_first_look_on() -> None:
    """What an exporter before this one may have sent is not sent again."""
    metrics = Metrics(delta=True, series_limit=100, born_ns=BORN_NS)
    told = [pushed(metrics, facts(cpu_s), NOW_NS + number) for number, cpu_s in enumerate((1000.0, 1007.5))]
    deltas = [[one.point.as_double for one in seen if one.metric.name == "system.cpu.time"] for seen in told]
    assert deltas == [[], [7.5]]


def test_what_does_not_answer_any_more_ends() -> None:
    """A file system whose server is gone gets the flag that Prometheus takes for an end."""
    metrics = Metrics(delta=False, series_limit=100, born_ns=BORN_NS)
    size = Sample(catalog.SYSTEM_FILESYSTEM_LIMIT, {catalog.MOUNTPOINT.name: "/lustre"}, 1e15)
    flags = [
        [one.point.flags for one in pushed(metrics, told) if one.metric.name == size.metric.name]
        for told in (facts(1.0, size), facts(2.0))
    ]
    assert flags == [[0], [1]]


def test_the_exporter_looks_anew_for_each_push(flight_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nobody scrapes it: what changed since the last push is in the next one."""
    monkeypatch.setattr(daemon, "TICK_S", 0.05)
    monkeypatch.setattr(host_module, "DEADLINE_S", 20.0)
    stat = "cpu  100 20 30 4000 50 6 7 8 90 10\nbtime 1795200000\nprocs_running {}\nprocs_blocked 1\n"
    (tmp_path / "stat").write_text(stat.format(3))
    with Receiver() as receiver:

        def running() -> list[float]:
            seen = points(receiver.of("/v1/metrics"))
            return [one.point.as_int or one.point.as_double for one in seen if one.metric.name == catalog.HOST_THREADS.name]

        push = PushConfig(metrics=to(receiver), interval_s=0.1)
        config = ExporterConfig(flight_dir=str(flight_dir), push=push, mode="node", collect_host=("cpu",), procfs=str(tmp_path))
        with Service(config):
            wait_until(lambda: 3 in running())
            (tmp_path / "stat").write_text(stat.format(7))
            wait_until(lambda: 7 in running())


@pytest.fixture
def snapshot(flight_dir: Path) -> Snapshot:
    """Of a rank whose application measures its machine, too, by OpenTelemetry's own instrumentation, and of forged series."""
    file = File(flight_dir)
    file.set(catalog.SYSTEM_CPU_TIME, 3.0, APPLICATION, **{"cpu.mode": "user"})
    file.set(Metric("system.memory.usage", Kind.GAUGE, "By", "Memory."), 4.0, APPLICATION)
    file.set(Metric("system.network.io", Kind.GAUGE, "By", "No counter."), 5.0, APPLICATION)
    file.set(catalog.HOST_OOM_KILLS, 6.0, APPLICATION)
    file.set(catalog.HOST_OOM_KILLS, 7.0)
    file.set(catalog.SYSTEM_MEMORY_LIMIT, 8.0)
    file.save()
    scanner = scanner_of(flight_dir, Clock())
    found = scanner.scan()
    scanner.close()
    return found


@pytest.mark.parametrize("host", [False, True])
def test_an_application_keeps_its_names_and_forges_none_of_ours(snapshot: Snapshot, host: bool) -> None:  # noqa: FBT001  # as parametrize gives it
    """Its series have a rank, the machine's have none; with one family of another type only the machine's is there."""
    machine = Sample(catalog.SYSTEM_NETWORK_IO, {catalog.NETWORK_INTERFACE.name: "eth0"}, 9.0)
    told = facts(12.5, machine)._replace(snapshot=snapshot) if host else ScrapeInput(snapshot)
    lines = "".join(Exposition(host=host).families(told, Style(openmetrics=False))).splitlines()
    of = {name: [line for line in lines if line.startswith(name)] for name in ("system_", "torchobs_host_")}
    rank = 'job_name="gpt",rank="0",run_id="run-1"'
    expected = [
        f'system_cpu_time_seconds_total{{cpu_mode="user",{rank}}} 3.0',
        f"system_memory_usage_bytes{{{rank}}} 4.0",
        *(['system_cpu_time_seconds_total{cpu_mode="user"} 12.5'] if host else []),
        'system_network_io_bytes_total{network_interface_name="eth0"} 9.0'
        if host
        else f"system_network_io_bytes{{{rank}}} 5.0",
    ]
    assert sorted(of["system_"]) == sorted(expected)
    assert of["torchobs_host_"] == []
    assert len([line for line in lines if line == "# TYPE system_cpu_time_seconds_total counter"]) == 1


def test_over_otlp_an_application_keeps_its_names_as_well(snapshot: Snapshot) -> None:
    """Each is of its own resource; what is forged is not sent."""
    metrics = Metrics(delta=False, series_limit=100, born_ns=BORN_NS)
    requests = metrics.collect(snapshot.ranks, (), NOW_NS)
    sent: Mapping[str, Any] = {
        one.metric.name: one.scope for one in points([Request("", {}, body, 0.0) for body, _ in requests])
    }
    assert {name: scope for name, scope in sent.items() if name.startswith(("system.", "torchobs.host."))} == {
        "system.cpu.time": APPLICATION.name, "system.memory.usage": APPLICATION.name, "system.network.io": APPLICATION.name,
    }  # fmt: skip
