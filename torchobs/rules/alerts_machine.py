"""The alerts about memory, disks, GPUs and links, and about torchobs itself."""

from __future__ import annotations

from torchobs import catalog
from torchobs.rules.promql import BY_RUN, ONE_RANK, ONE_RUN, lasting, select
from torchobs.rules.recordings import name, recent
from torchobs.rules.rule_file import AT, DURATION, EXPORTER, SEEN, SHARE, THIS_RUN, WINDOW, Alert, Culprits, Group, amount

_THERMAL = 'reason="thermal"'
_MACHINE = "cluster, namespace, pod, instance"
"""Labels of an exporter; a machine has one"""
_FILESYSTEM = f"{_MACHINE}, system_filesystem_mountpoint, system_filesystem_type"
INFINIBAND, UNAME = "node_infiniband_state_id", "node_uname_info"
"""Metrics of node_exporter's collectors `infiniband` and `uname`, on by default; the exporter has no such collector."""
ACTIVE = 4
"""State of a port that carries data (`/sys/class/infiniband/*/ports/*/state`); below it there are down, init and armed."""
DOWN = "2m"
"""A port that trains its link anew is back within seconds."""
PAST = "1d"
_PORT = "cluster, instance, device, port"


def _tensor_share(*matchers: str) -> str:
    """Return the share of a rank's device memory that tensors held over the whole window; none of a younger one."""
    allocated, limit = select(catalog.MEMORY_DEVICE_ALLOCATED, *matchers), select(catalog.MEMORY_DEVICE_LIMIT, *matchers)
    return f"min_over_time({allocated}[{WINDOW}]) / on ({ONE_RANK}, device) ({limit} > 0 and {limit} offset {WINDOW})"


def _split(*matchers: str) -> str:
    """Return the share of the allocator's device memory that lies in split blocks."""
    split, reserved = select(catalog.MEMORY_DEVICE_INACTIVE_SPLIT, *matchers), select(catalog.MEMORY_DEVICE_RESERVED, *matchers)
    return f"{split} / on ({ONE_RANK}, device) ({reserved} > 0)"


def _links_lost(*matchers: str) -> str:
    """Return how many NVLinks fewer a GPU has than within the last day."""
    there = select(catalog.GPU_NVLINK_LINKS, *matchers)
    return f"max_over_time({there}[{PAST}]) - {there} > 0"


def _filesystem() -> Alert:
    usage = select(catalog.SYSTEM_FILESYSTEM_USAGE, 'system_filesystem_state="used"')
    limit = select(catalog.SYSTEM_FILESYSTEM_LIMIT)
    used, every = select(catalog.SYSTEM_FILESYSTEM_INODES, 'state="used"'), select(catalog.SYSTEM_FILESYSTEM_INODES)
    return Alert(
        alert="TorchobsFilesystemFull",
        expr=f"""
            {usage} / on ({_FILESYSTEM}) ({limit} > 0) > @filesystem@
          or
            {used} / on ({_FILESYSTEM}) (sum by ({_FILESYSTEM}) ({every}) > 0) > @filesystem@
        """,
        worst=f"max by ({_FILESYSTEM})",
        summary=f"The file system {{{{ $labels.system_filesystem_mountpoint }}}} of {EXPORTER} is nearly full.",
        description=(
            "{{ $value | humanizePercentage }} of its space or its inodes is in use, and the next checkpoint may not fit. "
            "Delete old ones, or enlarge it."
        ),
        of_run=False,
    )


def _gpu_fault() -> Alert:
    states = (select(catalog.HW_STATUS, *more, 'hw_state="failed"') for more in ((), (THIS_RUN,)))
    failed, here = (f"last_over_time({state}[{SEEN}])" for state in states)
    errors, errors_here = name(catalog.HW_ERRORS), select(name(catalog.HW_ERRORS), THIS_RUN)
    return Alert(
        alert="TorchobsGpuFault",
        expr=f"""
            {errors} > 0
          or
            {failed} == 1
        """,
        severity="page",
        summary="has a faulty GPU.",
        description=(
            f"It is lost or asks to be replaced, or had {amount('hardware error', 'hardware errors')} (XID, memory) in the "
            "last 10 minutes. Drain the machine, and restart the run elsewhere."
        ),
        culprits=Culprits(
            f"max by ({ONE_RANK}, hw_id, error_type) ({errors_here} or {here} == 1)",
            "GPU {{ $l.hw_id }}{{ with $l.error_type }}, {{ . }}{{ else }}, lost{{ end }}",
            "Observed by",
        ),
    )


