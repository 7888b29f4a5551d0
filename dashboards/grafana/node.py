"""Node: the machines and containers of one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import BAD, GOOD, Query, Step
from dashboards.grafana.queries import EXPORTERS, MOST, RUNS, increase, rate, worst
from dashboards.grafana.template import Choice, page
from torchobs import catalog
from torchobs.rules.promql import select

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

    from torchobs.rules.values import Thresholds

NODE = "{{instance}}"
ABSENT = "Empty: where the exporter's collectors of the machine are off, or it is not Linux."


def dashboard(limits: Thresholds) -> Dashboard:
    """Return the dashboard."""
    sections = [
        Section("Processors", processors(limits)),
        Section("Memory", memory(limits)),
        Section("Disks and file systems", disks(limits)),
        Section("Network", network()),
    ]
    about = "The machines and containers of one run, as its exporters see them. Where node_exporter runs, it says more."
    return page("torchobs-node", "node", about, Choice.RUN | Choice.EXPORTER, sections)


def node(metric: catalog.Metric) -> str:
    """Return a machine's value by exporter."""
    return f"max by (instance) ({select(metric, *EXPORTERS)})"


def processors(limits: Thresholds) -> tuple[Panel, ...]:
    """Return CPU use and throttling."""
    cpu = rate(catalog.SYSTEM_CPU_TIME, *EXPORTERS)
    periods, held = (
        f"sum by (instance) ({rate(metric, *RUNS)})"
        for metric in (catalog.CGROUP_CPU_PERIODS, catalog.CGROUP_CPU_THROTTLED_PERIODS)
    )
    pressure = f"max by (instance, resource, waiting) ({rate(catalog.CGROUP_PRESSURE_TIME, *RUNS)})"
    return (
        panels.lines(
            "Processors by use",
            f"Share of all processors' time, by mode. Good: little iowait and steal. {ABSENT}",
            "percentunit",
            Query(f"sum by (cpu_mode) ({cpu}) / on () group_left () (sum({cpu}) > 0)", "{{cpu_mode}}"),
            stacked=True,
        ),
        panels.lines(
            "Busiest machines",
            f"Share of the processors' time that was not idle, of the {MOST} busiest. Good: below "
            f"{thresholds.percent(limits.cpu)}. {ABSENT}",
            "percentunit",
            Query(
                worst(
                    f"sum by (instance) ({rate(catalog.SYSTEM_CPU_TIME, *EXPORTERS, BUSY)}) / (sum by (instance) ({cpu}) > 0)"
                ),
                NODE,
            ),
            steps=thresholds.used_up(limits.cpu),
        ),
        panels.lines(
            "Load",
            f"Load average of a minute over the number of processors, of the {MOST} busiest. Good: below 1. {ABSENT}",
            "short",
            Query(worst(f"{node(catalog.SYSTEM_CPU_LOAD)} / ({node(catalog.HOST_CPUS)} > 0)"), NODE),
        ),
        panels.lines(
            "Threads",
            f"Threads that run or wait to run, and that wait for a disk, of all machines. Good: few blocked. {ABSENT}",
            "short",
            Query(f"sum by (state) ({select(catalog.HOST_THREADS, *EXPORTERS)})", "{{state}}"),
        ),
        panels.lines(
            "Throttled containers",
            f"Share of the quota periods in which the container was throttled, of the {MOST} worst. Good: 0. Empty: "
            "without a CPU quota.",
            "percentunit",
            Query(worst(f"{held} / ({periods} > 0)"), NODE),
            steps=thresholds.share(limits.cpu_throttled),
        ),
        panels.right_axis(
            panels.lines(
                "Throttled time",
                f"Threads that stand still because of the quota, on average, of the {MOST} worst; and the least quota in "
                "cores, on the right. Good: 0 threads. Empty: without a CPU quota.",
                "short",
                Query(worst(f"sum by (instance) ({rate(catalog.CGROUP_CPU_THROTTLED_TIME, *RUNS)})"), NODE),
                Query(f"min({select(catalog.CGROUP_CPU_LIMIT, *RUNS)})", "least quota"),
            ),
            "least quota",
        ),
        panels.lines(
            "Pressure",
            f"Share of the time in which some, or all, of a container's tasks waited for a resource: the {2 * MOST} "
            "worst. Good: below 10 % for some. Empty: where the kernel does not say (PSI).",
            "percentunit",
            Query(worst(pressure, 2 * MOST), "{{instance}} {{resource}} {{waiting}}"),
        ),
    )


BUSY = 'cpu_mode!~"idle|iowait"'


def memory(limits: Thresholds) -> tuple[Panel, ...]:
    """Return the machines' memory."""
    kinds = select(catalog.SYSTEM_MEMORY_USAGE, *EXPORTERS)
    return (
        panels.lines(
            "Memory by use",
            f"Of all machines. Good: used is level. {ABSENT}",
            "bytes",
            Query(f"sum by (system_memory_state) ({kinds})", "{{system_memory_state}}"),
            Query(f"sum({select(catalog.SYSTEM_MEMORY_SHARED, *EXPORTERS)})", "shared, part of cached"),
        ),
        panels.lines(
            "Fullest machines",
            f"Share of the memory that is not available, of the {MOST} fullest. Good: below "
            f"{thresholds.percent(limits.memory)}. {ABSENT}",
            "percentunit",
            Query(
                worst(f"1 - {node(catalog.SYSTEM_MEMORY_AVAILABLE)} / ({node(catalog.SYSTEM_MEMORY_LIMIT)} > 0)"),
                NODE,
            ),
            steps=thresholds.used_up(limits.memory),
        ),
        panels.lines(
            "Not yet written",
            "File pages to be written to disk, of all machines, as of a checkpoint. Good: it falls after each "
            f"checkpoint. {ABSENT}",
            "bytes",
            Query(f"sum by (state) ({select(catalog.HOST_MEMORY_UNWRITTEN, *EXPORTERS)})", "{{state}}"),
        ),
        panels.lines(
            "Swap",
            "Swap in use and free, of all machines. Good: none in use. Empty: without swap.",
            "bytes",
            Query(
                f"sum by (system_paging_state) ({select(catalog.SYSTEM_PAGING_USAGE, *EXPORTERS)})", "{{system_paging_state}}"
            ),
        ),
        panels.lines(
            "Killed for want of memory",
            f"Processes that the kernel ended, in any container of the machine. Good: 0. {ABSENT}",
            "short",
            Query(worst(f"max by (instance) ({increase(catalog.HOST_OOM_KILLS, *EXPORTERS)})"), NODE),
        ),
    )


