"""The panels in a real Prometheus: each has an answer, and what they say of an hour with a slow rank, a leak and a crash."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.dashboards import filled, shipped, targets, variables
from tests.page import openmetrics_page
from tests.prometheus_server import FLAG, PrometheusServer, Series, newest_prometheus, write
from tests.simulated_run import SLOW_RANK, Run, series
from tests.support import NEEDS_PROGRAM, wait_until
from torchobs import catalog

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence
    from pathlib import Path

OPTIONAL = {"cluster", "namespace", "le", "job_name"}
"""Labels that a legend names, and that a target, a native histogram or an alert about an exporter has not."""
GIVEN = {"rate_interval": "5s", "range": "30s", "interval": "1s"}
"""What Grafana would put in place of its variables of time."""
PROFILED = ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE")
DCGM = "".join(f'# TYPE {name} gauge\n{name}{{UUID="UUID0",Hostname="node"}} 0.5\n' for name in PROFILED)
"""As dcgm-exporter says it of the GPU that the page's ranks use."""


@pytest.fixture
def target() -> Iterator[str]:
    """The address of a page of all metrics; its counters grow with the time."""
    started = time.monotonic()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = openmetrics_page(catalog.METRICS, elapsed_s=time.monotonic() - started)
            body = page.replace("# EOF", f"{DCGM}# EOF").encode()
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


def unanswered(
    prometheus: PrometheusServer, dashboards: dict[str, dict[str, Any]], asked: Container[tuple[str, str]] | None = None
) -> dict[tuple[str, str], str]:
    """The queries without a series in Prometheus, or with series that lack what the legend names, by dashboard and panel.

    `asked`: only these panels and annotations.
    """
    wrong = {}
    for uid, dashboard in dashboards.items():
        for panel, target in targets(dashboard):
            if "@ 0" in target["expr"] or (asked is not None and (uid, panel["title"]) not in asked):
                continue
            answer = prometheus.query(filled(target["expr"], **GIVEN))
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - OPTIONAL
            if not answer or not all(named <= series.labels.keys() for series in answer):
                wrong[uid, panel["title"]] = target["expr"]
        for annotation in dashboard["annotations"]["list"]:
            if (asked is None or (uid, annotation["name"]) in asked) and not prometheus.query(
                filled(annotation["expr"], **GIVEN)
            ):
                wrong[uid, annotation["name"]] = annotation["expr"]
    return wrong


def exemplars(prometheus: PrometheusServer, expr: str) -> list[Any]:
    """The exemplars of a query, as Grafana asks for them: one list for each series."""
    when = {"start": f"{time.time() - 60:.3f}", "end": f"{time.time():.3f}"}
    answer: list[Any] = prometheus.get("/api/v1/query_exemplars", query=filled(expr, **GIVEN), **when)
    return answer


def choices(prometheus: PrometheusServer, dashboard: dict[str, Any]) -> dict[str, set[str]]:
    """What Grafana would offer for each variable."""
    offered = {}
    for name, variable in variables(dashboard).items():
        if name == "run_id":
            query = variable["definition"].removeprefix("query_result")
            offered[name] = {series.labels[name] for series in prometheus.query(filled(query, **GIVEN))}
        elif variable["type"] == "query":
            selector = filled(variable["definition"].removeprefix("label_values(").rpartition(",")[0])
            series = prometheus.get("/api/v1/series", **{"match[]": selector})
            offered[name] = {labels[name] for labels in series if name in labels}
    return offered


NATIVE = {"convert_classic_histograms_to_nhcb": True, "always_scrape_classic_histograms": False}


def scraping(program: str, target: str, rules: Sequence[Path] = (), job: Mapping[str, bool] | None = None) -> PrometheusServer:
    """A server that scrapes the page each second."""
    scrape = {"job_name": "torchobs", "static_configs": [{"targets": [target]}], **(job or {})}
    settings, arguments = {"scrape_configs": [scrape]}, ["--enable-feature=exemplar-storage"]
    return PrometheusServer(program, rules=rules, interval="1s", settings=settings, arguments=arguments)


def test_every_panel_has_data(prometheus_program: str, checkout: Path, tmp_path: Path, target: str) -> None:
    """However the histograms are stored; without the rules all have but those that show alerts and quantiles."""
    files = []
    for path in sorted((checkout / "deploy" / "prometheus" / "rules").glob("torchobs-*.yml")):
        files.append(tmp_path / path.name)
        files[-1].write_text(path.read_text().replace("  interval: 1m\n", ""))  # each second, not each minute
    newest = newest_prometheus(3)
    with contextlib.ExitStack() as stack:
        with_rules = stack.enter_context(scraping(prometheus_program, target, files))
        native = stack.enter_context(scraping(newest, target, job=NATIVE)) if newest else None
        check_panels(with_rules, target, native=False)
        (alert,) = wait_until(lambda: with_rules.alerts("TorchobsGradientExplosion"))
        assert (alert.state, alert.labels["job_name"], alert.labels["run_id"]) == ("firing", "gpt", "run-1")
        if native is None:
            pytest.skip(f"{NEEDS_PROGRAM}: Prometheus 3 (prometheus or prometheus3), on PATH")
        check_panels(native, target, native=True)


