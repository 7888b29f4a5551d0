"""Memory and leaks: of the device, the process, the container; what grows, and when it is full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import Query
from dashboards.grafana.queries import MOST, RANKS, RUNS, increase, per_rank, worst
from dashboards.grafana.template import Choice, page
from torchobs import catalog
from torchobs.rules.promql import select

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

    from torchobs.rules.values import Thresholds

DEVICE = "rank {{rank}} {{device}}"
CONTAINER = "{{instance}}"


def dashboard(limits: Thresholds) -> Dashboard:
    """Return the dashboard."""
    sections = [
        Section("When is it full", numbers(limits)),
        Section("Growth", growth(limits)),
        Section("Device", device(limits)),
        Section("Process", process()),
        Section("Container and machine", container(limits)),
    ]
    about = "Memory of one run: of devices, processes, containers; what grows, and when it is full."
    return page("torchobs-memory", "memory and leaks", about, Choice.RUN | Choice.RANK, sections)


def used_share() -> str:
    """Return the share of each rank's device memory that its tensors have."""
    allocated, limit = (
        per_rank(select(metric, *RANKS), "device") for metric in (catalog.MEMORY_DEVICE_PEAK, catalog.MEMORY_DEVICE_LIMIT)
    )
    return f"{allocated} / ({limit} > 0)"


def fragmentation() -> str:
    """Return the share of the allocator's memory in inactive split blocks, by rank and device."""
    split, reserved = (
        per_rank(select(metric, *RANKS), "device")
        for metric in (catalog.MEMORY_DEVICE_INACTIVE_SPLIT, catalog.MEMORY_DEVICE_RESERVED)
    )
    return f"{split} / ({reserved} > 0)"


def of_container() -> str:
    """Return the share of the tightest limit of container and machine that is in use, by exporter."""
    return f"max by (instance, limit) ({select(catalog.MEMORY_HOST_UTILIZATION, *RUNS)})"


def numbers(limits: Thresholds) -> tuple[Panel, ...]:
    """Return the numbers."""
    shared = f"max by (instance) ({select(catalog.MEMORY_SHARED_USED, *RUNS)})"
    size = f"max by (instance) ({select(catalog.MEMORY_SHARED_SIZE, *RUNS)})"
    return (
        panels.number(
            "Time to the limit",
            "Until memory that grows steadily with the steps is full, on the rank that has least. Good: no figure. Red "
            "where the alert fires. Empty: while nothing grows so.",
            "s",
            Query(f"min({select(catalog.MEMORY_TIME_TO_LIMIT, *RANKS)})"),
            steps=thresholds.time_left(limits.time_to_limit_s),
        ),
        panels.number(
            "Device memory",
            "Peak of the tensors over what the process may use, on the fullest device. Good: below "
            f"{thresholds.percent(limits.gpu_memory)}. Empty: without a GPU.",
            "percentunit",
            Query(f"max({used_share()})"),
            steps=thresholds.used_up(limits.gpu_memory),
        ),
        panels.number(
            "Container or machine",
            "Share of the limit, swap included, that is in use and cannot be reclaimed; at 100 % the kernel kills. Good: "
            f"below {thresholds.percent(limits.memory)}.",
            "percentunit",
            Query(f"max({of_container()})"),
            steps=thresholds.used_up(limits.memory),
        ),
        panels.number(
            "Shared memory",
            "Share of /dev/shm in use, through which loader workers and NCCL pass data. Good: below "
            f"{thresholds.percent(limits.shared_memory)}.",
            "percentunit",
            Query(f"max({shared} / ({size} > 0))"),
            steps=thresholds.used_up(limits.shared_memory),
        ),
        panels.number(
            "Out of memory",
            "Out-of-memory errors of device allocators within the graphs' time. Good: 0.",
            "short",
            Query(f"sum(increase({select(catalog.MEMORY_OOMS, *RANKS)}[$__range])) or vector(0)", instant=True),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Killed in the container",
            "Processes of the run's containers ended by the kernel for want of memory, within the graphs' time. Good: 0. "
            "Empty: without cgroup 2 or 1.",
            "short",
            Query(f"sum(increase({select(catalog.CGROUP_MEMORY_OOM_KILLS, *RUNS)}[$__range]))", instant=True),
            steps=thresholds.NONE_IS_GOOD,
        ),
    )


