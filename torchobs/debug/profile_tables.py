"""Tables of what ``torch.profiler`` has recorded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchobs.debug.findings import told
from torchobs.support.result import Result, fill

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_LINES = 15
SYNCHRONIZATIONS = frozenset({
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "hipDeviceSynchronize", "hipStreamSynchronize",
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero",
})  # fmt: skip
"""Where the host waits for a device, or would on one: ``item()`` is ``_local_scalar_dense``"""
COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::contiguous", "aten::clone"})
SLOW_SYNCHRONIZATION = 0.1
"""Share of the time from which waiting of the host for a CUDA device is told"""


@dataclass(frozen=True, slots=True)
class OperatorCost(Result):
    """One operator, by its input shapes where they are recorded. Times in seconds, of itself without what it calls."""

    name: str
    calls: int
    cpu_time: float
    device_time: float
    share: float
    """Of the time of all operators, on the device where one computes"""
    cpu_memory: int
    device_memory: int
    flops: int
    shapes: str


@dataclass(frozen=True, slots=True)
class EventCost(Result):
    """A kind of wait or copy. Seconds."""

    name: str
    calls: int
    time: float


@dataclass(frozen=True, slots=True)
class LineCost(Result):
    """A line of the program and the CPU time of the operators that it called, in seconds."""

    location: str
    calls: int
    time: float


@dataclass(frozen=True, slots=True)
class Profile(Result):
    """Recorded steps; empty before they are. Times in seconds."""

    name: str
    steps: int | None = None
    time: float | None = None
    """Of all recorded steps, by the clock, with the profiler's own cost"""
    time_per_step: float | None = None
    batch_size: int | None = None
    time_per_sample: float | None = None
    cpu_time: float = 0.0
    """Of operators, on the host"""
    device_time: float = 0.0
    """Of kernels and copies"""
    device_share: float | None = None
    """Part of the time that the device computed; ``None`` without one"""
    flops: int = 0
    """Estimated, of matrix products and convolutions"""
    operators: tuple[OperatorCost, ...] = ()
    synchronizations: tuple[EventCost, ...] = ()
    """Where the host waits for a device, or would on one"""
    copies: tuple[EventCost, ...] = ()
    lines: tuple[LineCost, ...] = ()
    """With ``stacks=True``"""
    trace: str | None = None
    tensorboard: str | None = None
    anomalies: tuple[str, ...] = ()


def filled(result: Profile, profiler: Any, steps: int, elapsed: float, top: int, *, by_shape: bool) -> None:
    """Fill a result that nobody was told to be complete."""
    rows = profiler.key_averages(group_by_input_shape=by_shape)
    on_device = [row for row in rows if row.device_type.name != "CPU" and not row.is_user_annotation]
    on_host = [row for row in rows if row.device_type.name == "CPU" and not row.key.startswith(("ProfilerStep", "[memory]"))]
    operators = [row for row in on_host if "::" in row.key]
    cpu, device = (sum(r.self_cpu_time_total for r in on_host) / 1e6, sum(r.self_device_time_total for r in on_device) / 1e6)
    synchronizations = _events(row for row in on_host if row.key in SYNCHRONIZATIONS)
    texts = [("slow_synchronization", result.name, text) for text in _anomalies(synchronizations, elapsed, bool(on_device))]
    fill(
        result, steps=steps, time=elapsed, time_per_step=elapsed / steps if steps else None, cpu_time=cpu,
        time_per_sample=elapsed / steps / result.batch_size if steps and result.batch_size else None,
        device_time=device, device_share=min(1.0, device / elapsed) if on_device else None,
        flops=sum(int(row.flops or 0) for row in operators), operators=_operators(operators, top, device > 0),
        synchronizations=synchronizations,
        copies=_events(row for row in rows if row.key in COPIES or row.key.startswith("Memcpy")),
        lines=_lines(profiler.events()), anomalies=told("profile", texts),
    )  # fmt: skip


def _operators(rows: list[Any], top: int, by_device: bool) -> tuple[OperatorCost, ...]:  # noqa: FBT001  # what the share is of
    def cost(row: Any) -> float:
        return float(row.self_device_time_total if by_device else row.self_cpu_time_total)

    total = sum(map(cost, rows)) or 1.0
    return tuple(
        OperatorCost(
            row.key, row.count, row.self_cpu_time_total / 1e6, row.self_device_time_total / 1e6, cost(row) / total,
            row.self_cpu_memory_usage, row.self_device_memory_usage, int(row.flops or 0),
            " ".join("x".join(map(str, shape)) for shape in row.input_shapes if shape) if row.input_shapes else "",
        )
        for row in sorted(rows, key=cost, reverse=True)[:top]
    )  # fmt: skip


def _events(rows: Iterable[Any]) -> tuple[EventCost, ...]:
    calls, times = Counter[str](), Counter[str]()
    for row in rows:
        calls[row.key] += row.count
        times[row.key] += row.self_device_time_total if row.device_type.name != "CPU" else row.self_cpu_time_total
    return tuple(EventCost(name, calls[name], time / 1e6) for name, time in times.most_common())


def _lines(events: Iterable[Any]) -> tuple[LineCost, ...]:
    from torchobs.debug.operator_watch import NOT_THE_USERS

    calls, times = Counter[str](), Counter[str]()
    for event in events:
        line = next((one for one in event.stack or () if _is_the_users(one, NOT_THE_USERS)), None)
        if line is not None:
            calls[line] += 1
            times[line] += event.self_cpu_time_total
    return tuple(LineCost(line, calls[line], time / 1e6) for line, time in times.most_common(MOST_LINES))


def _is_the_users(line: str, others: tuple[str, ...]) -> bool:
    """Return True for ``file(line): function`` outside torch, its modules and built-in functions."""
    is_torch = "torch/" in line or "torchobs/debug" in line
    return "(" in line and not line.startswith((*others, "<", "nn.Module")) and not is_torch


def _anomalies(synchronizations: tuple[EventCost, ...], elapsed: float, on_device: bool) -> Iterable[str]:  # noqa: FBT001
    for row in synchronizations:
        if on_device and row.time > SLOW_SYNCHRONIZATION * elapsed:
            yield f"the host waits in {row.name} for {row.time / elapsed:.0%} of the time, in {row.calls} calls"
