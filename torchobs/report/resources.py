"""Sections on memory and compilation. Pure."""

from __future__ import annotations

from torchobs import catalog
from torchobs.diagnosis import text_format
from torchobs.diagnosis.json_report import device_memory
from torchobs.diagnosis.json_report import memory as host_memory
from torchobs.diagnosis.rank_report import RankReport, attribute_text
from torchobs.report.content import LineChart, Section, Series, Table, section

_HOST = {
    catalog.MEMORY_HOST_RSS: "process", catalog.MEMORY_HOST_CHILDREN_RSS: "its children",
    catalog.CGROUP_MEMORY_WORKING_SET: "container",
}  # fmt: skip
_DEVICE = {catalog.MEMORY_DEVICE_ALLOCATED: "allocated", catalog.MEMORY_DEVICE_RESERVED: "reserved"}

_DEVICE_HEAD = ("Device", "Allocated", "Reserved", "Peak", "Limit")


def memory(report: RankReport, of: str) -> Section:
    """Return memory of host and devices: over time, and as last seen."""
    limit = report.value(catalog.CGROUP_MEMORY_LIMIT)
    host = _chart(report, "Host memory", _HOST, (("limit", limit),) if limit else ())
    device = _chart(report, "Device memory", _DEVICE, ())
    known = {name: value for name, value in host_memory(report).items() if value}
    rows = tuple((name.replace("_", " "), text_format.size(value)) for name, value in known.items())
    devices = tuple(
        (device_name, *(text_format.size(sizes.get(name)) for name in ("allocated", "reserved", "peak", "limit")))
        for device_name, sizes in device_memory(report).items()
    )
    return section(
        "memory", f"Memory{of}", host, device,
        Table("Host memory, as last seen", ("What", "Size"), rows) if rows else None,
        Table("Device memory, as last seen", _DEVICE_HEAD, devices) if devices else None,
    )  # fmt: skip


def _chart(
    report: RankReport, name: str, metrics: dict[catalog.Metric, str], levels: tuple[tuple[str, float], ...]
) -> LineChart | None:
    series = tuple(
        Series(f"{device} {word}".strip(), [(row.time_s, value) for row, value in points])
        for metric, word in metrics.items()
        for device, points in report.history.of(metric.name).items()
        if any(value for _, value in points)
    )
    greatest = max((value for one in series for _, value in one.points), default=0.0)
    # a limit far above would flatten the curves; the table has it
    near = tuple(level for level in levels if level[1] < 3 * greatest)
    return LineChart(f"{name} over time", series, text_format.size, levels=near, timed=True, from_zero=True) if series else None


def compilation(report: RankReport, of: str) -> Section:
    """Return what ``torch.compile`` did."""
    times = {stage: seconds for stage, seconds in report.by_attribute(catalog.COMPILE_TIME).items() if seconds}
    if not times:
        return section("compile", f"torch.compile{of}")
    counts = {
        "compilations": catalog.COMPILE_COMPILATIONS, "recompiled, by guard": catalog.COMPILE_RECOMPILES,
        "failed, by reason": catalog.COMPILE_FAILURES, "graph breaks, by reason": catalog.COMPILE_GRAPH_BREAKS,
    }  # fmt: skip
    rows = tuple(
        (what, kind.replace("_", " "), f"{int(count):,}")
        for what, metric in counts.items()
        for kind, count in report.by_attribute(metric).items()
        if count
    )
    stages = tuple((stage, text_format.duration(seconds)) for stage, seconds in times.items())
    return section(
        "compile", f"torch.compile{of}",
        Table("Time to compile; stages contain one another", ("Stage", "Time"), stages),
        Table("Compilations of the whole run", ("What", "Kind", "Number"), rows, frozenset({0, 1})) if rows else None,
        _reasons(report),
    )  # fmt: skip


def _reasons(report: RankReport) -> Table | None:
    events = (catalog.EVENT_RECOMPILE, catalog.EVENT_GRAPH_BREAK, catalog.EVENT_COMPILE_FAILED)
    rows = [
        (
            event.name.removeprefix("torchobs.").replace(".", " "),
            "-" if fact.step is None else f"{fact.step:,}",
            " · ".join(f"{name} {text}" for name in fact.attributes if (text := attribute_text(fact, name))),
        )
        for event in events
        for fact in report.events_named(event)[-8:]
    ]
    return (
        Table("Reasons, the last of each kind", ("Event", "Step", "Reason"), tuple(rows), frozenset({0, 2})) if rows else None
    )
