"""Write docs/metrics.md from the catalog, docs/openapi.json from the API: `python docs/generate.py`, or `--check` them."""

from __future__ import annotations

import argparse
import math
import re
import sys
from itertools import groupby
from pathlib import Path

from torchobs import catalog
from torchobs.catalog import Attribute, Event, Kind, Metric, Severity, Span, prometheus_label
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

EVENTS = "Each with its attributes. What is neither *info* nor *error* is a warning."

SPANS = """\
[Which traces there are, and which spans all ranks share](opentelemetry.md#which-traces-there-are). Sent over OTLP, the
attributes of events and spans are in the namespace of the event or span, `torchobs.step.loss`, except what the semantic
conventions name; `step` is `torchobs.step.number`."""

INTRODUCTION = """\
<!-- Generated from torchobs/catalog/ by docs/generate.py; `make docs` writes it again. -->

# Metrics, events and spans

Each name is Prometheus', with unit and labels. OpenTelemetry's is the same with dots for underscores, without the unit and
`_total`: `torchobs.step.duration`. Where it is not, it stands behind. What ends in `_total` is a counter, the rest are gauges,
unless *histogram* is said. Its bounds are powers of two from {seconds} seconds, or of four from {norms} for norms.

- A series of a rank has the labels `job_name`, `run_id` and `rank`; `{rank_info}` has the rest. Join
  `on (run_id, rank, instance)`. `rank` is [its number, or a name](exporter.md#restarts-and-names).
- *Quiet*: on the page only from its first value other than zero. A counter is shown at 0 first, so that `increase()` sees its
  first event.
- *Shared*: a fact of the container or the machine, without `rank`, once a page.
- *Stays*: a gauge that keeps its last value after the rank's end until the exporter's grace is over, as counters and
  histograms do; the other gauges of a rank are gone.
- A restarted rank's counters begin at 0. NaN and infinity are counted, and are never a gauge's value.
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
    described: set[tuple[str, ...]] = set()
    sections = [
        f"## {heading}\n\n{''.join(_metric(metric, described) for metric in metrics)}" for heading, metrics in _groups()
    ]
    return "\n".join([introduction, *sections, _events(described), _spans(described)])


def _groups() -> list[tuple[str, list[Metric]]]:
    heading = ""
    headed = [(heading := HEADINGS.get(metric, heading), metric) for metric in catalog.METRICS]
    return [(title, [metric for _, metric in group]) for title, group in groupby(headed, key=lambda pair: pair[0])]


def _metric(metric: Metric, described: set[tuple[str, ...]]) -> str:
    """Return the line of a metric, with its labels behind its name. A label is described where it comes first."""
    labels = ",".join(prometheus_label(attribute.name) for attribute in metric.attributes)
    new = [_label(attribute, described) for attribute in metric.attributes if _key(attribute) not in described]
    names = f"`{metric.prometheus}{{{labels}}}`" if labels else f"`{metric.prometheus}`"
    if _opentelemetry(metric.prometheus) != metric.name:
        names += f" `{metric.name}`"
    words = f"{', '.join(new)}." if new else ""
    return f"- {names}: {' '.join(filter(None, [metric.brief, words, _notes(metric)]))}\n"


def _opentelemetry(prometheus: str) -> str:
    """Return the OpenTelemetry name that the page's rule makes of a Prometheus name."""
    return re.sub(r"_(seconds|bytes|ratio|watts|joules|celsius|hertz)$", "", prometheus.removesuffix("_total")).replace(
        "_", "."
    )


def _label(attribute: Attribute, described: set[tuple[str, ...]]) -> str:
    described.add(_key(attribute))
    return f"`{attribute.name}` ({', '.join(attribute.values) or attribute.brief})"


def _key(attribute: Attribute) -> tuple[str, ...]:
    """Return what makes an attribute the one that was described before: its name and its values."""
    return attribute.name, *(attribute.values or [attribute.brief])


def _notes(metric: Metric) -> str:
    notes = {
        "histogram": metric.kind is Kind.HISTOGRAM,
        "quiet": metric.quiet is not None,
        "shared": metric.shared,
        "stays": metric.survives,
    }
    words = ", ".join(note for note, holds in notes.items() if holds)
    return f"*{words.capitalize()}.*" if words else ""


def _events(described: set[tuple[str, ...]]) -> str:
    lines = []
    for event in catalog.EVENTS:
        severity = "" if event.severity is Severity.WARNING else f"*{event.severity.name.capitalize()}.* "
        lines.append(f"- `{event.name}{_attributes(event)}`: {severity}{event.brief}{_values(event, described)}\n")
    return f"## Events\n\n{EVENTS}\n\n{''.join(lines)}"


def _spans(described: set[tuple[str, ...]]) -> str:
    lines = [f"- `{span.name}{_attributes(span)}`: {span.brief}{_values(span, described)}\n" for span in catalog.SPANS]
    return f"## Spans\n\n{SPANS}\n\n{''.join(lines)}"


def _attributes(entry: Event | Span) -> str:
    return f"{{{','.join(attribute.name for attribute in entry.attributes)}}}" if entry.attributes else ""


def _values(entry: Event | Span, described: set[tuple[str, ...]]) -> str:
    """Return the attributes that have a closed set of values, where they come first."""
    new = [_label(one, described) for one in entry.attributes if one.values and _key(one) not in described]
    return f" {', '.join(new)}." if new else ""


def _powers(base: int, bounds: tuple[float, ...]) -> str:
    least, most = (round(math.log(bound, base)) for bound in (bounds[0], bounds[-1]))
    return f"{base}<sup>{least}</sup> to {base}<sup>{most}</sup>"


if __name__ == "__main__":
    sys.exit(main())