def disks(limits: Thresholds) -> tuple[Panel, ...]:
    """Return disks and file systems."""
    on = ("instance", "system_filesystem_mountpoint")
    where, disk = "{{system_filesystem_mountpoint}} {{instance}}", "{{system_device}} {{instance}}"
    space = select(catalog.SYSTEM_FILESYSTEM_USAGE, *EXPORTERS, 'system_filesystem_state="used"')
    inodes = select(catalog.SYSTEM_FILESYSTEM_INODES, *EXPORTERS, 'state="used"')
    size = select(catalog.SYSTEM_FILESYSTEM_LIMIT, *EXPORTERS)

    def by(labels: tuple[str, ...], of: str, operator: str = "max") -> str:
        return f"{operator} by ({', '.join(labels)}) ({of})"

    of_disk = ("instance", "system_device")
    busy = by(of_disk, rate(catalog.SYSTEM_DISK_IO_TIME, *EXPORTERS))
    took, done = (
        by((*of_disk, "disk_io_direction"), rate(metric, *EXPORTERS))
        for metric in (catalog.SYSTEM_DISK_OPERATION_TIME, catalog.SYSTEM_DISK_OPERATIONS)
    )
    return (
        panels.lines(
            "Fullest file systems",
            f"Share of the space in use, of the {2 * MOST} fullest. Good: below "
            f"{thresholds.percent(limits.filesystem)}. {ABSENT}",
            "percentunit",
            Query(worst(f"{by(on, space)} / ({by(on, size)} > 0)", 2 * MOST), where),
            steps=thresholds.used_up(limits.filesystem),
        ),
        panels.lines(
            "Inodes",
            f"Share of the inodes in use, of the {MOST} fullest. Good: below "
            f"{thresholds.percent(limits.filesystem)}. Empty: where file systems do not "
            "count them.",
            "percentunit",
            Query(
                worst(f"{by(on, inodes)} / ({by(on, select(catalog.SYSTEM_FILESYSTEM_INODES, *EXPORTERS), 'sum')} > 0)"),
                where,
            ),
            steps=thresholds.used_up(limits.filesystem),
        ),
        panels.timeline(
            "Read-only file systems",
            f"File systems that are read-only, as after a disk error: the first {2 * MOST}. Good: those that you mount "
            f"so. {ABSENT}",
            "short",
            Query(worst(by(on, select(catalog.HOST_FILESYSTEM_READONLY, *EXPORTERS)), 2 * MOST), where),
            steps=(Step(None, GOOD), Step(1.0, BAD)),
            texts={"0": "writable", "1": "read-only"},
            width=8,
        ),
        panels.lines(
            "Disk traffic",
            "Bytes read and written, of all machines. Good: reads keep up with the training; writes at checkpoints. "
            "Empty: without physical disks.",
            "Bps",
            Query(f"sum by (disk_io_direction) ({rate(catalog.SYSTEM_DISK_IO, *EXPORTERS)})", "{{disk_io_direction}}"),
        ),
        panels.lines(
            "Busiest disks",
            f"Share of the time in which a disk was busy, of the {MOST} busiest. Good: below 80 %. Empty: without "
            "physical disks.",
            "percentunit",
            Query(worst(busy), disk),
        ),
        panels.lines(
            "Time of a read or write",
            f"Mean time that an operation took, of the {MOST} slowest. Good: below 10 ms on NVMe. Empty: without "
            "physical disks.",
            "s",
            Query(worst(f"{took} / ({done} > 0)"), f"{{{{disk_io_direction}}}} {disk}"),
        ),
    )


def network() -> tuple[Panel, ...]:
    """Return the network interfaces."""
    which = ("instance", "network_interface_name", "network_io_direction")
    legend = "{{network_io_direction}} {{network_interface_name}} {{instance}}"

    def by(of: str) -> str:
        return worst(f"sum by ({', '.join(which)}) ({of})", 2 * MOST)

    return (
        panels.lines(
            "Network traffic",
            f"Of the {2 * MOST} interfaces and directions with most. Good: below the link's speed. {ABSENT}",
            "Bps",
            Query(by(rate(catalog.SYSTEM_NETWORK_IO, *EXPORTERS)), legend),
        ),
        panels.lines(
            "Network errors",
            f"Errors of the {2 * MOST} worst interfaces. Good: 0. {ABSENT}",
            "short",
            Query(by(increase(catalog.SYSTEM_NETWORK_ERRORS, *EXPORTERS)), legend),
        ),
        panels.lines(
            "Dropped packets",
            f"Packets dropped without an error, of the {2 * MOST} worst interfaces. Good: 0, or few. {ABSENT}",
            "short",
            Query(by(increase(catalog.SYSTEM_NETWORK_DROPPED, *EXPORTERS)), legend),
        ),
    )
