"""Metrics of the machine: memory, the container, GPUs, the host."""

from __future__ import annotations

from torchobs.catalog.model import *

# --- memory -------------------------------------------------------------------------------------------------------------------
MEMORY_DEVICE_ALLOCATED = gauge("torchobs.memory.device.allocated", "By", DEVICE).described("Device memory in use by tensors.")
MEMORY_DEVICE_RESERVED = gauge("torchobs.memory.device.reserved", "By", DEVICE).described(
    "Device memory held by the caching allocator."
)
MEMORY_DEVICE_ACTIVE = gauge("torchobs.memory.device.active", "By", DEVICE).described(
    "Device memory in blocks in use, or that a stream may still use."
)
MEMORY_DEVICE_INACTIVE_SPLIT = gauge("torchobs.memory.device.inactive_split", "By", DEVICE).described(
    "Device memory in inactive split blocks: fragmentation."
)
MEMORY_DEVICE_PEAK = gauge("torchobs.memory.device.peak", "By", DEVICE).described(
    "Highest allocated device memory seen, whoever resets the allocator's own peaks."
)
MEMORY_DEVICE_LIMIT = gauge("torchobs.memory.device.limit", "By", DEVICE).described(
    "Device memory that the process may use: all, or its configured fraction."
)
MEMORY_ALLOC_RETRIES = counter("torchobs.memory.alloc_retries", "{retry}", DEVICE, quiet=0.0).described(
    "Device allocations retried after flushing the allocator's cache."
)
MEMORY_OOMS = counter("torchobs.memory.ooms", "{error}", DEVICE, quiet=0.0).described(
    "Out-of-memory errors of the device allocator."
)
MEMORY_HOST_RSS = gauge("torchobs.memory.host.rss", "By").described("Resident set size of the rank's process.")
MEMORY_HOST_PSS = gauge("torchobs.memory.host.pss", "By").described(
    "Proportional set size of the rank's process. From level advanced on."
)
MEMORY_HOST_CHILDREN_RSS = gauge("torchobs.memory.host.children_rss", "By", quiet=0.0).described(
    "Resident set sizes of the process's children, shared pages in each."
)
MEMORY_HOST_AVAILABLE = gauge("torchobs.memory.host.available", "By", shared=True).described("The machine's available memory.")
MEMORY_HOST_UTILIZATION = gauge("torchobs.memory.host.utilization", "1", LIMIT, shared=True).described(
    "Share of the limit, swap included, in use and not reclaimable; at 1 the kernel kills."
)
MEMORY_SHARED_SIZE = gauge("torchobs.memory.shared.size", "By", shared=True).described("Size of /dev/shm.")
MEMORY_SHARED_USED = gauge("torchobs.memory.shared.used", "By", shared=True).described("Bytes in use in /dev/shm.")
MEMORY_GROWTH_PER_STEP = gauge("torchobs.memory.growth_per_step", "By", SPACE).described(
    "Trend of the memory in use per step, after four minutes."
)
MEMORY_TIME_TO_LIMIT = gauge("torchobs.memory.time_to_limit", "s", SPACE).described(
    "Time until steadily growing memory reaches its limit; absent without such growth."
)