def growth(limits: Thresholds) -> tuple[Panel, ...]:
    """Return trends."""
    return (
        panels.lines(
            "Growth per step",
            f"Trend of the memory in use per step, of the {MOST} ranks with most. Good: 0; bytes per step that stay are "
            "a leak. Empty: before four minutes of training.",
            "bytes",
            Query(worst(select(catalog.MEMORY_GROWTH_PER_STEP, *RANKS)), "rank {{rank}} {{space}}"),
        ),
        panels.lines(
            "Time until it is full",
            f"Of the {MOST} ranks with least time, where memory grows steadily. Good: no line. Empty: while nothing grows so.",
            "s",
            Query(f"bottomk({MOST}, {select(catalog.MEMORY_TIME_TO_LIMIT, *RANKS)})", "rank {{rank}} {{space}}"),
            steps=thresholds.time_left(limits.time_to_limit_s),
            log_base=10,
        ),
        panels.by_rank(
            "Host memory by rank",
            "Resident memory of each rank's process. Good: one colour that stays; a row that reddens is one rank's leak, "
            "all of them are the program's.",
            "bytes",
            select(catalog.MEMORY_HOST_RSS, *RANKS),
            width=8,
        ),
    )


def device(limits: Thresholds) -> tuple[Panel, ...]:
    """Return the allocator's memory."""
    kinds = {
        "allocated": catalog.MEMORY_DEVICE_ALLOCATED,
        "active": catalog.MEMORY_DEVICE_ACTIVE,
        "reserved": catalog.MEMORY_DEVICE_RESERVED,
        "peak allocated": catalog.MEMORY_DEVICE_PEAK,
        "limit": catalog.MEMORY_DEVICE_LIMIT,
    }
    return (
        panels.lines(
            "Fullest device",
            "Tensors, blocks in use, what the allocator holds, and the peak: the most of any rank; and the least limit. "
            "Good: the peak stays below the limit, and reserved close to allocated. Empty: without a GPU.",
            "bytes",
            *(
                Query(f"{'min' if name == 'limit' else 'max'}({select(metric, *RANKS)})", name)
                for name, metric in kinds.items()
            ),
        ),
        panels.by_rank(
            "Device memory by rank",
            "Peak of the tensors over what the process may use. Good: one colour below "
            f"{thresholds.percent(limits.gpu_memory)}; a single red row is an uneven partition. Empty: without a GPU.",
            "percentunit",
            used_share(),
            width=8,
            highest=1,
        ),
        panels.lines(
            "Fragmentation",
            f"Share of the allocator's memory in inactive split blocks, which it cannot give to other sizes: the {MOST} "
            f"worst. Good: below {thresholds.percent(limits.fragmented)}. Empty: without a GPU.",
            "percentunit",
            Query(worst(fragmentation()), DEVICE),
            steps=thresholds.share(limits.fragmented),
        ),
        panels.lines(
            "Allocations tried again",
            "Allocations that succeeded only after the allocator had flushed its cache, which stops the device. Good: 0. "
            "Empty: while there are none.",
            "short",
            Query(worst(per_rank(increase(catalog.MEMORY_ALLOC_RETRIES, *RANKS), "device")), DEVICE),
        ),
        panels.lines(
            "Out-of-memory errors",
            "Errors of the device allocators, by rank. Good: 0. Empty: while there are none.",
            "short",
            Query(worst(per_rank(increase(catalog.MEMORY_OOMS, *RANKS), "device")), DEVICE),
        ),
        panels.lines(
            "GPU memory of all processes",
            "What the driver says is in use of each run's fullest GPU, by any process, and its size. Good: little more "
            "than the allocator has reserved. Empty: without a GPU.",
            "bytes",
            Query(f"max({select(catalog.HW_GPU_MEMORY_USAGE, *RANKS)})", "in use"),
            Query(f"min({select(catalog.HW_GPU_MEMORY_LIMIT, *RANKS)})", "size"),
        ),
    )


