"""The machine's own numbers: on trees in the formats of many kernels, on files that are none, and on this machine."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.openmetrics import parser as openmetrics_parser

from tests.exporters import Service
from tests.recorded_machines import unpack
from torchobs import catalog
from torchobs.catalog import HOST_COLLECTORS, Metric
from torchobs.cli.exporter import parser
from torchobs.exporter import daemon
from torchobs.exporter import host as host_package
from torchobs.exporter.config import ExporterConfig, parse
from torchobs.exporter.exporter_metrics import ScrapeInput
from torchobs.exporter.host import look
from torchobs.exporter.host.look import Host
from torchobs.exporter.prometheus.exposition import Exposition
from torchobs.exporter.prometheus.text_format import END, Style, page
from torchobs.ranks.scanner import EMPTY

GOLDEN = Path(__file__).parent / "golden"
OFF_TREE = tuple(name for name in HOST_COLLECTORS if name != "filesystem")
"""What a tree holds: a file system cannot be recorded."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look waits for its lanes as long as it takes: a machine that is busy with tests is no dead file server."""
    monkeypatch.setattr(look, "LANES_S", 20.0)
    monkeypatch.setattr(look, "WAIT_S", 20.0)


class Machine:
    """What is said of a machine."""

    def __init__(self, procfs: str, sysfs: str, collect: tuple[str, ...] = OFF_TREE, paths: tuple[str, ...] = ()) -> None:
        config = ExporterConfig(collect_host=collect, procfs=procfs, sysfs=sysfs, host_paths=paths, flight_dir="/nowhere")
        self._host = Host(config)
        self.look()
        self._host.close()

    def look(self) -> None:
        """Look once more."""
        self._host.take()
        assert self._host.latest is not None
        self.facts = self._host.latest

    def values(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """The metric's values, by its attributes' in the catalog's order."""
        said = [one for one in (*self.facts.said, *self.facts.own) if one.metric is metric]
        return {tuple(one.attributes.get(own.name, "") for own in metric.attributes): one.value for one in said}

    def value(self, metric: Metric, *attributes: str) -> float:
        """One of them."""
        return self.values(metric)[attributes]

    @property
    def failed(self) -> dict[str, float]:
        """Failures by collector, where there were some."""
        return {name: number for (name,), number in self.values(catalog.EXPORTER_HOST_ERRORS).items() if number}

    def page(self) -> str:
        """The page, in OpenMetrics; parsed, for what it does not admit is an error."""
        style, facts = Style(openmetrics=True), ScrapeInput(EMPTY, host=self.facts)
        text = page(style, END.encode(), Exposition(host=True).families(facts, style)).decode()
        assert list(openmetrics_parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
        return text


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], Machine]:
    """A machine from its text."""
    return lambda name: Machine(*unpack(name, tmp_path))


@pytest.mark.parametrize("name", ["laptop", "old_node"])
def test_a_machine_s_page_is_its_golden(name: str, machine: Callable[[str], Machine], pytestconfig: pytest.Config) -> None:
    """Every name, label and number, and nothing else: no partition, no loop device, no bridge, no core of its own."""
    found = machine(name)
    text = re.sub(r"(torchobs_exporter_host_duration_seconds) .*", r"\1 0.0", found.page())
    lines = [line for line in text.splitlines() if line.startswith(("system_", "torchobs_host_", "torchobs_exporter_host_"))]
    golden = GOLDEN / f"host_{name}.txt"
    if pytestconfig.getoption("--update-golden"):
        golden.write_text("\n".join(lines) + "\n")
    assert lines == golden.read_text().splitlines()
    assert found.failed == {}