# --- the container ------------------------------------------------------------------------------------------------------------
CGROUP_MEMORY_WORKING_SET = gauge("torchobs.cgroup.memory.working_set", "By", shared=True).described(
    "Memory of the rank's (tightest) cgroup without inactive file pages, as the kubelet counts."
)
CGROUP_MEMORY_LIMIT = gauge("torchobs.cgroup.memory.limit", "By", shared=True).described("Memory limit of that cgroup.")
CGROUP_MEMORY_PEAK = gauge("torchobs.cgroup.memory.peak", "By", shared=True).described(
    "Highest memory usage of that cgroup, file pages included."
)
CGROUP_MEMORY_SWAP = gauge("torchobs.cgroup.memory.swap", "By", shared=True).described("Swap in use by that cgroup.")
CGROUP_MEMORY_OOM_KILLS = counter("torchobs.cgroup.memory.oom_kills", "{process}", shared=True).described(
    "Processes of that cgroup ended by the kernel's OOM killer."
)
CGROUP_MEMORY_LAST_OOM_KILL = gauge(
    "torchobs.cgroup.memory.last_oom_kill.timestamp", "s", survives=True, shared=True
).described("Unix time at which the last such kill was seen.")
CGROUP_CPU_LIMIT = gauge("torchobs.cgroup.cpu.limit", "{cpu}", shared=True).described(
    "CPU quota of the rank's cgroup, in cores."
)
CGROUP_CPU_PERIODS = counter("torchobs.cgroup.cpu.periods", "{period}", shared=True).described(
    "Quota periods in which the cgroup ran."
)
CGROUP_CPU_THROTTLED_PERIODS = counter("torchobs.cgroup.cpu.throttled_periods", "{period}", shared=True).described(
    "Quota periods in which the cgroup was throttled."
)
CGROUP_CPU_THROTTLED_TIME = counter("torchobs.cgroup.cpu.throttled_time", "s", shared=True).described(
    "Time for which the cgroup's threads were throttled, summed."
)
CGROUP_PRESSURE_TIME = counter("torchobs.cgroup.pressure.time", "s", RESOURCE, WAITING, shared=True).described(
    "Time in which tasks of the cgroup waited for a resource."
)

# --- hardware: OpenTelemetry's names, and what they lack as torchobs.gpu.* ----------------------------------------------------
HW_GPU_UTILIZATION = gauge("hw.gpu.utilization", "1", GPU_ID, GPU_TASK).described("Share of recent time in which a kernel ran.")
GPU_MEMORY_BUSY = gauge("torchobs.gpu.memory.busy", "1", GPU_ID).described(
    "Share of recent time in which memory was read or written."
)
HW_GPU_MEMORY_USAGE = updown("hw.gpu.memory.usage", "By", GPU_ID).described("GPU memory in use by all processes.")
HW_GPU_MEMORY_LIMIT = updown("hw.gpu.memory.limit", "By", GPU_ID).described("Total GPU memory.")
HW_POWER = gauge("hw.power", "W", GPU_ID, HW_TYPE).described("Power drawn at present.")
HW_ENERGY = counter("hw.energy", "J", GPU_ID, HW_TYPE).described("Energy since the rank began to observe the GPU.")
GPU_POWER_LIMIT = gauge("torchobs.gpu.power.limit", "W", GPU_ID).described("Power that the GPU may draw.")
HW_TEMPERATURE = gauge("hw.temperature", "Cel", GPU_ID, HW_SENSOR).described("Temperature.")
GPU_CLOCK_FREQUENCY = gauge("torchobs.gpu.clock.frequency", "Hz", GPU_ID).described("Clock of the streaming multiprocessors.")
GPU_CLOCK_LIMIT = gauge("torchobs.gpu.clock.limit", "Hz", GPU_ID).described("Highest clock that the multiprocessors can have.")
GPU_THROTTLE_TIME = counter("torchobs.gpu.throttle.time", "s", GPU_ID, GPU_THROTTLE, quiet=0.0).described(
    "Time with throttled clocks, by the driver, else sampled every ten seconds."
)
HW_ERRORS = counter("hw.errors", "{error}", GPU_ID, HW_TYPE, HW_ERROR, quiet=0.0).described(
    "Errors since the rank began to observe the GPU."
)
GPU_NVLINK_IO = counter("torchobs.gpu.nvlink.io", "By", GPU_ID, IO_DIRECTION).described(
    "Payload sent and received over NVLink."
)
GPU_NVLINK_LINKS = gauge("torchobs.gpu.nvlink.links", "{link}", GPU_ID).described("NVLinks that are up.")
HW_STATUS = updown("hw.status", "1", GPU_ID, HW_TYPE, HW_STATE).described(
    "State of the GPU. failed: lost, or its memory cannot be remapped; degraded: needs a reset, or had an ECC error."
)
RANK_GPU_INFO = gauge(
    "torchobs.rank.gpu.info",
    "",
    GPU_ID,
    Attribute("UUID", "the same, as dcgm-exporter labels it"),
    DEVICE,
    Attribute("hw.model", "product name"),
    survives=True,
).described("Constant 1 for each GPU on which the rank holds memory.")