def process() -> tuple[Panel, ...]:
    """Return the processes' memory."""
    return (
        panels.lines(
            "Resident memory",
            f"Resident set size of the {MOST} largest ranks. Good: level after the first minutes.",
            "bytes",
            Query(worst(per_rank(select(catalog.MEMORY_HOST_RSS, *RANKS))), "rank {{rank}}"),
        ),
        panels.lines(
            "Memory of loader workers",
            f"Resident set sizes of the children of the {MOST} ranks with most; shared pages count in each. Good: level; "
            "Python objects in a dataset make it grow. Empty: without workers.",
            "bytes",
            Query(worst(per_rank(select(catalog.MEMORY_HOST_CHILDREN_RSS, *RANKS))), "rank {{rank}}"),
        ),
        panels.lines(
            "Proportional set size",
            "Memory of the largest ranks with shared pages divided among those who share them. Good: level. Empty: below "
            "level advanced.",
            "bytes",
            Query(worst(per_rank(select(catalog.MEMORY_HOST_PSS, *RANKS))), "rank {{rank}}"),
        ),
    )


def container(limits: Thresholds) -> tuple[Panel, ...]:
    """Return memory of cgroup and machine."""
    working, limit, peak, swap = (
        f"max by (instance) ({select(metric, *RUNS)})"
        for metric in (
            catalog.CGROUP_MEMORY_WORKING_SET,
            catalog.CGROUP_MEMORY_LIMIT,
            catalog.CGROUP_MEMORY_PEAK,
            catalog.CGROUP_MEMORY_SWAP,
        )
    )
    return (
        panels.lines(
            "Use of the limit",
            f"Share of the limit of container or machine that cannot be reclaimed, of the {MOST} fullest. Good: below "
            f"{thresholds.percent(limits.memory)}.",
            "percentunit",
            Query(worst(of_container()), "{{instance}} {{limit}}"),
            steps=thresholds.used_up(limits.memory),
        ),
        panels.lines(
            "Container",
            "The fullest container: working set as the kubelet counts it, peak with file pages, swap, and the least "
            "limit. Good: the working set is level and below the limit. Empty: without a memory cgroup; the limit, where "
            "there is none.",
            "bytes",
            Query(f"max({working})", "working set"),
            Query(f"max({peak})", "peak"),
            Query(f"max({swap})", "swap"),
            Query(f"min({limit})", "limit"),
        ),
        panels.lines(
            "Killed for want of memory",
            "Processes that the kernel ended: in the run's containers, and anywhere on its machines. Good: 0. Empty: "
            "where the kernel does not count them.",
            "short",
            Query(f"sum by (instance) ({increase(catalog.CGROUP_MEMORY_OOM_KILLS, *RUNS)}) > 0 or vector(0)", "container"),
            Query(f"time() - max({select(catalog.CGROUP_MEMORY_LAST_OOM_KILL, *RUNS)})", "seconds since the last"),
        ),
        panels.lines(
            "Shared memory in use",
            f"Bytes in use in /dev/shm of the {MOST} fullest, and the least size. Good: far below the size.",
            "bytes",
            Query(worst(f"max by (instance) ({select(catalog.MEMORY_SHARED_USED, *RUNS)})"), CONTAINER),
            Query(f"min({select(catalog.MEMORY_SHARED_SIZE, *RUNS)})", "least size"),
        ),
        panels.lines(
            "Available memory of the machine",
            f"The {MOST} machines with least. Good: gigabytes.",
            "bytes",
            Query(f"bottomk({MOST}, min by (instance) ({select(catalog.MEMORY_HOST_AVAILABLE, *RUNS)}))", CONTAINER),
        ),
    )
