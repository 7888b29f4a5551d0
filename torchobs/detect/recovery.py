"""Judge whether a training has recovered from an anomaly: it is past after fifty healthy steps.

That there was no further anomaly does not suffice, for baselines follow a loss that stays five times as high. So what was
judged has to be near the value again that was usual before. Past is only what is proven by the values of the last steps.
"""

from __future__ import annotations

from math import exp, isfinite
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from torchobs.detect.spikes import LEAST_LOSS_EXCESS, LEAST_NORM_EXCESS
from torchobs.detect.vanishing import LEAST_DECLINE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HEALTHY = 50
"""Steps after which an anomaly is past, as many as a loss that diverges is watched for (``divergence.LEAST_AFTER``)"""


class LastAnomaly(NamedTuple):
    """The last reported anomaly of a kind."""

    step: int
    usual: float | None
    """what was usual before it"""
    reported: int
    """number of all that were reported; others may have come after the last one"""


def healthy_steps(
    kind: str, count: int, last: LastAnomaly | None, losses: Mapping[int, float], norms: Mapping[int, float]
) -> int:
    """Return how many steps were healthy since the last anomaly of a kind that is not active; 0 if it is not past.

    ``count``: number of its anomalies. ``losses``, ``norms``: finite or not, by step, of the last steps.
    """
    newest = max([*losses, *norms], default=0)
    begin = newest - HEALTHY + 1
    recent = {step: loss for step, loss in losses.items() if step >= begin}
    if not all(map(isfinite, recent.values())):
        return 0
    is_exact = last is not None and last.reported >= count
    since = newest - last.step if last is not None and is_exact else HEALTHY
    if since < HEALTHY:
        return 0
    if not is_exact and min([*losses, *norms], default=newest) > begin:
        return 0
    if kind in {"nonfinite_loss", "diverged"}:
        return since if recent else 0
    after = last.step + 1 if last is not None else begin
    values = list(recent.values()) if kind == "loss_spike" else [norm for step, norm in norms.items() if step >= after]
    if not values or not all(map(isfinite, values)):
        return 0
    return since if kind == "nonfinite_gradient" or _is_usual(kind, values, last, is_exact=is_exact) else 0


def _is_usual(kind: str, values: Sequence[float], last: LastAnomaly | None, *, is_exact: bool) -> bool:
    """Return whether values are near what was usual before; each of them, if there may have been anomalies among them."""
    if last is None or last.usual is None or not isfinite(last.usual):
        return False
    if kind == "gradient_vanishing":
        return (median(values) if is_exact else min(values)) > last.usual / exp(LEAST_DECLINE)
    value = median(values) if is_exact else max(values)
    if kind == "gradient_explosion":
        return value < last.usual * exp(LEAST_NORM_EXCESS)
    return value - last.usual < LEAST_LOSS_EXCESS * max(1.0, abs(last.usual))
