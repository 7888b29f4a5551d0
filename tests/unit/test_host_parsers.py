"""From the text of the kernel's files to numbers."""

import math
import re

import pytest

from torchobs import catalog
from torchobs.exporter.host import choice, cpu, disk, filesystem, infiniband, memory, network, pressure
from torchobs.exporter.host.tree import count


def test_processors_are_told_by_mode_and_counted() -> None:
    """Interrupts of both kinds are one mode; guests are among users' time already; ticks become seconds."""
    stat = "cpu  100 20 30 4000 50 6 7 8 90 10\ncpu0 1 2 3 4\ncpu1 1 2 3 4\nintr 5 6\nprocs_running 3\nprocs_blocked 1\n"
    found = cpu.parse(stat, 100)
    assert found.times_s == {
        "user": 1.0, "nice": 0.2, "system": 0.3, "idle": 40.0, "iowait": 0.5, "interrupt": 0.13, "steal": 0.08,
    }  # fmt: skip
    assert (found.cpus, found.runnable, found.blocked) == (2, 3, 1)


def test_processors_of_a_kernel_that_says_less() -> None:
    """What is not said of threads is not invented; columns that are missing are zero."""
    found = cpu.parse("cpu  100 20 30 4000\n", 100)
    assert found.times_s["steal"] == 0
    assert (found.cpus, found.runnable, found.blocked) == (0, None, None)


@pytest.mark.parametrize("text", ["", "cpu\n", "cpu  a b c\n", "cpu  -1 2 3 4\n", "cpux 1 2\n", "procs_running 3\n"])
def test_what_is_no_stat_is_refused(text: str) -> None:
    """A machine without processors would be worse than none."""
    with pytest.raises(ValueError, match=r"cpu|no count"):
        cpu.parse(text, 100)


def test_the_load_and_the_boot_are_found() -> None:
    """The first of three averages; Unix time in nanoseconds."""
    assert cpu.load("104.21 98.77 97.02 97/4821 918273\n") == 104.21
    assert cpu.booted_ns("ctxt 1\nbtime 1795000000\n") == 1_795_000_000_000_000_000
    assert cpu.booted_ns("ctxt 1\n") is None
    for text in ("nan 1 2", "inf", "", "1e400 2 3", "-1.0"):
        with pytest.raises(ValueError, match="no load average"):
            cpu.load(text)


def test_the_states_of_memory_add_up_to_its_total() -> None:
    """Caches are the page cache and what of the slabs can be given back, as procps has it."""
    text = "MemTotal:  1000 kB\nMemFree:  100 kB\nBuffers:  50 kB\nCached:  300 kB\nSReclaimable:  50 kB\nHugePages_Total:  7\n"
    amounts = memory.parse(text)
    assert memory.usage(amounts) == {"used": 512_000, "free": 102_400, "buffers": 51_200, "cached": 358_400}
    assert sum(memory.usage(amounts).values()) == amounts["MemTotal"]
    assert "HugePages_Total" not in amounts


def test_memory_that_contradicts_itself_is_not_negative() -> None:
    """The lines of /proc/meminfo are not of one moment."""
    assert memory.usage(memory.parse("MemTotal: 10 kB\nMemFree: 9 kB\nCached: 9 kB\n"))["used"] == 0


def test_kills_are_told_where_the_kernel_counts_them() -> None:
    """Since Linux 4.13; a longer name is another counter."""
    assert memory.oom_kills("pgfault 1\noom_kill 3\nnuma_hit 2\n") == 3
    assert memory.oom_kills("pgfault 1\noom_kills 3\n") is None


def test_pressure_is_in_seconds() -> None:
    """The averages are Prometheus' own business."""
    text = "some avg10=0.15 avg60=0.34 avg300=0.60 total=118437094\nfull avg10=0.00 avg60=0.21 avg300=0.32 total=70626654\n"
    assert pressure.parse(text) == {"some": 118.437094, "full": 70.626654}
    assert pressure.parse("some total=-1\nhalf total=1\nfull total=x\n") == {}


def test_a_disk_s_sectors_are_bytes_and_its_milliseconds_seconds() -> None:
    """A sector is 512 bytes here, whatever the disk says; lines of partitions of old, and nonsense, are left out."""
    text = (
        "   8       0 sda 10 1 16 250 20 2 32 750 1 900 1000\n"
        "   8       1 sda1 1 2 3 4\n"
        "   8      16 sdb 1 2 x 4 5 6 7 8 9 10 11\n"
        " 259       0 nvme0n1 1 0 2 3 4 0 8 5 0 6 8 9 9 9 9 9 9\n"
    )
    first, second = disk.parse(text)
    assert first == disk.Disk("sda", (10, 20), (8192, 16384), (0.25, 0.75), 0.9)
    assert (second.name, second.io) == ("nvme0n1", (1024, 4096))


