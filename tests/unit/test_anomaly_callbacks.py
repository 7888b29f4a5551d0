"""Functions given to ``torchobs.on_anomaly``: each registration is called, and ended, by itself."""

import logging

import pytest

import torchobs
from torchobs.support.anomaly_callbacks import AnomalyReport, notify, wanted

REPORT = AnomalyReport("loss_spike", 7, 9.0, 1.0, None)


def test_ending_one_registration_leaves_the_other() -> None:
    """Also where both are of the same function, as after a cell of a notebook was run twice."""
    called: list[int] = []

    def note(report: AnomalyReport) -> None:
        called.append(report.step)

    first, second = torchobs.on_anomaly(note), torchobs.on_anomaly(note)
    first()
    first()
    notify(REPORT)
    second()
    assert called == [7]
    assert not wanted()


def test_one_that_raises_is_told_of_and_is_the_only_one_to_go(caplog: pytest.LogCaptureFixture) -> None:
    """The others are called for the next anomaly, too."""
    called: list[int] = []

    def fail(report: AnomalyReport) -> None:
        raise KeyError(report.kind)

    torchobs.on_anomaly(fail)
    end = torchobs.on_anomaly(lambda report: called.append(report.step))
    with caplog.at_level(logging.WARNING, "torchobs"):
        notify(REPORT)
        notify(REPORT)
    end()
    assert called == [7, 7]
    assert sum("is not called again" in record.getMessage() for record in caplog.records) == 1
    assert not wanted()
