"""The machine's numbers beside those of the real node_exporter, on this machine: whoever changes over reads the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from tests.exporters import Client, Service
from tests.support import free_port, wait_until
from torchobs.catalog import HOST_COLLECTORS
from torchobs.exporter import host
from torchobs.exporter.config import ExporterConfig

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import pytest

COUNTERS: dict[str, tuple[str | dict[str, str], dict[str, str]]] = {
    "system_cpu_time_seconds_total": ("node_cpu_seconds_total", {"cpu_mode": "mode"}),
    "system_disk_io_time_seconds_total": ("node_disk_io_time_seconds_total", {"system_device": "device"}),
    "system_disk_io_bytes_total": (
        {"read": "node_disk_read_bytes_total", "write": "node_disk_written_bytes_total"},
        {"system_device": "device"},
    ),
    "system_disk_operations_total": (
        {"read": "node_disk_reads_completed_total", "write": "node_disk_writes_completed_total"},
        {"system_device": "device"},
    ),
    "system_network_io_bytes_total": (
        {"receive": "node_network_receive_bytes_total", "transmit": "node_network_transmit_bytes_total"},
        {"network_interface_name": "device"},
    ),
    "system_network_errors_total": (
        {"receive": "node_network_receive_errs_total", "transmit": "node_network_transmit_errs_total"},
        {"network_interface_name": "device"},
    ),
    "torchobs_host_memory_oom_kills_total": ("node_vmstat_oom_kill", {}),
}
"""What only grows: theirs by direction, and what they call our labels."""

GAUGES = {
    ("system_cpu_load_average_1m", ""): ("node_load1", 1.0),
    ("system_memory_limit_bytes", ""): ("node_memory_MemTotal_bytes", 0.0),
    ("system_memory_linux_available_bytes", ""): ("node_memory_MemAvailable_bytes", 1 << 30),
    ("system_memory_linux_shared_bytes", ""): ("node_memory_Shmem_bytes", 1 << 30),
    ("system_memory_usage_bytes", "free"): ("node_memory_MemFree_bytes", 1 << 30),
    ("system_memory_usage_bytes", "buffers"): ("node_memory_Buffers_bytes", 1 << 28),
}
"""What comes and goes: theirs, and by how much it may do so within a moment, on a machine that others use as well."""

MODES = {"interrupt": ("irq", "softirq")}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(page: str) -> Samples:
    """Each value of a page."""
    families = text_string_to_metric_families(page)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def total(of: Samples, name: str, labels: Iterable[tuple[str, str]]) -> float | None:
    """The sum of what has that name and these labels; None where there is nothing."""
    wanted = frozenset(labels)
    found = [value for (called, own), value in of.items() if called == name and wanted <= own]
    return sum(found) if found else None


def theirs(node: Samples, name: str, labels: frozenset[tuple[str, str]]) -> float | None:
    """What node_exporter has for one of our counters."""
    called, translated = COUNTERS[name]
    if not isinstance(called, str):
        called = called[next(value for key, value in labels if key.endswith("_direction"))]
    own = [(translated[key], value) for key, value in labels if key in translated]
    modes = MODES.get(own[0][1]) if translated == {"cpu_mode": "mode"} else None
    if modes is None:
        return total(node, called, own)
    return sum(total(node, called, [("mode", mode)]) or 0 for mode in modes)


def test_both_tell_the_same(
    start: Callable[..., subprocess.Popen[str]],
    program: Callable[[str], str],
    flight_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processors, load, memory, disks, networks: theirs is between what we said before and after."""
    monkeypatch.setattr(host, "DEADLINE_S", 20.0)  # else a page may show a look that began before theirs
    port = free_port()
    start(program("prometheus-node-exporter"), f"--web.listen-address=127.0.0.1:{port}")
    node = Client(f"127.0.0.1:{port}")
    wait_until(lambda: answers(node), timeout_s=30)
    with Service(ExporterConfig(flight_dir=str(flight_dir), collect_host=HOST_COLLECTORS)) as service:
        wait_until(lambda: "system_cpu_time" in service.page())
        before, between = samples(service.page()), samples(node.page())
        wait_until(lambda: samples(service.page())[CLOCK] > before[CLOCK])  # a page may be shared for a tenth of a second
        after = samples(service.page())
    compared = set()
    for (name, labels), value in before.items():
        if name in COUNTERS:
            middle = theirs(between, name, labels)
            assert middle is not None, (name, labels)
            assert value - 0.5 <= middle <= after[name, labels] + 0.5, (name, labels)
            compared.add(name)
    assert "system_cpu_time_seconds_total" in compared, "a machine may have no disk and no network"
    for (name, state), (called, slack) in GAUGES.items():
        own = [("system_memory_state", state)] if state else []
        first, last, middle = total(before, name, own), total(after, name, own), total(between, called, [])
        assert first is not None
        assert last is not None
        assert middle is not None
        assert min(first, last) - slack <= middle <= max(first, last) + slack, name


CLOCK = ("system_cpu_time_seconds_total", frozenset({("cpu_mode", "user")}))


def answers(node: Client) -> bool:
    """Whether it listens."""
    try:
        return node.get().status == 200
    except OSError:
        return False
