"""What the live page says where a loss scaler, memory, a GPU or a loader's workers are in trouble, as the alerts do."""

import pytest

from tests.diagnosis_files import fact
from tests.flights import header
from tests.ui import Values, row, run
from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.detect.growth import NEAR_S
from torchobs.diagnosis.health import findings
from torchobs.diagnosis.status import anomalies_of, recent_anomalies
from torchobs.exporter.ui import events

GPU = "GPU-1"


def skips(streak: float, scale: float) -> Values:
    """The values of a rank whose scaler has skipped so many steps in a row."""
    return {catalog.AMP_SKIP_STREAK.name: {(): streak}, catalog.AMP_SCALE.name: {("0",): scale}}


def grows(left_s: float) -> Values:
    """The values of a rank whose memory is full after so long."""
    return {catalog.MEMORY_TIME_TO_LIMIT.name: {("host",): left_s}}


def gpu(state: str) -> Values:
    """The values of a rank whose GPU is in that state."""
    return {catalog.HW_STATUS.name: {(GPU, "gpu", one): float(one == state) for one in catalog.HW_STATE.values}}


LATELY = {catalog.EVENT_WORKER_DIED.name: 1}
DIED: Values = {catalog.DATA_WORKERS_DIED.name: {(): 2.0}}
WELL = [skips(19, 0.5), skips(30, 4.0), grows(NEAR_S + 1), gpu("ok"), gpu("degraded")]


@pytest.mark.parametrize(
    ("values", "said", "level"),
    [
        (skips(40, 0.5), "The loss scaler skips every step: 40 in a row, in which nothing was learned.", Severity.ERROR),
        (skips(20, 1.0), "The loss scaler skips every step: 20 in a row, in which nothing was learned.", Severity.WARNING),
        (skips(128, 9.0), "The loss scaler skips every step: 128 in a row, in which nothing was learned.", Severity.WARNING),
        (grows(3600.0), "Host memory grows with the steps, and is full in 1 h.", Severity.WARNING),
        (gpu("failed"), "1 GPU has failed: GPU-1.", Severity.ERROR),
        (DIED, "Earlier: 2 workers of data loaders died.", Severity.INFO),
    ],
)
def test_what_an_alert_is_about_is_not_all_well(values: Values, said: str, level: Severity) -> None:
    """While the loss is finite and every rank is alive."""
    health = run(row(0, values=values)).health
    assert health.text.endswith(said)
    assert health.level is level


def test_workers_that_died_are_worth_a_look_for_as_long_as_the_alert() -> None:
    """A run that has gone on for days without them, or has finished, is well."""
    now = run(row(0), row(1, values=DIED, lately=LATELY)).health
    assert (now.level, now.text.endswith("2 workers of data loaders died on rank 1.")) == (Severity.WARNING, True)
    failed = run(row(0, "failed", reason="exception", values=DIED, lately=LATELY))
    finished = run(row(0, "finished", reason="finished", values=DIED, lately=LATELY)).health
    assert "workers_died" in {one.kind for one in findings(failed.status) if one.severity == "warning"}
    assert (finished.level, finished.text.endswith(" 2 workers of data loaders died.")) == (Severity.INFO, True)


def test_when_a_worker_died_is_known_from_its_event() -> None:
    """From the file as from the page's list."""
    died = fact(catalog.EVENT_WORKER_DIED, 9.0, 90, pid=77)
    assert recent_anomalies(anomalies_of([died]), died.time_s + 60.0) == LATELY
    (shown,) = events.of_ring(header(), "0", [(0, {"k": "event", "name": died.name, "t": 0, "attrs": {"pid": 77}})])
    assert recent_anomalies(events.recent_kinds([shown]), shown.at_s + 60.0) == LATELY
    assert not recent_anomalies(events.recent_kinds([shown]), shown.at_s + 700.0)


def test_the_ranks_are_named() -> None:
    """Where it is not all of them."""
    assert run(row(0), row(1, values=grows(60.0))).health.text.endswith("grows with the steps on rank 1, and is full in 1 min.")


@pytest.mark.parametrize("values", WELL)
def test_what_is_ordinary_is_well(values: Values) -> None:
    """A scale that is found, also from 2^32 on, a limit that is far, a GPU that works."""
    assert run(row(0, values=values)).health.level is Severity.INFO


def test_of_an_ended_run() -> None:
    """Its last steps learned nothing; its memory is free again."""
    ended = run(row(0, "finished", reason="finished", values={**skips(40, 0.5), **grows(60.0)})).health
    assert ended.text.endswith("The loss scaler skipped every step: 40 in a row, in which nothing was learned.")