def test_a_laptop_shows_what_its_owner_would_name(machine: Callable[[str], Machine]) -> None:
    """One disk, though LUKS and zram are block devices as well; two interfaces, though there are a bridge and a VPN."""
    laptop = machine("laptop")
    assert {device for device, _ in laptop.values(catalog.SYSTEM_DISK_IO)} == {"nvme0n1"}
    assert laptop.value(catalog.SYSTEM_DISK_IO, "nvme0n1", "write") == 192837465 * 512
    assert laptop.value(catalog.SYSTEM_DISK_IO_TIME, "nvme0n1") == 812.736
    assert {interface for interface, _ in laptop.values(catalog.SYSTEM_NETWORK_IO)} == {"enp0s31f6", "wlp0s20f3"}
    assert laptop.value(catalog.SYSTEM_NETWORK_DROPPED, "wlp0s20f3", "receive") == 1203
    assert sum(laptop.values(catalog.SYSTEM_MEMORY_USAGE).values()) == laptop.value(catalog.SYSTEM_MEMORY_LIMIT)
    assert laptop.value(catalog.HOST_OOM_KILLS) == 2
    assert laptop.value(catalog.HOST_PRESSURE_TIME, "io", "full") == 80.192837
    assert laptop.facts.booted_ns == 1_795_200_000 * 10**9
    assert laptop.values(catalog.HOST_INFINIBAND_STATE) == {}


def test_an_old_kernel_says_less_and_nothing_fails(machine: Callable[[str], Machine]) -> None:
    """No pressure, no available memory, no OOM kills, no counters of the adapter's driver: absent, not zero."""
    old = machine("old_node")
    for metric in (catalog.HOST_PRESSURE_TIME, catalog.SYSTEM_MEMORY_AVAILABLE, catalog.HOST_OOM_KILLS):
        assert old.values(metric) == {}
    assert {device for device, _ in old.values(catalog.SYSTEM_DISK_IO)} == {"sda", "sdb", "cciss/c0d0", "sr0"}
    assert {interface for interface, _ in old.values(catalog.SYSTEM_NETWORK_IO)} == {"em1", "em2", "ib0"}
    assert old.value(catalog.HOST_INFINIBAND_STATE, "mlx4_0", "1", "active") == 1
    assert old.value(catalog.HOST_INFINIBAND_STATE, "mlx4_0", "2", "down") == 1
    kinds = {kind for _, _, kind in old.values(catalog.HOST_INFINIBAND_ERRORS)}
    assert "symbol" in kinds
    assert "ack_timeout" not in kinds
    # 32 bits that stand at their end, as the adapter says
    assert old.value(catalog.HOST_INFINIBAND_WAIT, "mlx4_0", "1") == (1 << 32) - 1


def test_a_training_node_s_ports_and_disks(machine: Callable[[str], Machine]) -> None:
    """Twelve ports, one of which is down, one waits for its subnet manager, and one limps; a multipath disk by its path."""
    node = machine("training_node")
    states = {(device, state) for (device, _, state), value in node.values(catalog.HOST_INFINIBAND_STATE).items() if value}
    assert len(states) == 12
    assert {one for one in states if one[1] != "active"} == {("mlx5_7", "down"), ("mlx5_10", "init")}
    rates = {device: rate for (device, _), rate in node.values(catalog.HOST_INFINIBAND_RATE).items()}
    assert (rates["mlx5_0"], rates["mlx5_4"], rates["mlx5_1"]) == (50e9, 25e9, 25e9)
    assert node.value(catalog.HOST_INFINIBAND_ERRORS, "mlx5_4", "1", "link_downed") == 7
    assert node.value(catalog.HOST_INFINIBAND_ERRORS, "mlx5_4", "1", "retries_exceeded") == 2
    assert node.value(catalog.HOST_INFINIBAND_CONGESTION, "mlx5_2", "1", "cnp_sent") > 0
    devices = {device for device, _ in node.values(catalog.SYSTEM_DISK_IO)}
    assert devices == {*(f"nvme{number}n1" for number in range(9)), "nvme9c9n1"}
    assert not {"bond0", "docker0", "lo", "cali1a2b3c"} & {name for name, _ in node.values(catalog.SYSTEM_NETWORK_IO)}
    assert len(node.facts.said) < 600


