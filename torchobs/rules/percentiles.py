"""Recording rules for percentiles, with one variant for classic and one for native histograms.

Both record the same series, which dashboards and alerts query, so that these do not depend on how Prometheus stores histograms:
with `convert_classic_histograms_to_nhcb` there are no `_bucket` series.
"""

from __future__ import annotations

from dataclasses import replace

from torchobs import catalog
from torchobs.catalog import Metric
from torchobs.rules.promql import RUN, select
from torchobs.rules.rule_file import Group, Recording

QUANTILES = ("0.5", "0.99")
INTERVAL = "1m"
"""For a thousand ranks a percentile takes half a second: 23 buckets each."""
WINDOW = "5m"
"""Five scrapes at the longest usual interval, a minute, so that one may fail; steps of a minute still count."""


def rank_quantile(metric: Metric) -> str:
    """Return the name of the recorded quantiles of each rank, with the label `quantile`."""
    return f"rank_quantile:{metric.prometheus}:histogram_quantile"


def run_quantile(metric: Metric) -> str:
    """Return the name of the recorded quantiles over all ranks of a run, with the label `quantile`."""
    return f"run_quantile:{metric.prometheus}:histogram_quantile"


def classic() -> Group:
    """Return the rules for classic histograms (`_bucket` series)."""
    return _group(suffix="_bucket", by=(*RUN, "le"))


def native() -> Group:
    """Return the rules for native histograms, including those with custom buckets."""
    return _group(suffix="", by=RUN)


def split(group: Group) -> list[Group]:
    """Return a group for each rule: they are evaluated side by side, and not one after the other."""
    return [
        replace(group, name=f"{group.name}.{number}", rules=(rule,), interval=INTERVAL)
        for number, rule in enumerate(group.rules, start=1)
    ]


def _group(suffix: str, by: tuple[str, ...]) -> Group:
    metric = catalog.STEP_DURATION
    rates = f"rate({select(metric, suffix=suffix)}[{WINDOW}])"
    summed = f"sum by ({', '.join(by)}) ({rates})"
    quantiles = [
        (name, of, q) for name, of in ((rank_quantile(metric), rates), (run_quantile(metric), summed)) for q in QUANTILES
    ]
    return Group("torchobs.percentiles", tuple(_quantile(name, of, q) for name, of, q in quantiles))


def _quantile(name: str, of: str, quantile: str) -> Recording:
    # Without steps in the window the quantile is NaN, which `>= 0` drops: nothing is recorded for a dead rank.
    return Recording(name, f"histogram_quantile({quantile}, {of}) >= 0", (("quantile", quantile),))
