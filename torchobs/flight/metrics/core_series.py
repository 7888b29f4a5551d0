"""Series that the fold maintains, and their words in the core (value block 0)."""

from __future__ import annotations

from torchobs import catalog
from torchobs.flight.metrics.totals import Word


def series() -> list[tuple[catalog.Metric, dict[str, str], int]]:
    """Return the series that the fold maintains, each with its word in block 0."""
    single = (
        (catalog.STEPS, Word.STEPS), (catalog.LAST_STEP_TIMESTAMP, Word.LAST_STEP_TIMESTAMP), (catalog.LOSS, Word.LOSS),
        (catalog.SAMPLES, Word.SAMPLES), (catalog.TOKENS, Word.TOKENS), (catalog.GRAD_NORM, Word.GRAD_NORM),
        (catalog.GRAD_NONFINITE_STEPS, Word.NONFINITE_STEPS), (catalog.AMP_STEPS_SKIPPED, Word.STEPS_SKIPPED),
        (catalog.STEP_DURATION, Word.STEP_DURATION), (catalog.GRAD_NORM_DISTRIBUTION, Word.NORM_DISTRIBUTION),
        (catalog.GRAD_CLIPPED_STEPS, Word.CLIPPED_STEPS), (catalog.MODEL_CHANGES, Word.MODEL_CHANGES),
    )  # fmt: skip
    several = (
        (catalog.STEP_PHASE_TIME, "phase", catalog.PHASES, Word.PHASE_TIME),
        (catalog.GOODPUT_TIME, "state", catalog.GOODPUT_STATES, Word.GOODPUT),
        (catalog.ANOMALIES, "kind", catalog.ANOMALY_KINDS, Word.ANOMALIES),
        (catalog.ANOMALY_ACTIVE, "kind", catalog.ANOMALY_KINDS, Word.ACTIVE),
    )
    found: list[tuple[catalog.Metric, dict[str, str], int]] = [(metric, {}, word) for metric, word in single]
    for metric, label, values, first in several:
        found += [(metric, {label: value}, first + index) for index, value in enumerate(values)]
    return [
        *found,
        (catalog.LEARNING_RATE, {"group": "0"}, Word.LEARNING_RATE),
        (catalog.FLIGHT_DROPPED, {"what": "record"}, Word.RECORDS_LOST),
    ]