def check_panels(prometheus: PrometheusServer, target: str, *, native: bool) -> None:
    """All of them, and what Grafana offers; `native`: histograms are, and there are no rules."""
    dashboards = shipped()
    prometheus.wait_for_scrapes(4)
    expected = only_by_rules(dashboards) if native else {}
    left = unanswered(prometheus, dashboards)

    def answered() -> bool:
        nonlocal left
        left = unanswered(prometheus, dashboards, left)  # who has had an answer is not asked again
        return left == expected

    wait_until(answered, timeout_s=150, interval_s=1.0)
    offered = choices(prometheus, dashboards["torchobs-itself"])
    ranks, run = {"0", "1"}, {"run-1"}
    no_labels: dict[str, set[str]] = {"cluster": set(), "namespace": set()}
    assert offered == {**no_labels, "job_name": {"gpt"}, "run_id": run, "rank": ranks, "instance": {target}}
    assert choices(prometheus, dashboards["torchobs-gradients"])["layer"] == {"layer0"}
    assert bool(prometheus.query("count_over_time(torchobs_step_duration_seconds_bucket[1m])")) != native
    check_exemplars(prometheus, dashboards)
    check_figures(prometheus, dashboards, recorded=not native)


def only_by_rules(dashboards: dict[str, dict[str, Any]]) -> dict[tuple[str, str], str]:
    """The queries that only rules answer: alerts, and quantiles, beside which the mean is shown."""
    return {
        (uid, panel["title"]): target["expr"]
        for uid, dashboard in dashboards.items()
        for panel, target in targets(dashboard)
        if ("ALERTS" in target["expr"] and "vector(0)" not in target["expr"])
        or ("run_quantile:" in target["expr"] and " or " not in target["expr"])
    }


def check_exemplars(prometheus: PrometheusServer, dashboards: dict[str, dict[str, Any]]) -> None:
    """Two panels show them, one for each rank."""
    asked = {
        panel["title"]: target["expr"]
        for dashboard in dashboards.values()
        for panel, target in targets(dashboard)
        if target.get("exemplar")
    }
    assert set(asked) == {"Step duration", "Gradient norms"}
    for expr in asked.values():
        assert len(wait_until(lambda expr=expr: exemplars(prometheus, expr))) == 2  # type: ignore[misc]


