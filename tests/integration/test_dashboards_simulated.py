"""What the panels say of an hour in which a rank is slow, memory grows, and the run crashes and gets another pod."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests import support
from tests.dashboards import filled, shipped, targets, variables
from tests.prometheus_server import FLAG, PrometheusServer, Series, newest_prometheus, write
from tests.simulated_run import SLOW_RANK, Run, series

RANGE_S = 3300.0
SICK, HEALTHY = Run(ranks=8, per_node=4), Run("vit", "48213", 4, 4, sick=False)


class Panels:
    """The panels' answers."""

    def __init__(self, server: PrometheusServer, ended_s: float) -> None:
        self._server, self._ended_s = server, ended_s
        self._dashboards = shipped()

    def ask(self, run: Run, uid: str, title: str, number: int = 0) -> list[Series]:
        """The answer to one query of a panel, over the whole time or at its end."""
        found = [target for panel, target in targets(self._dashboards[uid]) if panel["title"] == title]
        return self._query(found[number]["expr"], run, instant=found[number]["instant"])

    def annotation(self, run: Run, name: str) -> set[float]:
        """The values of an annotation."""
        every = self._dashboards["torchobs-run"]["annotations"]["list"]
        (expr,) = (one["expr"] for one in every if one["name"] == name)
        return {value for one in self._query(expr, run) for _, value in one.points}

    def _query(self, expr: str, run: Run, *, instant: bool = False) -> list[Series]:
        query = filled(expr, rate_interval="2m", range="55m", interval="30s").replace('run_id=~".*"', f'run_id=~"{run.run}"')
        if instant:
            return self._server.query(query, self._ended_s - 1)
        return self._server.query_range(query, self._ended_s - RANGE_S, self._ended_s - 1, "30s")


@pytest.fixture(scope="module")
def hour() -> Iterator[Panels]:
    """An hour of both runs."""
    if reason := support.why_missing("prometheus"):
        pytest.skip(reason)
    with PrometheusServer(newest_prometheus(2) or "prometheus", arguments=[FLAG]) as server:
        ended_s = time.time()
        for run in (SICK, HEALTHY):
            write(server.address, series(run, ended_s - RANGE_S, ended_s, 30.0))
        yield Panels(server, ended_s)


def highest(found: list[Series], label: str) -> dict[str, float]:
    """The highest value of each series, by a label."""
    return {one.labels[label]: max(value for _, value in one.points) for one in found}


def test_a_restart_is_seen_although_the_pod_was_replaced(hour: Panels) -> None:
    """A rank of node 1 has a new target, and so a new series that never changes; a run without a restart has none."""
    assert [one.value for one in hour.ask(SICK, "torchobs-run", "Starts again")] == [1.0]
    assert [one.value for one in hour.ask(HEALTHY, "torchobs-run", "Starts again")] == [0.0]
    assert len(hour.annotation(SICK, "Starts")) == 2
    assert len(hour.annotation(HEALTHY, "Starts")) == 1


def test_the_slow_rank_and_its_node_are_named(hour: Panels) -> None:
    """Compared with ranks on other machines, without the time in which the others wait for it."""
    found = highest(hour.ask(SICK, "torchobs-ranks", "Stragglers across nodes"), "rank")
    assert found.pop(str(SLOW_RANK)) > 1.5
    assert all(value < 1.2 for value in found.values())
    nodes = highest(hour.ask(SICK, "torchobs-ranks", "Slow nodes"), "host")
    assert max(nodes, key=lambda host: nodes[host]).startswith("gpt-1-")
    rows = {one.labels["row"]: one.points[-1][1] for one in hour.ask(SICK, "torchobs-ranks", "Own step time by rank")}
    assert max(rows, key=lambda row: rows[row]) == f"{SLOW_RANK:05}"
    assert max(highest(hour.ask(HEALTHY, "torchobs-ranks", "Stragglers across nodes"), "rank").values()) < 1.2


def test_growing_memory_has_a_time_at_which_it_is_full(hour: Panels) -> None:
    """Of the rank that leaks; a run whose memory does not grow has none."""
    (left,) = hour.ask(SICK, "torchobs-memory", "Time to the limit")
    assert 0 < left.value < 30_000
    assert hour.ask(HEALTHY, "torchobs-memory", "Time to the limit") == []
    (grown,) = [one for one in hour.ask(SICK, "torchobs-memory", "Growth per step") if max(v for _, v in one.points) > 0]
    assert (grown.labels["rank"], grown.labels["space"]) == ("3", "host")


def test_shares_add_up(hour: Panels) -> None:
    """The phases to the steps' time, the uses to the wall time, and goodput is the productive one."""
    phases = hour.ask(HEALTHY, "torchobs-run", "Step time by phase")
    assert sum(one.value for one in phases) == pytest.approx(1.0)
    uses = {one.labels["state"]: one.value for one in hour.ask(HEALTHY, "torchobs-run", "Wall time by use")}
    assert sum(uses.values()) == pytest.approx(1.0, rel=1e-3)
    (goodput,) = hour.ask(HEALTHY, "torchobs-run", "Goodput over time")
    assert goodput.value == pytest.approx(uses["productive"])


def test_one_run_id_in_two_clusters_is_two_runs(prometheus_program: str) -> None:
    """With all clusters chosen each panel's answers say of which one they are, and are not added up over both."""
    ended_s, ranks = time.time(), {"east": 4, "west": 2}
    with PrometheusServer(prometheus_program, arguments=[FLAG]) as server:
        for cluster, number in ranks.items():
            of = series(Run(ranks=number, per_node=2, sick=False), ended_s - 300, ended_s, 30.0)
            write(server.address, (({**labels, "cluster": cluster}, times, values) for labels, times, values in of))
        mixed = []
        for uid, dashboard in shipped().items():
            for panel, target in targets(dashboard):
                if "run_id" in variables(dashboard) and target.get("format") != "heatmap":
                    found = server.query(filled(target["expr"], rate_interval="2m", range="5m", interval="30s"), ended_s - 1)
                    mixed += [(uid, panel["title"]) for one in found if "cluster" not in one.labels]
        assert mixed == []
        up = Panels(server, ended_s).ask(Run(), "torchobs-run", "Ranks up")
        assert {one.labels["cluster"]: one.value for one in up} == ranks
