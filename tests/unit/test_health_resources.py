"""What the live page says where a loss scaler, memory, a GPU or a loader's workers are in trouble, as the alerts do."""

import pytest

from tests.ui import Values, row, run
from torchobs import catalog
from torchobs.catalog import Severity
from torchobs.detect.growth import NEAR_S

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


DIED: Values = {catalog.DATA_WORKERS_DIED.name: {(): 2.0}}
WELL = [skips(15, 2.0), grows(NEAR_S + 1), gpu("ok"), gpu("degraded")]


@pytest.mark.parametrize(
    ("values", "said", "level"),
    [
        (skips(40, 0.5), "The loss scaler skips every step: 40 in a row, in which nothing was learned.", Severity.ERROR),
        (skips(16, 2.0**20), "The loss scaler skips every step: 16 in a row, in which nothing was learned.", Severity.WARNING),
        (grows(3600.0), "Host memory grows with the steps, and is full in 1 h.", Severity.WARNING),
        (gpu("failed"), "1 GPU has failed: GPU-1.", Severity.ERROR),
        (DIED, "2 workers of data loaders died.", Severity.WARNING),
    ],
)
def test_what_an_alert_is_about_is_not_all_well(values: Values, said: str, level: Severity) -> None:
    """While the loss is finite and every rank is alive."""
    health = run(row(0, values=values)).health
    assert health.text.endswith(said)
    assert health.level is level


def test_the_ranks_are_named() -> None:
    """Where it is not all of them."""
    assert run(row(0), row(1, values=grows(60.0))).health.text.endswith("grows with the steps on rank 1, and is full in 1 min.")


@pytest.mark.parametrize("values", WELL)
def test_what_is_ordinary_is_well(values: Values) -> None:
    """A scale that is found, a limit that is far, a GPU that works."""
    assert run(row(0, values=values)).health.level is Severity.INFO


def test_of_an_ended_run() -> None:
    """Its last steps learned nothing; its memory is free again."""
    ended = run(row(0, "finished", reason="finished", values={**skips(40, 0.5), **grows(60.0)})).health
    assert ended.text.endswith("The loss scaler skipped every step: 40 in a row, in which nothing was learned.")
