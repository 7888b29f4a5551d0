"""A real Prometheus: what is pushed to its OTLP endpoint is what it scrapes, name by name, label by label, value by value."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.exporters import Service
from tests.prometheus_server import PrometheusServer, Series, newest_prometheus
from tests.rank_files import live_rank, live_span, train
from tests.support import NEEDS_PROGRAM, free_port, wait_until
from torchobs import catalog
from torchobs.exporter.config import ExporterConfig, address_of
from torchobs.exporter.otlp.options import PushConfig, PushTarget
from torchobs.flight.writer.writer import FlightWriter
from torchobs.otel import FlightMeterProvider
from torchobs.ranks import state

MOVING = {metric.prometheus for metric in (catalog.RANK_PROGRESS_AGE, catalog.RANK_HEARTBEAT_TIMESTAMP)}
"""Other values at any two moments."""
PLACE = ("job", "instance")


@pytest.fixture
def prometheus() -> Iterator[tuple[PrometheusServer, str]]:
    """One that takes OTLP, and scrapes the address."""
    program = newest_prometheus(major=3)
    if program is None:
        pytest.skip(f"{NEEDS_PROGRAM}: Prometheus 3 (prometheus or prometheus3), on PATH")
    address = f"127.0.0.1:{free_port()}"
    arguments = ["--web.enable-otlp-receiver", "--enable-feature=exemplar-storage"]
    with PrometheusServer(program, scrape=[address], arguments=arguments) as server:
        yield server, address


@pytest.fixture
def rank(flight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlightWriter]:
    """A living rank that has trained, with instruments of its user; a heartbeat that is late makes it no other."""
    monkeypatch.setattr(state, "UNRESPONSIVE_AFTER_S", 600.0)
    writer = live_rank(flight_dir, **{"k8s.pod.name": "pod-1", "ключ": "team", "job": "mine", "instance": "this"})
    train(writer, range(1, 5))
    live_span(writer, 2)
    meter = FlightMeterProvider(lambda: writer).get_meter("my.package", "1.2")
    meter.create_counter("my.requests", "{request}", "Requests.").add(3, {"http.route": "/ä", "rank": "mine", "none": ""})
    meter.create_up_down_counter("my.level").add(-2, {"flag": True, "n": 1.5})
    odd = {"ключ": "x", "слов": "y", "": "none", "__": "z", "__name__": "torchobs_rank_up", "job": "mine", "instance": "this"}
    meter.create_counter("my.odd").add(1, odd)
    meter.create_gauge("my.share", "1").set(0.25)
    for value in (0.001, 7.0, 1e9):
        meter.create_histogram("my.latency", "s").record(value, {"le.x": "y"})
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.2):
            writer.heartbeat()

    thread = threading.Thread(target=beat)
    thread.start()
    writer.publish()
    yield writer
    ended.set()
    thread.join()
    writer.close()


def by_labels(found: list[Series]) -> dict[tuple[tuple[str, str], ...], float]:
    """Values by names and labels, without where they came from."""
    assert len({key(one.labels) for one in found}) == len(found)
    return {key(one.labels): one.value for one in found}


def key(labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What is the same, scraped or pushed; Prometheus itself writes `le` as 128.0 and as 128."""
    kept = {name: value for name, value in labels.items() if name not in PLACE}
    if "le" in kept:
        kept["le"] = str(float(kept["le"]))
    return tuple(sorted(kept.items()))


def exemplars(server: PrometheusServer, selector: str) -> list[tuple[tuple[tuple[str, str], ...], str]]:
    """The exemplars of each series, as text."""
    when = {"start": f"{time.time() - 600:.3f}", "end": f"{time.time():.3f}"}
    found = server.get("/api/v1/query_exemplars", query=selector, **when)
    return sorted((key(one["seriesLabels"]), json.dumps(one["exemplars"], sort_keys=True)) for one in found)


def test_what_is_pushed_is_what_is_scraped(
    prometheus: tuple[PrometheusServer, str], rank: FlightWriter, flight_dir: Path
) -> None:
    """The same series, but for job, instance and target_info; and it ends when the rank has ended, as a scraped one does."""
    server, address = prometheus
    target = PushTarget(f"{server.url}/api/v1/otlp/v1/metrics")
    config = ExporterConfig(flight_dir=str(flight_dir), push=PushConfig(metrics=target, interval_s=1.0), grace_s=3.0)
    incarnation = rank.header.incarnation.hex()
    pushed, scraped = f'{{job="gpt", instance="{incarnation}"}}', '{job="torchobs", job_name="gpt", rank!=""}'
    with Service(replace(config, listen=(address_of(address),))) as service:
        server.wait_for_scrapes(2)

        def answers(*selectors: str) -> list[list[Series]]:
            found = [server.query(selector) for selector in selectors]
            return found if all(found) else []  # a scrape that takes longer than its second ends what was scraped

        ours, theirs = map(by_labels, wait_until(lambda: answers(scraped, pushed)))
        info = [of for of in theirs if ("__name__", "target_info") in of]
        (described,) = info
        assert {("host_name", "node-1"), ("k8s_pod_name", "pod-1"), ("torchobs_run_id", "run-1")} <= set(described)
        assert {("key____", "team"), ("exported_job", "mine"), ("exported_instance", "this")} <= set(described)
        (odd,) = (dict(of) for of in theirs if ("__name__", "my_odd_total") in of)
        assert odd.items() >= {"key____": "x;y", "exported_job": "mine", "exported_instance": "this"}.items()
        del theirs[described]
        assert theirs.keys() == ours.keys()
        assert len(ours) > 60
        moving = {of for of in ours if dict(of)["__name__"] in MOVING}
        assert {of: theirs[of] for of in theirs.keys() - moving} == {of: ours[of] for of in ours.keys() - moving}
        assert exemplars(server, pushed) == exemplars(server, scraped) != []
        own, shown = wait_until(lambda: answers('{job="torchobs-exporter"}', '{job="torchobs", job_name=""}'))
        names = {one.labels["__name__"] for one in own} - {"target_info"}
        assert {"torchobs_run_local_ranks", "torchobs_run_step_spread"} <= names
        names = {name for name in names if not name.startswith("torchobs_run_")}
        dropped = catalog.EXPORTER_SERIES_DROPPED.prometheus  # of the page
        page = {one.labels["__name__"] for one in shown}
        assert names == {name for name in page if name.startswith(("torchobs_exporter_", "torchobs_build_"))} - {dropped}
        counts = service.value("torchobs_exporter_otlp_dropped_total", signal="metrics", reason="refused")
        assert counts == 0
        rank.exit(1, 0)
        rank.close()
        wait_until(lambda: server.query(f'torchobs_rank_state{{instance="{incarnation}", state="finished"}} == 1'))
        assert not server.query(f'my_share_ratio{{instance="{incarnation}"}}')
        rest = f'{{job="gpt", instance="{incarnation}", __name__!="target_info"}}'
        wait_until(lambda: not server.query(rest), timeout_s=20)
