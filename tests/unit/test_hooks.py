"""What probes tell each other: the lists, and who is called."""

from __future__ import annotations

import contextlib
import logging

import pytest

import torchobs
from torchobs.config import settings
from torchobs.probes import factories
from torchobs.probes.amp import LossScaling
from torchobs.support.anomaly_callbacks import AnomalyReport, notify, wanted
from torchobs.support.error_guard import CircuitBreaker


def test_every_probe_of_the_settings_is_made_under_its_name() -> None:
    """All but the exit probe, which needs no torch and which the session makes."""
    made = factories(LossScaling())
    assert {*made, "exits"} == set(settings.PROBES)
    assert [make().name for make in made.values()] == list(made)


@pytest.mark.parametrize(
    ("text", "is_users"),
    [
        ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later", True),
        ("HIP error: unspecified launch failure", True),
        ("CUDA error: operation not permitted when stream is capturing\n", False),
        ("the loss had an illegal memory access", False),
    ],
)
def test_a_failure_of_the_user_s_work_on_a_device_is_handed_on(text: str, is_users: bool) -> None:  # noqa: FBT001  # a parameter
    """It is told by whichever call comes next, and some are told once; it is none of the probe's errors."""
    breaker = CircuitBreaker("gradients")

    def query() -> None:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError) if is_users else contextlib.nullcontext():
        breaker.guard(query)()
    assert breaker.is_open
    assert breaker.errors == (not is_users)


REPORT = AnomalyReport("loss_spike", 7, 9.0, 1.0, None)


def test_ending_one_registration_leaves_the_other() -> None:
    """Also where both are of the same function, as after a cell of a notebook was run twice."""
    called: list[AnomalyReport] = []
    first, second = torchobs.on_anomaly(called.append), torchobs.on_anomaly(called.append)
    first()
    first()
    notify(REPORT)
    second()
    assert called == [REPORT]
    assert not wanted()


def test_one_that_raises_is_told_of_and_is_the_only_one_to_go(caplog: pytest.LogCaptureFixture) -> None:
    """The others are called for the next anomaly, too."""
    called: list[AnomalyReport] = []

    def fail(report: AnomalyReport) -> None:
        raise KeyError(report.kind)

    torchobs.on_anomaly(fail)
    end = torchobs.on_anomaly(called.append)
    with caplog.at_level(logging.WARNING, "torchobs"):
        notify(REPORT)
        notify(REPORT)
    end()
    assert called == [REPORT, REPORT]
    assert sum("is not called again" in record.getMessage() for record in caplog.records) == 1
    assert not wanted()
