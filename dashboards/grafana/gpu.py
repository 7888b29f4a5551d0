"""GPU: hardware of the GPUs on which one run computes; with dcgm-exporter's profiling metrics where that is scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.grafana import panels, thresholds
from dashboards.grafana.layout import Section
from dashboards.grafana.panels import BAD, FAIR, GOOD, Column, Query, Step
from dashboards.grafana.queries import MOST, RANKS, increase, per_run, rate, worst
from dashboards.grafana.template import Choice, page
from torchobs import catalog
from torchobs.rules.promql import select

if TYPE_CHECKING:
    from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

    from torchobs.rules.values import Thresholds

GPU = "{{hw_id}}"
NO_GPU = "Empty: without NVIDIA GPUs."
DCGM = {
    "DCGM_FI_PROF_SM_ACTIVE": ("Busy multiprocessors", "Share of the time in which a multiprocessor had a warp", "above 70 %"),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("Busy tensor cores", "Share of the time in which tensor cores computed", "above 30 %"),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("Busy memory", "Share of the time in which GPU memory moved data", "below 80 %"),
}
"""dcgm-exporter's metrics, with title, meaning and what is good. They say what utilization does not: a kernel on one
multiprocessor counts there as 100 %."""


def dashboard(limits: Thresholds) -> Dashboard:
    """Return the dashboard."""
    sections = [
        Section("Health", health(limits)),
        Section("Work", work(limits)),
        Section("Power, heat and clocks", power(limits)),
        Section("By dcgm-exporter", by_dcgm(), collapsed=True),
    ]
    about = "GPUs of one run, as NVML sees them; joined with dcgm-exporter by UUID where that is scraped."
    return page("torchobs-gpu", "GPU", about, Choice.RUN | Choice.RANK, sections)


def by_gpu(of: str, *labels: str) -> str:
    """Aggregate by GPU: ranks that share one see it both."""
    return f"max by ({', '.join(('hw_id', *labels))}) ({of})"


def health(limits: Thresholds) -> tuple[Panel, ...]:
    """Return errors and states."""
    bad = by_gpu(select(catalog.HW_STATUS, *RANKS, 'hw_state=~"degraded|failed"'), "hw_state")
    throttled = by_gpu(rate(catalog.GPU_THROTTLE_TIME, *RANKS, HOT))
    return (
        panels.number(
            "GPUs",
            f"GPUs that the run observes. Good: as many as ranks. {NO_GPU}",
            "short",
            Query(f"count({by_gpu(select(catalog.HW_STATUS, *RANKS))})"),
        ),
        panels.number(
            "Faulty GPUs",
            f"GPUs that are lost, need a reset or a repair. Good: 0. {NO_GPU}",
            "short",
            Query(f"sum({by_gpu(bad)})"),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Errors",
            "XIDs and uncorrectable memory errors within the graphs' time. Good: 0; an XID may also be the program's own. "
            f"{NO_GPU}",
            "short",
            Query(f"sum({by_gpu(f'increase({select(catalog.HW_ERRORS, *RANKS, SERIOUS)}[$__range])')})", instant=True),
            steps=thresholds.NONE_IS_GOOD,
        ),
        panels.number(
            "Too hot",
            "Share of the time in which heat held the clocks down, on the worst GPU. Good: 0 %. Red where the alert "
            "fires. Empty: without NVIDIA GPUs, and before the first throttling.",
            "percentunit",
            Query(f"max({throttled})"),
            steps=thresholds.share(limits.gpu_throttled),
        ),
        panels.number(
            "Utilization",
            f"Mean over the GPUs. Good: above 80 %. {NO_GPU}",
            "percentunit",
            Query(f"avg({by_gpu(select(catalog.HW_GPU_UTILIZATION, *RANKS))})"),
            steps=thresholds.BUSY,
        ),
        panels.number(
            "Energy",
            f"Energy used by all GPUs within the graphs' time. Good: what your budget says. {NO_GPU}",
            "joule",
            Query(f"sum({by_gpu(f'increase({select(catalog.HW_ENERGY, *RANKS)}[$__range])')})", instant=True),
        ),
        panels.lines(
            "Errors by GPU and kind",
            f"Errors since the last point: the {2 * MOST} series with most. Good: 0; corrected ones are harmless while "
            f"they are few. {NO_GPU}",
            "short",
            Query(worst(by_gpu(increase(catalog.HW_ERRORS, *RANKS), "error_type"), 2 * MOST), "{{error_type}} {{hw_id}}"),
            width=12,
        ),
        panels.timeline(
            "Faulty GPUs over time",
            "GPUs in the state degraded (it needs a reset) or failed (lost, or memory that cannot be remapped). Good: "
            f"no red. {NO_GPU}",
            "short",
            Query(worst(bad, 2 * MOST), "{{hw_state}} {{hw_id}}"),
            steps=(Step(None, GOOD), Step(1.0, BAD)),
            texts={"0": "no", "1": "yes"},
            width=12,
        ),
    )


def work(limits: Thresholds) -> tuple[Panel, ...]:
    """Return utilization and memory."""
    busy = select(catalog.HW_GPU_UTILIZATION, *RANKS)
    memory, limit = (by_gpu(select(metric, *RANKS)) for metric in (catalog.HW_GPU_MEMORY_USAGE, catalog.HW_GPU_MEMORY_LIMIT))
    links = select(catalog.GPU_NVLINK_LINKS, *RANKS)
    columns = (
        Column("", per_run("max", select(catalog.RANK_GPU_INFO, *RANKS), "rank", "instance", "device", "hw_id", "hw_model")),
    )
    return (
        panels.by_rank(
            "Utilization by rank",
            f"Share of the time in which a kernel ran on the rank's GPU. Good: green; a red row is a rank that waits. {NO_GPU}",
            "percentunit",
            busy,
            reverse=True,
            highest=1,
        ),
        panels.lines(
            "Least used GPUs",
            f"Utilization of the {MOST} GPUs with least. Good: above 80 %. {NO_GPU}",
            "percentunit",
            Query(f"bottomk({MOST}, {by_gpu(busy)})", GPU),
            steps=thresholds.BUSY,
            width=6,
        ),
        panels.lines(
            "Phases on the GPU",
            "Time that the slowest rank's GPU is in each phase of a step, idle or not, of one step a second. Good: forward, "
            "backward and optimizer make up all of it; data is a GPU that waits for its batch. Empty: without CUDA, and where "
            "steps are replays of CUDA graphs.",
            "s",
            Query(f"max by (phase) ({select(catalog.STEP_DEVICE_TIME, *RANKS)})", "{{phase}}"),
        ),
        panels.lines(
            "Memory controller",
            f"Share of the time in which GPU memory was read or written, of the {MOST} busiest. Good: below 80 %, above "
            f"it the memory is the limit. {NO_GPU}",
            "percentunit",
            Query(worst(by_gpu(select(catalog.GPU_MEMORY_BUSY, *RANKS))), GPU),
            width=6,
        ),
        panels.lines(
            "Memory in use",
            f"Share of each GPU's memory in use by all processes, of the {MOST} fullest. Good: below "
            f"{thresholds.percent(limits.gpu_memory)}. {NO_GPU}",
            "percentunit",
            Query(worst(f"{memory} / ({limit} > 0)"), GPU),
            steps=thresholds.used_up(limits.gpu_memory),
        ),
        panels.lines(
            "NVLink traffic",
            "Payload of all GPUs by direction. Good: level while training. Empty: without NVLink.",
            "Bps",
            Query(
                f"sum by (network_io_direction) ({by_gpu(rate(catalog.GPU_NVLINK_IO, *RANKS), DIRECTION)})",
                "{{network_io_direction}}",
            ),
        ),
        panels.lines(
            "NVLinks up",
            "Links of the GPU with fewest and with most. Good: all the same. Empty: without NVLink.",
            "short",
            Query(f"min({links})", "fewest"),
            Query(f"max({links})", "most"),
        ),
        panels.rows(
            "GPUs of the ranks",
            f"On which GPU each rank holds memory. Good: one row for each rank. {NO_GPU}",
            columns,
            labels={"rank": "rank", "device": "device", "hw_model": "model", "hw_id": "UUID", "instance": "exporter"},
        ),
    )


def power(limits: Thresholds) -> tuple[Panel, ...]:
    """Return power, temperature, clocks."""
    throttle = by_gpu(rate(catalog.GPU_THROTTLE_TIME, *RANKS), "reason")
    clock, limit = (by_gpu(select(metric, *RANKS)) for metric in (catalog.GPU_CLOCK_FREQUENCY, catalog.GPU_CLOCK_LIMIT))
    return (
        panels.lines(
            "Power",
            "Power of the GPU that draws most and of the one that draws least, and the least limit. Good: close "
            f"together; the one with least waits. {NO_GPU}",
            "watt",
            Query(f"max({select(catalog.HW_POWER, *RANKS)})", "most"),
            Query(f"min({select(catalog.HW_POWER, *RANKS)})", "least"),
            Query(f"min({select(catalog.GPU_POWER_LIMIT, *RANKS)})", "limit"),
        ),
        panels.lines(
            "Temperature",
            f"The {MOST} hottest. Good: below 85 °C for the chip and 95 °C for its memory. {NO_GPU}",
            "celsius",
            Query(worst(by_gpu(select(catalog.HW_TEMPERATURE, *RANKS), SENSOR)), "{{hw_sensor_location}} {{hw_id}}"),
            steps=(Step(None, GOOD), Step(85.0, FAIR), Step(95.0, BAD)),
        ),
        panels.lines(
            "Clocks",
            f"Clock of the multiprocessors over their highest, of the {MOST} slowest GPUs. Good: above 80 %. {NO_GPU}",
            "percentunit",
            Query(f"bottomk({MOST}, {clock} / ({limit} > 0))", GPU),
        ),
        panels.lines(
            "Throttling",
            f"Share of the time in which the clocks were held down, of the {MOST} worst. Good: none by heat; by the "
            "power limit is normal. Empty: before the first throttling.",
            "percentunit",
            Query(worst(throttle), "{{reason}} {{hw_id}}"),
            steps=thresholds.share(limits.gpu_throttled),
        ),
        panels.lines(
            "Energy per step",
            f"Energy of all GPUs for a step of the run. Good: level. {NO_GPU}",
            "joule",
            Query(
                f"sum({by_gpu(rate(catalog.HW_ENERGY, *RANKS))}) / (avg({rate(catalog.STEPS, *RANKS)}) > 0)", "energy per step"
            ),
        ),
    )


def by_dcgm() -> tuple[Panel, ...]:
    """Return metrics of dcgm-exporter, joined with the ranks: of the exporter's labels only UUID matters."""
    here = per_run("max", select(catalog.RANK_GPU_INFO, *RANKS), "rank", "UUID")
    return tuple(
        panels.lines(
            title,
            f"{meaning}, of the {MOST} ranks with least. Good: {good}. Empty: where dcgm-exporter is not scraped.",
            "percentunit",
            Query(f"bottomk({MOST}, {here} * on (UUID) group_left () max by (UUID) ({name}))", "rank {{rank}}"),
        )
        for name, (title, meaning, good) in DCGM.items()
    )


HOT = 'reason="thermal"'
FAULTS = {"xid", "xid_hardware", "ecc_uncorrected"}
SERIOUS = 'error_type=~"' + "|".join(kind for kind in catalog.HW_ERROR.values if kind in FAULTS) + '"'
DIRECTION, SENSOR = "network_io_direction", "hw_sensor_location"
