"""The helper that the tests with a real Prometheus stand on."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.prometheus_server import PrometheusError, PrometheusServer
from tests.support import wait_until

RULES = {
    "groups": [
        {
            "name": "self",
            "rules": [
                {"record": "twice:up", "expr": "2 * up"},
                {"alert": "Up", "expr": "up == 1", "annotations": {"summary": "{{ $labels.job }} is up"}},
            ],
        }
    ]
}


@pytest.mark.parametrize("name", ["prometheus", "prometheus3"])
def test_a_prometheus_scrapes_records_alerts_and_leaves(name: str, program: Callable[[str], str], tmp_path: Path) -> None:
    """It scrapes what it is told to, evaluates the rules, answers instant and range queries, and is gone afterwards."""
    rules = tmp_path / "rules.yml"
    rules.write_text(yaml.safe_dump(RULES))
    with PrometheusServer(program(name)) as target:
        with PrometheusServer(program(name), scrape=[target.address], rules=[rules], interval="1s") as prom:

            def lately() -> set[float]:
                now = prom.query("up")[0].points[0][0]
                (series,) = prom.query_range("up", now - 1, now)
                return {value for _, value in series.points}

            prom.wait_for_scrapes(2)
            wait_until(lambda: prom.targets() == {target.address: "up"})  # a scrape that takes longer than a second fails
            wait_until(lambda: prom.value("sum(up)") == 1)
            wait_until(lambda: [series.value for series in prom.query("twice:up")] == [2])
            alert = wait_until(lambda: prom.alerts("Up"))[0]
            assert (alert.state, alert.annotations["summary"]) == ("firing", "torchobs is up")
            wait_until(lambda: lately() == {1})
            pid = prom.pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_refused_query_is_an_error_that_says_why(program: Callable[[str], str]) -> None:
    """A typing error in a query fails the test with Prometheus' own words, and a wrong number of series is one too."""
    with PrometheusServer(program("prometheus")) as prom:
        with pytest.raises(PrometheusError, match="parse error"):
            prom.query("sum(")
        with pytest.raises(PrometheusError, match="gives 0 series"):
            prom.value("nothing")
        assert prom.query("1 + 1")[0].value == 2


def test_a_prometheus_that_cannot_start_says_why(program: Callable[[str], str], tmp_path: Path) -> None:
    """A broken rule file is an error at once, with the log's words."""
    rules = tmp_path / "rules.yml"
    rules.write_text("groups: [{name: broken, rules: [{record: a, expr: 'sum('}]}]")
    with pytest.raises(PrometheusError, match="parse error"), PrometheusServer(program("prometheus"), rules=[rules]):
        pytest.fail("it started")