def _infiniband() -> Alert:
    """Return the alert on node_exporter's ports, joined with the ranks by the node's name.

    A target that two jobs scrape, or that has just changed its name, must not make the rule fail.
    """
    nodes = f"topk by (cluster, instance) (1, max by (cluster, instance, nodename) ({UNAME}))"
    down = f"max by ({_PORT}) (max_over_time({INFINIBAND}[{DOWN}]))"
    before = f"max by ({_PORT}) (max_over_time({INFINIBAND}[{PAST}]))"
    lost = f"(({down} < {ACTIVE} and {before} >= {ACTIVE}) * on (cluster, instance) group_left (nodename) {nodes})"
    return Alert(
        alert="TorchobsInfinibandDown",
        expr=f"""
            {_located()}
            * on (cluster, nodename) group_left ()
            count by (cluster, nodename) ({lost})
        """,
        summary="has lost InfiniBand ports.",
        description=(
            f"One of its nodes has {amount('port', 'ports')} down that carried data within the last day: collectives are "
            "slower or fail. Check the cable and the switch."
        ),
        culprits=Culprits(
            f"{lost} and on (cluster, nodename) {_located(THIS_RUN)}",
            "port {{ $l.port }} of {{ $l.device }} on {{ $l.nodename }}",
            "Down",
            named=False,
        ),
    )


def _located(*matchers: str) -> str:
    """Return the ranks with their node's name: Kubernetes' where it is known, for a pod has a host name of its own."""
    by_host = f'label_replace({select(catalog.RANK_INFO, *matchers)}, "nodename", "$1", "host", "(.+)")'
    return f'label_replace({by_host}, "nodename", "$1", "k8s_node_name", "(.+)")'


def _growing(*counters: str) -> str:
    """Return the increase of several selections of series, where there is any."""
    return f"sum by ({_MACHINE}) ({' or '.join(f'increase({counter}[{WINDOW}])' for counter in counters)}) > 0"


def _of_exporter(alert: str, expr: str, summary: str, description: str) -> Alert:
    return Alert(alert, expr, summary, description, worst=f"max by ({_MACHINE})", of_run=False)


