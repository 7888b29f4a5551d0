"""An hour of a training that did not take place: every series of the catalog, with the shapes that dashboards are asked about.

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

STEP_S = 0.4
CRASH, GAP_S = 0.6, 150.0
"""When it crashes, as a share of the time, and how long it is gone."""
SLOW_RANK, SLOW_FROM, SLOW_S = 5, 0.3, 0.16
LAYERS = tuple(f"transformer.h.{block}.{part}" for block in range(8) for part in ("attn", "mlp"))
_SINGLE = (
    "group=0 exception.type=ValueError message=gone location=train.py:7 device=cuda:0 device_type=cuda dtype=float16"
    " backend=nccl parallelism=ddp mesh= comm_hook=none tp= cp= ep= version=0.1 python=3.12 network.interface.name=eth0"
    " system.filesystem.type=xfs hw.model=H100"
)
OPEN: dict[str, tuple[str, ...]] = {
    **{name: (value,) for name, _, value in (pair.partition("=") for pair in _SINGLE.split())},
    "layer": (*LAYERS, "other"),
    "operation": ("train_step", "evaluate"),
    "name": ("perplexity", "accuracy"),
    "probe": ("step", "gradients", "data", "memory"),
    "system.device": ("nvme0n1", "nvme1n1"),
    "system.filesystem.mountpoint": ("/", "/data"),
}
"""Values of attributes that may have any"""


@dataclass(frozen=True, slots=True)
class Run:
    """``per_node``: ranks of a machine. ``sick``: it has a slow rank, and crashes; else nothing happens to it."""

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

    @property
    def age(self) -> Array:
        return self.times - self.start_s

    @property
    def slow(self) -> Array:
        """1 while the run has its slow rank."""
        return (self.age > 600).astype(float) if self.run.sick else np.zeros(len(self.times))

    def counted(self, rate: Array | float) -> Array:
        """A counter that grows at this rate, per second."""
        grown: Array = np.cumsum(np.broadcast_to(rate, self.times.shape) * np.diff(self.times, prepend=self.start_s))
        return grown

    @property
    def step_s(self) -> Array:
        """Seconds of a step: all ranks wait for the slow one."""
        seconds: Array = STEP_S + SLOW_S * self.slow
        return seconds

    @property
    def steps(self) -> Array:
        return self.counted(1 / self.step_s)


def phase(life: Life, name: str) -> Array:
    """Seconds per second in a phase."""
    seconds: dict[str, Any] = {"data": 0.012, "forward": 0.11, "optimizer": 0.02, "other": 0.004, "between": 0.0}
    seconds["data"] += SLOW_S * life.slow if life.rank == SLOW_RANK else 0.0
    seconds["backward"] = life.step_s - sum(seconds.values())
    share: Array = seconds[name] / life.step_s
    return share


def use(life: Life, state: str) -> Array:
    """Seconds per second of a goodput state: it compiles for a minute, and trains."""
    compiling = (life.age < 60).astype(float)
    data = (1 - compiling) * np.minimum(1, phase(life, "data"))
    share: Array = {"compile": compiling, "data": data, "productive": 1 - compiling - data}.get(state, 0.0 * life.age)
    return share


Shape = Callable[[Life, Mapping[str, str]], "Array | float"]
_COUNTED: dict[Metric, Shape] = {
    catalog.STEPS: lambda life, _: 1 / life.step_s,
    catalog.STEP_PHASE_TIME: lambda life, of: phase(life, of["phase"]),
    catalog.GOODPUT_TIME: lambda life, of: use(life, of["state"]),
}
"""Rates of counters."""

_SHOWN: dict[Metric, Shape] = {
    catalog.CHECKPOINTS: lambda life, of: np.floor(life.age / 600) * (of["result"] == "saved"),
    catalog.LAST_STEP_TIMESTAMP: lambda life, _: life.times - 0.4,
    catalog.RANK_HEARTBEAT_TIMESTAMP: lambda life, _: life.times - 0.3,
    catalog.RANK_START_TIME: lambda life, _: life.start_s,
    catalog.RANK_RESTARTS: lambda _, __: 0.0,
    catalog.ANOMALY_ACTIVE: lambda _, __: 0.0,
    catalog.DATA_STARVED: lambda life, _: life.slow * (life.rank == SLOW_RANK),
    catalog.WORLD_SIZE: lambda life, _: float(life.run.ranks),
    catalog.RUN_LOCAL_RANKS: lambda life, _: float(life.run.per_node),
    catalog.RUN_MISSING_RANKS: lambda _, __: 0.0,
    catalog.HW_STATUS: lambda _, of: float(of["hw.state"] == "ok"),
    catalog.RANK_STATE_SET: lambda _, of: float(of["state"] == "alive"),
    catalog.RANK_SLOWDOWN: lambda life, _: 1.0 + life.slow * (life.rank == SLOW_RANK),
    catalog.RANK_EXCESS: lambda life, of: 0.001 + SLOW_S * life.slow * (life.rank == SLOW_RANK) * (of["phase"] == "data"),
    catalog.RANK_EXIT: lambda _, __: np.nan,
    catalog.RANK_EXCEPTION: lambda _, __: np.nan,
    catalog.PROBE_DISABLED: lambda _, __: 0.0,
    catalog.EXPORTER_FILES: lambda life, of: float(life.run.per_node) * (of["status"] == "served"),
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
    node = rank // run.per_node
    crash_s = began_s + CRASH * (ended_s - began_s)
    ends = ((began_s, crash_s), (crash_s + GAP_S, ended_s)) if run.sick else ((began_s, ended_s),)
    for number, (start_s, end_s) in enumerate(ends):
        pod = number if node == 1 else 0
        times = np.arange(start_s + (rank % 7) * 0.1, end_s, interval_s)
        yield Life(run, rank, number, f"{run.job}-{node}-{pod}:10960", start_s, times)


def _of(metric: Metric, life: Life) -> Iterator[Series]:
    names = [prometheus_label(attribute.name) for attribute in metric.attributes]
    for combination in itertools.product(*(_values(attribute, life) for attribute in metric.attributes)):
        of = {attribute.name: value for attribute, value in zip(metric.attributes, combination, strict=True)}
        labels = {"instance": life.instance, "job": "torchobs", **dict(zip(names, combination, strict=True))}
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
        where = {"__name__": f"{metric.prometheus}_bucket", **labels, "le": "+Inf" if np.isinf(bound) else f"{bound:g}"}
        yield _ended(where, life, life.counted((typical <= bound) / life.step_s))
    yield _ended({"__name__": f"{metric.prometheus}_sum", **labels}, life, life.counted(typical / life.step_s))
    yield _ended({"__name__": f"{metric.prometheus}_count", **labels}, life, life.steps)


def _ended(labels: Mapping[str, str], life: Life, values: Array) -> Series:
    """Return the series; where its life ends before the picture does, with the mark of a target that is no more."""
    if not life.run.sick or life.number:
        return labels, life.times, values
    return labels, np.append(life.times, life.times[-1] + 1), np.append(values, STALE)