def test_a_port_s_words_are_bytes(tmp_path: Path) -> None:
    """The port counts four bytes at a time; EFA has no port counters, and its driver's are of bytes; 64 bits are none."""
    tree = unpack("old_node", tmp_path)
    counters = tmp_path / "sys/class/infiniband/mlx4_0/ports/1/counters"
    (counters / "port_rcv_data").write_text(f"{1 << 62}\n")
    efa = tmp_path / "sys/class/infiniband/efa_0/ports/1"
    (efa / "hw_counters").mkdir(parents=True)
    (efa / "hw_counters" / "rx_bytes").write_text("18273645\n")
    (efa / "state").write_text("4: ACTIVE\n")
    found = Machine(*tree)
    assert found.values(catalog.HOST_INFINIBAND_IO) == {
        ("mlx4_0", "1", "transmit"): 8273645182 * 4,
        ("mlx4_0", "2", "receive"): 0,
        ("mlx4_0", "2", "transmit"): 0,
        ("efa_0", "1", "receive"): 18273645,
    }


def test_in_a_pod_the_pod_s_interface_is_shown(tmp_path: Path) -> None:
    """It has no physical one; of a mounted tree, the first process's interfaces are the machine's."""
    tree = unpack("laptop", tmp_path)
    net = tmp_path / "proc" / "net" / "dev"
    lines = net.read_text().splitlines(keepends=True)
    (tmp_path / "proc/1/net").mkdir(parents=True)
    (tmp_path / "proc/1/net/dev").write_text("".join(line.replace("docker0", "eth0") for line in lines if "0s" not in line))
    found = Machine(*tree)
    assert {interface for interface, _ in found.values(catalog.SYSTEM_NETWORK_IO)} == {"eth0", "tailscale0"}


def test_a_machine_of_a_thousand_devices_fills_no_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first 64, and the log says so."""
    (tmp_path / "proc/net").mkdir(parents=True)
    rows = [f"vf{number}: {' '.join('1' * 16)}\n" for number in range(1000)]
    (tmp_path / "proc/net/dev").write_text("".join(rows))
    found = Machine(str(tmp_path / "proc"), str(tmp_path / "sys"), ("network",))
    assert len(found.values(catalog.SYSTEM_NETWORK_IO)) == 128
    assert "1000 network interfaces, of which the first 64" in caplog.text


GARBAGE = (
    b"",
    b"\0" * 70_000,
    b"\xff\xfe\n" * 9,
    b"9" * 400,
    b"nan inf -1 1e9 : \n",
    b'x"\n} 1\n' * 50,
    b"cpu  1\nMemTotal: 1 kB\n",
)


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_no_file_can_break_the_page_or_another_collector(tmp_path: Path, garbage: bytes) -> None:
    """Each file in turn is garbage: the page parses, and what does not depend on the file is as it was."""
    tree = unpack("old_node", tmp_path)
    whole = Machine(*tree)
    counters = {tmp_path / "sys/class/infiniband/mlx4_0/ports/1/counters" / name for name in ("symbol_error", "port_xmit_data")}
    of = {"stat": "cpu", "loadavg": "cpu", "meminfo": "memory", "vmstat": "memory", "diskstats": "disk", "dev": "network"}
    for path in sorted({*(path for path in (tmp_path / "proc").rglob("*") if path.is_file()), *counters}):
        before = path.read_bytes()
        path.write_bytes(garbage)
        found = Machine(*tree)
        path.write_bytes(before)
        found.page()
        assert set(found.failed) <= {of.get(path.name, "infiniband")}
        if path.name in of:
            kept = found.values(catalog.HOST_INFINIBAND_ERRORS), found.values(catalog.HOST_INFINIBAND_IO)
            assert kept == (whole.values(catalog.HOST_INFINIBAND_ERRORS), whole.values(catalog.HOST_INFINIBAND_IO))
            assert found.values(catalog.SYSTEM_CPU_TIME) == whole.values(catalog.SYSTEM_CPU_TIME) or of[path.name] == "cpu"


def test_what_is_no_file_holds_nothing_up(tmp_path: Path) -> None:
    """A FIFO that nobody writes, a directory, a link to itself: failures, counted and told."""
    tree = unpack("laptop", tmp_path)
    for name, make in (("stat", os.mkfifo), ("meminfo", Path.mkdir), ("diskstats", lambda path: path.symlink_to(path))):
        path = tmp_path / "proc" / name
        path.unlink()
        make(path)
    found = Machine(*tree)
    assert found.failed == {"cpu": 1, "memory": 1, "disk": 1}
    assert found.values(catalog.SYSTEM_NETWORK_IO)


def test_a_failure_is_counted_each_time_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And told again when it comes back."""
    tree = unpack("laptop", tmp_path)
    meminfo, text = tmp_path / "proc/meminfo", (tmp_path / "proc/meminfo").read_text()
    meminfo.unlink()
    found = Machine(*tree)
    found.look()
    assert found.failed == {"memory": 2}
    assert len(caplog.records) == 1
    meminfo.write_text(text)
    found.look()
    assert found.values(catalog.SYSTEM_MEMORY_LIMIT)
    meminfo.unlink()
    found.look()
    assert found.failed == {"memory": 3}
    assert len(caplog.records) == 2


