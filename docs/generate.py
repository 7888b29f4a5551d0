"""Write docs/metrics.md from the catalog, docs/openapi.json from the API: `python docs/generate.py`, or `--check` them."""

from __future__ import annotations

import argparse
import math
import sys
from itertools import groupby
from pathlib import Path

from torchobs import catalog
from torchobs.catalog import Attribute, Event, Kind, Metric, Span
from torchobs.exporter import api_schema

HEADINGS = {
    catalog.STEPS: "Progress",
    catalog.GRAD_NORM: "Gradients",
    catalog.ANOMALIES: "Verdicts",
    catalog.AMP_SCALE: "Automatic mixed precision",
    catalog.DATA_WORKER_START_TIME: "Data loaders",
    catalog.COMPILE_TIME: "Compilation",
    catalog.MEMORY_DEVICE_ALLOCATED: "Memory",
    catalog.CGROUP_MEMORY_WORKING_SET: "The container",
    catalog.CHECKPOINTS: "Checkpoints",
    catalog.DISTRIBUTED_WORLD_SIZE: "Distributed training",
    catalog.HW_GPU_UTILIZATION: "GPU hardware",
    catalog.RANK_STATE_SET: "Ranks",
    catalog.SYSTEM_CPU_TIME: "The machine",
    catalog.OVERHEAD: "torchobs itself",
}
"""Each heading stands above the metric that begins it, in the catalog's order."""

EXPORTER_S = ("torchobs.exporter.", "torchobs.build.")
"""Beginnings of the names that belong to no rank."""
HOST_S = ("system.", "torchobs.host.")
"""And to no exporter: to the machine."""

SPANS = """\
[Which traces there are, and which spans all ranks share](opentelemetry.md#which-traces-there-are). Sent over OTLP, the
attributes of events and spans are in the namespace of the event or span, `torchobs.step.loss`, except what the semantic
conventions name; `step` is `torchobs.step.number`."""

INTRODUCTION = """\
<!-- Generated from torchobs/catalog/ by docs/generate.py; `make docs` writes it again. -->

# Metrics, events and spans

Instruments have OpenTelemetry names; the page at `/metrics` has the names that Prometheus' own OTLP endpoint makes of them,
so that a query means the same whether torchobs is scraped or pushes.

Every series of a rank carries the labels `job_name`, `run_id` and `rank`; what else there is to say about a rank stands on
`{rank_info}`. A rank is unique within a target only, so joins are `on (run_id, rank, instance)`. A step's number is
never a label. `rank` is the rank's number; in a replica group (torchft) the group follows, as in `0-g1`; and the younger one of
two living processes that claim one rank has digits of its own behind it, as in `0-3f9a12bc`
([restarts](exporter.md#the-state-of-a-rank)).

One page serves the newest incarnation of each rank: after a restart its counters begin at 0 again, which `rate()` and
`increase()` take for what it is. NaN and infinity are counted; they are never a gauge's value.

**Quiet** series are on the page from their first value on that says something, which is other than zero: a run without a loss
scaler has nothing of one, and a probe that never failed has no error. A counter is at 0 first, until each scraper that is
expected has got a page with that 0, and only then at what it has counted: `increase()` sees the first event, one scrape late.
(What has counted before the exporter saw the rank is shown as it is.)

**Shared** series are facts of the container or the machine, the same for all ranks in it. They have `job_name` and `run_id`,
but no `rank`, and stand on the page once, from the first rank of the run that lives, so that `sum()` does not count them per
rank. (Pushed over OTLP they are each rank's, as its resource is.)

**After the rank's end** a series is *kept* (the dead rank shows its last value until the exporter's grace is over), or it
*ends* at once.

**Histogram bounds** are powers of two from {seconds} seconds, and powers of four from {norms} for norms: they
convert to exponential and to native histograms without loss.
"""

METRIC_HEAD = """\
| OpenTelemetry | Prometheus | kind | unit | attributes | meaning | after the rank's end |
|---|---|---|---|---|---|---|
"""


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or with `--check` say which are stale and return 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is stale")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the pages (default: docs)")
    options = parser.parse_args(argv)
    stale = [
        (options.out / name, text)
        for name, text in {"metrics.md": metrics_page(), "openapi.json": api_schema.text()}.items()
        if not (options.out / name).is_file() or (options.out / name).read_text(encoding="utf-8") != text
    ]
    for page, text in stale:
        if options.check:
            print(f"{page} is stale: run `make docs`")
        else:
            page.write_text(text, encoding="utf-8")
            print(f"wrote {page}")
    return 1 if stale and options.check else 0


def metrics_page() -> str:
    """Return docs/metrics.md as it has to be."""
    introduction = INTRODUCTION.format(
        rank_info=catalog.RANK_INFO.prometheus,
        seconds=_powers(2, catalog.SECONDS_BOUNDS),
        norms=_powers(4, catalog.NORM_BOUNDS),
    )
    sections = [
        f"## {heading}\n\n{METRIC_HEAD}{''.join(_metric(metric) for metric in metrics)}" for heading, metrics in _groups()
    ]
    return "\n".join([introduction, *sections, _events(), _spans()])


def _groups() -> list[tuple[str, list[Metric]]]:
    heading = ""
    headed = [(heading := HEADINGS.get(metric, heading), metric) for metric in catalog.METRICS]
    return [(title, [metric for _, metric in group]) for title, group in groupby(headed, key=lambda pair: pair[0])]


def _metric(metric: Metric) -> str:
    kind = "up-down counter" if metric.kind is Kind.UPDOWN else metric.kind.name.lower()
    unit = f"`{metric.unit}`" if metric.unit else ""
    return _row(
        f"`{metric.name}`", f"`{metric.prometheus}`", kind, unit, _attributes(metric.attributes),
        f"{metric.brief}{_manner(metric)}", _survival(metric),
    )  # fmt: skip


def _manner(metric: Metric) -> str:
    words = [word for word, is_so in (("quiet", metric.quiet is not None), ("shared", metric.shared)) if is_so]
    return f" *{', '.join(words).capitalize()}.*" if words else ""


def _survival(metric: Metric) -> str:
    if metric.name.startswith(EXPORTER_S):
        return "the exporter's own"
    if metric.name.startswith(HOST_S):
        return "the machine's"
    return "kept" if metric.survives or metric.kind is not Kind.GAUGE else "ends"


def _events() -> str:
    def row(event: Event) -> str:
        severity = event.severity.name.lower()
        return _row(f"`{event.name}`", severity, _attributes(event.attributes), event.brief)

    head = "| event | severity | attributes | meaning |\n|---|---|---|---|\n"
    return f"## Events\n\n{head}{''.join(row(event) for event in catalog.EVENTS)}"


def _spans() -> str:
    def row(span: Span) -> str:
        return _row(f"`{span.name}`", _attributes(span.attributes), span.brief)

    head = "| span | attributes | meaning |\n|---|---|---|\n"
    return f"## Spans\n\n{SPANS}\n\n{head}{''.join(row(span) for span in catalog.SPANS)}"


def _attributes(attributes: tuple[Attribute, ...]) -> str:
    return "; ".join(f"`{one.name}`: {one.brief}{_values(one)}" for one in attributes)


def _values(attribute: Attribute) -> str:
    return f" ({', '.join(f'`{value}`' for value in attribute.values)})" if attribute.values else ""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def _powers(base: int, bounds: tuple[float, ...]) -> str:
    least, most = (round(math.log(bound, base)) for bound in (bounds[0], bounds[-1]))
    return f"{base}<sup>{least}</sup> to {base}<sup>{most}</sup>"


if __name__ == "__main__":
    sys.exit(main())