MEMORY = Group(
    "torchobs.memory",
    (
        recent(catalog.MEMORY_ALLOC_RETRIES, born_later=True),
        Alert(
            "TorchobsMemoryGrowth",
            f"{select(catalog.MEMORY_TIME_TO_LIMIT)} < @time_to_limit_s@",
            "will run out of memory.",
            "The memory of one of its ranks grows steadily with the steps, and reaches its limit in "
            "{{ $value | humanizeDuration }}. `torchobs inspect` names what grows, and by which lines.",
            worst=f"min {BY_RUN}",
            culprits=Culprits(
                f"bottomk(3, {select(catalog.MEMORY_TIME_TO_LIMIT, THIS_RUN)})",
                f"{DURATION} left ({{{{ $l.space }}}})",
                "First",
            ),
        ),
        Alert(
            "TorchobsOutOfMemoryNear",
            lasting(select(catalog.MEMORY_HOST_UTILIZATION), "> @memory@", WINDOW, f"{_MACHINE}, limit"),
            "is close to its memory limit.",
            "For 10 minutes {{ $value | humanizePercentage }} of a container's or a machine's memory has been in use and "
            "cannot be reclaimed; at 100 % the kernel kills processes. Raise the limit, or use fewer data loader workers.",
            culprits=Culprits(
                select(catalog.MEMORY_HOST_UTILIZATION, THIS_RUN), f"{SHARE} of the {{{{ $l.limit }}}} at {AT}", named=False
            ),
        ),
        Alert(
            "TorchobsCgroupOomKill",
            f"sum {BY_RUN} (increase({select(catalog.CGROUP_MEMORY_OOM_KILLS)}[{WINDOW}])) > 0",
            "had processes killed because memory ran out.",
            f"The kernel killed {amount('process', 'processes')} in its containers in the last 10 minutes: ranks, or workers "
            "of their data loaders. Raise the memory limit, or use fewer workers.",
            culprits=Culprits(
                f"increase({select(catalog.CGROUP_MEMORY_OOM_KILLS, THIS_RUN)}[{WINDOW}]) > 0",
                f'{{{{ printf "%.0f" $v }}}} at {AT}',
                "Most",
                named=False,
            ),
        ),
        Alert(
            "TorchobsGpuMemoryNearLimit",
            f"{_tensor_share()} > @gpu_memory@",
            "is close to its GPU memory limit.",
            "For 10 minutes tensors have held {{ $value | humanizePercentage }} of the memory that a rank may use on its "
            "device. A longer sequence or a larger batch may fail.",
            culprits=Culprits(f"max by ({ONE_RANK}) ({_tensor_share(THIS_RUN)})", SHARE),
        ),
        Alert(
            "TorchobsMemoryFragmented",
            f"""
            {_split()} > @fragmented@
            and on ({ONE_RANK}, device)
            {name(catalog.MEMORY_ALLOC_RETRIES)} > 0
            """,
            "runs out of GPU memory because of fragmentation.",
            "Allocations were retried in the last 10 minutes, while {{ $value | humanizePercentage }} of the memory that the "
            "allocator holds lies in pieces too small to use. Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
            culprits=Culprits(f"max by ({ONE_RANK}) ({_split(THIS_RUN)})", SHARE),
        ),
        Alert(
            "TorchobsSharedMemoryFull",
            f"{select(catalog.MEMORY_SHARED_USED)} / ({select(catalog.MEMORY_SHARED_SIZE)} > 0) > @shared_memory@",
            "is running out of shared memory.",
            "{{ $value | humanizePercentage }} of /dev/shm is in use. Workers of data loaders and NCCL pass data through it; "
            "when it is full they die of SIGBUS. Give the container a larger one.",
            culprits=Culprits(
                f"{select(catalog.MEMORY_SHARED_USED, THIS_RUN)} / ({select(catalog.MEMORY_SHARED_SIZE, THIS_RUN)} > 0)",
                f"{SHARE} at {AT}",
                named=False,
            ),
        ),
        _filesystem(),
        Alert(
            "TorchobsCpuSaturated",
            f"""1 - sum by ({_MACHINE}) (rate({select(catalog.SYSTEM_CPU_TIME, 'cpu_mode="idle"')}[{WINDOW}])) """
            f"/ on ({_MACHINE}) ({select(catalog.HOST_CPUS)} > 0 and {select(catalog.HOST_CPUS)} offset {WINDOW}) > @cpu@",
            f"The processors of {EXPORTER} are busy.",
            "{{ $value | humanizePercentage }} of their time in the last 10 minutes was used: data loaders and kernel launches "
            "wait for each other. Use fewer workers and threads, or fewer jobs on this machine.",
            worst=f"max by ({_MACHINE})",
            of_run=False,
        ),
    ),
)
"""Memory and disks"""

RESOURCES = Group(
    "torchobs.resources",
    (
        recent(catalog.HW_ERRORS, 'error_type=~"xid_hardware|ecc_uncorrected"'),
        recent(catalog.DATA_WORKERS_DIED, born_later=True),
        Alert(
            "TorchobsLossScaleStuck",
            f"{select(catalog.AMP_SKIP_STREAK)} >= @skipped@",
            "makes no progress, because its loss scaler skips every step.",
            '{{ printf "%.0f" $value }} steps in a row were skipped; a few at the start are usual. At no scale are the '
            "gradients finite: look for where the first NaN or infinity begins.",
            culprits=Culprits(select(catalog.AMP_SKIP_STREAK, THIS_RUN), '{{ printf "%.0f" $v }} steps in a row', "Longest"),
        ),
        _gpu_fault(),
        Alert(
            "TorchobsGpuThrottled",
            f"rate({select(catalog.GPU_THROTTLE_TIME, _THERMAL)}[{WINDOW}]) > @gpu_throttled@",
            "has an overheated GPU.",
            "Heat held its clocks down for {{ $value | humanizePercentage }} of the last 10 minutes; none is usual. Check the "
            "machine's cooling.",
            culprits=Culprits(
                f"rate({select(catalog.GPU_THROTTLE_TIME, THIS_RUN, _THERMAL)}[{WINDOW}])",
                f"GPU {{{{ $l.hw_id }}}}, {SHARE}",
                "Observed by",
            ),
        ),
        Alert(
            "TorchobsLoaderWorkerDied",
            f"sum {BY_RUN} ({name(catalog.DATA_WORKERS_DIED)}) > 0",
            "lost data loader workers.",
            f"{amount('worker was', 'workers were')} ended by a signal or an error in the last 10 minutes. The loader "
            "raises, or waits for their batches. SIGKILL most often means that memory ran out.",
            culprits=Culprits(select(name(catalog.DATA_WORKERS_DIED), THIS_RUN), amount("worker", "workers", "$v"), "Most on"),
        ),
    ),
)
"""Devices and workers"""