def test_hostile_names_forge_no_series(tmp_path: Path) -> None:
    """A device may be called whatever a file may."""
    tree = unpack("laptop", tmp_path)
    for name in (b'a"} 1\nforged 1', b"\xff\xfe", "größe".encode()):
        port = tmp_path / "sys/class/infiniband" / os.fsdecode(name) / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
    found = Machine(*tree)
    assert "\nforged" not in found.page()
    assert {device for device, _, _ in found.values(catalog.HOST_INFINIBAND_STATE)} == {'a"} 1\nforged 1', "??", "größe"}


def bracket(before: float, ours: float, after: float, slack: float = 0.0) -> bool:
    """Whether ours is of a moment between the two."""
    return min(before, after) - slack <= ours <= max(before, after) + slack


def test_this_machine_s_counters_are_those_of_psutil() -> None:
    """Processor times, disks and networks: what we say lies between what psutil says before and after."""

    def asked() -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
        disks = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
        return psutil.cpu_times(), disks, psutil.net_io_counters(pernic=True, nowrap=False)

    cpu, disks, nets = asked()
    ours = Machine("/proc", "/sys", ("cpu", "disk", "network"))
    cpu_after, disks_after, nets_after = asked()
    for mode in ("user", "nice", "system", "steal"):
        assert bracket(getattr(cpu, mode), ours.value(catalog.SYSTEM_CPU_TIME, mode), getattr(cpu_after, mode), 1e-6)
    for (name, direction), value in ours.values(catalog.SYSTEM_DISK_IO).items():
        assert bracket(getattr(disks[name], f"{direction}_bytes"), value, getattr(disks_after[name], f"{direction}_bytes"))
    columns = {"receive": ("bytes_recv", "errin", "dropin"), "transmit": ("bytes_sent", "errout", "dropout")}
    for metric, column in (
        (catalog.SYSTEM_NETWORK_IO, 0),
        (catalog.SYSTEM_NETWORK_ERRORS, 1),
        (catalog.SYSTEM_NETWORK_DROPPED, 2),
    ):
        for (name, direction), value in ours.values(metric).items():
            field = columns[direction][column]
            assert bracket(getattr(nets[name], field), value, getattr(nets_after[name], field))
    assert ours.value(catalog.HOST_CPUS) == psutil.cpu_count()
    assert ours.facts.booted_ns == psutil.boot_time() * 10**9
    assert ours.failed == {}


