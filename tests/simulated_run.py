"""An hour of a training that did not take place: series with the shapes of real ones, for pictures and benchmarks.

A rank waits for the slowest one; one rank loads its data slowly from half of the time on; the run crashes, and goes on with
node 1's pod replaced by another. What a series has no shape for is constant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.page import DESCRIBED, EXPORTER_S
from tests.prometheus_server import STALE
from torchobs import catalog
from torchobs.catalog import Kind, Metric, prometheus_label

Array = np.ndarray[Any, Any]
Series = tuple[Mapping[str, str], Array, Array]

GIB = 2.0**30
STEP_S = 0.4
CRASH, GAP_S = 0.6, 150.0
"""When it crashes, as a share of the time, and how long it is gone."""
SLOW_RANK, SLOW_FROM, SLOW_S = 5, 0.3, 0.16
LAYERS = tuple(f"transformer.h.{block}.{part}" for block in range(8) for part in ("attn", "mlp"))
OPEN = {
    "operation": ("train_step", "evaluate"),
    "group": ("0",),
    "exception.type": ("ValueError",),
    "message": ("no batch",),
    "location": ("train.py:7",),
    "device": ("cuda:0",),
    "layer": (*LAYERS, "other"),
    "name": ("perplexity", "accuracy"),
    "probe": ("step", "gradients", "data", "memory"),
    "device_type": ("cuda",),
    "dtype": ("float16",),
    "system.device": ("nvme0n1", "nvme1n1"),
    "system.filesystem.mountpoint": ("/", "/data"),
    "system.filesystem.type": ("xfs",),
    "network.interface.name": ("eth0",),
    "version": ("0.1",),
    "python": ("3.12",),
    "backend": ("nccl",),
    "parallelism": ("ddp",),
    "mesh": ("",),
    "comm_hook": ("none",),
    "tp": ("",),
    "cp": ("",),
    "ep": ("",),
    "hw.model": ("NVIDIA H100 80GB HBM3",),
}


@dataclass(frozen=True, slots=True)
class Run:
    """``per_node``: ranks of a machine. ``sick``: it has a slow rank, crashes, and leaks; else nothing happens to it."""

    job: str = "gpt"
    run: str = "20260105-gpt-7b"
    ranks: int = 16
    per_node: int = 8
    sick: bool = True
    quiet: bool = True
    """Also the series that a real exporter leaves out as long as they have their usual value."""


@dataclass(frozen=True, slots=True)
class Life:
    """A rank between two starts: the times of its samples, and the seconds since its start at each."""

    run: Run
    rank: int
    number: int
    """0 before the crash, 1 after it"""
    instance: str
    start_s: float
    times: Array
    noise: np.random.Generator

    @property
    def age(self) -> Array:
        """Seconds since its start."""
        return self.times - self.start_s

    @property
    def slow(self) -> Array:
        """1 while the run has its slow rank."""
        return (self.age > 600).astype(float) if self.run.sick else np.zeros(len(self.times))

    def wobble(self, level: float, share: float = 0.03) -> Array:
        """A level with noise."""
        return level * (1 + share * self.noise.standard_normal(len(self.times)))

    def counted(self, rate: Array | float) -> Array:
        """A counter that grows at this rate, per second."""
        grown: Array = np.cumsum(np.broadcast_to(rate, self.times.shape) * np.diff(self.times, prepend=self.start_s))
        return grown

    @property
    def step_s(self) -> Array:
        """Seconds of a step: all ranks wait for the slow one."""
        found: Array = (STEP_S + SLOW_S * self.slow) * (1 + 0.02 * np.sin(self.times / 300))
        return found

    @property
    def steps(self) -> Array:
        """Steps done."""
        return self.counted(1 / self.step_s)


def phase(life: Life, name: str) -> Array:
    """Seconds per second in a phase."""
    own = {"data": 0.012, "forward": 0.11, "optimizer": 0.02, "other": 0.004, "between": 0.0}
    slow = SLOW_S * life.slow if life.rank == SLOW_RANK else 0.0
    seconds = {part: life.wobble(level) + (slow if part == "data" else 0.0) for part, level in own.items()}
    seconds["backward"] = life.step_s - sum(seconds.values())
    share: Array = seconds[name] / life.step_s
    return share


def use(life: Life, state: str) -> Array:
    """Seconds per second of a goodput state."""
    age = life.age
    evaluating, saving = (age % 900 > 840).astype(float), (age % 600 > 585) & (age % 900 <= 840)
    starting, compiling = (age < 30).astype(float), ((age >= 30) & (age < 90)).astype(float)
    busy = 1 - np.maximum.reduce([evaluating, saving, starting, compiling])
    data = busy * np.minimum(1, phase(life, "data"))
    skipped = 0.004 * busy
    parts = {"startup": starting, "compile": compiling, "evaluation": evaluating, "checkpoint": saving, "data": data}
    parts |= {"skipped": skipped, "productive": busy - data - skipped}
    found: Array = parts.get(state, 0.0 * age)
    return found


def loss(life: Life) -> Array:
    """It falls; the restart goes on from the last checkpoint."""
    seconds = life.age + 1800 * life.number
    falling: Array = 2.1 + 4.2 * np.exp(-seconds / 700)
    return falling + life.wobble(0.04, 1.0)


def bursts(life: Life, at_s: tuple[float, ...], size: float = 1.0) -> Array:
    """A counter that jumps at these ages."""
    jumps: Array = size * np.sum([life.age > second for second in at_s], axis=0) + 0 * life.age
    return jumps


def layer_norm(life: Life, layer: str) -> Array:
    """Smaller the farther from the loss."""
    depth = LAYERS.index(layer) if layer in LAYERS else len(LAYERS) // 2
    return life.wobble(0.02 * 1.25**depth, 0.15)


def anomalies(life: Life, kind: str) -> Array:
    """Some loss spikes, and before the crash gradients that explode."""
    if not life.run.sick or life.number:
        return bursts(life, (1500.0,) if kind == "loss_spike" else ())
    return bursts(life, {"loss_spike": (500.0, 1300.0), "gradient_explosion": (1800.0, 1830.0, 1900.0)}.get(kind, ()))


def memory(life: Life) -> Array:
    """Of the process, which leaks where the run is sick."""
    return 9 * GIB + (life.age * 1.2e6 if life.run.sick and life.rank == 3 else 0) + life.wobble(0.02 * GIB, 1.0)


Shape = Callable[[Life, Mapping[str, str]], "Array | float"]
_COUNTED: dict[Metric, Shape] = {
    catalog.STEPS: lambda life, _: 1 / life.step_s,
    catalog.STEP_PHASE_TIME: lambda life, of: phase(life, of["phase"]),
    catalog.GOODPUT_TIME: lambda life, of: use(life, of["state"]),
    catalog.SAMPLES: lambda life, _: 32 / life.step_s,
    catalog.TOKENS: lambda life, _: 32 * 2048 / life.step_s,
    catalog.SCHEDULER_STEPS: lambda life, _: 1 / life.step_s,
    catalog.EPOCHS: lambda _, __: 1 / 900,
    catalog.GRAD_CLIPPED_STEPS: lambda life, _: 0.2 / life.step_s,
    catalog.DATA_WORKER_START_TIME: lambda life, _: 0.4 * (life.age < 40),
    catalog.COMPILE_TIME: lambda life, of: (
        {"dynamo": 0.2, "aot": 0.1, "inductor": 0.4, "kernels": 0.2}[of["stage"]]
        * (((life.age > 30) & (life.age < 90)) | ((life.age > 1200) & (life.age < 1230)))
    ),
    catalog.COMPILE_COMPILATIONS: lambda life, of: {"first": 0.3, "recompile": 0.05}[of["cause"]] * (life.age < 120),
    catalog.COMPILE_RECOMPILES: lambda life, of: 0.05 * (of["guard"] in {"shape", "tensor"}) * (life.age % 1200 < 90),
    catalog.COMPILE_GRAPH_BREAKS: lambda life, of: 0.05 * (of["reason"] == "call") * (life.age < 90),
    catalog.COMPILE_CACHE_LOOKUPS: lambda life, of: {"hit": 0.3, "miss": 0.1, "bypass": 0.0}[of["result"]] * (life.age < 120),
    catalog.HW_ENERGY: lambda life, _: life.wobble(620),
    catalog.GPU_THROTTLE_TIME: lambda life, of: {"power": 0.1, "thermal": 0.16 * (life.rank == 2)}[of["reason"]] * life.slow,
    catalog.GPU_NVLINK_IO: lambda life, _: life.wobble(9e10),
    catalog.HW_ERRORS: lambda life, of: 0.002 * (of["error.type"] == "ecc_corrected") * (life.rank == 1),
    catalog.OVERHEAD: lambda life, of: life.wobble(
        {"step": 4e-4, "gradients": 9e-4, "data": 1e-4, "memory": 5e-5}[of["probe"]]
    ),
    catalog.CGROUP_CPU_PERIODS: lambda _, __: 10.0,
    catalog.CGROUP_CPU_THROTTLED_PERIODS: lambda life, _: 0.4 + 2.0 * life.slow,
    catalog.CGROUP_CPU_THROTTLED_TIME: lambda life, _: 0.02 + 0.3 * life.slow,
    catalog.CGROUP_PRESSURE_TIME: lambda life, of: (
        {"cpu": 0.04, "memory": 0.0, "io": 0.02}[of["resource"]] * (1 if of["waiting"] == "some" else 0.3) * (1 + 3 * life.slow)
    ),
    catalog.SYSTEM_CPU_TIME: lambda life, of: life.wobble(
        {"user": 40.0, "system": 8.0, "idle": 74.0, "iowait": 4.0, "nice": 0.0, "interrupt": 1.0, "steal": 1.0}[of["cpu.mode"]]
    ),
    catalog.SYSTEM_DISK_IO: lambda life, of: life.wobble({"read": 4e8, "write": 2e7}[of["disk.io.direction"]], 0.2),
    catalog.SYSTEM_DISK_OPERATIONS: lambda life, of: life.wobble(
        {"read": 3000.0, "write": 150.0}[of["disk.io.direction"]], 0.2
    ),
    catalog.SYSTEM_DISK_IO_TIME: lambda life, _: life.wobble(0.35, 0.2),
    catalog.SYSTEM_DISK_OPERATION_TIME: lambda life, of: life.wobble({"read": 1.2, "write": 0.9}[of["disk.io.direction"]], 0.2),
    catalog.SYSTEM_NETWORK_IO: lambda life, _: life.wobble(6e8, 0.1),
    catalog.OTLP_SENT: lambda life, _: life.wobble(900.0),
}
"""Rates of counters."""

_SHOWN: dict[Metric, Shape] = {
    catalog.ANOMALIES: lambda life, of: anomalies(life, of["kind"]),
    catalog.CHECKPOINTS: lambda life, of: np.floor(life.age / 600) * (of["result"] == "saved"),
    catalog.GRAD_NONFINITE_STEPS: lambda life, _: bursts(life, (200.0, 900.0, 1400.0)),
    catalog.GRAD_NONFINITE_ELEMENTS: lambda life, _: bursts(life, (200.0, 900.0, 1400.0), 4096.0),
    catalog.AMP_STEPS_SKIPPED: lambda life, _: bursts(life, (200.0, 900.0, 1400.0)),
    catalog.AMP_OVERFLOWS: lambda life, of: bursts(life, (200.0, 900.0, 1400.0) if of["optimizer"] == "0" else ()),
    catalog.AMP_SCALE: lambda life, _: 65536 * 2.0 ** (np.floor(life.age / 800) - bursts(life, (200.0, 900.0, 1400.0))),
    catalog.AMP_GROWTH_TRACKER: lambda life, _: life.age % 800 / STEP_S,
    catalog.AMP_SKIP_STREAK: lambda life, _: ((life.age % 700) < 15).astype(float),
    catalog.LAST_STEP_TIMESTAMP: lambda life, _: life.times - life.wobble(0.4, 0.5),
    catalog.RANK_HEARTBEAT_TIMESTAMP: lambda life, _: life.times - life.wobble(0.3, 0.3),
    catalog.CHECKPOINT_TIMESTAMP: lambda life, _: np.where(
        life.age > 600, life.start_s + np.floor(life.age / 600) * 600, np.nan
    ),
    catalog.CHECKPOINT_DURATION: lambda life, _: np.where(life.age > 600, life.wobble(11.0, 0.1), np.nan),
    catalog.CHECKPOINT_SIZE: lambda life, _: np.where(life.age > 600, 1.7 * GIB, np.nan),
    catalog.RANK_START_TIME: lambda life, _: life.start_s,
    catalog.RANK_PROGRESS_AGE: lambda life, _: life.wobble(0.5, 0.4),
    catalog.RANK_RESTARTS: lambda _, __: 0.0,
    catalog.LOSS: lambda life, _: loss(life),
    catalog.SCALAR_VALUE: lambda life, of: (
        np.exp(loss(life)) if of["name"] == "perplexity" else 0.7 - 0.4 * np.exp(-life.age / 900)
    ),
    catalog.LEARNING_RATE: lambda life, _: (
        3e-4 * np.minimum(1, life.age / 300 + life.number) * (1 - (life.age + 1800 * life.number) / 8000)
    ),
    catalog.OPTIMIZER_WEIGHT_DECAY: lambda _, __: 0.1,
    catalog.OPTIMIZER_MOMENTUM: lambda _, __: 0.9,
    catalog.OPTIMIZER_BETA2: lambda _, __: 0.95,
    catalog.STEPS_PLANNED: lambda _, __: 20_000.0,
    catalog.STEPS_RESUMED_FROM: lambda life, _: 1_000.0 * (life.number > 0),
    catalog.GRAD_NORM: lambda life, _: (
        life.wobble(0.8, 0.1) * (1 + 12 * ((life.age > 1790) & (life.age < 1910) & (life.run.sick and not life.number)))
    ),
    catalog.RUN_GRAD_NORM: lambda _, __: np.nan,
    catalog.GRAD_LAYER_NORM: lambda life, of: layer_norm(life, of["layer"]),
    catalog.PARAM_LAYER_NORM: lambda life, of: 40 * layer_norm(life, of["layer"]) ** 0.2,
    catalog.UPDATE_LAYER_RATIO: lambda life, of: 1e-3 * layer_norm(life, of["layer"]) ** 0.3,
    catalog.GRAD_CLIP_MAX_VALUE: lambda _, __: np.nan,
    catalog.GRAD_INTERVAL: lambda _, __: 4.0,
    catalog.GRAD_LAYER_GROWTH: lambda _, __: np.nan,
    catalog.GRAD_LAYERS_FOLDED: lambda _, __: 12.0,
    catalog.GRAD_UNMOVED_LAYERS: lambda _, __: 0.0,
    catalog.GRAD_ZERO: lambda _, __: 0.01,
    catalog.MODEL_FLOPS: lambda _, __: 1.6e14,
    catalog.MFU: lambda life, _: 1.6e14 / life.step_s / 9.9e14,
    catalog.STEP_DEVICE_TIME: lambda life, of: phase(life, of["phase"]) * life.step_s,
    catalog.ACTIVATION_LAYER_MEAN_ABS: lambda life, _: life.wobble(0.7, 0.05),
    catalog.ACTIVATION_LAYER_STD: lambda life, _: life.wobble(1.0, 0.05),
    catalog.ACTIVATION_LAYER_MAX: lambda life, _: life.wobble(6.0, 0.1),
    catalog.ACTIVATION_LAYER_ZERO: lambda life, of: life.wobble(0.5 if of["layer"].endswith("mlp") else 0.01),
    catalog.ACTIVATION_LAYER_NONFINITE: lambda _, __: 0.0,
    catalog.ANOMALY_ACTIVE: lambda life, of: (
        ((life.age > 1790) & (life.age < 1910) & (life.run.sick and not life.number)) * (of["kind"] == "gradient_explosion")
    ),
    catalog.DATA_WORKERS: lambda _, __: 4.0,
    catalog.DATA_BATCHES_READY: lambda life, _: (
        np.round(np.clip(life.wobble(6, 0.3), 0, 8)) * (1 - life.slow * (life.rank == SLOW_RANK))
    ),
    catalog.DATA_STARVED: lambda life, _: life.slow * (life.rank == SLOW_RANK),
    catalog.COMPILE_IN_PROGRESS: lambda life, _: ((life.age > 30) & (life.age < 90)).astype(float),
    catalog.MEMORY_DEVICE_ALLOCATED: lambda life, _: life.wobble(52 * GIB, 0.04),
    catalog.MEMORY_DEVICE_ACTIVE: lambda life, _: life.wobble(54 * GIB, 0.03),
    catalog.MEMORY_DEVICE_RESERVED: lambda _, __: 66 * GIB,
    catalog.MEMORY_DEVICE_INACTIVE_SPLIT: lambda life, _: life.wobble(5 * GIB, 0.2),
    catalog.MEMORY_DEVICE_PEAK: lambda life, _: (61 + life.rank % 3) * GIB + 0 * life.age,
    catalog.MEMORY_DEVICE_LIMIT: lambda _, __: 79 * GIB,
    catalog.MEMORY_HOST_RSS: lambda life, _: memory(life),
    catalog.MEMORY_HOST_PSS: lambda life, _: 0.8 * memory(life),
    catalog.MEMORY_HOST_CHILDREN_RSS: lambda life, _: life.wobble(3 * GIB, 0.05),
    catalog.MEMORY_HOST_AVAILABLE: lambda life, _: 700 * GIB - life.age * 1.2e6,
    catalog.MEMORY_HOST_UTILIZATION: lambda life, of: (0.42 if of["limit"] == "machine" else 0.6) + 4e-5 * life.age,
    catalog.MEMORY_SHARED_SIZE: lambda _, __: 64 * GIB,
    catalog.MEMORY_SHARED_USED: lambda life, _: life.wobble(9 * GIB, 0.1),
    catalog.MEMORY_GROWTH_PER_STEP: lambda life, of: np.where(
        life.age > 240, 4.8e5 if of["space"] == "host" and life.rank == 3 else 0.0, np.nan
    ),
    catalog.MEMORY_TIME_TO_LIMIT: lambda life, of: np.where(
        (life.age > 240) & (of["space"] == "host") & (life.rank == 3) & life.run.sick, 30_000 - life.age * 5, np.nan
    ),
    catalog.CGROUP_MEMORY_WORKING_SET: lambda life, _: 120 * GIB + life.age * 2e6,
    catalog.CGROUP_MEMORY_LIMIT: lambda _, __: 200 * GIB,
    catalog.CGROUP_MEMORY_PEAK: lambda life, _: 150 * GIB + life.age * 2e6,
    catalog.CGROUP_MEMORY_SWAP: lambda _, __: 0.0,
    catalog.CGROUP_MEMORY_LAST_OOM_KILL: lambda _, __: np.nan,
    catalog.CGROUP_CPU_LIMIT: lambda _, __: 64.0,
    catalog.DISTRIBUTED_WORLD_SIZE: lambda life, _: float(life.run.ranks),
    catalog.WORLD_SIZE: lambda life, _: float(life.run.ranks),
    catalog.RUN_LOCAL_RANKS: lambda life, _: float(life.run.per_node),
    catalog.RUN_MISSING_RANKS: lambda _, __: 0.0,
    catalog.RUN_STEP_SPREAD: lambda _, __: 0.0,
    catalog.RANK_STALL_POSITION: lambda _, __: np.nan,
    catalog.RANK_BEHIND: lambda life, _: np.round(np.clip(life.wobble(0.2, 2.0), 0, 1)),
    catalog.DDP_TIME: lambda life, of: life.wobble(
        {"forward": 0.11, "backward": 0.25, "communication": 0.2, "overlap": 0.18}[of["part"]]
    ),
    catalog.DDP_BUCKETS: lambda _, __: 24.0,
    catalog.DDP_BUCKET_SIZE: lambda _, __: 25.0 * 2**20,
    catalog.DDP_UNUSED_SIZE: lambda _, __: 0.0,
    catalog.HW_GPU_UTILIZATION: lambda life, _: np.clip(life.wobble(0.93, 0.03) - 0.25 * life.slow, 0, 1),
    catalog.GPU_MEMORY_BUSY: lambda life, _: np.clip(life.wobble(0.5, 0.05), 0, 1),
    catalog.HW_GPU_MEMORY_USAGE: lambda life, _: life.wobble(70 * GIB, 0.005),
    catalog.HW_GPU_MEMORY_LIMIT: lambda _, __: 80 * GIB,
    catalog.HW_POWER: lambda life, _: life.wobble(640, 0.02) - 120 * life.slow,
    catalog.GPU_POWER_LIMIT: lambda _, __: 700.0,
    catalog.HW_TEMPERATURE: lambda life, of: life.wobble(
        (61 if of["hw.sensor_location"] == "gpu" else 72) + 16.0 * (life.rank == 2), 0.01
    ),
    catalog.GPU_CLOCK_FREQUENCY: lambda life, _: life.wobble(1.75e9, 0.01) - 3e8 * life.slow * (life.rank == 2),
    catalog.GPU_CLOCK_LIMIT: lambda _, __: 1.98e9,
    catalog.GPU_NVLINK_LINKS: lambda _, __: 18.0,
    catalog.HW_STATUS: lambda _, of: float(of["hw.state"] == "ok"),
    catalog.RANK_STATE_SET: lambda _, of: float(of["state"] == "alive"),
    catalog.RANK_SLOWDOWN: lambda life, _: life.wobble(1.0, 0.02) + 1.0 * life.slow * (life.rank == SLOW_RANK),
    catalog.RANK_EXCESS: lambda life, of: (
        life.wobble(0.001, 0.5) + SLOW_S * life.slow * (life.rank == SLOW_RANK) * (of["phase"] == "data")
    ),
    catalog.RANK_EXIT: lambda _, __: np.nan,
    catalog.RANK_EXCEPTION: lambda _, __: np.nan,
    catalog.PROCESS_CHILDREN: lambda _, __: 4.0,
    catalog.PROCESS_THREADS: lambda _, __: 96.0,
    catalog.PROCESS_OPEN_FILES: lambda life, _: 180 + life.age * 0.01,
    catalog.PROCESS_MAX_FILES: lambda _, __: 65536.0,
    catalog.PROBE_DISABLED: lambda _, __: 0.0,
    catalog.SYSTEM_CPU_LOAD: lambda life, _: life.wobble(58.0, 0.1),
    catalog.HOST_CPUS: lambda _, __: 128.0,
    catalog.HOST_THREADS: lambda life, of: life.wobble(55.0 if of["state"] == "runnable" else 2.0, 0.2),
    catalog.SYSTEM_MEMORY_LIMIT: lambda _, __: 1000 * GIB,
    catalog.SYSTEM_MEMORY_USAGE: lambda life, of: (
        {"used": 280, "free": 500, "buffers": 5, "cached": 215}[of["system.memory.state"]] * life.wobble(GIB, 0.01)
    ),
    catalog.SYSTEM_MEMORY_AVAILABLE: lambda life, _: 700 * GIB - life.age * 1.2e6,
    catalog.SYSTEM_MEMORY_SHARED: lambda life, _: life.wobble(9 * GIB, 0.1),
    catalog.HOST_MEMORY_UNWRITTEN: lambda life, of: np.maximum(0, 8 - (life.age % 600) / 20) * GIB * (of["state"] == "dirty"),
    catalog.SYSTEM_PAGING_USAGE: lambda _, of: 8 * GIB * (of["system.paging.state"] == "free"),
    catalog.SYSTEM_FILESYSTEM_LIMIT: lambda _, __: 4000 * GIB,
    catalog.SYSTEM_FILESYSTEM_USAGE: lambda life, of: (
        {"used": 2900, "free": 1000, "reserved": 100}[of["system.filesystem.state"]] * GIB
        + life.age * 2e7 * (of["system.filesystem.mountpoint"] == "/data")
    ),
    catalog.SYSTEM_FILESYSTEM_INODES: lambda _, of: {"used": 4e6, "free": 9e7}[of["state"]],
    catalog.HOST_FILESYSTEM_READONLY: lambda _, __: 0.0,
    catalog.EXPORTER_FILES: lambda life, of: float(life.run.per_node) * (of["status"] == "served"),
    catalog.EXPORTER_SCAN_DURATION: lambda life, _: life.wobble(0.004, 0.2),
    catalog.EXPORTER_HOST_DURATION: lambda life, _: life.wobble(0.006, 0.2),
    catalog.OTLP_QUEUED: lambda life, _: np.round(np.abs(life.wobble(40, 1.0))),
}
"""Values of gauges, and of counters that jump."""


def series(run: Run, began_s: float, ended_s: float, interval_s: float) -> Iterator[Series]:
    """Yield the series of the run and its exporters; each life of a rank has its own samples."""
    for rank in range(run.ranks):
        first = rank % run.per_node == 0
        for life in _lives(run, rank, began_s, ended_s, interval_s):
            for metric in catalog.METRICS:
                if metric.name.startswith((*EXPORTER_S, "torchobs.run.")) or metric.shared:
                    if first:
                        yield from _of(metric, life)
                else:
                    yield from _of(metric, life)


def _lives(run: Run, rank: int, began_s: float, ended_s: float, interval_s: float) -> Iterator[Life]:
    node, noise = rank // run.per_node, np.random.default_rng(rank)
    crash_s = began_s + CRASH * (ended_s - began_s)
    ends = ((began_s, crash_s), (crash_s + GAP_S, ended_s)) if run.sick else ((began_s, ended_s),)
    for number, (start_s, end_s) in enumerate(ends):
        pod = number if node == 1 else 0
        times = np.arange(start_s + (rank % 7) * 0.1, end_s, interval_s)
        yield Life(run, rank, number, f"{run.job}-{node}-{pod}:10960", start_s, times, noise)


def _of(metric: Metric, life: Life) -> Iterator[Series]:
    names = [prometheus_label(attribute.name) for attribute in metric.attributes]
    for given in itertools.product(*(_values(attribute, life) for attribute in metric.attributes)):
        of = {attribute.name: value for attribute, value in zip(metric.attributes, given, strict=True)}
        labels = {"instance": life.instance, "job": "torchobs", **dict(zip(names, given, strict=True))}
        if not metric.name.startswith(EXPORTER_S):
            labels |= {"job_name": life.run.job, "run_id": life.run.run}
            if not metric.shared and not metric.name.startswith("torchobs.run."):
                labels["rank"] = str(life.rank)
        if metric is catalog.RANK_INFO:
            labels |= DESCRIBED | {"host": life.instance.partition(":")[0], "script": "train", "torch_version": "2.9"}
        labels = {name: value for name, value in labels.items() if value}
        if metric.kind is Kind.HISTOGRAM:
            yield from _histogram(metric, life, labels)
        else:
            values = _shape(metric, life, of)
            if life.run.quiet or metric.quiet is None or (values != metric.quiet).any():
                yield _ended({"__name__": metric.prometheus, **labels}, life, values)


def _values(attribute: catalog.Attribute, life: Life) -> tuple[str, ...]:
    if attribute is catalog.GPU_ID or attribute.name == "UUID":
        return (f"GPU-{life.run.job}-{life.rank:04}",)
    if attribute.values and attribute.name in {"scaler", "optimizer", "find_unused_parameters", "static_graph"}:
        return (attribute.values[-1] if "true" in attribute.values else attribute.values[0],)
    if attribute.name in {"dp", "pp"}:  # two pipeline stages
        return (str(divmod(life.rank, 2)[attribute.name == "pp"]),)
    if attribute.name == "gradient_as_bucket_view":
        return ("true",)
    return attribute.values or OPEN[attribute.name]


def _shape(metric: Metric, life: Life, of: Mapping[str, str]) -> Array:
    if metric in _SHOWN:
        value = _SHOWN[metric](life, of)
    elif metric.kind is Kind.COUNTER:
        value = life.counted(_COUNTED[metric](life, of)) if metric in _COUNTED else 0.0
    else:
        value = 1.0
    return np.broadcast_to(np.asarray(value, dtype=float), life.times.shape)


def _histogram(metric: Metric, life: Life, labels: Mapping[str, str]) -> Iterator[Series]:
    typical = life.step_s if metric is catalog.STEP_DURATION else np.full(life.times.shape, 0.8)
    for bound in (*metric.bounds, np.inf):
        share = 1 / (1 + np.exp(-4 * (np.log(bound) - np.log(typical)))) if np.isfinite(bound) else np.ones(life.times.shape)
        where = {"__name__": f"{metric.prometheus}_bucket", **labels, "le": "+Inf" if np.isinf(bound) else f"{bound:g}"}
        yield _ended(where, life, life.counted(np.round(share, 3) / life.step_s))
    yield _ended({"__name__": f"{metric.prometheus}_sum", **labels}, life, life.counted(typical / life.step_s))
    yield _ended({"__name__": f"{metric.prometheus}_count", **labels}, life, life.steps)


def _ended(labels: Mapping[str, str], life: Life, values: Array) -> Series:
    """Return the series; where its life ends before the picture does, with the mark of a target that is no more."""
    if not life.run.sick or life.number:
        return labels, life.times, values
    return labels, np.append(life.times, life.times[-1] + 1), np.append(values, STALE)
