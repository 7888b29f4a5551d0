"""Five elastic restarts in a real Prometheus: one series per rank, resets and all, and nothing merged."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.exporters import start_program
from tests.prometheus_server import PrometheusServer
from tests.rank_files import live_rank, train
from tests.support import wait_until
from torchobs.flight.format.layout import Exit

LIVES = (500, 400, 300, 200, 100)
"""Steps of each life: fewer every time, so that no counter overtakes its predecessor and hides the reset."""


@pytest.mark.parametrize("prometheus", ["prometheus", "prometheus3"])
def test_restarts_are_resets_of_one_series(
    start: Callable[..., object],
    flight_dir: Path,
    tmp_path: Path,
    free_port: Callable[[], int],
    program: Callable[[str], str],
    prometheus: str,
) -> None:
    """The highest value is that of the longest life, never a sum; `resets()` counts the restarts; the restart count is told."""
    path = program(prometheus)
    exporter = start_program(start, tmp_path / "log", free_port(), "--flight-dir", str(flight_dir))  # type: ignore[arg-type]
    with PrometheusServer(path, scrape=[exporter.address], interval="1s") as server:
        server.wait_for_scrapes()
        for restart, steps in enumerate(LIVES):
            writer = live_rank(flight_dir, restart=restart)
            train(writer, range(1, steps + 1))
            wait_until(lambda expected=steps: values(server, "torchobs_steps_total") == [expected], timeout_s=15)  # type: ignore[misc]
            writer.exit(Exit.EXCEPTION, 1)
            writer.close()
        assert values(server, "max_over_time(torchobs_steps_total[5m])") == [max(LIVES)]
        assert values(server, "resets(torchobs_steps_total[5m])") == [len(LIVES) - 1]
        # each life after the first counts from zero; of the first only what came after its first scrape is seen
        assert values(server, "increase(torchobs_steps_total[5m])")[0] >= sum(LIVES[1:])
        assert values(server, "torchobs_rank_restarts_total") == [len(LIVES) - 1]
        wait_until(lambda: values(server, 'torchobs_exporter_files{status="superseded"}') == [len(LIVES) - 1])


def values(server: PrometheusServer, expression: str) -> list[float]:
    """The values of every series of an answer."""
    return [series.value for series in server.query(expression)]
