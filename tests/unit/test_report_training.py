"""The report's sections on the optimization, of facts that a test states."""

from __future__ import annotations

from typing import Any

from tests.diagnosis_files import fact, facts, steps
from torchobs import catalog
from torchobs.flight.reader.decode import Distribution
from torchobs.report.content import StripChart, Table
from torchobs.report.training import anomalies


def test_a_share_is_of_the_steps_that_were_measured() -> None:
    """Promise: of gradients those with a norm, finite or not, where they are known; of losses all steps."""
    values: dict[Any, Any] = {
        (catalog.ANOMALIES, "gradient_vanishing"): 8, (catalog.ANOMALIES, "nonfinite_loss"): 5,
        catalog.GRAD_NORM_DISTRIBUTION: Distribution((10, 2, 0), 1.0, 0.0, 1.0), catalog.GRAD_NONFINITE_STEPS: 4,
    }  # fmt: skip
    assert table(values) == (("gradient vanishing", "8", "50 %"), ("nonfinite loss", "5", "5 %"))
    del values[catalog.GRAD_NORM_DISTRIBUTION], values[catalog.GRAD_NONFINITE_STEPS]
    assert table(values) == (("gradient vanishing", "8", "8 %"), ("nonfinite loss", "5", "5 %"))


def table(values: dict[Any, Any]) -> tuple[tuple[str, ...], ...]:
    """The rows on a run of a hundred steps."""
    (found,) = anomalies(facts(steps(100), values=values), "").blocks
    assert isinstance(found, Table)
    return found.rows


def test_what_a_script_asked_for_is_no_anomaly() -> None:
    """Promise: an evaluation that ended is not listed among anomalies; a spike is."""
    asked = [fact(catalog.EVENT_DEBUG_VALIDATION, 5.0, 50, name="validation"), fact(catalog.EVENT_TUNE_PLAN, 0.1, 1)]
    assert not anomalies(facts(steps(100), events=asked), "").blocks
    spike = fact(catalog.EVENT_ANOMALY, 6.0, 60, kind="loss_spike")
    (chart,) = anomalies(facts(steps(100), events=[*asked, spike]), "").blocks
    assert isinstance(chart, StripChart)
    assert chart.rows == (("loss spike", "warning", (60.0,)),)
