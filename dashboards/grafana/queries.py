"""PromQL of panels: aggregation by run and rank, restarts, fallbacks where recording rules are not loaded."""

from __future__ import annotations

import math
import re

from torchobs import catalog
from torchobs.catalog import Metric
from torchobs.rules import recordings
from torchobs.rules.promql import ON_RANK, ON_RUN, RUN, select
from torchobs.rules.recordings import RANK_QUANTILE, RUN_QUANTILE

RUNS = tuple(f'{label}=~"${label}"' for label in RUN)
"""Matchers for the chosen run; series recorded over all ranks, and shared ones, have no `rank`."""
RANKS = (*RUNS, 'rank=~"$rank"')
FLEET = RUNS[:-1]
"""Matchers for all runs of the chosen clusters, namespaces and jobs."""
EXPORTERS = ('instance=~"$instance"',)
"""Matchers for the own metrics of the chosen runs' exporters, which carry no job, run or rank."""
LAYERS = (*RANKS, 'layer=~"$layer"')

PRODUCTIVE = 'state="productive"'
MOST = 5
"""Number of ranks in panels that show the worst: a graph of a thousand lines shows nothing."""


def rate(metric: Metric, *matchers: str) -> str:
    """Return the metric's increase per second, over Grafana's ``$__rate_interval``."""
    return f"rate({select(metric, *matchers)}[$__rate_interval])"


def increase(metric: Metric, *matchers: str, suffix: str = "") -> str:
    """Return the metric's increase over about the time between two points of the graph."""
    return f"increase({select(metric, *matchers, suffix=suffix)}[$__rate_interval])"


def exemplars(metric: Metric, *matchers: str) -> str:
    """Return a query without samples that yields the exemplars of a histogram, classic or native: recorded series have none.

    Prometheus' exemplar API evaluates only the selectors. At Unix time 0 there are no samples, so that the query is cheap,
    however many buckets there are.
    """
    both = (select(metric, *matchers, suffix=suffix) for suffix in ("_bucket", ""))
    return " or ".join(f"rate({series}[$__rate_interval] @ 0)" for series in both)


def per_run(operator: str, of: str, *labels: str) -> str:
    """Aggregate by run, and by more labels."""
    return f"{operator} by ({', '.join((*RUN, *labels))}) ({of})"


def per_rank(of: str, *labels: str, operator: str = "max") -> str:
    """Aggregate by rank, and by more labels."""
    return per_run(operator, of, "rank", "instance", *labels)


def worst(of: str, number: int = MOST) -> str:
    """Return the greatest at each time."""
    return f"topk({number}, {of})"


def share_of(part: str, whole: str) -> str:
    """Divide two expressions of the same labels, where the second is more than 0."""
    return f"{part} / ({whole} > 0)"


def shares(metric: Metric, by: str, *matchers: str) -> str:
    """Return the share of each value of the label ``by`` in the metric's increase, for each run."""
    grown = rate(metric, *matchers)
    return f"{per_run('sum', grown, by)} / {ON_RUN} group_left () ({per_run('sum', grown)} > 0)"


def own_step_s(*matchers: str) -> str:
    """Return the seconds of a step that a rank does not spend in its backward pass, in which it waits for the slowest one."""
    own = per_rank(rate(catalog.STEP_PHASE_TIME, *matchers, 'phase!="backward"'), operator="sum")
    return f"{own} / {per_rank(rate(catalog.STEPS, *matchers) + ' > 0', operator='sum')}"


def straggling(*matchers: str) -> str:
    """Return how slow each rank is as recorded; where rules are not loaded, as the exporter of its machine says."""
    return f"{select(recordings.SLOWDOWN, *matchers)} or {per_rank(select(catalog.RANK_SLOWDOWN, *matchers))}"


def slow_nodes(*matchers: str) -> str:
    """Return how slow the ranks of each machine are on average, as recorded or as its exporter says."""
    info = per_rank(select(catalog.RANK_INFO, *matchers), "host")
    slowdown = per_rank(select(catalog.RANK_SLOWDOWN, *matchers))
    computed = per_run("avg", f"{slowdown} * {ON_RANK} group_left (host) {info}", "host")
    return f"{select(recordings.NODE_SLOWDOWN, *RUNS)} or {computed}"


def tokens(*matchers: str) -> str:
    """Return a run's recorded tokens a second; where rules are not loaded, the sum of what its ranks count."""
    return f"{select(recordings.TOKENS, *RUNS)} or {per_run('sum', rate(catalog.TOKENS, *matchers))}"