def test_this_machine_s_amounts_are_those_of_psutil(tmp_path: Path) -> None:
    """Memory, swap and a file system, within what other programs take and give back meanwhile."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(tmp_path))
    ours = Machine("/proc", "/sys", ("memory", "filesystem"), (str(tmp_path),))
    memory_after, disk_after = psutil.virtual_memory(), psutil.disk_usage(str(tmp_path))
    slack = memory.total * 0.02
    assert ours.value(catalog.SYSTEM_MEMORY_LIMIT) == memory.total
    assert bracket(memory.available, ours.value(catalog.SYSTEM_MEMORY_AVAILABLE), memory_after.available, slack)
    for state in ("free", "buffers", "cached"):
        value = ours.value(catalog.SYSTEM_MEMORY_USAGE, state)
        assert bracket(getattr(memory, state), value, getattr(memory_after, state), slack)
    assert sum(ours.values(catalog.SYSTEM_PAGING_USAGE).values()) == psutil.swap_memory().total
    (mount,) = ours.values(catalog.SYSTEM_FILESYSTEM_LIMIT)
    assert tmp_path.is_relative_to(mount[0])
    assert ours.value(catalog.SYSTEM_FILESYSTEM_LIMIT, *mount) == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    used, free = (ours.value(catalog.SYSTEM_FILESYSTEM_USAGE, *mount, state) for state in ("used", "free"))
    assert bracket(disk.used, used, disk_after.used, disk.total * 0.02)
    assert bracket(disk.free, free, disk_after.free, disk.total * 0.02)
    assert ours.value(catalog.HOST_FILESYSTEM_READONLY, *mount) == 0
    assert ours.failed == {}


def test_a_directory_that_is_not_there_is_a_failure_of_its_own(tmp_path: Path) -> None:
    """The others are told of; two on one file system once."""
    here = [tmp_path / "a", tmp_path / "b"]
    for path in here:
        path.mkdir()
    found = Machine("/proc", "/sys", ("filesystem",), (*map(str, here), str(tmp_path / "missing")))
    assert found.failed == {"filesystem": 1}
    assert len(found.values(catalog.SYSTEM_FILESYSTEM_LIMIT)) == 1


@pytest.fixture
def running(flight_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """An exporter on a laptop that is asked for everything."""
    monkeypatch.setattr(daemon, "TICK_S", 0.1)
    tree = unpack("laptop", tmp_path)
    config = ExporterConfig(
        flight_dir=str(flight_dir), mode="node", collect_host=HOST_COLLECTORS, procfs=tree.procfs, sysfs=tree.sysfs
    )
    with Service(config) as exporter:
        yield exporter


def test_the_exporter_s_page_has_it_and_promtool_no_complaint(running: Service, program: Callable[[str], str]) -> None:
    """In the first scrape already, without labels of a rank, beside the file system of the flight files."""
    text = running.page()
    labels = {"disk_io_direction": "read", "system_device": "nvme0n1"}
    assert running.value("system_disk_io_bytes_total", **labels) == 73120482 * 512
    assert running.value("system_memory_linux_available_bytes") == 19283456 * 1024
    assert re.search(
        r'system_filesystem_limit_bytes{system_filesystem_mountpoint="/[^"]*",system_filesystem_type="\w+"} ', text
    )
    assert 'torchobs_exporter_host_errors_total{collector="filesystem"} 0.0\n' in text
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    complaints = [line for line in checked.stderr.splitlines() if line.startswith(("system_", "torchobs_"))]
    assert complaints == []


def test_nothing_is_said_and_nothing_imported_unless_asked_for(flight_dir: Path) -> None:
    """Off is the default."""
    assert host_package.of(ExporterConfig()) is None
    with Service(ExporterConfig(flight_dir=str(flight_dir), mode="node")) as exporter:
        text = exporter.page()
    assert not re.search(r"^(# HELP )?(system_|torchobs_host|torchobs_exporter_host)", text, re.MULTILINE)


def test_the_bare_option_means_everything() -> None:
    """It needs no value, and takes none that is another option; the variable does the same."""
    for arguments in (["--collect.host", "--grace", "5m"], ["--collect.host=all", "--grace=5m"]):
        given = parser(lenient=True).parse_args(arguments)
        assert (given.collect_host, given.grace_s) == (["all"], ["5m"])
    assert parser(lenient=True).parse_args(["--collect.host", "cpu"]).collect_host == ["cpu"]
    assert parse({}, {"TORCHOBS_EXPORTER_COLLECT_HOST": "cpu,disk"}).collect_host == ("cpu", "disk")


def test_a_collector_that_does_not_exist_is_a_problem_that_lists_them() -> None:
    """A sidecar goes on without any, and its page says that its configuration is not honoured."""
    found = parse({"collect_host": ["cpu,discs"]}, {})
    assert found.collect_host == ()
    allowed = f"all, none, or a comma-separated list of {', '.join(HOST_COLLECTORS)}"
    assert found.problems == (f"--collect.host 'cpu,discs': allowed is {allowed}",)