# --- the machine: OpenTelemetry's names, and what they lack as torchobs.host.* ------------------------------------------------
SYSTEM_CPU_TIME = counter("system.cpu.time", "s", CPU_MODE).described("CPU time of all processors together, by mode.")
SYSTEM_CPU_LOAD = gauge("system.cpu.load_average.1m", "{thread}").described(
    "Threads that ran, or waited to run or for a disk, over a minute."
)
HOST_CPUS = gauge("torchobs.host.cpus", "{cpu}").described("Logical processors that are online.")
HOST_THREADS = gauge("torchobs.host.threads", "{thread}", THREAD_STATE).described(
    "Threads that run, or wait to run or for a disk."
)
SYSTEM_MEMORY_LIMIT = updown("system.memory.limit", "By").described("The machine's memory.")
SYSTEM_MEMORY_USAGE = updown("system.memory.usage", "By", MEMORY_STATE).described("The machine's memory by use.")
SYSTEM_MEMORY_AVAILABLE = updown("system.memory.linux.available", "By").described(
    "Memory available without swapping, by the kernel's estimate."
)
SYSTEM_MEMORY_SHARED = updown("system.memory.linux.shared", "By").described(
    "Shared memory, including files in a tmpfs; part of the state cached."
)
HOST_MEMORY_UNWRITTEN = gauge("torchobs.host.memory.unwritten", "By", UNWRITTEN_STATE).described(
    "File pages not yet written to disk, as of checkpoints."
)
HOST_OOM_KILLS = counter("torchobs.host.memory.oom_kills", "{process}").described(
    "Processes ended by the kernel's OOM killer, in any cgroup."
)
SYSTEM_PAGING_USAGE = updown("system.paging.usage", "By", PAGING_STATE).described("The machine's swap space.")
SYSTEM_DISK_IO = counter("system.disk.io", "By", SYSTEM_DEVICE, DISK_DIRECTION).described(
    "Bytes read from and written to disks."
)
SYSTEM_DISK_OPERATIONS = counter("system.disk.operations", "{operation}", SYSTEM_DEVICE, DISK_DIRECTION).described(
    "Reads and writes that disks completed."
)
SYSTEM_DISK_IO_TIME = counter("system.disk.io_time", "s", SYSTEM_DEVICE).described("Time in which a disk was busy.")
SYSTEM_DISK_OPERATION_TIME = counter("system.disk.operation_time", "s", SYSTEM_DEVICE, DISK_DIRECTION).described(
    "Time that a disk's reads and writes took, summed."
)
SYSTEM_FILESYSTEM_LIMIT = updown("system.filesystem.limit", "By", MOUNTPOINT, FILESYSTEM_TYPE).described(
    "Size of a file system."
)
SYSTEM_FILESYSTEM_USAGE = updown("system.filesystem.usage", "By", MOUNTPOINT, FILESYSTEM_TYPE, FILESYSTEM_STATE).described(
    "Space in a file system by state."
)
SYSTEM_FILESYSTEM_INODES = updown(
    "system.filesystem.inodes.usage", "{inode}", MOUNTPOINT, FILESYSTEM_TYPE, INODE_STATE
).described("Inodes of a file system by state.")
HOST_FILESYSTEM_READONLY = gauge("torchobs.host.filesystem.readonly", "", MOUNTPOINT, FILESYSTEM_TYPE).described(
    "1 if the file system is read-only, as after a disk error."
)
SYSTEM_NETWORK_IO = counter("system.network.io", "By", NETWORK_INTERFACE, NETWORK_DIRECTION).described(
    "Bytes received and transmitted."
)
SYSTEM_NETWORK_ERRORS = counter("system.network.errors", "{error}", NETWORK_INTERFACE, NETWORK_DIRECTION).described(
    "Errors of receiving and transmitting."
)
SYSTEM_NETWORK_DROPPED = counter("system.network.packet.dropped", "{packet}", NETWORK_INTERFACE, NETWORK_DIRECTION).described(
    "Packets dropped although they had no error."
)
