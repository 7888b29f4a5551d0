"""Texts of the alerts: Go templates that Prometheus fills in when an alert fires, with the culprits asked for by `query`."""

from __future__ import annotations

from dataclasses import dataclass

from torchobs import catalog
from torchobs.rules import promql
from torchobs.rules.promql import ONE_RANK, select

RUN = (
    "Training run {{ $labels.run_id }} of {{ $labels.job_name }}"
    "{{ with $labels.namespace }} in namespace {{ . }}{{ end }}{{ with $labels.cluster }} ({{ . }}){{ end }}"
)
"""How a summary begins"""

MATCHERS = (
    '{{ $run := printf "cluster=%q, namespace=%q, job_name=%q, run_id=%q"'
    " $labels.cluster $labels.namespace $labels.job_name $labels.run_id }}"
)
"""How every query of a text begins"""
THIS_RUN = "%[1]s"
"""In a query for culprits, the matchers of the alert's run"""
NUMBER = '{{ printf "%.3g" $v }}'
TIMES = '{{ printf "%.2f" $v }} times'
SHARE = "{{ $v | humanizePercentage }}"
DURATION = "{{ $v | humanizeDuration }}"

AT = "{{ $l.instance }}{{ with $l.pod }} (pod {{ . }}){{ end }}"
"""Whose series it is that has no rank: the scrape's address, and the pod where the scrape adds that label"""
EXPORTER = (
    "{{ $labels.instance }}{{ with $labels.pod }} of pod {{ . }}{{ end }}"
    "{{ with $labels.namespace }} in namespace {{ . }}{{ end }}"
)
"""The same in an alert about an exporter or a machine"""

HOUR_BEFORE = '{{ query "(floor(vector(time()) / 600) * 600 - 3600) * 1000" | first | value | printf "%.0f" }}'
"""The time an hour before the alert; it changes every ten minutes only"""
_WHERE = "host, k8s_node_name, k8s_pod_name"


@dataclass(frozen=True, slots=True)
class Culprits:
    """The three worst ranks, GPUs or layers. ``query`` has :data:`THIS_RUN` in its selectors, and one series for each.

    ``show``: what to say of the value ``$v`` and the labels ``$l``. ``about``: how their sentence begins.
    """

    query: str
    show: str = NUMBER
    about: str = "Worst"
    named: bool = True
    """Whether they are ranks, to be named with node and pod; else ``show`` says all"""

    def rendered(self) -> str:
        """Return the sentence, which is empty when nothing is found any more."""
        query = f"topk(3, {_located(self.query) if self.named else self.query})"
        who = (
            "rank {{ $l.rank }}{{ with or $l.k8s_node_name $l.host }} on {{ . }}{{ end }}"
            "{{ with $l.k8s_pod_name }} in pod {{ . }}{{ end }}: "
        )
        text = f"{who if self.named else ''}{self.show}"
        escaped = query.replace('"', '\\"')
        return (
            f'{MATCHERS}{{{{ with query (printf "{escaped}" $run) }}}} {self.about}: '
            f'{{{{ range $i, $s := sortByLabel "rank" . }}}}'
            f"{{{{ $l := $s.Labels }}}}{{{{ $v := $s.Value }}}}{{{{ if $i }}}}; {{{{ end }}}}{text}{{{{ end }}}}.{{{{ end }}}}"
        )


def amount(one: str, many: str, value: str = "$value") -> str:
    """Return a number with its noun, ``many`` of it unless the number is 1."""
    number = f'printf "%.0f" {value}'
    return f'{{{{ {number} }}}} {{{{ if eq ({number}) "1" }}}}{one}{{{{ else }}}}{many}{{{{ end }}}}'


def first(query: str, show: str) -> str:
    """Return what ``show`` says of the value ``$v`` and the labels ``$l`` of a query's one series; nothing without one."""
    escaped = query.replace('"', '\\"')
    return (
        f'{MATCHERS}{{{{ range query (printf "{escaped}" $run) }}}}'
        f"{{{{ $l := .Labels }}}}{{{{ $v := .Value }}}}{show}{{{{ end }}}}"
    )


def dashboard(grafana_url: str, uid: str, since: str = HOUR_BEFORE) -> str:
    """Return a link to a dashboard with the alert's run, from that time on."""
    variables = "".join(
        f"{{{{ with $labels.{label} }}}}&var-{label}={{{{ . | urlquery }}}}{{{{ end }}}}" for label in promql.RUN
    )
    return f"{grafana_url}/d/{uid}?from={since}&to=now{variables}"


def _located(query: str) -> str:
    """Return the query with node and pod as labels of its ranks; a dead rank's may be some minutes old."""
    info = f"topk by ({ONE_RANK}) (1, max_over_time({select(catalog.RANK_INFO, THIS_RUN)}[10m]))"
    return f"(({query}) * on ({ONE_RANK}) group_left ({_WHERE}) {info} or on ({ONE_RANK}) ({query}))"
