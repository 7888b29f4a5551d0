"""prometheus-client's multiprocess mode with the series of a page of ours, for ``bench.exporter``.

``python -m bench.multiprocess worker PAGE RANK`` makes that rank's series with prometheus-client, says "ready", and gives
them other values on every line that it reads. ``python -m bench.multiprocess server PORT`` serves those of all workers as
its documentation says, by uvicorn. Both want PROMETHEUS_MULTIPROC_DIR to be set.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, make_asgi_app
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

Change = Callable[[float], object]


def changes(page: str, rank: str) -> Iterator[Change]:
    """Make a rank's series, yield what changes each."""
    for family in text_string_to_metric_families(page):
        owned = [sample for sample in family.samples if sample.labels.get("rank") == rank]
        by_labels: dict[tuple[tuple[str, str], ...], list[float]] = defaultdict(list)
        for sample in owned:
            own = {name: value for name, value in sample.labels.items() if name != "le"}
            by_labels[tuple(sorted(own.items()))].append(float(sample.labels.get("le", 0.0)))
        if owned:
            yield from _of_family(family, {labels: sorted(set(edges)) for labels, edges in by_labels.items()})


def _of_family(family: Metric, children: Mapping[tuple[tuple[str, str], ...], list[float]]) -> Iterator[Change]:
    labels, edges = next(iter(children.items()))
    names = [name for name, _ in labels]
    if family.type == "histogram":
        histogram = Histogram(family.name, family.documentation, names, buckets=[edge for edge in edges if edge])
        yield from (histogram.labels(**dict(child)).observe for child in children)
    elif family.type == "counter":
        counter = Counter(family.name, family.documentation, names)
        yield from (counter.labels(**dict(child)).inc for child in children)
    else:
        gauge = Gauge(family.name, family.documentation, names, multiprocess_mode="mostrecent")
        yield from (gauge.labels(**dict(child)).set for child in children)


def work(page: Path, rank: str) -> None:
    """Be a rank."""
    found = list(changes(page.read_text(), rank))
    for number, line in enumerate(chain(["ready\n"], iter(sys.stdin.readline, "")), 1):
        for index, change in enumerate(found):
            change(1.0 / (index + 1.7 * number))
        sys.stdout.write(line)
        sys.stdout.flush()


def serve(port: int) -> None:
    """Serve all ranks."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # it has no types
    uvicorn.run(
        make_asgi_app(registry), host="127.0.0.1", port=port, timeout_keep_alive=75, log_level="error", access_log=False
    )


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        work(Path(sys.argv[2]), sys.argv[3])
    else:
        serve(int(sys.argv[2]))