LINKS = Group(
    "torchobs.links",
    (
        Alert(
            "TorchobsNvlinkDown",
            _links_lost(),
            "has lost NVLinks.",
            f"A GPU has {amount('link', 'links')} fewer than within the last day, and collectives take a slower way. Reset the "
            "GPU, or drain the machine.",
            culprits=Culprits(_links_lost(THIS_RUN), f"GPU {{{{ $l.hw_id }}}}, {amount('link', 'links', '$v')}", "Observed by"),
        ),
        _infiniband(),
    ),
    interval="1m",
)

ITSELF = Group(
    "torchobs.itself",
    (
        recent(catalog.FLIGHT_DROPPED, born_later=True),
        Alert(
            "TorchobsProbeDisabled",
            f"count {BY_RUN} ({select(catalog.PROBE_DISABLED)} == 1)",
            "has probes that are switched off.",
            f"{amount('probe was', 'probes were')} switched off after an exception, and what they measure is missing on those "
            "ranks. Training is not affected; its log has the exception, which is a bug of torchobs.",
            culprits=Culprits(
                f"count by ({ONE_RUN}, probe) ({select(catalog.PROBE_DISABLED, THIS_RUN)} == 1)",
                f"{{{{ $l.probe }}}} on {amount('rank', 'ranks', '$v')}",
                "Most",
                named=False,
            ),
        ),
        Alert(
            "TorchobsFlightDropped",
            f"sum {BY_RUN} ({name(catalog.FLIGHT_DROPPED)}) > 0",
            "records more than its flight files hold.",
            '{{ printf "%.0f" $value }} series, events or steps of the last 10 minutes did not fit and are missing.',
            culprits=Culprits(
                select(name(catalog.FLIGHT_DROPPED), THIS_RUN), '{{ printf "%.0f" $v }} of kind {{ $l.what }}', "Most on"
            ),
        ),
        _of_exporter(
            "TorchobsExporterConfig",
            f"count by ({_MACHINE}) (max_over_time({select(catalog.EXPORTER_CONFIG_OK)}[{WINDOW}]) == 0)",
            f"The exporter {EXPORTER} runs with an invalid configuration.",
            "A part of it cannot be applied. The exporter serves what it can; its log says what is wrong.",
        ),
        _of_exporter(
            "TorchobsExporterReadErrors",
            _growing(select(catalog.EXPORTER_READ_ERRORS)),
            f"The exporter {EXPORTER} cannot read flight files.",
            f"It failed {amount('time', 'times')} in the last 10 minutes, and ranks are missing from its page. Its log says "
            "which.",
        ),
        _of_exporter(
            "TorchobsSeriesDropped",
            _growing(select(catalog.EXPORTER_SERIES_DROPPED, 'reason!="drop_list"')),
            f"The exporter {EXPORTER} does not serve all series.",
            '{{ printf "%.0f" $value }} were left out in the last 10 minutes, for a limit on their number or a conflict of '
            "names.",
        ),
        _of_exporter(
            "TorchobsPushDropped",
            _growing(  # a receiver that takes no logs refuses them all its life, and is no fault
                select(catalog.OTLP_DROPPED, 'reason!="shutdown"', 'signal!="logs"'),
                select(catalog.OTLP_DROPPED, 'reason!~"shutdown|refused"', 'signal="logs"'),
            ),
            f"The exporter {EXPORTER} loses data that it pushes.",
            '{{ printf "%.0f" $value }} data points, spans or log records of the last 10 minutes were dropped, because the '
            "receiver refused them or did not answer. Its log says which.",
        ),
    ),
)
"""torchobs itself"""
