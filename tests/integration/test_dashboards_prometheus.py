"""Every panel and every annotation gets an answer from a real Prometheus that scrapes every metric."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.page import openmetrics_page
from tests.prometheus_server import PrometheusServer, Series
from tests.promql import filled
from tests.support import wait_until
from torchobs import catalog


@pytest.fixture
def target() -> Iterator[str]:
    """The address of a page of all metrics whose counters grow with the time."""
    started = time.monotonic()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = openmetrics_page(catalog.METRICS, elapsed_s=time.monotonic() - started).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/openmetrics-text; version=1.0.0; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def unanswered(prometheus: PrometheusServer, dashboard: dict[str, Any]) -> dict[str, str]:
    """The queries of the dashboard that Prometheus has no series or exemplars for, by the title of the panel."""
    targets = [(panel["title"], target) for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked = [(title, target["expr"]) for title, target in targets if "@ 0" not in target["expr"]] + [
        (annotation["name"], annotation["expr"]) for annotation in dashboard["annotations"]["list"]
    ]
    assert len(asked) > 30
    # nothing restarts here
    series = {
        title: expr for title, expr in asked if title != "Restarts" and not prometheus.query(filled(expr, rate_interval="5s"))
    }
    with_exemplars = [(title, target["expr"]) for title, target in targets if target.get("exemplar")]
    assert {title for title, _ in with_exemplars} == {"Step duration", "Gradient norms"}
    return series | {title: expr for title, expr in with_exemplars if len(exemplars(prometheus, expr)) != 2}


def exemplars(prometheus: PrometheusServer, expr: str) -> list[Any]:
    """The exemplars of a query, as Grafana asks for them: one list for each series."""
    when = {"start": f"{time.time() - 60:.3f}", "end": f"{time.time():.3f}"}
    found: list[Any] = prometheus.get("/api/v1/query_exemplars", query=filled(expr, rate_interval="5s"), **when)
    return found


def choices(prometheus: PrometheusServer, dashboard: dict[str, Any]) -> dict[str, set[str]]:
    """What Grafana would offer for each variable."""
    variables = [variable for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    series = prometheus.get("/api/v1/series", **{"match[]": "torchobs_rank_up"})
    return {variable["name"]: {one[variable["name"]] for one in series} for variable in variables}


@pytest.mark.parametrize(
    ("name", "variant", "settings"),
    [
        ("prometheus", "rules", {}),
        ("prometheus3", "rules", {}),
        (
            "prometheus3",
            "rules-native",
            {"convert_classic_histograms_to_nhcb": True, "always_scrape_classic_histograms": False},
        ),
    ],
    ids=["2.42", "3", "3 with native histograms"],
)
def test_every_panel_has_data(
    name: str,
    variant: str,
    settings: dict[str, object],
    program: Callable[[str], str],
    checkout: Path,
    tmp_path: Path,
    target: str,
) -> None:
    """With the shipped rules, however the histograms are stored; and they judge what the page says."""
    dashboard = json.loads((checkout / "deploy" / "grafana" / "dashboards" / "torchobs-run.json").read_text())
    rules = checkout / "deploy" / "prometheus"
    shipped = [rules / "rules" / "torchobs-alerts.yml", rules / variant / "torchobs-percentiles.yml"]
    files = [tmp_path / path.name for path in shipped]
    for path, copy in zip(shipped, files, strict=True):
        copy.write_text(path.read_text().replace("  interval: 1m\n", ""))  # each second, not each minute
    scrape = {"job_name": "torchobs", "static_configs": [{"targets": [target]}], **settings}
    given: Any = {"settings": {"scrape_configs": [scrape]}, "arguments": ["--enable-feature=exemplar-storage"]}
    with PrometheusServer(program(name), rules=files, interval="1s", **given) as prometheus:
        prometheus.wait_for_scrapes(4)
        wait_until(lambda: not unanswered(prometheus, dashboard), timeout_s=60, interval_s=0.5)
        assert choices(prometheus, dashboard) == {
            "job_name": {"gpt"},
            "run_id": {"run-1"},
            "rank": {"0", "1"},
            "instance": {target},
        }
        native = "native" in variant
        assert bool(prometheus.query("count_over_time(torchobs_step_duration_seconds_bucket[1m])")) != native
        check_figures(prometheus, dashboard)
        (alert,) = wait_until(lambda: prometheus.alerts("TorchobsGradientExplosion"))
        assert (alert.state, alert.labels["job_name"], alert.labels["run_id"]) == ("firing", "gpt", "run-1")


def check_figures(prometheus: PrometheusServer, dashboard: dict[str, Any]) -> None:
    """The page's numbers are known, so those on the panels are; there are none while a scrape has failed or been late."""
    exprs = {
        panel["title"]: filled(panel["targets"][0]["expr"], rate_interval="5s")
        for panel in dashboard["panels"]
        if "targets" in panel
    }

    def shown(title: str) -> list[Series]:
        return wait_until(lambda: prometheus.query(exprs[title]))

    assert [series.value for series in shown("Ranks up")] == [2]
    assert wait_until(lambda: prometheus.value(exprs["Anomalous now"])) == 2
    shares = {series.labels["phase"]: series.value for series in shown("Step time by phase")}
    # the n-th phase of five grows n times as fast as the first
    assert shares == pytest.approx({phase: number / 15 for number, phase in enumerate(catalog.PHASES, start=1)})
    durations = {series.labels["quantile"]: series.value for series in shown("Step duration")}
    typical = catalog.SECONDS_BOUNDS[len(catalog.SECONDS_BOUNDS) // 2]
    # all in one bucket, in which both kinds of histogram interpolate linearly
    assert durations == pytest.approx({"0.5": typical * 0.75, "0.99": typical * 0.995})