def test_an_interface_s_columns() -> None:
    """Old kernels write no blank behind the colon, and an alias has one in its name."""
    text = (
        "Inter-|   Receive |  Transmit\n face |bytes packets\n"
        "  eth0:1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
        "eth0:1: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
        "  eth1: 1 2 3\n  eth2: a 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
    )
    first, second = network.parse(text)
    assert first == network.Interface("eth0", (1, 9), (3, 11), (4, 12))
    assert second.name == "eth0:1"


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400 Gb/sec (4X NDR)\n", 50e9), ("2.5 Gb/sec (1X SDR)\n", 312.5e6), ("56 Gb/sec (4X FDR)", 7e9), ("", None),
     ("N/A", None), ("-1 Gb/sec", None), ("nan Gb/sec", None)],
)  # fmt: skip
def test_a_port_s_rate_is_in_bytes_per_second(text: str, rate: float | None) -> None:
    """As the link runs at present."""
    assert infiniband.rate(text) == rate


@pytest.mark.parametrize(
    ("text", "state"),
    [("4: ACTIVE\n", "active"), ("1: DOWN", "down"), ("2: INIT", "init"), ("5: ACTIVE_DEFER", "active_defer"),
     ("0: NOP", None), ("9: X", None), ("", None)],
)  # fmt: skip
def test_a_port_s_state_is_one_of_five(text: str, state: str | None) -> None:
    """By its number, as in ibstat."""
    assert infiniband.state(text) == state


MOUNTS = """\
27 1 259:2 / / rw,relatime - ext4 /dev/nvme0n1p2 rw
31 27 0:27 / /dev/shm rw - tmpfs tmpfs rw
40 27 0:40 / /lustre rw shared:5 - lustre 10.0.0.1@o2ib:/fs rw
41 40 0:41 / /lustre/my\\040data rw shared:5 master:1 - nfs4 filer:/export rw
42 41 0:42 / /lustre/my\\040data rw - fuse.sshfs user@host: rw
garbage
"""


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [("/lustre/checkpoints", "/lustre", "lustre"), ("/lustre/my data/x", "/lustre/my data", "fuse.sshfs"),
     ("/lustrefs", "/", "ext4"), ("/dev/shm", "/dev/shm", "tmpfs"), ("/", "/", "ext4")],
)  # fmt: skip
def test_a_path_is_on_the_innermost_mount(path: str, point: str, kind: str) -> None:
    """The last of two at one place is over the other; blanks are written in octal."""
    assert filesystem.mount_of(MOUNTS, path) == filesystem.Mount(point, kind)


def test_no_mount_is_found_in_nothing() -> None:
    """Nor is one made up."""
    assert filesystem.mount_of("garbage\n", "/x") is None


@pytest.mark.parametrize("word", ["", "-1", "1_000", "1.5", "٣", "0x1", "9" * 20, str(1 << 63), "nan", " 1", "1\0"])
def test_what_is_no_count_is_refused(word: str) -> None:
    """Python's int takes more than any kernel writes; OTLP holds 63 bits."""
    with pytest.raises(ValueError, match="no count"):
        count(word)


def test_counts_are_exact() -> None:
    """Up to the last bit."""
    assert count("0") == 0
    assert count(str((1 << 63) - 1)) == (1 << 63) - 1 != math.inf


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("all", catalog.HOST_COLLECTORS), ("True", catalog.HOST_COLLECTORS), ("1", catalog.HOST_COLLECTORS), ("none", ()),
     ("off", ()), ("disk", ("disk",)), ("infiniband, cpu ,", ("cpu", "infiniband")), ("CPU", ("cpu",))],
)  # fmt: skip
def test_collectors_are_chosen_by_name(text: str, chosen: tuple[str, ...]) -> None:
    """All, none, or a list in any order."""
    assert choice.KIND.parse(text) == chosen


@pytest.mark.parametrize("text", ["cpus", "cpu,meminfo", "all,cpu", "cpu memory"])
def test_a_collector_that_does_not_exist_is_refused(text: str) -> None:
    """And the message says which there are."""
    with pytest.raises(ValueError, match=re.escape(text)):
        choice.KIND.parse(text)
    assert all(name in choice.KIND.allowed for name in catalog.HOST_COLLECTORS)
