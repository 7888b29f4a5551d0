"""Recording rules for percentiles, in a variant for classic and one for native histograms.

Dashboards and alerts ask for the recorded series, which are the same in both, so that they do not care how Prometheus stores a
histogram: with `convert_classic_histograms_to_nhcb` the `_bucket` series are gone.
"""

from __future__ import annotations

from dashboards.promql import select
from dashboards.rules import Group, Recording
from torchobs import catalog
from torchobs.catalog import Metric

QUANTILES = ("0.5", "0.99")
WINDOW = "5m"
"""Five scrapes at the usual longest interval of a minute, so that one may fail; and steps of a minute still count."""


def rank_quantile(metric: Metric) -> str:
    """Return the name under which each rank's quantiles of a histogram are recorded, by the label `quantile`."""
    return f"rank_quantile:{metric.prometheus}:histogram_quantile"


def run_quantile(metric: Metric) -> str:
    """Return the name under which the quantiles over all ranks of a run are recorded, by the label `quantile`."""
    return f"run_quantile:{metric.prometheus}:histogram_quantile"


def classic() -> Group:
    """Return the rules for histograms that are stored as `_bucket` series."""
    return _group(suffix="_bucket", by=("namespace", "job_name", "run_id", "le"))


def native() -> Group:
    """Return the rules for native histograms, those with custom buckets included."""
    return _group(suffix="", by=("namespace", "job_name", "run_id"))


def _group(suffix: str, by: tuple[str, ...]) -> Group:
    metric = catalog.STEP_DURATION
    rates = f"rate({select(metric, suffix=suffix)}[{WINDOW}])"
    summed = f"sum by ({', '.join(by)}) ({rates})"
    quantiles = [
        (name, of, q) for name, of in ((rank_quantile(metric), rates), (run_quantile(metric), summed)) for q in QUANTILES
    ]
    return Group("torchobs.percentiles", tuple(_quantile(name, of, q) for name, of, q in quantiles))


def _quantile(name: str, of: str, quantile: str) -> Recording:
    # Without a step in the window the quantile is NaN, which `>= 0` drops: a dead rank records nothing.
    return Recording(name, f"histogram_quantile({quantile}, {of}) >= 0", (("quantile", quantile),))