def run_step_s(share: str, *matchers: str) -> str:
    """Return the recorded quantile of a run's step durations; without the rules there is only :func:`mean_step_s`."""
    return per_run("max", select(RUN_QUANTILE, *matchers, f'quantile="{share}"'))


def mean_step_s(*matchers: str) -> str:
    """Return a run's mean step duration, which classic and native histograms need not be asked for."""
    time_, steps = (per_run("sum", rate(metric, *matchers)) for metric in (catalog.STEP_PHASE_TIME, catalog.STEPS))
    return share_of(time_, steps)


def rank_step_s(*matchers: str) -> str:
    """Return each rank's recorded median step duration; where rules are not loaded, the mean."""
    recorded = per_rank(select(RANK_QUANTILE, *matchers, 'quantile="0.5"'))
    time_, steps = (per_rank(rate(metric, *matchers), operator="sum") for metric in (catalog.STEP_PHASE_TIME, catalog.STEPS))
    return f"{recorded} or {share_of(time_, steps)}"


def goodput(*runs: str) -> str:
    """Return the recorded goodput of a run; where rules are not loaded, the productive share of its living ranks' time now."""
    productive = per_run("sum", rate(catalog.GOODPUT_TIME, *runs, PRODUCTIVE))
    return f"{select(recordings.GOODPUT, *runs)} or {share_of(productive, _living(*runs))}"


def uses(*ranks: str) -> str:
    """Return the share of a run's time in each goodput state: those of a rank add up to its lifetime."""
    states = per_run("sum", rate(catalog.GOODPUT_TIME, *ranks), "state")
    return f"{states} / {ON_RUN} group_left () ({_living(*ranks)} > 0)"


def _living(*ranks: str) -> str:
    return per_run("sum", select(catalog.RANK_UP, *ranks))


def starts(*matchers: str) -> str:
    """Return how often a run was started again within the graph's time.

    By rank over all targets, because a replaced pod is another target with another series: ``changes()`` of a series sees
    nothing then.
    """
    newest = per_run("max", select(catalog.RANK_START_TIME, *matchers), "rank")
    return per_run("max", f"changes({newest}[$__range:$__interval])")


_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\{([^}]*)\}")
_METRICS = {metric.prometheus: metric for metric in catalog.METRICS}


def series_of_a_rank(expr: str) -> int:
    """Return how many series of each rank a query reads: one for each value of a closed attribute that it does not choose.

    Those of a quiet metric count as one, for they are there only where something happened; recorded series of a rank, too.
    """
    return sum(_series(name, matchers) for name, matchers in _SELECTOR.findall(expr) if 'rank=~"$rank"' in matchers)


def _series(name: str, matchers: str) -> int:
    metric = _METRICS.get(name)
    if metric is None or metric.quiet is not None:
        return 1
    return math.prod(_chosen(attribute, matchers) for attribute in metric.attributes)


def _chosen(attribute: catalog.Attribute, matchers: str) -> int:
    found = re.search(rf'\b{catalog.prometheus_label(attribute.name)}(=~|!~|!=|=)"([^"]*)"', matchers)
    every, named = len(attribute.values) or 1, len(found[2].split("|")) if found else 0
    return named if found and found[1].startswith("=") else max(1, every - named)


_AGGREGATION = re.compile(r"\b(sum|max|min|avg|count|quantile)(?: by \(([^)]*)\))? ?\(")
_JOIN = re.compile(r"\bon \(([^)]*)\)")
_ALONE = ("cluster", "UUID")
"""Labels one of which tells clusters apart already: a GPU's UUID is unique."""


def apart(expr: str) -> str:
    """Return the query with every aggregation and join by run, so that one run id in two clusters stays two runs.

    Exporters' own series have no job and no run: a label that is absent on both sides of a join changes nothing.
    """
    found = _AGGREGATION.sub(lambda one: f"{one[1]} by ({_with_run(one[2] or '')}) (", expr)
    found = _JOIN.sub(lambda one: f"on ({_with_run(one[1])})", found)
    up = select(catalog.RANK_UP, *RUNS)
    nothing = f"last_over_time({up}[$__range])" if "$__range" in expr else up
    return found.replace("vector(0)", f"0 * {per_run('max', nothing)}")


def _with_run(labels: str) -> str:
    named = [label for label in labels.split(", ") if label]
    return labels if set(named) & set(_ALONE) else ", ".join(dict.fromkeys((*RUN, *named)))


def by_padded_rank(of: str) -> str:
    """Return the greatest by the label `row`, the rank in five digits, so that text order is numerical order."""
    digits = f'label_replace({of}, "row", "0000$1", "rank", "(.*)")'
    return f'max by (row) (label_replace({digits}, "row", "$1", "row", ".*(.{{5}})"))'
