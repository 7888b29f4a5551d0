"""The machine's metrics: on changed copies of this machine's files, beside a file server that is dead, and over OTLP."""

import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.exporters import Service
from tests.otlp import Request, points
from tests.support import wait_until
from torchobs import catalog
from torchobs.catalog import HOST_COLLECTORS, Metric
from torchobs.exporter import daemon
from torchobs.exporter import host as host_module
from torchobs.exporter.config import ExporterConfig
from torchobs.exporter.exporter_metrics import HostFacts, Sample, ScrapeInput
from torchobs.exporter.host import HostMetrics
from torchobs.exporter.otlp import source
from torchobs.exporter.otlp.source import Metrics
from torchobs.ranks.snapshot import EMPTY

KERNEL_S = tuple(name for name in HOST_COLLECTORS if name != "filesystem")
FILES = ("stat", "meminfo", "vmstat", "diskstats", "net/dev")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look waits as long as it takes: a machine that is busy with tests is no dead file server."""
    monkeypatch.setattr(host_module, "DEADLINE_S", 20.0)


class Machine:
    """What is said of a machine."""

    def __init__(
        self, procfs: str = "/proc", sysfs: str = "/sys", collect: tuple[str, ...] = KERNEL_S, paths: tuple[str, ...] = ()
    ) -> None:
        config = ExporterConfig(collect_host=collect, procfs=procfs, sysfs=sysfs, host_paths=paths, flight_dir="/nowhere")
        self._host = HostMetrics(config)
        self.look()

    def look(self) -> None:
        self._host.collect()
        assert self._host.latest is not None
        self.facts = self._host.latest

    def values(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """The metric's values, by its attributes' in the catalog's order."""
        said = [sample for sample in (*self.facts.said, *self.facts.collection) if sample.metric is metric]
        names = [attribute.name for attribute in metric.attributes]
        return {tuple(sample.attributes.get(name, "") for name in names): sample.value for sample in said}

    def value(self, metric: Metric, *attributes: str) -> float:
        return self.values(metric)[attributes]

    @property
    def failed(self) -> dict[str, float]:
        """Failures by collector, where there were some."""
        return {name: number for (name,), number in self.values(catalog.EXPORTER_HOST_ERRORS).items() if number}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of this machine's files, with a disk and an interface of each kind; `proc` and `sys` below it."""
    for name in FILES:
        (tmp_path / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(f"/proc/{name}", tmp_path / "proc" / name)
    numbers = " ".join(map(str, range(1, 12)))
    disks = [f" 259 {number} {name} {numbers}\n" for number, name in enumerate(("nvme0n1", "nvme0n1p1", "dm-0", "cciss/c0d0"))]
    (tmp_path / "proc/diskstats").write_text("".join(disks))
    _network(tmp_path / "proc/net/dev", "lo", "eth7", "docker0", "bond0")
    for link, target in (
        ("block/nvme0n1", "../devices/pci0000:00/nvme/nvme0/nvme0n1"),
        ("block/dm-0", "../devices/virtual/block/dm-0"),
        ("block/cciss!c0d0", "../devices/pci0000:00/cciss0/c0d0/block/cciss!c0d0"),
        ("class/net/eth7", "../../devices/pci0000:00/net/eth7"),
        ("class/net/docker0", "../../devices/virtual/net/docker0"),
        ("class/net/bond0", "../../devices/virtual/net/bond0"),
    ):
        (tmp_path / "sys" / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / link).symlink_to(target)
    return tmp_path


def _network(path: Path, *names: str) -> None:
    """Interfaces as /proc/net/dev has them, with the numbers 1 to 16."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{name}: {' '.join(map(str, range(1, 17)))}\n" for name in names]
    path.write_text("".join(["Inter-|   Receive\n", " face |bytes\n", *rows]))


def of_tree(tree: Path, collect: tuple[str, ...] = KERNEL_S) -> Machine:
    """The machine of those files."""
    return Machine(str(tree / "proc"), str(tree / "sys"), collect)


def test_a_disk_s_and_an_interface_s_numbers_are_the_kernel_s_in_standard_units(tree: Path) -> None:
    """Bytes of sectors of 512, seconds; of whole disks and physical interfaces alone: a bond's traffic is its members'."""
    machine = of_tree(tree)
    assert {device for (device,) in machine.values(catalog.SYSTEM_DISK_IO_TIME)} == {"nvme0n1", "cciss/c0d0"}
    assert machine.value(catalog.SYSTEM_DISK_OPERATIONS, "nvme0n1", "read") == 1
    assert machine.value(catalog.SYSTEM_DISK_IO, "nvme0n1", "read") == 3 * 512
    assert machine.value(catalog.SYSTEM_DISK_OPERATION_TIME, "nvme0n1", "write") == 0.008
    assert machine.value(catalog.SYSTEM_DISK_IO_TIME, "cciss/c0d0") == 0.01
    assert machine.values(catalog.SYSTEM_NETWORK_IO) == {("eth7", "receive"): 1, ("eth7", "transmit"): 9}
    assert machine.values(catalog.SYSTEM_NETWORK_ERRORS) == {("eth7", "receive"): 3, ("eth7", "transmit"): 11}
    assert machine.values(catalog.SYSTEM_NETWORK_DROPPED) == {("eth7", "receive"): 4, ("eth7", "transmit"): 12}
    _network(tree / "proc/1/net/dev", "lo", "eth0")  # a pod has no physical one: of a mounted tree, those of the first process
    assert {interface for interface, _ in of_tree(tree).values(catalog.SYSTEM_NETWORK_IO)} == {"eth0"}
    assert psutil.PROCFS_PATH == "/proc", "psutil's own variable holds for the whole process"


def test_memory_s_states_add_up_to_its_limit(tree: Path) -> None:
    """Caches are the page cache and the reclaimable slabs, as procps has it; kB are KiB."""
    amounts = {"MemTotal": 1000, "MemFree": 100, "MemAvailable": 400, "Buffers": 50, "Cached": 300, "SReclaimable": 50,
               "Active": 1, "Inactive": 1, "Shmem": 7, "SwapTotal": 20, "SwapFree": 5, "Dirty": 3, "Writeback": 2}  # fmt: skip
    (tree / "proc/meminfo").write_text("".join(f"{name}: {number:8} kB\n" for name, number in amounts.items()))
    (tree / "proc/vmstat").write_text("pswpin 1\npswpout 2\noom_kill 2\n")
    machine = of_tree(tree)
    assert machine.failed == {}
    usage = machine.values(catalog.SYSTEM_MEMORY_USAGE)
    assert usage == {("used",): 500 << 10, ("free",): 100 << 10, ("buffers",): 50 << 10, ("cached",): 350 << 10}
    assert sum(usage.values()) == machine.value(catalog.SYSTEM_MEMORY_LIMIT)
    assert machine.value(catalog.SYSTEM_MEMORY_AVAILABLE) == 400 << 10
    assert machine.value(catalog.SYSTEM_MEMORY_SHARED) == 7 << 10
    assert machine.values(catalog.SYSTEM_PAGING_USAGE) == {("used",): 15 << 10, ("free",): 5 << 10}
    assert machine.values(catalog.HOST_MEMORY_UNWRITTEN) == {("dirty",): 3 << 10, ("writeback",): 2 << 10}
    assert machine.value(catalog.HOST_OOM_KILLS) == 2


def test_processors_are_told_by_mode_and_threads_by_state(tree: Path) -> None:
    """Interrupts of both kinds are one mode; ticks become seconds; the boot is when the counters were 0."""
    ticks = os.sysconf("SC_CLK_TCK")
    stat = "cpu  100 20 30 4000 50 6 7 8 90 10\ncpu0 1 2 3 4\nbtime 1795200000\nprocs_running 3\nprocs_blocked 1\n"
    (tree / "proc/stat").write_text(stat)
    machine = of_tree(tree)
    modes = {"user": 100, "nice": 20, "system": 30, "idle": 4000, "iowait": 50, "interrupt": 13, "steal": 8}
    assert machine.values(catalog.SYSTEM_CPU_TIME) == {(mode,): pytest.approx(n / ticks) for mode, n in modes.items()}
    assert machine.values(catalog.HOST_THREADS) == {("runnable",): 3, ("blocked",): 1}
    assert machine.facts.booted_ns == 1_795_200_000 * 10**9


def test_a_failure_is_counted_each_time_and_told_once(tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged again when it comes back."""
    meminfo, text = tree / "proc/meminfo", (tree / "proc/meminfo").read_text()
    meminfo.unlink()
    machine = of_tree(tree)
    machine.look()
    assert machine.failed == {"memory": 2}
    assert len(caplog.records) == 1
    meminfo.write_text(text)
    machine.look()
    assert machine.values(catalog.SYSTEM_MEMORY_LIMIT)
    meminfo.unlink()
    machine.look()
    assert machine.failed == {"memory": 3}
    assert len(caplog.records) == 2


def test_a_file_system_s_numbers_are_those_of_statvfs(tmp_path: Path) -> None:
    """By its mount point: its size in bytes, and whether it can be written."""
    machine = Machine(collect=("filesystem",), paths=(str(tmp_path),))
    (mount,) = machine.values(catalog.SYSTEM_FILESYSTEM_LIMIT)
    assert tmp_path.is_relative_to(mount[0])
    size = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert machine.value(catalog.SYSTEM_FILESYSTEM_LIMIT, *mount) == size
    usage = machine.values(catalog.SYSTEM_FILESYSTEM_USAGE)
    assert sum(usage.values()) == size
    assert {state for *_, state in usage} == {"used", "free", "reserved"}
    assert machine.value(catalog.HOST_FILESYSTEM_READONLY, *mount) == 0


@pytest.fixture
def running(flight_dir: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """An exporter that is asked for everything."""
    monkeypatch.setattr(daemon, "TICK_S", 0.1)
    procfs, sysfs = str(tree / "proc"), str(tree / "sys")
    config = ExporterConfig(flight_dir=str(flight_dir), mode="node", collect_host=HOST_COLLECTORS, procfs=procfs, sysfs=sysfs)
    with Service(config) as exporter:
        yield exporter


def test_the_exporter_s_page_has_it(running: Service) -> None:
    """In the first scrape already, without labels of a rank, beside the file system of the flight files."""
    text = running.page()
    labels = {"disk_io_direction": "read", "system_device": "nvme0n1"}
    assert running.value("system_disk_io_bytes_total", **labels) == 3 * 512
    assert (running.value("system_memory_linux_available_bytes") or 0) > 0
    assert re.search(
        r'system_filesystem_limit_bytes{system_filesystem_mountpoint="/[^"]*",system_filesystem_type="[\w.]+"} ', text
    )
    assert 'torchobs_exporter_host_errors_total{collector="filesystem"} 0.0\n' in text


class Server:
    """A file server: questions hang while it is down."""

    def __init__(self) -> None:
        self.asked = 0
        self.up = threading.Event()
        self.up.set()

    def collect(self, path: str) -> Iterator[Sample]:
        self.asked += 1
        assert path == "/lustre/checkpoints"
        self.up.wait()
        yield LUSTRE


LUSTRE = Sample(catalog.SYSTEM_FILESYSTEM_LIMIT, {catalog.MOUNTPOINT.name: "/lustre"}, 1.0)


def test_a_dead_file_server_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last numbers stand for a minute, then end; it is not asked again until it has answered. An exporter may end."""
    server, clock = Server(), [100.0]
    monkeypatch.setattr(host_module, "filesystem", server.collect)
    monkeypatch.setattr(host_module, "find_existing", lambda *_: None)
    config = ExporterConfig(collect_host=("filesystem", "cpu"), host_paths=("/lustre/checkpoints",))
    host = HostMetrics(config, lambda: clock[0])

    def shown() -> set[str]:
        host.collect()
        assert host.latest is not None
        return {sample.metric.name for sample in host.latest.said}

    size, processors = catalog.SYSTEM_FILESYSTEM_LIMIT.name, catalog.HOST_CPUS.name
    assert shown() >= {size, processors}
    server.up.clear()
    monkeypatch.setattr(host_module, "DEADLINE_S", 0.0)
    for _ in range(3):
        assert shown() >= {size, processors}
    wait_until(lambda: server.asked == 2)
    clock[0] += host_module.KEEP_S + 1.0
    wait_until(lambda: processors in shown())  # nobody has waited for a new look at the processors
    assert size not in shown()
    assert server.asked == 2
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("host-")), "Python waits for others"
    server.up.set()
    monkeypatch.setattr(host_module, "DEADLINE_S", 20.0)
    assert size in shown()


BOOTED_NS, BORN_NS, NOW_NS = (seconds * 10**9 for seconds in (1_000_000_000, 1_100_000_000, 1_100_000_060))


def test_the_machine_is_a_resource_of_its_own_that_began_with_its_boot() -> None:
    """Named as the host; no rank, no exporter. A counter's zero was when the machine was booted, not when we looked first."""
    said = Sample(catalog.SYSTEM_CPU_TIME, {catalog.CPU_MODE.name: "user"}, 12.5)
    facts = HostFacts((said,), (Sample(catalog.EXPORTER_HOST_DURATION, {}, 0.001),), BOOTED_NS)
    items = Metrics(BORN_NS).collect((), (), NOW_NS, ScrapeInput(EMPTY, host=facts))
    exported = list(points([Request("/v1/metrics", {}, batch.body, 0.0) for batch in source.batches("metrics", [*items])]))
    (cpu,) = [point for point in exported if point.metric.name == "system.cpu.time"]
    assert cpu.resource["host.name"] == cpu.resource["service.instance.id"] == socket.gethostname()
    assert cpu.resource["service.name"] == "torchobs-host"
    assert (cpu.attributes, cpu.metric.unit, cpu.metric.sum.is_monotonic) == ({"cpu.mode": "user"}, "s", True)
    assert (cpu.point.start_time_unix_nano, cpu.point.as_double) == (BOOTED_NS, 12.5)
    (took,) = [point for point in exported if point.metric.name == "torchobs.exporter.host.duration"]
    assert took.resource["service.name"] == "torchobs-exporter"