def check_figures(prometheus: PrometheusServer, dashboards: dict[str, dict[str, Any]], *, recorded: bool) -> None:
    """The page's numbers are known, so those on the panels are; there are none while a scrape has failed or been late."""
    exprs: dict[tuple[str, str], list[str]] = {}
    for uid, dashboard in dashboards.items():
        for panel, target in targets(dashboard):
            exprs.setdefault((uid.removeprefix("torchobs-"), panel["title"]), []).append(filled(target["expr"], **GIVEN))

    def shown(uid: str, title: str, number: int = 0) -> list[Series]:
        return wait_until(lambda: prometheus.query(exprs[uid, title][number]))

    assert [series.value for series in shown("run", "Ranks up")] == [2]
    assert [series.value for series in shown("run", "Anomalous ranks")] == [2]
    shares = {series.labels["phase"]: series.value for series in shown("run", "Step time by phase")}
    # the n-th phase of six grows n times as fast as the first
    assert shares == pytest.approx({phase: number / 21 for number, phase in enumerate(catalog.PHASES, start=1)})
    # all in one bucket, in which both kinds of histogram interpolate linearly; the phases grow by 21 s a step
    typical = catalog.SECONDS_BOUNDS[len(catalog.SECONDS_BOUNDS) // 2]
    for number, quantile in enumerate((0.5, 0.99) if recorded else ()):
        (series,) = shown("run", "Step duration", number)
        assert series.value == pytest.approx(typical * (1 + quantile) / 2, rel=1e-3)
    assert shown("run", "Step duration", 2)[0].value == pytest.approx(21.0, rel=1e-3)
    # both ranks do the same, at two targets or one
    assert [series.value for series in shown("ranks", "Stragglers across nodes")] == pytest.approx([1.0, 1.0])
    assert sorted(series.labels["row"] for series in shown("ranks", "Own step time by rank")) == ["00000", "00001"]
    assert {series.value for series in shown("gpu", "Busy tensor cores")} == {0.5}
    assert {series.labels["rank"] for series in shown("gpu", "Busy tensor cores")} == {"0", "1"}


RANGE_S = 3300.0
SICK, HEALTHY = Run(ranks=8, per_node=4), Run("vit", "48213", 4, 4, sick=False)
TWINS = [Run("bert", "twin", ranks, 2, sick=False) for ranks in (4, 2)]


class Panels:
    """The panels' answers."""

    def __init__(self, server: PrometheusServer, ended_s: float) -> None:
        self._server, self._ended_s = server, ended_s
        self._dashboards = shipped()

    def ask(self, run: Run, uid: str, title: str, number: int = 0) -> list[Series]:
        """The answer to one query of a panel, over the whole time or at its end."""
        matching = [target for panel, target in targets(self._dashboards[uid]) if panel["title"] == title]
        return self.query(matching[number]["expr"], run, instant=matching[number]["instant"])

    def annotation(self, run: Run, name: str) -> set[float]:
        """The values of an annotation."""
        every = self._dashboards["torchobs-run"]["annotations"]["list"]
        (expr,) = (item["expr"] for item in every if item["name"] == name)
        return {value for item in self.query(expr, run) for _, value in item.points}

    def query(self, expr: str, run: Run, *, instant: bool = False) -> list[Series]:
        """The answer to a query of a run's dashboard."""
        query = filled(expr, rate_interval="2m", range="55m", interval="30s").replace('run_id=~".*"', f'run_id=~"{run.run}"')
        if instant:
            return self._server.query(query, self._ended_s - 1)
        return self._server.query_range(query, self._ended_s - RANGE_S, self._ended_s - 1, "30s")


def highest(answer: list[Series], label: str) -> dict[str, float]:
    """The highest value of each series, by a label."""
    return {line.labels[label]: max(value for _, value in line.points) for line in answer}


def check_restart(hour: Panels) -> None:
    """A rank of node 1 has a new target, and so a new series that never changes; a run without a restart has none."""
    assert [line.value for line in hour.ask(SICK, "torchobs-run", "Starts again")] == [1.0]
    assert [line.value for line in hour.ask(HEALTHY, "torchobs-run", "Starts again")] == [0.0]
    assert len(hour.annotation(SICK, "Starts")) == 2
    assert len(hour.annotation(HEALTHY, "Starts")) == 1


def check_slow_rank(hour: Panels) -> None:
    """Compared with ranks on other machines, without the time in which the others wait for it."""
    ratios = highest(hour.ask(SICK, "torchobs-ranks", "Stragglers across nodes"), "rank")
    assert ratios.pop(str(SLOW_RANK)) > 1.5
    assert all(value < 1.2 for value in ratios.values())
    nodes = highest(hour.ask(SICK, "torchobs-ranks", "Slow nodes"), "host")
    assert max(nodes, key=lambda host: nodes[host]).startswith("gpt-1-")
    rows = {line.labels["row"]: line.points[-1][1] for line in hour.ask(SICK, "torchobs-ranks", "Own step time by rank")}
    assert max(rows, key=lambda row: rows[row]) == f"{SLOW_RANK:05}"
    assert max(highest(hour.ask(HEALTHY, "torchobs-ranks", "Stragglers across nodes"), "rank").values()) < 1.2


def check_shares(hour: Panels) -> None:
    """The uses to the wall time, and goodput is the productive one."""
    uses = {line.labels["state"]: line.value for line in hour.ask(HEALTHY, "torchobs-run", "Wall time by use")}
    assert sum(uses.values()) == pytest.approx(1.0, rel=1e-3)
    (goodput,) = hour.ask(HEALTHY, "torchobs-run", "Goodput over time")
    assert goodput.value == pytest.approx(uses["productive"])


def check_clusters(hour: Panels) -> None:
    """One run id in two clusters is two runs: each panel's answers say of which one they are, and are not added up."""
    mixed = []
    for uid, dashboard in shipped().items():
        for panel, target in targets(dashboard):
            if "run_id" in variables(dashboard) and target.get("format") != "heatmap":
                answer = hour.query(target["expr"], TWINS[0], instant=True)
                mixed += [(uid, panel["title"]) for line in answer if "cluster" not in line.labels]
    assert mixed == []
    up = hour.ask(TWINS[0], "torchobs-run", "Ranks up")
    assert {line.labels["cluster"]: line.value for line in up} == {"east": 4, "west": 2}


def test_an_hour_of_runs(prometheus_program: str) -> None:
    """A restart is seen although the pod was replaced, the slow rank is named, shares add up, clusters are kept apart."""
    with PrometheusServer(prometheus_program, arguments=[FLAG]) as server:
        ended_s = time.time()
        for cluster, run in (("north", SICK), ("north", HEALTHY), *zip(("east", "west"), TWINS, strict=True)):
            of = series(run, ended_s - (300 if run in TWINS else RANGE_S), ended_s, 30.0)
            write(server.address, (({**labels, "cluster": cluster}, times, values) for labels, times, values in of))
        for check in (check_restart, check_slow_rank, check_shares, check_clusters):
            check(Panels(server, ended_s))
